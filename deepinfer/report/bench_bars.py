"""Bars of a sweep: what its rows must reach, judged from what is saved.

Checked tables `[[bar]]` of a sweep file, saved rows and the run's `meta` come in; records go out,
and a table of them. It must not know files, nor how a row is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.report.bench import STEADY, moved
from deepinfer.report.bench_rows import Row, good, label, median, varying
from deepinfer.report.tables import Table, amount

__all__ = ["judge", "table"]

Record = dict[str, Any]
UNITS = {"_ms": "ms", "tok_s": "tokens/s", "tok_s_per_card": "tokens/s", "length": "tokens a step"}


def judge(
    bars: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], rows: Sequence[Row]
) -> list[Record]:
    """A record of each bar: of all rows that it selects the one that is worst.

    value: the figure's median; ratio: over that of the peer, the best of the rows under `over` that
    equal it in the axis `each`; p5, p95: of the figure or, repeat by repeat, of the ratio. verdict:
    met, missed, void (the machine was not still, so neither), or not judged; why: in words, if not
    met or missed by the number alone. correct: repeats gave the same answers, and prefill ran what
    was planned.
    """
    return [_judged(bar, meta, rows) for bar in bars]


def _judged(bar: Mapping[str, Any], meta: Mapping[str, Any], rows: Sequence[Row]) -> Record:
    figure, least = bar["figure"], "at_least" in bar
    here, names = meta.get("environment") or {}, varying(rows)
    known = meta.get("ceilings") or {}
    commit = here.get("commit")
    record: Record = {
        "bar": bar["name"], "figure": figure, "value": None,
        "unit": next((unit for end, unit in UNITS.items() if figure.endswith(end)), "share"),
        "p5": None, "p95": None, "peer": None, "peer_value": None, "ratio": None, "floor": None,
        "limit": bar["at_least"] if least else bar["at_most"],
        "comparison": "at least" if least else "at most",
        "ceilings": {when: known.get(when) for when in ("before", "after")} if known else None,
        "git": f"{commit[:12]}{'-dirty' * bool(here.get('dirty'))}" if commit else None,
        "row": None, "runs": None, "steady": None, "correct": None, "verdict": "not judged",
        "why": None,
    }  # fmt: skip
    mine = [row for row in rows if _fits(row, bar["rows"])]
    peers = [row for row in rows if _fits(row, bar["over"])] if bar.get("over") else []
    for row in mine + peers:
        if _value(row, figure) is None:
            why = (row.get("why") or {}).get(figure) or f"{figure} was not measured"
            return record | {"why": f"{label(row, names)}: {why}"}
    sides = [(row, _peer(row, peers, bar.get("each"), figure, least)) for row in mine]
    if not mine or (bar.get("over") and not all(peer for _, peer in sides)):
        return record | {"why": "not all of its rows are in the sweep"}
    worst = min if least else max
    row, peer = worst(sides, key=lambda side: _over(*side, figure))
    series, reached = _series(row, peer, figure), _over(row, peer, figure)
    used = [one for one in (row, peer) if one]
    wrong = [label(one, names) for one in used if not _correct(one)]
    shaky = [label(one, names) for one in used if one.get("steady") is False]
    met = reached >= record["limit"] if least else reached <= record["limit"]
    verdict, why = "met" if met else "missed", None
    if moved(meta):
        verdict, why = "void", "the ceilings moved"
    elif shaky:
        low, high = STEADY
        verdict, why = "void", f"not steady within {low} to {high}: {', '.join(shaky)}"
    if wrong:
        verdict, why = "missed", f"answers differ, or prefill did not run as planned: {wrong[0]}"
    return record | {
        "value": _value(row, figure), "p5": series[0], "p95": series[-1],
        "peer": label(peer, names) if peer else None,
        "peer_value": _value(peer, figure) if peer else None,
        "ratio": reached if peer else None, "row": label(row, names), "runs": row.get("repeats"),
        "steady": not shaky, "correct": not wrong, "verdict": verdict, "why": why,
    }  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """A line each bar: what was reached, of which row beside which, and the verdict."""
    heads = ("bar", "reached", "p5 to p95", "limit", "row", "verdict")
    lines = []
    for one in records:
        reached = one["value"] if one["ratio"] is None else one["ratio"]
        what = one["unit"] if one["ratio"] is None else "times"
        spread = "-" if one["p5"] is None else f"{amount(one['p5'])} to {amount(one['p95'])}"
        beside = f", beside {one['peer']}" if one["peer"] else ""
        why = f" ({one['why']})" if one["why"] else ""
        lines.append(
            (one["bar"], "-" if reached is None else f"{amount(reached)} {what}", spread,
             f"{one['comparison']} {one['limit']:g}",
             f"{one['row']}{beside}" if one["row"] else "-", f"{one['verdict']}{why}")
        )  # fmt: skip
    return heads, lines, "Bars"


def _fits(row: Row, wanted: Mapping[str, Sequence[Any]]) -> bool:
    return all(row["axes"].get(name) in values for name, values in wanted.items())


def _peer(
    row: Row, peers: Sequence[Row], each: str | None, figure: str, least: bool
) -> Row | None:  # fmt: skip
    alike = [one for one in peers if not each or one["axes"].get(each) == row["axes"].get(each)]
    best = max if least else min
    return best(alike, key=lambda one: _value(one, figure) or 0.0, default=None)


def _value(row: Row, figure: str) -> float | None:
    found: Any = row if good(row) else {}
    for part in figure.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return median(found)


def _over(row: Row, peer: Row | None, figure: str) -> float:
    value = _value(row, figure) or 0.0
    return value / (_value(peer, figure) or 1.0) if peer else value


def _series(row: Row, peer: Row | None, figure: str) -> tuple[float | None, float | None]:
    """p5 and p95 of the repeats, or of their ratios."""
    mine, theirs = ((one or {}).get("samples", {}).get(figure) or [] for one in (row, peer))
    if peer:
        mine = [a / b for a, b in zip(mine, theirs, strict=False) if a and b]
    mine = [value for value in mine if value is not None]
    if len(mine) < 2:
        return None, None
    cuts = statistics.quantiles(mine, n=20, method="inclusive")
    return cuts[0], cuts[-1]


def _correct(row: Row) -> bool:
    pairs = [row.get(f"prefill_saved_{what}") or {} for what in ("rows", "flops")]
    apart = [abs(pair.get("planned", 0) - pair.get("measured", 0)) for pair in pairs]
    return row.get("same_answers") is not False and max(apart) < 1e-3
