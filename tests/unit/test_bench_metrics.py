"""DI-46 to DI-48 on a virtual clock: what is counted from deliveries, and what a row says."""

import pytest

from deepinfer.bench.metrics import (
    MEASURED,
    Heard,
    outliers,
    quantile,
    sample,
    self_ratio,
    spread,
    summary,
)
from deepinfer.speculative.proposal import Counts


def test_di_46_time_to_first_token_and_time_per_token():
    r1 = Heard(0.0, deliveries=[(1.0, 1), (1.5, 4), (2.0, 4)])  # the first one is a thought
    r2 = Heard(0.0, deliveries=[(1.0, 3), (1.5, 4)])
    r3 = Heard(0.0, queue=2.0, deliveries=[(3.0, 1), (3.5, 1)])
    r4 = Heard(0.0, deliveries=[(1.0, 1)])
    assert [one.ttft for one in (r1, r2, r3)] == [1.0, 1.0, 3.0]
    assert r1.tpot == 0.125
    assert 1 / r2.tpot == 8.0  # not 12: what came first is not in the rate
    assert r4.tpot is None
    alone = sample([r3])
    assert (alone["ttft_ms"], alone["queue_ms"]) == (3000, 2000)
    row = summary([sample([r4])])
    assert row["tpot_ms"] is None and row["why"]["tpot_ms"]
    together = summary([sample([r1, r2, r3, r4])])
    for name in MEASURED:
        if together[name] is not None:
            assert together[name]["median"] > 0, name


def _trace(block, steps):
    """Counts of steps (drafts that stand, tokens delivered, was it the end)."""
    counts = Counts()
    for accepted, committed, ended in steps:
        counts.add(block, block, accepted, committed, ended)
    return counts


@pytest.mark.parametrize("block", [5, 7])
def test_di_47_accepted_length(block):
    # Five accepted (of seven: five) and a bonus; two and a correction; EOS as the third draft.
    counts = _trace(block, [(5, 6, False), (2, 3, False), (4, 3, True)])
    heard = Heard(0.0, deliveries=[(1.0, 1), (2.0, 6), (3.0, 3), (4.0, 3)], counts=counts)
    row = summary([sample([heard])])
    assert row["accepted_length"]["median"] == 4.0
    assert row["accepted_drafts_per_step"] == pytest.approx(10 / 3)
    assert row["acceptance_rate"] == pytest.approx(10 / (3 * block))
    assert row["verified_length"] == block
    assert counts.committed == 12 and counts.discarded == block - 3


def test_di_47_is_null_without_speculation():
    row = summary([sample([Heard(0.0, deliveries=[(1.0, 1), (2.0, 1)])])])
    for name in ("accepted_length", "acceptance_rate", "verified_length"):
        assert row[name] is None and row["why"][name] == "nothing is drafted"


def test_di_48_throughput_and_reuse():
    requests = [
        Heard(10.0, prompt_tokens=1000, cached=600, computed=400,
              deliveries=[(11.0, 1), (15.0, 99)])
        for _ in range(2)
    ]  # fmt: skip
    found = sample(requests, cards=2)  # the ten seconds of warm-up before are in no number
    assert found["output_tok_s"] == 40
    assert found["output_tok_s_per_card"] == 20
    assert found["total_tok_s"] == 440
    assert found["prompt_tokens"] == {"cached": 1200, "computed": 800, "replayed": 0}
    assert found["prompt_tok_s"] == 800  # computed in the second before the first token


def test_di_48_savings_are_of_all_layers():
    from deepinfer.bench.savings import rows_saved
    from deepinfer.replay.plan import ReplayRule

    for truncated, saved in ((20, 0.493), (19, 0.468)):
        rule = ReplayRule(40, 40 - truncated, 128, "compact", 140)
        assert rows_saved(rule.plan(10_000)) == pytest.approx(saved, abs=5e-4)
    assert rows_saved(rule.plan(100)) == 0


def test_nothing_completed_is_said_and_not_zero():
    row = summary([sample([Heard(0.0)]), sample([])])
    assert row["status"] == "empty"
    assert all(row[name] is None and row["why"][name] for name in MEASURED)


def test_spread_and_self_ratio():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "p5": 1.2, "p95": 4.8, "n": 5}
    assert quantile([1.0], 0.95) == 1.0
    assert self_ratio([1.0]) is None
    assert self_ratio([1.0, 2.0, 1.0, 2.0, 1.0]) == 0.5


def test_a_row_whose_halves_differ_is_marked():
    def row(times):
        return summary([sample([Heard(0.0, deliveries=[(t, 10)])]) for t in times])

    assert row([1.0, 1.01, 1.0, 1.0, 1.01])["steady"] is True
    assert row([1.0, 1.1, 1.0, 1.1, 1.0])["steady"] is False
    only = row([1.0])
    assert only["steady"] is False and only["why"]["self_ratio"]


def test_outliers_are_far_from_what_is_usual():
    assert outliers([1.00, 1.001, 1.002, 1.001, 1.05]) == [4]
    assert outliers([1.00, 1.01, 1.02, 1.01, 1.05]) == []
    assert outliers([1.0, 1.0, 1.0]) == []
    assert outliers([1.0, 2.0]) == []


def test_drafts_that_were_not_verified_are_drafted_all_the_same():
    counts = Counts(steps=2, drafted=10, verified=4, accepted=3, committed=5)
    heard = Heard(0.0, deliveries=[(1.0, 1), (2.0, 5)], counts=counts)
    row = summary([sample([heard])])
    assert (row["acceptance_rate"], row["verified_length"]) == (0.3, 2.0)
    assert row["accepted_length"]["median"] == 2.5
