"""How many drafts are verified: exact optimum, split, staleness, curves; no torch, no clock."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache

import pytest

from deepinfer.speculative import Counts, Schedule, schedule
from deepinfer.speculative.timing import Curve, StepTimes

BLOCK = 5


# --- chances ------------------------------------------------------------------------------------


def test_confidences_are_calibrated_by_position():
    two, half = math.log(2), math.log(0.5)
    assert schedule.confidences([two, half], [1.0]) == pytest.approx([2 / 3, 1 / 3])
    assert schedule.confidences([two, two], [1.0, 0.5]) == pytest.approx([2 / 3, 4 / 5])
    assert schedule.confidences([1e9, -math.inf], (2.0,)) == pytest.approx([1, 0])
    with pytest.raises(ValueError):
        schedule.confidences([1.0] * 3, [1.0, 1.0])


def test_survivals_are_products():
    assert schedule.survivals([0.9, 0.8, 0.7]) == pytest.approx((0.9, 0.72, 0.504))
    assert schedule.survivals([]) == ()


def test_a_confidence_that_is_no_number_counts_as_zero_with_a_warning():
    lines = []
    (chance,) = schedule.confidences([math.nan], [1.0])
    assert schedule.survivals([0.9, chance, 0.8], lines.append) == (0.9, 0.0, 0.0)
    assert lines == ["the confidence of draft 2 is not a number; it counts as 0"]
    schedule.survivals([0.9, 0.8], lines.append)
    assert len(lines) == 1


# --- split --------------------------------------------------------------------------------------


def test_split_by_cumulative_chances():
    a, b = schedule.survivals([0.9, 0.8, 0.7]), schedule.survivals([0.95, 0.3, 0.99])
    assert schedule.split([a, b], 4) == [3, 1]
    assert [schedule.split([a, b], k) for k in (0, 1, 2, 6, 99)] == [
        [0, 0], [0, 1], [1, 1], [3, 3], [3, 3],
    ]  # fmt: skip


def test_split_ties_go_to_the_earlier_request_then_the_earlier_draft():
    half = (0.5, 0.5, 0.5)
    assert [schedule.split([half, half], k) for k in range(7)] == [
        [0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3],
    ]  # fmt: skip
    assert schedule.split([(0.5, 0.25), (0.5, 0.5)], 3) == [1, 2]


def test_nothing_is_verified_at_confidence_zero():
    assert schedule.split([(0.0,) * 5, (0.5, 0.0)], 10) == [0, 1]


def test_split_is_the_best_of_all_prefixes():
    rng = random.Random(1)
    for _ in range(200):
        values = [block(rng) for _ in range(rng.randint(1, 3))]
        extra = rng.randint(0, BLOCK * len(values))
        chosen = schedule.split(values, extra)
        assert sum(chosen) == extra
        best = max(
            worth(values, counts)
            for counts in itertools.product(range(BLOCK + 1), repeat=len(values))
            if sum(counts) == extra
        )
        assert worth(values, chosen) == pytest.approx(best)


# --- budget -------------------------------------------------------------------------------------


def block(rng, mean=1.5, apart=1.2, noise=1.0, difficulty=None):
    """Survivals of a block; `difficulty` is what its drafts have in common."""
    d = rng.gauss(0, 1) if difficulty is None else difficulty
    logits = [mean + apart * d + rng.gauss(0, noise) for _ in range(BLOCK)]
    return schedule.survivals(schedule.confidences(logits, [1.0]))


def worth(values, counts):
    return sum(sum(some[:count]) for some, count in zip(values, counts, strict=True))


def smooth(rng):
    """Overhead, a part that saturates like experts touched, a part per row."""
    base, experts, row = rng.uniform(1, 20), rng.uniform(0, 60), rng.uniform(0.001, 0.5)
    knee, request = rng.uniform(4, 200), rng.uniform(0, 0.05)
    return lambda rows, requests: (
        base + experts * (1 - math.exp(-rows / knee)) + row * rows + request * requests
    )


def cliffs(rng):
    """The same in steps, as padded shapes have it, and a jump where fast shapes end."""
    under, width, end = smooth(rng), rng.choice([2, 4, 8, 16, 64]), rng.randint(8, 600)
    jump = rng.uniform(1, 4)
    return lambda rows, requests: (
        under(-(-rows // width) * width, requests) * (jump if rows > end else 1)
    )


def best_by_search(values, requests, time):
    """Tokens a second of the best of all budgets, straight from the definition."""
    ranked = sorted((x for some in values for x in some), reverse=True)
    return max(
        (requests + sum(ranked[:k])) / time(requests + k, requests) for k in range(len(ranked) + 1)
    )


def rate(values, counts, time):
    requests = len(values)
    return (requests + worth(values, counts)) / time(requests + sum(counts), requests)


def test_budget_is_the_global_maximum_of_all_splits():
    rng = random.Random(2)
    for _ in range(150):
        values = [block(rng) for _ in range(rng.randint(1, 3))]
        time = rng.choice([smooth, cliffs])(rng)
        extra = schedule.budget([list(itertools.chain(*values))], len(values), time)
        best = max(
            rate(values, counts, time)
            for counts in itertools.product(range(BLOCK + 1), repeat=len(values))
        )
        assert rate(values, schedule.split(values, extra), time) == pytest.approx(best, rel=1e-12)


def test_budget_looks_beyond_a_dip_and_takes_the_first_maximum():
    seconds = [1, 2, 2.2, 9]
    assert schedule.budget([[0.9, 0.9, 0.9]], 1, lambda rows, _: seconds[rows - 1]) == 2
    assert schedule.budget([[1.0, 1.0]], 1, lambda rows, _: float(rows)) == 0
    assert schedule.budget([[0.0, 0.0]], 1, lambda rows, _: 1.0) == 2, "free"
    assert schedule.budget([], 0, lambda rows, _: 1.0) == 0
    assert schedule.budget([[]], 3, lambda rows, _: 1.0) == 0


def test_budget_keeps_to_the_row_limit():
    free = lambda rows, _: 1.0  # noqa: E731
    assert [schedule.budget([[0.9] * 10], 2, free, limit=k) for k in (0, 3, 99, -1)] == [
        0,
        3,
        10,
        0,
    ]


def test_rows_within_the_noise_are_free():
    seconds = lambda rows, _: 10.0 + 0.5 * rows  # noqa: E731
    values = [[0.9, 0.8, 0.001, 0.001, 0.001]]
    assert schedule.budget(values, 1, seconds) == 2
    assert [schedule.budget(values, 1, seconds, noise) for noise in (0.04, 0.05, 0.09, 1)] == [
        2, 3, 4, 5,
    ]  # fmt: skip


def searched():
    """Speed over that of the best budget in 2,000 batches of 1 to 256 requests on 20 curves: with
    the true curve, and with medians of 5 noisy steps a row count."""
    rng = random.Random(3)
    ratios, exact = [], []
    for at in range(20):
        time, known = (smooth, cliffs)[at % 2](rng), StepTimes()
        truth = [time(rows, 0) for rows in range(256 * (1 + BLOCK) + 1)]
        for rows in range(1, len(truth)):
            for _ in range(5):
                known.target.observe(rows, truth[rows] * rng.gauss(1, 0.01))
        noise = known.noise
        assert noise == pytest.approx(0.01 * 1.2533 / 5**0.5, rel=0.35)
        for _ in range(100):
            requests = round(256 ** rng.random())
            values = [block(rng) for _ in range(requests)]
            flat = list(itertools.chain(*values))
            ranked = sorted(flat, reverse=True)
            gains = list(itertools.accumulate(ranked, initial=requests))
            rates = [gain / truth[requests + k] for k, gain in enumerate(gains)]
            extra = schedule.budget([flat], requests, lambda rows, _: truth[rows])  # noqa: B023
            exact.append(rates[extra] / max(rates))
            ratios.append(rates[schedule.budget([flat], requests, known, noise)] / max(rates))
    return exact, ratios


def test_against_exhaustive_search_on_a_measured_curve():
    exact, ratios = searched()
    assert min(exact) == 1.0
    assert sum(ratios) / len(ratios) >= 0.995
    assert min(ratios) >= 0.97


# --- the schedule over many steps ---------------------------------------------------------------

# Byte floor of a decoder layer of V4.1-Flash by rows, microseconds (performance ledger §1.1).
_LAYER = ((1, 65), (2, 91), (4, 141), (8, 237), (16, 413), (32, 703), (64, 1105), (128, 1494),
          (256, 1688), (512, 1717), (2048, 1717))  # fmt: skip


def ledger(rows, requests):
    """40 layers, 0.38 us a row and layer of arithmetic, launches, drafting; milliseconds."""
    at = next(at for at, (knot, _) in enumerate(_LAYER) if knot >= rows)
    (low, left), (high, right) = _LAYER[max(at - 1, 0)], _LAYER[at]
    layer = right if low == high else left + (right - left) * (rows - low) / (high - low)
    return 0.04 * (layer + 0.38 * rows) + 2.9 + 4.5 * requests / 256


CURVES = {
    "ledger": ledger,
    "steps of 8": lambda rows, requests: ledger(-(-rows // 8) * 8, requests),
    "a cliff": lambda rows, requests: (5 if rows <= 40 else 10) + 0.01 * rows,
    "a price a row": lambda rows, requests: 5 + 0.2 * rows,
    "a high price": lambda rows, requests: 2 + 0.8 * rows,
    "flat, then steep": lambda rows, requests: 8 + max(0, rows - 64) / 8,
}
# How much the drafts of a block have in common, how much they differ, how long a request stays
# easy or hard, and the mean that makes 3.51 tokens a step of five verified drafts.
WORLDS = {
    "lasting": (1.2, 1.0, 0.8, 1.509),
    "alike, then anew": (2.0, 0.3, 0.0, 1.332),
    "all by chance": (0.0, 1.0, 0.0, 1.498),
    "hard to guess": (1.0, 3.0, 0.5, 2.644),
}


def simulate(requests, steps, world):
    """What each step's blocks are worth: survivals by step and request."""
    apart, noise, stays, mean = WORLDS[world]
    rng = random.Random(requests)
    difficulty = [rng.gauss(0, 1) for _ in range(requests)]
    out = []
    for _ in range(steps):
        difficulty = [
            stays * d + math.sqrt(1 - stays * stays) * rng.gauss(0, 1) for d in difficulty
        ]
        out.append([block(rng, mean, apart, noise, d) for d in difficulty])
    return out


