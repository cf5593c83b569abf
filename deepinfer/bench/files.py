"""The folder of a sweep: written so that a kill at any moment leaves it readable, and read back.

Rows, single repeats and the document about the run come in; `rows.jsonl`, `samples.jsonl`,
`meta.json` and `summary.csv` go out. Lines are appended whole, files replaced whole; of what is
damaged nothing is believed. It must not know how a row is measured; nothing here may import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    @property
    def taken(self) -> bool:
        """Is a sweep here already?"""
        return (self.path / "rows.jsonl").exists() or (self.path / "meta.json").exists()

    def check(self) -> None:
        """Can files be written here? Makes the folder. Raises UsageError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            part = self.path / ".part"
            part.open("wb").close()
            part.unlink()
        except OSError as problem:
            raise self._not_written(problem) from None

    def load(self, on_warning: Callable[[str], object]) -> dict[str, Any] | None:
        """Read what an earlier run left, and throw out of the files what is not whole: half lines,
        damaged ones, failed and repeated rows. The meta document, None if there is none.
        """
        try:
            meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
            if not isinstance(meta, dict) or "fingerprint" not in meta:
                meta = None
        except (OSError, ValueError):
            meta = None
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
        return meta

    def clear(self) -> None:
        """Forget what an earlier run left."""
        self.rows, self.samples = {}, {}
        for name in ("rows.jsonl", "samples.jsonl", "summary.csv"):
            (self.path / name).unlink(missing_ok=True)

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        text = json.dumps(meta, indent=1, ensure_ascii=False, allow_nan=False)
        self._write("meta.json", [text + "\n"])

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
