"""The scheduler, without a model: each step's plan is executed by counting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.request import Request, SamplingParams
from deepinfer.core.sequence import Sequence
from deepinfer.kvcache import BlockAllocator, PrefixCache, Reuse
from deepinfer.replay import ReplayRule
from deepinfer.scheduler.policy import Policy, Verify
from tests.unit.simulated import Bench as Shared

RULE = ReplayRule(layers=4, boundary=2, window=4)


class Bench:
    """A policy and the loop around it: token 7 is what everybody says."""

    def __init__(self, pages=64, page_tokens=4, slots=8, max_rows=32, chunk=32, drafts=None):
        prefix = PrefixCache(
            RULE,
            BlockAllocator(pages, page_tokens),
            BlockAllocator(0, page_tokens),
            Reuse(enabled=False),
        )
        self.policy = Policy(prefix, slots=slots, max_rows=max_rows, chunk=chunk, drafts=drafts)
        self.order = itertools.count()
        self.steps = []
        self.done = []
        self.landed = None
        self.stops = {}

    def add(self, prompt: int, new: int, stops: int | None = None) -> Sequence:
        """A request; stops: it ends after so many tokens, which nobody knows before."""
        params = SamplingParams(max_tokens=new)
        request = Request(0, 0, tuple(range(prompt)), params, seed=0, max_new=new)
        sequence = Sequence(request, next(self.order))
        assert self.policy.blocks.pages_for(request.need) <= self.policy.blocks.total
        self.stops[sequence] = stops or new
        self.policy.add(sequence)
        return sequence

    def step(self):
        """Plan a step, settle the one before, let this one happen."""
        step = self.policy.next_step()
        self.settle()
        if step is None:
            return None
        self.check(step)
        self.steps.append(step)
        counts = []
        for sequence in step.choosing:
            left = self.stops[sequence] - sequence.generated
            counts.append(min(self.tokens(step, sequence), left))
            for _ in range(counts[-1]):
                sequence.append(7)
        self.landed = step, np.array(counts, dtype=np.int64)
        return step

    def tokens(self, step, sequence) -> int:
        return 1

    def settle(self):
        if self.landed is None:
            return
        (step, counts), self.landed = self.landed, None
        self.policy.settle(step, counts)
        for chunk, (sequence, run) in zip(step.plan.chunks, step.chunks, strict=True):
            if sequence.slot is not None and sequence.preemptions == run:
                self.policy.advance(sequence, chunk.end)
        for sequence in step.choosing:
            if sequence.generated == self.stops[sequence] and sequence not in self.done:
                self.policy.remove(sequence)
                self.done.append(sequence)

    def run(self, limit=10_000):
        for _ in range(limit):
            if self.step() is None and not self.policy.running and not self.policy.waiting:
                return self
        pytest.fail("the schedule does not end")

    def check(self, step):
        policy, plan = self.policy, step.plan
        assert 0 < plan.rows <= policy.max_rows
        everybody = [*step.decoding, *(sequence for sequence, _ in step.chunks)]
        pages = [page for sequence in everybody for page in sequence.pages]
        assert len(pages) == len(set(pages))
        slots = [*(plan.decoding.slots if plan.decoding else ()), *(c.slot for c in plan.chunks)]
        assert slots == [sequence.slot for sequence in everybody]
        assert len(set(slots)) == len(slots)
        for sequence in step.decoding:
            assert len(sequence.pages) >= policy.blocks.pages_for(
                min(len(sequence.tokens), sequence.request.need)
            )
        if plan.decoding:
            assert plan.decoding.pages == max(len(s.pages) for s in step.decoding)
        for chunk, (sequence, _) in zip(plan.chunks, step.chunks, strict=True):
            assert chunk.end == sequence.computed
            assert list(chunk.token_ids) == sequence.tokens[chunk.start : chunk.end]
            assert len(chunk.token_ids) <= policy.chunk
            assert len(chunk.pages) == policy.blocks.pages_for(chunk.end)
            assert chunk.logits == (chunk.end == len(sequence.tokens))
            assert chunk.logits == (sequence in step.choosing)

    @property
    def idle(self):
        policy = self.policy
        return (
            policy.blocks.free == policy.blocks.total
            and policy.slots_in_use == 0
            and not policy.batch.members
        )


def test_decoding_rows_come_first_and_never_wait():
    """DI-33, the part without grammars: a long prompt starves nobody."""
    bench = Bench(pages=1000, max_rows=32)
    talkers = [bench.add(4, 200) for _ in range(2)]
    bench.step()
    bench.add(2000, 1)
    shorts = [bench.add(8, 3) for _ in range(5)]
    for _ in range(20):  # as one whose grammar takes as long: it comes to the scheduler late
        assert list(bench.step().decoding[:2]) == talkers
    shorts.append(bench.add(8, 3))
    while any(sequence not in bench.done for sequence in shorts):
        step = bench.step()
        assert list(step.decoding[:2]) == talkers, "both talk in every step"
    bench.run()
    assert len(bench.done) == 9 and bench.idle
    prefill = [
        s
        for s in bench.steps
        if any(c.start < 2000 and len(c.token_ids) > 8 for c in s.plan.chunks)
    ]
    assert 60 <= len(prefill) <= 75


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunks_respect_their_limit_and_the_budget(chunk):
    bench = Bench(max_rows=16, chunk=chunk)
    bench.add(50, 2)
    bench.run()
    sizes = [len(c.token_ids) for s in bench.steps for c in s.plan.chunks]
    assert sum(sizes) == 50 and max(sizes) == min(chunk, 16)
    assert sum(len(s.decoding) for s in bench.steps) == 1, "the second of two tokens"


def test_no_more_run_than_rows_or_slots():
    for slots, rows in ((3, 32), (20, 5)):
        bench = Bench(slots=slots, max_rows=rows, chunk=rows, pages=1000)
        for _ in range(12):
            bench.add(6, 6)
        while len(bench.done) < 12:
            bench.step()
            assert len(bench.policy.running) <= min(slots, rows)
        assert bench.idle


def test_memory_pressure_preempts_the_newest_and_everybody_finishes():
    bench = Bench(pages=12, page_tokens=4, slots=8)
    old, new = bench.add(16, 30), bench.add(16, 30)
    bench.run()
    assert old.preemptions == 0 and new.preemptions > 0
    assert bench.done == [old, new] and bench.idle


def test_pairs_that_fit_only_one_at_a_time():
    """DI-31, the requests that can run."""
    bench = Bench(pages=16, page_tokens=4)
    for prompt in (20, 40, 40):
        bench.add(prompt, 5)
    bench.run()
    prefilled = sum(len(c.token_ids) for s in bench.steps for c in s.plan.chunks)
    assert len(bench.done) == 3 and bench.idle and prefilled <= 200


def test_removal_at_any_moment_returns_everything():
    bench = Bench(pages=20, slots=3)
    sequences = [bench.add(12, 8) for _ in range(5)]
    bench.step()
    for sequence in sequences + sequences:  # twice is harmless
        bench.policy.remove(sequence)
    assert bench.idle
    bench.landed = None
    assert bench.step() is None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(13, 20),
    st.integers(1, 6),
    st.integers(1, 24),
    st.integers(1, 24),
)
def test_every_mix_ends_with_everything_back(requests, pages, slots, max_rows, chunk):
    bench = Bench(pages=pages, slots=slots, max_rows=max_rows, chunk=chunk)
    for prompt, new in requests:
        bench.add(prompt, new)
    bench.run()
    assert len(bench.done) == len(requests) and bench.idle
    # bounded waste: two optimistic admissions and one that nobody can interrupt
    assert all(sequence.preemptions <= 3 for sequence in bench.done)


class Eager:
    """Drafts for everybody, and all the rows for them that there are."""

    length = 3

    def wanted(self, number):
        return True

    def choose(self, number, sequences, most, spare):
        return Verify(self.length, min(self.length * len(sequences), spare))


def test_drafts_keep_nobody_out():
    """Two whose drafts would fill every step, and a third."""
    bench = Bench(pages=1000, max_rows=8, drafts=Eager())
    talkers = [bench.add(4, 300) for _ in range(2)]
    for _ in range(5):
        step = bench.step()
    assert list(step.decoding) == talkers and step.plan.decoding.extra == 6
    third = bench.add(3, 2)
    step = bench.step()
    assert [sequence for sequence, _ in step.chunks] == [third]
    assert len(step.plan.chunks[0].token_ids) == 3 and step.plan.decoding.extra == 3
    bench.run()
    assert bench.idle


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=2, max_size=12),
    st.integers(1, 6), st.integers(1, 24), st.integers(1, 24),
)  # fmt: skip
def test_drafts_take_half_of_what_prompts_could_use(requests, slots, max_rows, chunk):
    bench = Bench(pages=1000, slots=slots, max_rows=max_rows, chunk=chunk, drafts=Eager())
    policy = bench.policy
    for prompt, new in requests:
        bench.add(prompt, new)
    while len(bench.done) < len(requests):
        pending = {s: s.pending for s in policy.running}
        full = not policy.waiting or len(pending) == min(slots, max_rows)
        step = bench.step()
        if step is None or not step.plan.decoding:
            continue
        sizes = {s: len(c.token_ids)
                 for c, (s, _) in zip(step.plan.chunks, step.chunks, strict=True)}  # fmt: skip
        old = [s for s in sizes if s in pending]
        spare = max_rows - len(step.decoding) - len(old)
        if step.plan.decoding.extra > spare // 2:
            assert full
            assert all(sizes[s] == min(pending[s], chunk) for s in old)
    assert bench.idle


def test_rows_with_logits_come_in_bounded_chunks():
    bench = Bench(pages=2000, max_rows=4096, chunk=4096)
    bench.add(3000, 1).full = True
    step = bench.policy.next_step()
    [chunk] = step.plan.chunks
    assert len(chunk.token_ids) == chunk.logits == 1024


# With prefix reuse, on the device that knows what a page holds (`tests.unit.simulated`)

CUT = ReplayRule(layers=4, boundary=2, window=4, mode="compact", keep=4)


def test_a_shared_prefix_lets_more_run_at_once():
    """Six requests with 40 tokens in common fit where two unrelated ones do."""
    for apart, at_once in ((0, 6), (50, 2)):
        bench = Shared(
            pages=24, size=4, slots=8, windows=40, max_rows=256, chunk=256, rule=CUT
        )  # fmt: skip
        bench.ask(range(40))
        for n in range(6):
            bench.add([*range(n * apart + apart, n * apart + apart + 40), n], 3)
        bench.step()
        assert len(bench.policy.running) == at_once
        bench.run()
        assert bench.idle


def test_a_hit_never_counts_its_own_pages_as_free():
    """The pool is full of a cached prompt; the request that shares it may not take them too."""
    bench = Shared(pages=12, size=4, windows=40, rule=CUT)
    bench.ask(range(44))
    talker = bench.add(range(100, 104), 8)
    bench.step()
    longer = bench.add(range(46), 2)
    bench.step()
    assert longer.slot is None and not longer.pages, "10 pages shared, 2 more wanted, 1 is free"
    bench.run()
    assert talker.preemptions == longer.preemptions == 0 and bench.idle


def test_one_that_was_preempted_resumes_from_what_it_left():
    bench = Shared(pages=12, size=4, slots=2, windows=40, rule=CUT)
    old, new = bench.add(range(16), 20), bench.add(range(100, 116), 20)
    again = []
    while bench.open:
        step = bench.step()
        if step and new.preemptions:
            again += [c for c, (s, _) in zip(step.plan.chunks, step.chunks, strict=True)
                      if s is new]  # fmt: skip
    bench.settle()
    assert old.preemptions == 0 < new.preemptions and bench.idle
    assert again[0].start == 12, "not all of it again"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 12)), min_size=1,
        max_size=12,
    ),
    st.integers(14, 20), st.integers(1, 6), st.integers(1, 24), st.integers(1, 24),
    st.integers(0, 12),
)  # fmt: skip
def test_pressure_with_hits_ends_and_admits_what_fits(
    requests, pages, slots, max_rows, chunk, windows
):
    """As `test_every_mix_ends_with_everything_back`; right after an admission all that run can
    grow by a page."""
    bench = Shared(
        pages=pages, size=4, slots=slots, max_rows=max_rows, chunk=chunk, windows=windows, rule=CUT
    )
    for n, (common, own, new) in enumerate(requests):
        bench.add([*range(common), 100 + n, *range(own)], new)
    admitted, admit = [], bench.policy._admit

    def checked(sequence):
        loads = admit(sequence)
        if loads is not None:
            admitted.append(sequence)
            assert sequence.slot is not None and len(sequence.pages) * 4 >= len(sequence.tokens)
            others = [other for other in bench.policy.running if other is not sequence]
            grow = sum(len(other.pages) * 4 < other.request.need for other in others)
            assert grow <= bench.policy.blocks.free
        return loads

    bench.policy._admit = checked
    bench.run(limit=1000)
    assert len(bench.done) == len(requests) and bench.idle
    assert all(sequence.preemptions <= 3 for sequence in bench.done)
    # One may lose its memory while its last token is on its way: it never comes back.
    preempted = sum(s.preemptions for s in bench.done)
    assert len(requests) <= len(admitted) <= len(requests) + preempted
