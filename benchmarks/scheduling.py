"""Verification lengths against exhaustive search, and the law of what they let through (bar C3).

Two games whose drafts, confidences and step times are known play a million tokens by the rejection
and the coupled rule: total variation between what came out and the target. Then 2,000 batches of 1
to 256 requests on 20 curves of step time, which the schedule knows from noisy steps and the search
to the last digit: tokens a second over the best of all budgets. No model runs.

    python -m benchmarks.scheduling
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks import measure
from tests.unit.test_schedule import searched
from tests.unit.test_verify import JUMPY, MIXED, play

LAW, MEAN = 0.002, 0.98  # most total variation, least mean ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1_000_000, help="tokens of each game")
    asked = parser.parse_args()
    records, rows = [], []
    for rule, game, name in (
        ("rejection", MIXED, "mixed"), ("rejection", JUMPY, "jumpy"), ("coupled", MIXED, "mixed"),
    ):  # fmt: skip
        apart, accepted, _ = play(rule, game, asked.draws)
        bar, met = f"C3 total variation, {rule}, {name} game", bool(apart <= LAW)
        more = {"at_most": LAW, "met": met, "accepted_of_verified": round(float(accepted), 4)}
        record = measure.record(bar, [float(apart)], "share", **more)
        records.append(record | {"draws": asked.draws, "value": float(f"{apart:.3g}")})
        rows.append([bar, f"{apart:.5f}", f"at most {LAW}", "met" if met else "missed"])
    exact, ratios = searched()
    mean, bar = statistics.mean(ratios), "C3 tokens/s over exhaustive search"
    met = mean >= MEAN and min(exact) == 1.0
    more = {"at_least": MEAN, "met": met, "mean": round(mean, 5), "worst": round(min(ratios), 5)}
    records.append(measure.record(bar, ratios, "ratio", correct=min(exact) == 1.0, **more))
    rows.append([bar, f"mean {mean:.4f}, worst {min(ratios):.4f}", f"mean at least {MEAN}",
                 "met" if met else "missed"])  # fmt: skip
    measure.table(("bar", "reached", "limit", "verdict"), rows)
    measure.lines(records)
    return 0 if all(record["met"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
