"""The folder of a sweep: written so that a kill at any moment leaves it readable, and read back.

Rows, single repeats and the document about the run come in; `rows.jsonl`, `samples.jsonl`,
`meta.json` and `summary.csv` go out. Lines are appended whole, files replaced whole, by one run at
a time; of what is damaged nothing is believed. It must not know how a row is measured; nothing here
may import torch.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from deepinfer.bench.axes import row_id
from deepinfer.errors import UsageError

__all__ = ["META", "ROW", "Folder", "read_rows"]

META, ROW, SAMPLE = "deepinfer.bench/1", "deepinfer.bench.row/1", "deepinfer.bench.sample/1"


class Folder:
    """The folder of one sweep. rows: those that are done, by id; samples: repeats of the others.

    table: makes CSV of all rows, for `summary.csv`.
    """

    def __init__(self, path: Path, table: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        self.path, self._table = path, table
        self.rows: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, dict[int, dict[str, Any]]] = {}

    @classmethod
    def named(
        cls, name: str, table: Callable[[Sequence[Mapping[str, Any]]], str],
        today: date | None = None,
    ) -> Folder:  # fmt: skip
        """`bench-<date>-<name>` here, with a number behind it if that is taken."""
        base = f"bench-{(today or date.today()).isoformat()}-{name}"
        numbers = (Path(base if n == 1 else f"{base}-{n}") for n in range(1, 10_000))
        return cls(next(path for path in numbers if not path.exists()), table)

    def refuse(self, resume: bool) -> None:
        """Raises UsageError where a sweep is here already that nobody asked to go on with."""
        if not resume and self._here("rows.jsonl", "meta.json"):
            raise UsageError(
                "output-exists", f"{self.path} already has results", ["from --out"],
                f"--out {self.path} --resume to go on, or another folder",
            )  # fmt: skip

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Make the folder, and keep every other run out of it. Raises UsageError where one is in
        it, where results are that nobody asked for, or where files cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            part = self.path / ".part"
            part.open("wb").close()
            part.unlink()
            place = os.open(self.path, os.O_RDONLY)
        except OSError as problem:
            raise self._not_written(problem) from None
        try:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    "output-in-use", f"another run is writing into {self.path}", ["from --out"],
                    "wait until it ends, or --out another folder",
                ) from None  # fmt: skip
            except OSError:
                pass  # a file system without locks
            self.refuse(resume)
            yield
        finally:
            os.close(place)  # the lock goes with it, as it does with a killed process

    def meta(self) -> dict[str, Any] | None:
        """The document of the run to go on with, None where none began. Nothing is changed.

        Raises UsageError where rows or a document are here, but not how they were measured.
        """
        file = self.path / "meta.json"
        held = self._here("rows.jsonl", "samples.jsonl")
        try:
            meta = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(meta, dict) and isinstance(meta.get("fingerprint"), dict):
                return meta
            wrong = "has no fingerprint"
        except FileNotFoundError:
            if not held:
                return None
            wrong = "is not there"
        except OSError as problem:
            wrong = f"cannot be read: {problem.strerror}"
        except (ValueError, RecursionError):
            wrong = "is damaged"
        raise UsageError(
            "resume-mismatch", f"cannot resume: {file} {wrong}",
            [f"nothing else says how {' and '.join(held) or 'rows'} here came about; "
             "nothing was changed"],
            f"put {file.name} back, or --out another folder",
        )  # fmt: skip

    def load(self, on_warning: Callable[[str], object]) -> None:
        """Read what an earlier run left, and throw out of the files what is not whole: half lines,
        damaged ones, failed and repeated rows. Only behind `meta`: it tells what may be used."""
        kept, dropped = read_rows(self.path / "rows.jsonl", on_warning)
        good = {}
        for row in kept:
            if row.get("status") != "ok" or row["row_id"] in good:
                dropped += 1
            else:
                good[row["row_id"]] = row
        self.rows = good
        samples, bad = _lines(self.path / "samples.jsonl", SAMPLE, on_warning)
        for one in samples:
            here = isinstance(one.get("repeat"), int) and isinstance(one.get("sample"), dict)
            if here and one.get("row_id") not in good:
                self.samples.setdefault(one["row_id"], {})[one["repeat"]] = one["sample"]
        if dropped:
            self._write("rows.jsonl", [_line(row) for row in good.values()])
        if bad:
            self._write("samples.jsonl", [_line(one) for one in samples])

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        text = json.dumps(meta, indent=1, ensure_ascii=False, allow_nan=False)
        self._write("meta.json", [text + "\n"])

    def write_text(self, name: str, text: str) -> None:
        """A file beside the rows, replaced whole."""
        self._write(name, [text])

    def add_sample(self, identity: str, repeat: int, sample: Mapping[str, Any]) -> None:
        """One repeat of a row that is not done yet."""
        self.samples.setdefault(identity, {})[repeat] = dict(sample)
        line = {"schema": SAMPLE, "row_id": identity, "repeat": repeat, "sample": sample}
        self._append("samples.jsonl", line)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """A row that is done or has failed; the table of all rows with it."""
        self.rows[row["row_id"]] = dict(row)
        self.samples.pop(row["row_id"], None)
        self._append("rows.jsonl", row)
        self._write("summary.csv", [self._table(list(self.rows.values()))])

    def finish(self) -> None:
        """Every row is done: single repeats are in the rows, and the table is of all of them, also
        where a kill came between a row and its table."""
        if self.rows:
            self._write("summary.csv", [self._table(list(self.rows.values()))])
        (self.path / "samples.jsonl").unlink(missing_ok=True)

    def _here(self, *names: str) -> list[str]:
        return [name for name in names if (self.path / name).exists()]

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(_line(line))
        except OSError as problem:
            raise self._not_written(problem) from None

    def _write(self, name: str, lines: Iterable[str]) -> None:
        """Replace a file: it is the old or the new one, never half."""
        part = self.path / f"{name}.part"
        try:
            part.write_text("".join(lines), encoding="utf-8", newline="")
            os.replace(part, self.path / name)
        except OSError as problem:
            raise self._not_written(problem) from None

    def _not_written(self, problem: OSError) -> UsageError:
        return UsageError(
            "out-not-written", f"{self.path} cannot be written",
            [problem.strerror or str(problem), "from --out"], "--out another place",
        )  # fmt: skip


def read_rows(path: Path, on_warning: Callable[[str], object]) -> tuple[list[dict[str, Any]], int]:
    """The rows of a `rows.jsonl` whose id is that of their axes, and how many lines were none."""
    rows, bad = _lines(path, ROW, on_warning)
    good = [
        row for row in rows
        if isinstance(row.get("axes"), dict) and row.get("row_id") == row_id(row["axes"])
    ]  # fmt: skip
    wrong = len(rows) - len(good)
    if wrong:
        on_warning(f"{path.name}: {wrong} lines are not what their id says and were dropped")
    return good, bad + wrong


def _lines(
    path: Path, schema: str, on_warning: Callable[[str], object]
) -> tuple[list[dict[str, Any]], int]:
    try:
        texts = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as problem:
        raise UsageError(
            "results-unreadable", f"{path} cannot be read", [problem.strerror or str(problem)],
            "name the folder of a sweep",
        ) from None  # fmt: skip
    good, bad = [], 0
    for number, text in enumerate(texts, start=1):
        last = number == len(texts)
        if last and not text:
            continue
        try:
            line = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
            if last or not isinstance(line, dict) or line.get("schema") != schema:
                raise ValueError
            good.append(line)
        except (ValueError, RecursionError):
            bad += 1
            what = "the last line is half-written" if last else f"line {number} is damaged"
            on_warning(f"{path.name}: {what} and was dropped")
    return good, bad


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
