"""Saved rows of `bench`: how they are read, which axes tell them apart, what they are called.

A folder, a `rows.jsonl` or a `bench --json` document comes in; `Saved` goes out, and words for axes
and numbers. It must not know how rows are measured, nor which table or picture they end in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError

__all__ = [
    "Row",
    "Saved",
    "good",
    "key",
    "label",
    "median",
    "read",
    "spread",
    "values",
    "varying",
    "word",
]

Row = Mapping[str, Any]
SCHEMA = "deepinfer.bench.row/1"
# What an axis is called in a table or a legend; others go by their own name.
WORDS = {
    "prompt_len": "prompt", "gen_len": "gen", "batch_size": "batch", "swa_keep": "keep",
    "replay_mode": "mode", "mtp_varlen": "varlen", "batch_invariant": "invariant",
    "accepted_length": "simulated length",
}  # fmt: skip


# Axes that another one decides: no drafts, no rule; nothing is cut, no mode.
DECIDED = {"replay_mode": "swa_keep", "verify": "mtp", "accepted_length": "mtp"}


@dataclass(frozen=True)
class Saved:
    """A run as its files tell it. `warnings`: lines about what could not be read."""

    name: str
    meta: Mapping[str, Any]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()


def read(path: Path) -> Saved:
    """A result folder, its `rows.jsonl`, or a document of `bench --json`.

    Of rows with the same axes the last counts: a resumed run appends. Lines that are no row are
    dropped with a warning. Raises UsageError: `bench-missing`, `bench-invalid` without any row.
    """
    file = path / "rows.jsonl" if path.is_dir() else path
    text = _text(file, path)
    document = _parsed(text)
    if isinstance(document, Mapping) and isinstance(document.get("rows"), list):
        # The head of a document stands beside its `meta`, in a folder inside of it.
        head = {name: value for name, value in document.items() if name not in ("meta", "rows")}
        beside, found, warnings = document.get("meta"), document["rows"], []
        meta = head | (beside if isinstance(beside, dict) else {})
        found = [row for row in found if _is_row(row)]
    else:
        lines = [line for line in text.split("\n") if line.strip()]
        found = [row for row in map(_parsed, lines) if _is_row(row)]
        lost = len(lines) - len(found)
        warnings = [f"{file.name}: {lost} damaged lines were dropped"] if lost else []
        beside = file.with_name("meta.json")
        meta = _parsed(_text(beside, path)) if beside.is_file() else {}
    if not found:
        raise UsageError(
            "bench-invalid", f"{path} has no row of bench", [f"expected lines of {SCHEMA}"],
            "deepinfer bench --out DIR writes them",
        )  # fmt: skip
    last = {key(row): row for row in found}
    meta = meta if isinstance(meta, Mapping) else {}
    return Saved(path.resolve().name, meta, tuple(last.values()), tuple(warnings))


def good(row: Row) -> bool:
    """Whether the row was measured."""
    return row.get("status") == "ok"


def key(row: Row) -> str:
    """Equal for rows that measured the same thing."""
    return json.dumps([row.get("kind", "e2e"), row["axes"]], sort_keys=True)


def varying(rows: Sequence[Row]) -> list[str]:
    """The axes whose values differ between the rows, in the order of the rows' own keys.

    Without those that say nothing more, as a mode that is off where all is kept.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["axes"]))

    def decided(name: str) -> bool:
        by = DECIDED.get(name)
        return by is not None and values(rows, by, name) == values(rows, by)

    return [name for name in names if values(rows, name) > 1 and not decided(name)]


def values(rows: Sequence[Row], *names: str) -> int:
    """Different combinations of values of some axes."""
    return len({tuple(word(row["axes"].get(name)) for name in names) for row in rows})


def label(row: Row, names: Sequence[str]) -> str:
    """`keep 140, mtp 5`: the row's values on these axes; "all rows" where none tells."""
    parts = [f"{WORDS.get(name, name)} {word(row['axes'].get(name))}" for name in names]
    return ", ".join(parts) or "all rows"


def word(value: object) -> str:
    """A value of an axis as a reader writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def median(value: object) -> float | None:
    """Of a measured number, be it alone or with its spread; None where there is none."""
    found = value.get("median") if isinstance(value, Mapping) else value
    number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if number else None  # type: ignore[arg-type]


def spread(value: object) -> tuple[float, float]:
    """How far p5 lies below the median and p95 above it; zeros where nobody knows."""
    middle = median(value)
    if middle is None or not isinstance(value, Mapping):
        return 0.0, 0.0
    low, high = (value.get(name) for name in ("p5", "p95"))
    return (
        max(middle - low, 0.0) if low is not None else 0.0,
        max(high - middle, 0.0) if high is not None else 0.0,
    )


def _is_row(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("axes"), Mapping)
        and value.get("schema", SCHEMA) == SCHEMA
    )


def _text(file: Path, asked: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError as problem:
        raise UsageError(
            "bench-missing", f"{asked} cannot be read",
            [f"{file.name}: {problem.strerror or problem}"], "deepinfer bench --out DIR writes one",
        ) from None  # fmt: skip


def _parsed(text: str) -> Any:
    """What the text says, None for what is no strict JSON."""
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")