@pytest.mark.parametrize("world", WORLDS)
def test_never_below_the_best_fixed_length(world):
    """Tokens a second at 1 to 256 requests with an accepted length of 3.51, against every fixed
    draft length; what was verified is what the newest confidences were worth."""
    lengths = []
    curves = {name: cache(time) for name, time in CURVES.items()}
    for requests in (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256):
        first = 2 + 24 // requests
        steps = simulate(requests, first + max(4, 500 // requests), world)
        count = len(steps) - first
        fixed = [
            sum(worth(values, [k] * requests) for values in steps[first:]) for k in range(BLOCK + 1)
        ]
        lengths.append(1 + fixed[BLOCK] / requests / count)
        for name, time in curves.items():
            plan, tokens, seconds = Schedule(time), 0.0, 0.0
            for step, values in enumerate(steps):
                plan.learn(step - 1, dict(enumerate(values)))
                if step >= first:
                    extra = plan.budget(step, dict.fromkeys(range(requests), BLOCK))
                    counts = schedule.split(values, extra)
                    tokens += requests + worth(values, counts)
                    seconds += time(requests + sum(counts), requests)
            best = max(
                (requests * count + gain) / (count * time(requests * (1 + k), requests))
                for k, gain in enumerate(fixed)
            )
            assert tokens / seconds > 0.99 * best, (requests, name, tokens / seconds / best)
    assert sum(lengths) / len(lengths) == pytest.approx(3.51, abs=0.12)


def test_a_budget_rests_on_what_was_drafted_two_steps_ago():
    seen = []

    def time(rows, requests):
        seen.append((rows, requests))
        return 1 + 0.4 * (rows - requests) / requests

    sure, lost = (0.9, 0.9), (0.1, 0.1)
    names = [f"request {at}" for at in range(24)]
    drafts = dict.fromkeys(names, 2)
    plan = Schedule(time)
    plan.learn(7, dict.fromkeys(names, lost))
    plan.learn(8, dict.fromkeys(names, sure))
    plan.learn(9, dict.fromkeys(names, lost))
    flat = schedule.budget([[*sure] * 24], 24, time)
    none = schedule.budget([[*lost] * 24], 24, time)
    assert flat != none
    assert [plan.budget(step, drafts) for step in (11, 10, 9, 10)] == [none, flat, none, flat]
    assert {requests for _, requests in seen} == {24}
    ahead = Schedule(time)  # planned before step 9 is known
    ahead.learn(8, dict.fromkeys(names, sure))
    assert ahead.budget(10, drafts) == flat


def test_a_small_batch_also_counts_the_steps_before():
    """One lucky block two steps ago is a poor guide: the mean of 24 blocks is taken."""
    time = lambda rows, requests: 1 + 0.4 * (rows - requests)  # noqa: E731
    plan, chosen = Schedule(time), []
    for step in range(80):
        plan.learn(step - 1, {"a": (0.9, 0.9) if step % 24 == 11 else (0.1, 0.1)})
        chosen.append(plan.budget(step, {"a": 2}))
    mean = (0.9 + 23 * 0.1) / 24
    assert schedule.budget([(mean, mean)], 1, time) == 0
    assert schedule.budget([(0.9, 0.9)], 1, time) == 2
    assert chosen[0] == 2 and not any(chosen[1:]), "nothing known yet, then the mean"
    assert len(plan._steps) <= 26, "old steps are forgotten"


def test_what_a_request_did_not_draft_counts_as_sure():
    time = lambda rows, requests: 1 + 0.4 * (rows - requests) ** 2  # noqa: E731
    plan = Schedule(time)
    assert plan.budget(5, {"new": 3}) == schedule.budget([[1.0] * 3], 1, time)
    plan.learn(3, {"old": (0.0, 0.0, 0.0)})
    assert plan.budget(5, {"old": 3}) == 0
    assert plan.budget(5, {"old": 3, "new": 3}) == schedule.budget([[1.0] * 3 + [0] * 3], 2, time)
    plan.learn(2, {"old": (0.0, 0.0, 0.0), "gone": (1.0, 1.0)})
    assert plan.budget(5, {"old": 1, "new": 3}) == schedule.budget([[1.0] * 3 + [0]], 2, time)
    assert plan.budget(5, {}) == 0
    plan = Schedule(lambda rows, requests: 1 + 0.1 * (rows - requests))
    plan.learn(12, {"early": (0.0, 0.0)})
    plan.learn(13, {"early": (0.0, 0.0), "late": (0.0, 0.0)})
    assert plan.budget(15, {"early": 2, "late": 2}) == 0, "what came later stands in"


# --- measured time ------------------------------------------------------------------------------


def test_a_curve_is_of_running_medians():
    curve = Curve()
    assert curve(5) == 0.0
    for seconds in (3.0, 9.0):
        curve.observe(10, seconds)
    assert curve(10) == 0.0, "two samples may both have been disturbed"
    curve.observe(10, 4.0)
    assert [curve(count) for count in (1, 10, 99)] == [0.4, 4.0, 4.0]
    for _ in range(15):
        curve.observe(10, 7.0)
    assert curve(10) == 7.0
    assert len(curve.samples[10]) == 15


def test_what_lies_between_is_taken_for_cheap_until_it_is_measured():
    curve = Curve()
    for count, seconds in ((4, 1.0), (16, 5.0)):
        for _ in range(3):
            curve.observe(count, seconds)
    assert [curve(count) for count in (2, 4, 8, 12, 16, 19)] == [0.5, 1.0, 1.0, 3.0, 5.0, 6.0]
    assert [curve.knows(count) for count in (2, 4, 8, 16, 17)] == [False, True, False, True, False]
    curve.observe(8, 9.0)
    assert curve(8) == 3.0, "one sample, perhaps disturbed: a third of it"
    curve.observe(8, 1.2)
    assert curve(8) == pytest.approx(2 / 3 * 5.1)
    curve.observe(8, 1.2)
    assert curve(8) == 1.2 and curve.knows(8)
    for count, seconds in ((15, 4.5), (14, 4.0)):
        for _ in range(3):
            curve.observe(count, seconds)
    assert curve.knows(15) and not curve.knows(13)


def test_neighbouring_counts_are_known_together():
    curve = Curve()
    for count, seconds in ((250, 1.0), (251, 1.2), (255, 1.1)):
        assert curve(252) == 0.0
        curve.observe(count, seconds)
    assert curve(252) == 1.1


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("cost", [
    pytest.param(lambda rows: 0.08 + 0.03 * rows, id="linear"),
    pytest.param(lambda rows: 0.2 + 0.0005 * rows, id="flat"),
    pytest.param(lambda rows: 0.1 if rows <= 8 else 0.4, id="cliff"),
    pytest.param(lambda rows: 0.1 + 0.1 * math.ceil(rows / 8), id="stairs"),
])  # fmt: skip
def test_a_schedule_that_learns_its_curve_ends_at_the_best(requests, chance, cost):
    """From nothing known, 1 % of noise: after 200 steps within 2 % of the best fixed length, and
    3 % over all 1,000 steps, trials included."""
    rng, times = random.Random(1), StepTimes()
    plan = Schedule(times, times.knows)
    survivals = schedule.survivals([chance] * BLOCK)

    def rate(extra):
        gain = sum(sorted(survivals * requests, reverse=True)[:extra])
        return (requests + gain) / (cost(requests + extra) + 0.01)

    best = max(rate(requests * fixed) for fixed in range(BLOCK + 1))
    reached = []
    for step in range(1000):
        extra = plan.budget(step, dict.fromkeys(range(requests), BLOCK), times.noise)
        reached.append(rate(extra))
        rows = requests + extra
        times.observe(rows, requests, cost(rows) * rng.gauss(1, 0.01), 0.01)
        plan.learn(step, dict.fromkeys(range(requests), survivals))
    assert sum(reached[200:]) / 800 >= 0.98 * best
    assert sum(reached) / 1000 >= 0.97 * best


def test_noise_is_what_a_median_cannot_tell():
    rng = random.Random(4)
    curve = Curve()
    assert curve.noise == 0.0
    for count in range(1, 200):
        for _ in range(15):
            curve.observe(count, count * rng.gauss(1, 0.05))
        curve.observe(1000 + count, 1e9)  # counts met once or twice say nothing
    assert curve.noise == pytest.approx(0.05 * 1.2533 / 15**0.5, rel=0.15)


def test_an_unknown_curve_takes_rows_to_be_free_so_that_they_get_measured():
    times, values = StepTimes(), [[0.5] * 10]
    assert schedule.budget(values, 2, times, times.noise, knows=times.knows) == 10
    for _ in range(3):
        times.observe(12, 2, 9.0, 0.1)
    assert schedule.budget(values, 2, times, times.noise, knows=times.knows) == 0, "tried next"
    for _ in range(3):
        times.observe(2, 2, 8.9, 0.1)
    assert schedule.budget(values, 2, times, times.noise, knows=times.knows) == 10


def test_answers_of_a_curve_are_as_new_as_its_samples():
    """They are kept; each sample may change any of them."""
    draw, curve, samples = random.Random(5), Curve(), []
    for _ in range(60):
        samples.append((draw.choice((1, 2, 5, 9, 40, 70, 71)), draw.choice((1.0, 1.0, 2.0, 3.0))))
        curve.observe(*samples[-1])
        fresh = Curve()
        for sample in samples:
            fresh.observe(*sample)
        wanted = [fresh(n) for n in range(1, 90, 3)]
        for _ in "12":
            assert [curve(n) for n in range(1, 90, 3)] == wanted


def test_no_time_is_not_learned():
    times = StepTimes()
    times.observe(4, 1, 0.0, 0.0)
    assert not times.target.samples and not times.rest.samples and times(4, 1) == 1.0


def filled():
    times = StepTimes()
    for rows in (1, 8, 40):
        for _ in range(3):
            times.observe(rows, 1 + rows // 6, rows * 0.5, 0.25)
    return times


def test_step_times_survive_on_disk_for_their_life(tmp_path):
    lines, now = [], [1000.0]
    keep = {"on_warning": lines.append, "clock": lambda: now[0]}
    folder = tmp_path / "perf"
    assert not StepTimes.load(folder, "gpu, model, build", 60, **keep).target.samples
    filled().save(folder, "gpu, model, build", **keep)
    now[0] += 59
    again = StepTimes.load(folder, "gpu, model, build", 60, **keep)
    assert again.target.samples == filled().target.samples
    assert [again(rows, 2) for rows in (1, 8, 20)] == [filled()(rows, 2) for rows in (1, 8, 20)]
    assert not StepTimes.load(folder, "gpu, other model, build", 60, **keep).target.samples
    now[0] += 1
    assert not StepTimes.load(folder, "gpu, model, build", 60, **keep).target.samples, "too old"
    now[0] = 0.0
    assert not StepTimes.load(folder, "gpu, model, build", 60, **keep).target.samples, "of tomorrow"
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    assert lines == []


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "not text": lambda text: "\udcff",
    "a list": lambda text: "[]",
    "a number": lambda text: "7",
    "deep": lambda text: "[" * 100_000,
    "another kind": lambda text: text.replace("step-times/1", "step-times/9"),
    "another model": lambda text: text.replace("model", "mouse"),
    "no number": lambda text: text.replace("0.25", "NaN"),
    "below zero": lambda text: text.replace("0.25", "-0.25"),
    "no time at all": lambda text: text.replace("0.25", "0.0"),
    "a text": lambda text: text.replace("0.25", '"0.25"'),
    "no count": lambda text: text.replace('"8"', '"eight"'),
    "no samples": lambda text: text.replace('"target": {', '"target": {"3": [], '),
    "curve missing": lambda text: text.replace('"rest"', '"test"'),
    "curve a list": lambda text: text.replace('"target": {', '"target": [], "tarjet": {'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, damage):
    lines = []
    filled().save(tmp_path, "gpu, model, build", lines.append)
    (path,) = tmp_path.iterdir()
    path.write_text(DAMAGE[damage](path.read_text()), errors="surrogateescape")
    times = StepTimes.load(tmp_path, "gpu, model, build", 60, lines.append)
    assert not times.target.samples and not times.rest.samples
    assert lines == [f"step times: {path.name} is damaged; measured anew"]
    filled().save(tmp_path, "gpu, model, build", lines.append)
    assert StepTimes.load(tmp_path, "gpu, model, build", 60, lines.append).target.samples


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path):
    lines, place = [], tmp_path / "file"
    place.write_text("")
    filled().save(place, "gpu", lines.append)
    assert len(lines) == 1 and "not kept for the next run" in lines[0]
    assert not StepTimes.load(place, "gpu", 60, lines.append).target.samples
    assert len(lines) == 2
    assert json.loads(json.dumps(lines)) == lines


# --- counting -----------------------------------------------------------------------------------


def test_counts_have_one_definition():
    counts = Counts()
    assert (counts.accepted_length, counts.acceptance_rate) == (None, None)
    counts.add(5, 3, 2, committed=3, ended=False)
    counts.add(5, 5, 5, committed=3, ended=True)
    counts.add(0, 0, 0, committed=1, ended=True)
    counts.add(5, 2, 1, committed=1, ended=False)
    assert (counts.drafted, counts.verified, counts.accepted, counts.discarded) == (15, 10, 6, 2)
    assert counts.accepted_length == 8 / 4
    assert counts.acceptance_rate == 6 / 15
    assert counts.as_json() == {
        "steps": 4, "drafted": 15, "verified": 10, "accepted": 6, "accepted_length": 2.0,
    }  # fmt: skip
