"""Files of requests and of their answers: lines read, checked, and appended whole.

A file of lines comes in, twice: all are checked before one runs, and of each only a number and a
digest stay in memory. Lines of answers go out, one write each; what a kill left half is dropped.
It must not know engines, nor how a request becomes a prompt.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.core.request import Problem
from deepinfer.errors import DeepinferError, ExitCode, UsageError
from deepinfer.protocol.convert import URLS

__all__ = ["SHOWN", "Input", "Line", "Results", "Scan", "failed", "identity", "seed", "succeeded"]

SHOWN = 10  # bad lines of a file that are listed
_FIELDS = ("custom_id", "method", "url", "body", "params")
_PREFIX = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_", "completions": "cmpl-"}
_SEED_BITS = (1 << 53) - 1  # seeds survive JSON readers that use doubles


class _Bad(ValueError):
    """What is wrong with a line."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch: its place in the file, its name, what it asks."""

    number: int
    custom_id: str
    kind: str
    body: dict[str, Any]


@dataclass
class Scan:
    """What a look at all lines found. numbers, digests: of the good ones, in order; bad: the first
    bad ones, described; count: lines in all, blank ones apart."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    count: int = 0

    def add_bad(self, number: int, why: str) -> None:
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append(f"line {number}: {why}")

    def refusal(self, name: str) -> UsageError:
        """The error that lists the bad lines."""
        more = self.bad_count - len(self.bad)
        lines = "line" if self.bad_count == 1 else "lines"
        return UsageError(
            "batch-invalid", f"{name} has {self.bad_count:,} bad {lines} of {self.count:,}",
            [*self.bad, *([f"and {more:,} more"] if more else [])],
            "nothing was run; fix these lines, or add --skip-invalid",
        )  # fmt: skip


class Input:
    """A file of requests, one a line. Raises UsageError for a file that cannot be read twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise OSError("it is no file on disk, and it is read twice")
        except OSError as problem:
            raise UsageError(
                "batch-file", f"{path} cannot be read", [problem.strerror or str(problem)],
                "--batch FILE.jsonl",
            ) from None  # fmt: skip

    @property
    def digest(self) -> str:
        """Of its bytes: does a later run mean the same requests?"""
        self._file.seek(0)
        return hashlib.file_digest(self._file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def scan(self, check: Callable[[Line], object]) -> Scan:
        """Look at all lines. check: raises UsageError for one that cannot run."""
        scan = Scan()
        for number, raw in self._lines():
            scan.count += 1
            try:
                line = _parsed(number, raw)
                check(line)
            except _Bad as why:
                scan.add_bad(number, str(why))
            except UsageError as problem:
                scan.add_bad(number, described(problem))
            else:
                scan.numbers.append(number)
                scan.digests.append(_digest(line.custom_id))
        self._without_doubles(scan)
        return scan

    def _without_doubles(self, scan: Scan) -> None:
        """A name that an earlier line has is an error of the later one."""
        import numpy as np

        digests = np.frombuffer(scan.digests, dtype=np.uint64)
        _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
        again = first[inverse] != np.arange(len(digests))
        if not again.any():
            return
        numbers = np.frombuffer(scan.numbers, dtype=np.uint64)
        earlier = {
            int(numbers[at]): int(numbers[first[inverse[at]]]) for at in np.flatnonzero(again)
        }
        for number, raw in self._lines():
            if number in earlier:
                name = json.dumps(_parsed(number, raw).custom_id, ensure_ascii=False)
                scan.add_bad(number, f"custom_id {name} already used on line {earlier[number]}")
        scan.numbers = array("Q", numbers[~again].tolist())
        scan.digests = array("Q", digests[~again].tolist())

    def wanted(self, scan: Scan, done: array[int]) -> Iterator[Line]:
        """The good lines whose names are not among `done`, in order."""
        import numpy as np

        finished = np.isin(
            np.frombuffer(scan.digests, dtype=np.uint64), np.frombuffer(done, dtype=np.uint64)
        )
        at = 0
        for number, raw in self._lines():
            if at < len(scan.numbers) and number == scan.numbers[at]:
                if not finished[at]:
                    try:
                        line = _parsed(number, raw)
                    except _Bad as why:
                        raise self._changed(str(why)) from None
                    if _digest(line.custom_id) != scan.digests[at]:
                        raise self._changed("another custom_id")
                    yield line
                at += 1
        if at < len(scan.numbers):
            raise self._changed("it is shorter")

    def _changed(self, how: str) -> UsageError:
        return UsageError(
            "batch-changed", f"{self.path} was changed while it ran", [how],
            "what is finished is kept: the same command with --resume",
        )  # fmt: skip

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        for number, raw in enumerate(self._file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, raw

    def close(self) -> None:
        self._file.close()


def _parsed(number: int, raw: bytes) -> Line:
    try:
        row = json.loads(raw.decode("utf-8").rstrip(), parse_constant=_no_constant)
    except UnicodeDecodeError as bad:
        raise _Bad(f"not UTF-8 (byte {bad.start})") from None
    except json.JSONDecodeError as bad:
        raise _Bad(f"not JSON (column {bad.colno}: {bad.msg})") from None
    except (ValueError, RecursionError) as bad:
        raise _Bad(f"not JSON ({bad})") from None
    if not isinstance(row, dict):
        raise _Bad("not a JSON object")
    unknown = [name for name in row if name not in _FIELDS]
    if unknown:
        raise _Bad(f"{unknown[0]!r} is no field of a batch line ({', '.join(_FIELDS)})")
    name, url, method = row.get("custom_id"), row.get("url"), row.get("method")
    if not isinstance(name, str) or not name:
        raise _Bad("no text under custom_id")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _Bad("custom_id has half of a surrogate pair") from None
    if method not in (None, "POST"):
        raise _Bad(f"method {json.dumps(method)} is not supported")
    if url is None and "params" in row:
        url = "/v1/messages"
    if url is None:
        raise _Bad("no url")
    kind = URLS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise _Bad(f"url {json.dumps(url)} is not supported")
    if ("body" in row) == ("params" in row) or ("params" in row and kind != "messages"):
        raise _Bad("the request stands under body, of /v1/messages under body or params")
    body = row.get("body", row.get("params"))
    if not isinstance(body, dict):
        raise _Bad("the request is no JSON object")
    if body.get("stream"):
        raise _Bad("stream is not supported in a batch: each answer comes whole")
    return Line(number, name, kind, body)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def described(problem: DeepinferError | Problem) -> str:
    """An error on one line."""
    facts = "; ".join(problem.facts)
    return f"{problem.message} ({facts})" if facts else problem.message


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def seed(custom_id: str, base: int | None = None) -> int:
    """The seed of an answer whose request has none: 53 bits of BLAKE2b of its name, or of `base`, a
    blank and its name. So it does not depend on the line's place or on the others."""
    text = custom_id if base is None else f"{base} {custom_id}"
    return _digest(text) & _SEED_BITS


def identity(line: Line) -> str:
    """The id of the answer: from the request's name, so the same when it is run again."""
    return _PREFIX[line.kind] + _hex(line)


def succeeded(line: Line, document: Mapping[str, Any]) -> dict[str, Any]:
    """The line of an answer, in the shape of its vendor's batches."""
    if line.kind == "messages":
        result = {"type": "succeeded", "message": document}
        return {"custom_id": line.custom_id, "result": result}
    response = {"status_code": 200, "request_id": identity(line), "body": document}
    return {"id": _line_id(line), "custom_id": line.custom_id, "response": response, "error": None}


def failed(line: Line, problem: DeepinferError | Problem) -> dict[str, Any]:
    """The line of a request that has no answer."""
    usage = problem.exit_status in (ExitCode.USAGE, ExitCode.CAPACITY)
    message = described(problem)
    kind = "invalid_request_error" if usage else "api_error"
    if line.kind == "messages":
        error = {"type": "error", "error": {"type": kind, "message": message},
                 "request_id": identity(line)}  # fmt: skip
        return {"custom_id": line.custom_id, "result": {"type": "errored", "error": error}}
    body = {"error": {"message": message, "type": kind, "param": None, "code": problem.code}}
    response = {"status_code": 400 if usage else 500, "request_id": identity(line), "body": body}
    return {
        "id": _line_id(line), "custom_id": line.custom_id, "response": response,
        "error": {"code": problem.code, "message": message},
    }  # fmt: skip


def _line_id(line: Line) -> str:
    return f"batch_req_{_hex(line)}"


def _hex(line: Line) -> str:
    return hashlib.blake2b(line.custom_id.encode(), digest_size=12).hexdigest()


class Results:
    """The file of answers, or stdout (`-`). Raises UsageError where it cannot be written.

    done: digests of the names that have a line; errors: how many of these are failures. Beside the
    file stands `.meta.json`: what a later run must share to go on.
    """

    def __init__(self, name: str) -> None:
        self.name, self.done, self.errors = name, array("Q"), 0
        self._path = None if name == "-" else Path(name)
        self._fd, self._size, self._regular = 1, 0, False

    def writes(self, path: Path) -> bool:
        """Is `path`, which is there, one of the files that are written? Links are followed."""
        endings = ("", ".meta.json", ".meta.json.part", ".part")
        places = () if self._path is None else map(self._beside, endings)
        return any(os.path.exists(place) and os.path.samefile(place, path) for place in places)

    def check(self) -> None:
        """Can it be written? Nothing is."""
        place = self._path
        try:
            if place is not None and place.exists():
                os.close(os.open(place, os.O_WRONLY | os.O_APPEND))
            elif place is not None and not os.access(place.parent, os.W_OK):
                raise OSError(f"no writable folder {place.parent}")
        except OSError as problem:
            raise self._not_written(problem) from None

    @property
    def empty(self) -> bool:
        """Nothing is in it, not even half a line; stdout and devices are empty always."""
        return not self._size

    def open(self) -> int:
        """Open it for appending, for this process alone. How many whole lines are there already."""
        if self._path is None:
            return 0
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if not self._regular:
                return 0
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = os.fstat(self._fd).st_size
            with self._path.open("rb") as file:
                return sum(raw.endswith(b"\n") for raw in file)
        except BlockingIOError:
            raise UsageError(
                "out-in-use", f"another run is writing {self.name}", hint="-o another file"
            ) from None
        except OSError as problem:
            raise self._not_written(problem) from None

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Empty it; meta: what a later run must share to go on."""
        if not self._regular:
            return
        try:
            os.ftruncate(self._fd, 0)
            self._size = 0
            part = self._beside(".meta.json.part")
            part.write_text(
                json.dumps(meta, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
            )
            os.replace(part, self._beside(".meta.json"))
        except OSError as problem:
            raise self._not_written(problem) from None

    def go_on(self, on_warning: Callable[[str], object]) -> None:
        """Read the names that have a line. A half-written last line is cut off, damaged ones are
        thrown out: their requests run again."""
        if not self._regular or self._path is None:
            return
        bad = end = 0
        try:
            with self._path.open("rb") as file:
                for raw in file:
                    if not raw.endswith(b"\n"):
                        on_warning(f"{self.name}: the last line is half-written and was dropped")
                        break
                    end += len(raw)
                    row = _row(raw)
                    if row is None:
                        bad += 1
                    else:
                        self._count(row)
            os.ftruncate(self._fd, end)
            self._size = end
            if bad:
                on_warning(f"{self.name}: {bad:,} damaged lines were dropped")
                self._without_damaged(self._path)
        except OSError as problem:
            raise self._not_written(problem) from None

    def _without_damaged(self, path: Path) -> None:
        """Leave the good lines; the file is the old or the new one, never half."""
        part = self._beside(".part")
        with path.open("rb") as old, part.open("wb") as new:
            new.writelines(raw for raw in old if _row(raw) is not None)
        os.replace(part, path)
        os.close(self._fd)
        self.open()

    def meta(self) -> dict[str, Any] | None:
        """What `begin` wrote; None if it is not there or damaged."""
        try:
            meta = json.loads(self._beside(".meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return meta if isinstance(meta, dict) else None

    def append(self, line: Mapping[str, Any]) -> None:
        """One whole line, in one write; what did not fit is taken back."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair becomes its JSON escape.
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            left = data
            while left:
                left = left[os.write(self._fd, left) :]
        except BrokenPipeError:
            raise
        except OSError as problem:
            if self._regular:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            raise self._not_written(problem) from None
        self._size += len(data)
        self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        self.done.append(_digest(line["custom_id"]))
        result = line.get("result")
        errored = isinstance(result, Mapping) and result.get("type") != "succeeded"
        self.errors += bool(errored or line.get("error"))

    def close(self) -> None:
        if self._fd != 1:
            with suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = 1

    def _beside(self, ending: str) -> Path:
        return Path(self.name + ending)

    def _not_written(self, problem: OSError) -> UsageError:
        kept = f"{len(self.done):,} results are complete in it"
        return UsageError(
            "out-not-written", f"{self.name} cannot be written",
            [problem.strerror or str(problem), *([kept] if self.done else [])],
            "make room, or name another place with -o; --resume goes on in the same file",
        )  # fmt: skip


def _row(raw: bytes) -> dict[str, Any] | None:
    """A line of answers; None: it is damaged."""
    try:
        row = json.loads(raw)
        row["custom_id"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return row
