"""`trace.jsonl`: a header line and one line per step, written whole and read with care.

A `Trace` comes in and a file goes out, or the other way round; a half-written last line is dropped
with a warning, steps that are missing are one, anything else that is wrong is a UsageError that
names the line. It must not know models or views, nor may it import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError
from deepinfer.speculative.trace import Line, Trace, TraceStep

SCHEMA = "deepinfer.trace/1"

_LARGEST = 1e300

_COUNTS = (
    "step", "seq", "pos", "useful", "limit", "split", "verified", "accepted", "discarded",
    "committed", "rows", "requests",
)  # fmt: skip
_MAYBE = ("budget", "target_id")  # absent where there is none
_PER_DRAFT = ("confidence", "logits", "survival")


def step_json(line: Line) -> dict[str, Any]:
    """A step as an object of the file: what is missing is absent, what is not a number is null."""
    step = line.step
    out: dict[str, Any] = {"step": step.step, "seq": step.seq, "pos": step.pos}
    out["draft_ids"] = [token if token >= 0 else None for token in step.draft_ids]
    out["draft_text"] = list(line.draft_text)
    for name in _PER_DRAFT:
        out[name] = [_number(value) for value in getattr(step, name)]
    for field in fields(step):
        value = getattr(step, field.name)
        if field.name not in out and field.name not in ("time_ms", "ms") and value is not None:
            out[field.name] = value
    if line.target_text is not None:
        out["target_text"] = line.target_text
    if step.time_ms:
        out["time_model"] = [_number(value) for value in step.time_ms]
    return {**out, "ms": _number(step.ms)}


def write(trace: Trace, path: Path) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for document in (trace.header, *map(step_json, trace.lines)):
            file.write(json.dumps(document, allow_nan=False) + "\n")
    part.replace(path)


def is_trace(path: Path) -> bool:
    """Whether a file begins as one: only such a file may be written over."""
    try:
        with path.open("rb") as file:
            return b'"deepinfer.trace/' in file.read(200)
    except OSError:
        return False


def read(path: Path, on_warning: Callable[[str], object]) -> Trace:
    """Read a file. Raises UsageError for one that is missing, foreign, newer or damaged."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as problem:
        raise UsageError(
            "trace-missing", f"{path} cannot be read",
            [problem.strerror or str(problem), "from --from"], "--from TRACE.jsonl",
        ) from None  # fmt: skip
    except UnicodeDecodeError as bad:
        raise _damaged(path, 1, f"not UTF-8 text, byte {bad.start}") from None
    rows = text.split("\n")
    header = _header(path, rows[0])
    lines = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            if row.strip():
                lines.append(_line(_parsed(row), header["sequences"]))
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            if number == len(rows):  # no line end: the writer was stopped in it
                on_warning(f"{path.name}: the last line is half-written and was dropped")
                break
            raise _damaged(path, number, _why(problem)) from None
    trace = Trace(header, tuple(lines))
    if trace.cut:
        on_warning(f"{path.name} has {len(lines):,} of {header['lines']:,} steps: it was cut")
    return trace


def _header(path: Path, row: str) -> Mapping[str, Any]:
    try:
        header = _parsed(row)
        schema = header["schema"]
        if not isinstance(schema, str):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        schema = ""
    kind, _, version = schema.rpartition("/")
    if kind != "deepinfer.trace":
        raise UsageError(
            "trace-invalid", f"{path} is not a trace", [f"its first line is no {SCHEMA} header"],
            "deepinfer spec-trace -p TEXT -o TRACE.jsonl writes one",
        )  # fmt: skip
    if schema != SCHEMA:
        raise UsageError(
            "trace-unsupported", f"{path.name} is a trace of version {version}",
            [f"this version reads {SCHEMA}"], "read it with the version that wrote it",
        )  # fmt: skip
    try:
        _check_header(header)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, 1, f"header: {_why(problem)}") from None
    return header


def _check_header(header: Mapping[str, Any]) -> None:
    speculation, sequences = header["speculation"], header["sequences"]
    for value in (speculation["mtp"], header.get("lines", 0)):
        _whole(value)
    for value in (*speculation["temperatures"], speculation.get("threshold", 1.0)):
        _real(value)
    for name in ("varlen", "verify"):
        if not isinstance(speculation[name], bool | str):
            raise ValueError(f"{name} is no switch or word")
    if not isinstance(header["model"]["name"], str) or not isinstance(sequences, list):
        raise ValueError("no model or no sequences")
    for sequence in sequences:
        _whole(sequence["prompt_tokens"])
        ids, texts = sequence["token_ids"], sequence["token_text"]
        _texts([sequence["prompt"], sequence["text"], *texts])
        if [_whole(token) for token in ids] and len(texts) != len(ids):
            raise ValueError("texts and ids of an answer differ in number")


def _line(row: Mapping[str, Any], sequences: Sequence[Mapping[str, Any]]) -> Line:
    """Raises KeyError, TypeError or ValueError for what no writer of ours wrote."""
    values: dict[str, Any] = {name: _whole(row[name]) for name in _COUNTS}
    values |= {name: _whole(row[name]) if name in row else None for name in _MAYBE}
    ids = tuple(-1 if token is None else _whole(token) for token in row["draft_ids"])
    for name in _PER_DRAFT:
        values[name] = tuple(math.nan if v is None else _real(v) for v in row[name])
        if len(values[name]) != len(ids):
            raise ValueError(f"{name} has {len(values[name])} entries for {len(ids)} drafts")
    values["time_ms"] = tuple(_real(value) for value in row.get("time_model", ()))
    values["ms"] = math.nan if row["ms"] is None else _real(row["ms"])
    step = TraceStep(draft_ids=ids, **values)
    draft_text = tuple(_texts(row["draft_text"]))
    own = row.get("target_text")
    if len(draft_text) != len(ids) or (own is None) != (step.target_id is None):
        raise ValueError("a token without its text")
    chances = (*step.survival, *(value for value in step.confidence if not math.isnan(value)))
    if not all(0 <= value <= 1 for value in chances):
        raise ValueError("a confidence or a survival is no chance")
    if step.seq >= len(sequences):
        raise ValueError("it is of no sequence")
    sequence = sequences[step.seq]
    at = step.pos - sequence["prompt_tokens"]
    if (
        not 0 <= at <= len(sequence["token_ids"]) - step.committed
        or not step.accepted <= step.verified <= step.split <= step.useful <= len(ids)
        or step.requests < 1
        or step.committed != step.accepted + (step.target_id is not None)
    ):
        raise ValueError("its counts contradict each other")
    return Line(step, draft_text, None if own is None else _texts([own])[0])


def _why(problem: Exception) -> str:
    return f"no {problem}" if isinstance(problem, KeyError) else str(problem)


def _parsed(row: str) -> Any:
    return json.loads(row, parse_constant=_no_constant)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ValueError(f"{str(value)[:40]} is no number")
    return float(value)


def _texts(values: list[Any]) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise ValueError("a text is missing")
    return values


def _damaged(path: Path, line: int, why: str) -> UsageError:
    return UsageError(
        "trace-damaged", f"{path.name} is damaged", [f"line {line}: {' '.join(why.split())[:160]}"],
        "run spec-trace again, with -o",
    )  # fmt: skip
