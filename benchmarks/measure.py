"""How a measurement is taken and told: interleaved runs, medians, tables, one JSON line a record.

Functions that return one number come in, samples and printed lines go out. It must not know what is
measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deepinfer.bench.metrics import STEADY, quantile, self_ratio

ROOT = Path(__file__).parents[1]


def interleave(sides: Mapping[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """A B A B ...: the samples of each side, all of one process, after one run each to warm up."""
    for side in sides.values():
        side()
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, side in sides.items():
            samples[name].append(side())
    return samples


def record(
    bar: str,
    samples: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    peer_samples: Sequence[float] | None = None,
    floor: float | None = None,
    correct: bool | None = None,
    **more: object,
) -> dict[str, object]:
    """One record: median, p5, p95, the peer's median, and whether the series was steady."""
    value = statistics.median(samples)
    peer_value = statistics.median(peer_samples) if peer_samples else None
    itself = self_ratio(samples) if len(samples) > 1 else None
    return {
        "bar": bar,
        "value": round(value, 4),
        "unit": unit,
        "p5": round(quantile(samples, 0.05), 4),
        "p95": round(quantile(samples, 0.95), 4),
        "peer": peer,
        "peer_value": peer_value and round(peer_value, 4),
        "ratio": peer_value and round(value / peer_value, 4),
        "floor": floor,
        "ceilings": None,
        "runs": len(samples),
        "self_ratio": itself and round(itself, 4),
        "steady": itself and STEADY[0] <= itself <= STEADY[1],
        "correct": correct,
        "git": git(),
        "load": round(os.getloadavg()[0], 2),
        **more,
    }


def git() -> str | None:
    """The commit, with `-dirty` behind it if files differ; None outside a clone."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table; numbers to the right."""
    texts = [[_text(cell) for cell in row] for row in rows]
    width = [max(len(line[at]) for line in [list(head), *texts]) for at in range(len(head))]
    left = [all(isinstance(row[at], str) for row in rows) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(w) if to_left else cell.rjust(w)
            for cell, w, to_left in zip(cells, width, left, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    print(line(head))
    print("|" + "|".join("-" * (w + 1) + ("-" if to_left else ":")
                         for w, to_left in zip(width, left, strict=True)) + "|")  # fmt: skip
    for cells in texts:
        print(line(cells))
    print()


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:,.1f}"
    return str(cell)


def lines(records: Sequence[Mapping[str, object]]) -> None:
    """Prints each record as a line of JSON."""
    for entry in records:
        print(json.dumps(entry))
