"""DI-46 to DI-48 on a virtual clock: what is counted from deliveries, and what a row says."""

import json
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

import deepinfer
from deepinfer.bench.metrics import (
    LEAST,
    MEASURED,
    Heard,
    outliers,
    quantile,
    sample,
    self_ratio,
    spread,
    summary,
    window,
)
from deepinfer.bench.synthetic import chance_of
from deepinfer.speculative.proposal import Counts

EMBEDDED = Path(deepinfer.__file__).parent / "embedded"


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


def stepped(first, steps, tokens=1, start=0.0):
    """A request whose first token comes at `first`, then some at each of so many seconds."""
    sizes = [tokens] * steps if isinstance(tokens, int) else tokens
    times = [(first + 1 + at, n) for at, n in enumerate(sizes)]
    return Heard(start, deliveries=[(first, 1), *times])


def test_decode_speed_is_of_the_steps_in_which_all_decode():
    """The second prompt runs for two steps in which the first request decodes."""
    early, late = stepped(1.0, 10, 2), stepped(3.0, 10, [3] * 10)
    found = window([early, late])
    # From 3.0, the last first token, to 11.0, the first finish: eight steps of both.
    assert (found.seconds, found.steps, found.tokens) == (8.0, 8, 8 * 2 + 8 * 3)
    assert found.behind == (1 + 4 + 8 + 1 + 12) / 2
    row = summary([sample([early, late])])
    assert row["decode_tok_s"]["median"] == 5.0 and row["decode_step_ms"]["median"] == 1000
    assert row["prefill_in_tpot"] is True
    assert row["tpot_ms"]["median"] == pytest.approx((500 + 1000 / 3) / 2)  # as it is defined


def test_deliveries_of_one_step_come_one_by_one():
    """The caller reads the clock for each of them, in any order."""
    requests = [stepped(1.0 + at * 1e-4, 8) for at in (2, 0, 1)]
    found = window(requests)
    assert (found.steps, found.tokens) == (8, 24)
    assert sample(requests)["prefill_in_tpot"] is False


def test_without_a_window_decode_speed_is_null_and_says_why():
    apart = [stepped(1.0, 5), stepped(7.0, 5)]
    assert window(apart) is None
    row = summary([sample(apart)])
    assert row["decode_tok_s"] is None and row["tpot_ms"]["median"] == 1000
    assert row["why"]["decode_tok_s"].startswith("no decode window: the first answer ended")
    short = summary([sample([stepped(1.0, LEAST + 1), stepped(3.0, LEAST + 1)])])
    assert f"fewer than {LEAST} steps" in short["why"]["decode_step_ms"]
    assert summary([sample([stepped(1.0, LEAST)])])["decode_tok_s"]["median"] == 1.0
    single = summary([sample([stepped(1.0, 0)])])
    assert single["why"]["decode_tok_s"] == single["why"]["tpot_ms"]


def drafting(sizes, block, drafted=None):
    """A request whose steps give so many tokens."""
    one = stepped(1.0, len(sizes), sizes)
    count, total = len(sizes), sum(sizes)
    made = block * count if drafted is None else drafted
    one.counts = Counts(count, made, made, total - count, 0, total)
    return one


def test_the_end_of_an_answer_does_not_shorten_the_accepted_length():
    # Of 16 tokens the first comes with the prompt; the last step had room for two, and took two.
    row = summary([sample([drafting([6, 4, 3, 2], 5, 15 + 1)], drafts=5)])
    assert row["accepted_length"]["median"] == 15 / 4  # as it is defined
    assert row["accepted_length_uncut"]["median"] == 5.0  # 6 and 4 had room, 3 and 2 had not
    at = [one["median"] for one in row["acceptance_by_position"]]
    assert at == [1.0, 1.0, 1.0, 0.5, 0.5] and row["acceptance_by_position"][0]["n"] == 1
    none = summary([sample([drafting([3, 2], 5, 6)], drafts=5)])
    assert none["accepted_length_uncut"] is None and none["acceptance_by_position"] is None
    assert none["why"]["acceptance_by_position"] == "no step had room for all drafts"


@pytest.mark.parametrize("tokens", [32, 128])
def test_a_mean_over_uncut_steps_is_that_of_the_drafts(tokens):
    """Drafts that stand by a draw of 3.51 tokens a step, as many as there is room for."""
    draw, chance = random.Random(3), chance_of(3.51, 5)
    cut, uncut = [], []
    for _ in range(4000):
        left, sizes = tokens - 1, []
        while left:
            stood = next((n for n in range(5) if draw.random() > chance), 5)
            sizes.append(min(stood + 1, left))
            left -= sizes[-1]
        found = sample([drafting(sizes, 5)], drafts=5)
        cut.append((found["speculation"]["committed"], found["speculation"]["steps"]))
        uncut += drafting(sizes, 5).uncut(5)
    assert sum(uncut) / len(uncut) == pytest.approx(3.51, abs=0.03)
    plain = sum(n for n, _ in cut) / sum(n for _, n in cut)
    assert plain < 3.51 - 5 / tokens, "what the definition gives shows the cut"


def test_pauses_leave_no_acceptance_by_position():
    row = summary([sample([drafting([1] * 20, 5, 50)], drafts=5)])
    assert row["acceptance_by_position"] is None
    assert row["why"]["acceptance_by_position"] == "some steps had no drafts"


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
    from deepinfer.bench.savings import savings
    from deepinfer.model.config import ModelConfig
    from deepinfer.replay.plan import ReplayRule

    flash = ModelConfig.from_dict(json.loads((EMBEDDED / "v41-flash.json").read_text()))
    done = SimpleNamespace(layer_rows=0, total_flops=0)
    for truncated, saved in ((20, 0.493), (19, 0.468)):
        rule = ReplayRule(40, 40 - truncated, 128, "compact", 140)
        for tokens, share in ((10_000, saved), (100, 0)):
            found = savings(flash, rule.plan(tokens), done)["prefill_saved_rows"]
            assert found["planned"] == pytest.approx(share, abs=5e-4)


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


def test_a_machine_that_changes_marks_its_rows():
    """On a virtual clock: noise of 0.5 % leaves nine of ten rows unmarked, other work none of them
    in which halves differ by more than 2 %."""
    draw = random.Random(5)

    def rows(noise):
        for _ in range(400):
            times = [max(1 + noise(at), 0.1) for at in range(5)]
            yield times, summary([sample([Heard(0.0, deliveries=[(t, 10)])]) for t in times])

    quiet = [row["steady"] for _, row in rows(lambda at: draw.gauss(0, 0.005))]
    assert sum(quiet) >= 0.9 * len(quiet)
    seen = set()
    for times, row in rows(lambda at: draw.gauss(0.05 * (at % 2), 0.03)):
        ratio = statistics.median(times[::2]) / statistics.median(times[1::2])
        seen.add(row["steady"])
        if not 0.9795 < ratio < 1.0205:
            assert row["steady"] is False
        elif 0.9805 < ratio < 1.0195:
            assert row["steady"] is True
    assert seen == {True, False}


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
