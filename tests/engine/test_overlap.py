"""The loop that plans ahead of the device against the loop that waits: same plans, same tokens.

DI-34: requests come, go and come again at any step; whatever pages nobody holds are poisoned.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from deepinfer.core.request import SamplingParams
from deepinfer.engine.assembly import Sizes
from deepinfer.speculative.schedule import DraftRules
from tests.engine.fakes import byte_tokenizer
from tests.engine.shelf import VOCAB, Asked, Work, play, table, work

SEEDS = [range(50), *(range(first, first + 25) for first in range(50, 250, 25))]
REACHED = ("preempted", "twice", "hit", "accepted", "error", "gone")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def told(result):
    """All of a result but its times."""
    return (
        result.index, result.sample, result.token_ids, result.text, result.finish_reason,
        result.logprobs, result.prompt_logprobs, result.seed, result.speculation, result.usage,
        result.error,
    )  # fmt: skip


def compare(seed: int, tokenizer, **force):
    made = work(seed, **force)
    plain, ahead = (play(made, overlap, tokenizer) for overlap in (False, True))
    # A call that is closed while its last tokens are in flight has ended in the plain loop alone:
    # others find its pages there, later plans may differ, and with them what rejection draws.
    exact = not made.reuse or not any(one.goes is not None for one in made.calls)
    free = made.rules is None or made.rules.verify == "coupled"
    assert plain[0] == ahead[0] or not exact
    assert len(plain[1]) == len(ahead[1])
    for asked, one, two, *gone in zip(
        plain[5], plain[1], ahead[1], plain[2], ahead[2], strict=True
    ):
        if not (exact or free or asked.params.temperature == 0):
            continue
        for a, b in zip(one, two, strict=True):
            if not any(gone):
                assert said(a) == said(b)
                assert not exact or told(a) == told(b)
            else:  # what is in flight is not told: the other loop may be a step further
                longer, shorter = sorted((a, b), key=lambda r: -len(r.token_ids))
                assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
                assert longer.text.startswith(shorter.text.rstrip("\ufffd"))
    if seed % 3 == 0:
        check_truth(made, plain, tokenizer)
    return made, plain, ahead


def check_truth(made, plain, tokenizer):
    """Whoever was not withdrawn and is not drawn by rejection says what it says alone."""
    free = made.rules is None or made.rules.verify == "coupled"
    results = {id(one): truth(replace(made, calls=[one]), tokenizer)[0] for one in made.calls}
    for one, got, gone in zip(plain[5], plain[1], plain[2], strict=True):
        if gone or not (free or one.params.temperature == 0):
            continue
        for a, b in zip(got, results[id(one)], strict=True):
            if a.error is None or a.error.code == "numeric-error":
                assert said(a) == said(b), one


def truth(made, tokenizer):
    """Results of the same calls in an engine with room for all, without drafts or withdrawal."""
    calls = [replace(one, comes=0, goes=None) for one in made.calls]
    sizes = replace(made.sizes, slots=32, pages=1000, max_rows=1000, chunk=64)
    roomy = replace(made, calls=calls, sizes=sizes, reuse=False, rules=None)
    return play(roomy, False, tokenizer)[1]


def said(result):
    return result.token_ids, result.text, result.finish_reason, result.logprobs, result.seed


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}")
def test_both_loops_do_the_same(seeds, tokenizer):
    """250 random workloads; of every third the tokens are also those of each request alone. The
    first ones have everything in them: preemption (of one twice), hits, drafts, errors."""
    seen = Counter()
    for seed in seeds:
        try:
            _, _, (_, results, gone, taken, _, _) = compare(seed, tokenizer)
        except BaseException as problem:
            problem.add_note(f"workload {seed}")
            raise
        everything = [result for call in results for result in call]
        seen["preempted"] += taken
        seen["twice"] += taken > 2
        seen["hit"] += sum(r.usage.cached_tokens > 0 for r in everything)
        seen["accepted"] += sum((r.speculation or {}).get("accepted", 0) for r in everything)
        seen["error"] += sum(r.error is not None for r in everything)
        seen["gone"] += sum(gone)
    assert seeds[0] or all(seen[what] for what in REACHED), seen


def test_nothing_is_left_behind(tokenizer):
    """No thread, no process, no growth: the same workload again and again in one engine."""
    before = threading.active_count()
    counts = []
    for _ in range(3):
        play(work(7), True, tokenizer)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert threading.active_count() == before and not multiprocessing.active_children()
    assert counts[2] <= counts[1] + 50


@pytest.mark.parametrize("overlap", [False, True])
def test_rejection_beside_others(overlap, tokenizer):
    """With one draft length for all, what rejection draws is that of each request alone: everybody
    is judged by the scores of its own drafts, whichever slots and places they have."""
    draw, calls = random.Random(3), []
    for at in range(7):
        ids = [draw.randrange(VOCAB - 1) for _ in range(draw.randrange(1, 9))]
        params = SamplingParams(max_tokens=5 + 3 * at, seed=at, ignore_eos=at % 2 == 0)
        calls.append(Asked(ids, params, comes=(0, 0, 5, 0, 2, 7, 0)[at]))
    sizes = Sizes(8, 200, 4, 60, 300, 60)
    made = Work(calls, sizes, table(5), False, DraftRules(3, "rejection"), agrees=4)
    together = play(made, overlap, tokenizer)[1]
    for one, got in zip(calls, sorted(together, key=lambda r: r[0].seed), strict=True):
        [[alone]] = play(replace(made, calls=[replace(one, comes=0)]), False, tokenizer)[1]
        assert said(got[0]) == said(alone)
        assert got[0].speculation["accepted"] == alone.speculation["accepted"]
