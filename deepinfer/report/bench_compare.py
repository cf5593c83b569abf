"""Two runs of `bench` beside each other: ratios with intervals, and whether something got slower.

Saved rows of both come in; ratios go out, above 1 where the second is faster. Rows are paired by
their axes and never otherwise. It must not know how rows are measured, nor how ratios are shown.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError
from deepinfer.report.bench_rows import (
    Row,
    Saved,
    good,
    key,
    label,
    median,
    read,
    varying,
    word,
)
from deepinfer.report.tables import Table

__all__ = ["compare", "interval", "regressions", "table"]

# Measures compared, and whether more is better.
MEASURES = {
    "output_tok_s": True, "decode_tok_s": True, "ttft_ms": False, "tpot_ms": False,
    "time_us": False,
}  # fmt: skip
DRAWS = 2000
CHANCE = 0.95


def compare(a: Path, b: Path) -> dict[str, Any]:
    """The body of a `deepinfer.bench.compare/1` document: B against A, row by row.

    `rows`: axes and `ratios {measure: {ratio, low, high, a, b, verdict}}`, above 1 where B is
    better; `low` and `high` hold the ratio with 95 % (bootstrap over the samples of both).
    `environment`: what differs between the machines. Raises UsageError `bench-unlike` unless both
    measured the same rows.
    """
    one, other = read(a), read(b)
    pairs = _paired(one, other)
    rows = []
    for row, against in pairs:
        if good(row) and good(against):
            ratios = {
                name: _ratio(row, against, name) for name in MEASURES if _both(row, against, name)
            }
            steady = row.get("steady") is not False and against.get("steady") is not False
            rows.append({"axes": row["axes"], "steady": steady, "ratios": ratios})
    if not rows:
        raise UsageError(
            "bench-unlike", "no row was measured on both sides",
            [f"{side.name}: {sum(map(good, side.rows))} of {len(side.rows)} rows have numbers"
             for side in (one, other)], "deepinfer bench --resume",
        )  # fmt: skip
    return {
        "a": one.name,
        "b": other.name,
        "differs": _differs(one.meta, other.meta),
        "rows": rows,
        "failed": len(pairs) - len(rows),
        "warnings": [*one.warnings, *other.warnings],
    }


def regressions(
    meta: Mapping[str, Any], rows: Sequence[Row], baseline: Saved, limit: float
) -> dict[str, Any]:
    """Which measures lost more than `limit` (0.1: a tenth of their speed) against the baseline.

    `{limit, judged, unmatched, remarks, regressions}`: rows judged, labels of rows the baseline
    lacks, what else makes the two unlike (machine, versions, settings, rows that were not steady),
    and `{row, measure, ratio, low, high, a, b}` of each loss. A loss counts only if the whole
    interval lies below 1 too, so that noise is not taken for one. A row that was measured and now
    failed or is missing is one, with `measure` "status"; so are other prompts ("prompt_digest"), as
    nothing can be said of such a row. Raises UsageError `bench-unlike` where no row is in both.
    """
    before, now = ({key(row): row for row in side} for side in (baseline.rows, rows))
    names = varying([*rows, *baseline.rows])
    both = [(before[at], row) for at, row in now.items() if at in before]
    if not both:
        raise _unlike(list(baseline.rows), list(rows), "the baseline and this run")
    judged = [(old, new) for old, new in both if good(old)]
    gone = [
        {"row": label(row, names), "measure": "status", "a": row["status"], "b": "missing"}
        for at, row in before.items() if good(row) and at not in now
    ]  # fmt: skip
    shaky = [
        f"{label(new, names)}: not steady {'then' if old.get('steady') is False else 'now'}, its "
        "ratios say little"
        for old, new in judged if old.get("steady") is False or new.get("steady") is False
    ]  # fmt: skip
    return {
        "limit": limit,
        "judged": len(judged),
        "unmatched": [label(row, names) for at, row in now.items() if at not in before],
        "remarks": [f"differs: {line}" for line in _differs(baseline.meta, meta)] + shaky,
        "regressions": gone + [
            {"row": label(new, names), **loss}
            for old, new in judged for loss in _losses(old, new, limit)
        ],
    }  # fmt: skip


def _losses(old: Row, new: Row, limit: float) -> list[dict[str, Any]]:
    if not good(new):
        return [{"measure": "status", "a": old["status"], "b": new.get("status")}]
    asked = [row.get("prompt_digest") for row in (old, new)]
    if all(asked) and asked[0] != asked[1]:
        return [{"measure": "prompt_digest", "a": asked[0], "b": asked[1]}]
    found = ((name, _ratio(old, new, name)) for name in MEASURES if _both(old, new, name))
    return [
        {"measure": name, **ratio}
        for name, ratio in found
        if ratio["ratio"] < 1 - limit and ratio["high"] < 1
    ]


def interval(
    a: Sequence[float], b: Sequence[float], draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """What holds median(b) / median(a) in 95 % of resamplings of both, the same for a seed."""
    draw = random.Random(seed)
    ratios = sorted(
        statistics.median(draw.choices(b, k=len(b))) / statistics.median(draw.choices(a, k=len(a)))
        for _ in range(draws)
    )
    edge = int((1 - CHANCE) / 2 * draws)
    return ratios[edge], ratios[-1 - edge]


def table(document: Mapping[str, Any]) -> Table:
    """Ratios with their intervals, a line each row."""
    rows = document["rows"]
    axes = varying(rows)
    names = [name for name in MEASURES if any(name in row["ratios"] for row in rows)]
    heads = ("row", *(f"{_WORDS[name]} B/A" for name in names), "note")
    lines = [
        (label(row, axes), *(_cell(row["ratios"].get(name)) for name in names),
         "" if row["steady"] else "not steady")
        for row in rows
    ]  # fmt: skip
    title = f"A {document['a']}, B {document['b']}: above 1 B is better, 95 % in brackets"
    return heads, lines, title


_WORDS = {
    "output_tok_s": "output tok/s", "decode_tok_s": "decode tok/s", "ttft_ms": "TTFT speed",
    "tpot_ms": "TPOT speed", "time_us": "time",
}  # fmt: skip


def _cell(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    sign = {"better": " +", "worse": " -", "same": ""}[ratio["verdict"]]
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]{sign}"


def _both(a: Row, b: Row, name: str) -> bool:
    return bool(median(a.get(name))) and bool(median(b.get(name)))


def _ratio(a: Row, b: Row, name: str) -> dict[str, Any]:
    """Of B to A, above 1 where B is better, whichever way the measure goes."""
    old, new = _samples(a, name), _samples(b, name)
    up, down = (new, old) if MEASURES[name] else (old, new)
    low, high = interval(down, up)
    ratio = statistics.median(up) / statistics.median(down)
    verdict = "worse" if high < 1 else "better" if low > 1 else "same"
    return {
        "ratio": ratio, "low": low, "high": high, "a": median(a[name]), "b": median(b[name]),
        "verdict": verdict,
    }  # fmt: skip


def _samples(row: Row, name: str) -> list[float]:
    """The samples, or the median alone where none were kept."""
    kept = [value for value in (row.get("samples") or {}).get(name) or () if value]
    return kept or [median(row[name]) or 0.0]


def _paired(a: Saved, b: Saved) -> list[tuple[Row, Row]]:
    first, second = ({key(row): row for row in side.rows} for side in (a, b))
    if set(first) != set(second):
        only = [row for at, row in first.items() if at not in second]
        new = [row for at, row in second.items() if at not in first]
        raise _unlike(only, new, f"{a.name} and {b.name}")
    digests = [  # a row that failed has none
        (row.get("prompt_digest"), second[at].get("prompt_digest")) for at, row in first.items()
    ]
    other = [pair for pair in digests if all(pair) and pair[0] != pair[1]]
    if other:
        raise UsageError(
            "bench-unlike", f"{a.name} and {b.name} asked other prompts",
            [f"{len(other)} rows have the same axes and another prompt_digest"],
            "run both with one version of the prompts, and compare again",
        )  # fmt: skip
    return [(row, second[at]) for at, row in first.items()]


def _unlike(a: Sequence[Row], b: Sequence[Row], what: str) -> UsageError:
    """Names the axes in which rows that have no partner differ."""
    facts = [f"{count} rows have no partner in {where}" for count, where in
             ((len(a), "the second"), (len(b), "the first")) if count]  # fmt: skip
    if a and b:
        names = varying([a[0], b[0]])
        facts += [
            f"{name}: {word(a[0]['axes'].get(name))} and {word(b[0]['axes'].get(name))}"
            for name in names
        ]
    return UsageError(
        "bench-unlike", f"rows of {what} are not alike", facts,
        "run both with the same axes, and compare again",
    )  # fmt: skip


def _differs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Facts of the two runs that are not the same, such as the commit, a line each."""
    first, second = _facts(a), _facts(b)
    return [
        f"{name}: {first.get(name, '-')} and {second.get(name, '-')}"
        for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)
    ]  # fmt: skip


def _facts(meta: Mapping[str, Any]) -> dict[str, str]:
    here = meta.get("environment") or {}
    facts = {"version": meta.get("deepinfer_version"), "commit": here.get("commit")}
    facts |= {"local changes": here.get("dirty"), "torch": here.get("torch")}
    facts["model"] = (meta.get("fingerprint") or {}).get("model")
    facts["cpu"] = (here.get("cpu") or {}).get("name")
    facts["devices"] = ", ".join(device.get("name", "?") for device in here.get("devices") or ())
    for name, entry in (meta.get("settings") or {}).items():
        facts[name] = entry.get("value")
    return {name: word(value) for name, value in facts.items() if value not in (None, "")}
