"""A device made of dictionaries, and the loop around the scheduler: what a page really holds.

Every prefix of tokens has a number. A row writes the number of its own prefix if all it reads is
what a fresh prefill would read (window rows, entries, n-gram context), and a number of its own if
not; so a page that others can find must hold the numbers that its name stands for. No torch.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter

import numpy as np

from deepinfer.core.request import Request, SamplingParams
from deepinfer.core.sequence import Sequence
from deepinfer.core.step import Chunk
from deepinfer.kvcache import BlockAllocator, PrefixCache, Reuse
from deepinfer.replay import ReplayRule
from deepinfer.scheduler.policy import Policy

KINDS = ("entries", "windows")


class Prefixes:
    """Numbers of token prefixes: equal ones for equal prefixes only."""

    def __init__(self):
        self.known = {}

    def of(self, tokens) -> list[int]:
        """The number of each prefix that ends with a token of `tokens`."""
        out, at = [], 0
        for token in tokens:
            at = self.known.setdefault((at, token), len(self.known) + 1)
            out.append(at)
        return out


class DictTier:
    """A tier that remembers all, or (lossy) loses a page between `contains` and `get`."""

    def __init__(self, losing=0):
        self.pages, self.losing, self.gets = {}, losing, 0

    def contains(self, key):
        return key in self.pages

    def get(self, key):
        self.gets += 1
        if self.losing and self.gets % self.losing == 0:
            self.pages.pop(key, None)
        return self.pages.get(key)

    def put(self, key, payload):
        self.pages[key] = payload

    def drop(self, key):
        self.pages.pop(key, None)


class Device:
    """Pages and slots. Whatever was not written holds 0, which no prefix has."""

    def __init__(self, rule, size, context):
        self.rule, self.size, self.context = rule, size, context
        self.prefixes = Prefixes()
        self.pages = {kind: {} for kind in KINDS}
        self.slots = {}
        self.wrong = itertools.count(-1, -1)
        self.approximate = 0

    def read(self, kind, page) -> bytes:
        return array("q", self._cells(kind, page)).tobytes()

    def _cells(self, kind, page):
        return self.pages[kind].setdefault(page, [0] * self.size)

    def run(self, step, cache, over, breaks=None):
        """Execute a step but for those that are over; breaks: stop after so many rows, as an error
        in its middle would."""
        for load in step.plan.loads:
            assert load.page not in cache._pools[load.kind]._names, "a named page was written"
            self.pages[load.kind][load.page] = list(array("q", load.payload))
        left = itertools.count() if breaks is None else iter(range(breaks))
        for sequence in step.decoding:
            if sequence in over:
                continue
            self._chunk(self._newest(sequence), sequence, cache, left)
        for chunk, (sequence, _) in zip(step.plan.chunks, step.chunks, strict=True):
            self._chunk(chunk, sequence, cache, left)

    def _newest(self, sequence):
        """The row of a decoding sequence, as the device makes it from what it knows."""
        start = len(sequence.tokens) - 1
        index = start // self.size
        kept = sequence.windows.get(index)
        return Chunk(
            sequence.slot, start, (sequence.tokens[-1],), tuple(sequence.pages), 1,
            sequence.replay, () if kept is None else ((index, kept),),
        )  # fmt: skip

    def _chunk(self, chunk, sequence, cache, left):
        """Rows of one chunk, with the ring and n-gram history of its slot."""
        window, size, plan = self.rule.window, self.size, chunk.replay
        truth = self.prefixes.of(sequence.tokens[: chunk.end])
        if chunk.start in (0, plan.first):
            self.slots[chunk.slot] = [0] * window, {}
        ring, history = self.slots[chunk.slot]
        first = chunk.start - len(chunk.restore) * size
        for p in range(max(first, chunk.start - window), chunk.start if chunk.restore else 0):
            page = chunk.restore[(p - first) // size]
            ring[p % window] = self._cells("windows", page)[p % size]
        for at, token in enumerate(reversed(chunk.context), start=1):
            history[chunk.start - at] = token
        # A replayed row reads no entry that it would have to write first.
        known = max(chunk.start, plan.cached)
        entries = [self._cells("entries", chunk.pages[p // size])[p % size]
                   for p in range(min(known, chunk.end))]  # fmt: skip
        clean = entries == truth[: len(entries)]
        kept = dict(chunk.windows)
        for p, token in enumerate(chunk.token_ids, start=chunk.start):
            if next(left, None) is None:
                return
            sees = max(p - window + 1, plan.sees_from(0), 0)
            exact = clean and sees == max(p - window + 1, 0)
            exact = exact and all(ring[q % window] == truth[q] for q in range(sees, p))
            back = range(max(p - self.context, 0), p)
            assert all(history.get(q) == sequence.tokens[q] for q in back), "n-grams"
            history[p] = token
            value = truth[p] if exact else next(self.wrong)
            assert exact or plan.refill, f"row {p} of {plan} is not what a fresh prefill gives"
            self.approximate += not exact
            clean = clean and exact
            ring[p % window] = value
            if p >= plan.cached:
                self._write(cache.entries, "entries", chunk.pages[p // size], p, value)
            if p // size in kept:
                self._write(cache.windows, "windows", kept[p // size], p, value)

    def _write(self, pool, kind, page, p, value):
        assert page not in pool._names, "a page that others can find was written"
        assert pool._owners[page] == 1, "a page that was written has one owner"
        self._cells(kind, page)[p % self.size] = value


class Bench:
    """Prefix cache, policy, device and the engine's loop; every step is checked from outside."""

    def __init__(
        self, *, pages=32, windows=16, size=4, slots=4, max_rows=32, chunk=32, rule=None,
        tiers=(), durable=None, replay=False, context=2, enabled=True,
    ):  # fmt: skip
        self.rule = rule or ReplayRule(layers=4, boundary=2, window=5)
        self.prefix = PrefixCache(
            self.rule, BlockAllocator(pages, size), BlockAllocator(windows, size),
            Reuse(enabled, b"i" * 32, context, replay), tiers, durable,
        )  # fmt: skip
        self.policy = Policy(self.prefix, slots=slots, max_rows=max_rows, chunk=chunk)
        self.device = Device(self.rule, size, context)
        self.size = size
        self.truth, self.learned = {}, {}
        self.order = itertools.count()
        self.open, self.done, self.cached, self.steps = [], [], {}, 0
        self.landed, self.over = None, []
        self.lossless = all(not getattr(tier, "losing", 0) for tier in tiers)

    # requests

    def add(self, tokens, new=1, full=False):
        """A request, or None where the engine would have refused it."""
        params = SamplingParams(max_tokens=new)
        request = Request(0, 0, tuple(tokens), params, seed=0, max_new=new)
        if self.policy.blocks.pages_for(request.need) > self.policy.blocks.total:
            return None
        sequence = Sequence(request, next(self.order), full)
        self.policy.add(sequence)
        self.open.append(sequence)
        return sequence

    def end(self, sequence):
        self.policy.remove(sequence)
        if sequence in self.open:
            self.open.remove(sequence)
        self._persist()

    def ask(self, tokens, new=1, **more):
        """Run one request to its end, alone or beside what is open."""
        sequence = self.add(tokens, new, **more)
        assert sequence is not None
        while sequence in self.open:
            self.step()
        if not self.open:
            self.settle()
            self._persist()
        return sequence

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.open:
                self.settle()
                return self
            self.step()
        raise AssertionError("the schedule does not end")

    # the engine's loop

    def step(self, fails=None, broken=None):
        """Plan a step and run it; then settle the one before, as late as the engine does.

        fails: an error after so many rows; broken: which sequence of the step, decoding ones first,
        is not finite."""
        if self.lossless:
            self._expect()
        step = self.policy.next_step()
        self.policy.preempted.clear()
        self._move(self.prefix.leaving(), self.prefix.keep)
        if step is not None:
            self.steps += 1
            self._check_plan(step)
            self.check()
            if fails is not None:
                self.device.run(step, self.prefix, self.over, breaks=fails)
                self.start_afresh()
                self._persist()
                self.check()
                return step
            self.device.run(step, self.prefix, self.over)
        self.settle()
        if step is not None:
            self.landed = step, self._land(step, broken)
        self._persist()
        self.check()
        return step

    def _land(self, step, broken):
        """Tokens of a step; what the scheduler will hear of it: counts, ends of what is complete,
        and the sequence that is not finite."""
        everybody = [*step.decoding, *(sequence for sequence, _ in step.chunks)]
        counts, ends, bad = [], [], None
        for (sequence, run), chunk in zip(step.chunks, step.plan.chunks, strict=True):
            self.cached.setdefault(sequence, chunk.replay.cached)
            ends.append((sequence, run, chunk.end))
        for sequence in step.choosing:
            counts.append(int(sequence not in self.over))
            if sequence in self.over:
                continue
            ends.append((sequence, sequence.preemptions, len(sequence.tokens)))
            sequence.append(self.device.prefixes.of(sequence.tokens)[-1] % 3)
            if sequence.generated == sequence.request.max_new:
                self._over(sequence)
                self.done.append(sequence)
        if broken is not None and broken < len(everybody):
            bad = everybody[broken]
            ends = [end for end in ends if end[0] is not bad]
            self._over(bad)
        return np.array(counts, dtype=np.int64), ends, bad

    def _over(self, sequence):
        self.over.append(sequence)
        if sequence in self.open:
            self.open.remove(sequence)

    def settle(self):
        if self.landed is not None:
            (step, (counts, ends, bad)), self.landed = self.landed, None
            self.policy.settle(step, counts)
            if bad is not None:
                self.prefix.forget(bad)
            for sequence, run, end in ends:
                if sequence.slot is not None and sequence.preemptions == run:
                    self.policy.advance(sequence, end)
            for sequence in self.over:
                self.policy.remove(sequence)
            self.over = []

    def start_afresh(self):
        self.landed = None
        self.policy.drop()
        self.policy.preempted.clear()
        for sequence in self.over:
            self.policy.remove(sequence)
        self.over = []

    def _persist(self):
        self._move(self.prefix.completed(), self.prefix.persist)

    def _move(self, pages, store):
        for key, page in pages:
            payload = self.device.read(key[0], page)
            assert payload == self.content(key[1]), f"a {key[0]} page was moved that is not whole"
            store(key, payload)

    def _expect(self):
        """Compare the next admission's resume point with the best one, by trying all."""
        if not self.policy.waiting or len(self.policy.running) == self.policy.slots:
            return
        sequence, cache = self.policy.waiting[0], self.prefix
        cache._extend_names(sequence)
        self._learn()
        names = sequence.names
        best = 0
        limit = 0 if sequence.full or not cache.reuse.enabled else self._latest(sequence)
        for count in range(1, limit // self.size + 1):
            halo = names[max(count * self.size - self.rule.window, 0) // self.size : count]
            pages = [cache.windows.find(name) for name in halo]
            room = sum(page is None or not cache.windows.owned(page) for page in pages)
            if (
                all(cache._known("entries", name) for name in names[:count])
                and all(cache._known("windows", name) for name in halo)
                and room <= cache.windows.free
            ):
                best = count
        before = self._owned()
        hit = cache.find(sequence)
        if hit is None:
            return
        if hit.plan.refill:
            assert cache.reuse.replay and hit.plan.cached > best * self.size
            assert hit.plan.refill == self.rule.window
        else:
            assert hit.plan.cached == best * self.size
        cache.undo(hit)
        assert self._owned() == before

    def _latest(self, sequence):
        keep = self.rule.keep if self.rule.mode != "off" else 1
        return max(sequence.prompt_tokens - keep, 0)

    # what must hold

    def content(self, name) -> bytes:
        self._learn()
        return array("q", self.truth[name]).tobytes()

    def _learn(self):
        """What each name stands for, from the tokens alone."""
        for sequence in (*self.open, *self.done):
            known = self.learned.get(sequence, 0)
            if known == len(sequence.names):
                continue
            self.learned[sequence] = len(sequence.names)
            numbers = self.device.prefixes.of(sequence.tokens)
            for i, name in enumerate(sequence.names[known:], start=known):
                cells = numbers[i * self.size : (i + 1) * self.size]
                assert self.truth.setdefault(name, cells) == cells, "two contents with one name"

    def _owned(self):
        return [list(pool._owners) for pool in (self.prefix.entries, self.prefix.windows)]

    def check(self):
        cache = self.prefix
        held = {kind: Counter() for kind in KINDS}
        for sequence in self.policy.running:
            held["entries"].update(sequence.pages)
            held["windows"].update([*sequence.restore, *sequence.windows.values()])
            for pages in (sequence.pages, [*sequence.restore, *sequence.windows.values()]):
                assert len(set(pages)) == len(pages), "a sequence holds a page twice"
        for sequence in self.policy.waiting:
            assert not (sequence.pages or sequence.restore or sequence.windows)
            assert sequence.slot is None and sequence.computed == 0
        for kind, pool in cache._pools.items():
            assert pool._owners == [held[kind][page] for page in range(pool.total)]
            free, cached = set(pool._free), set(pool._cached)
            assert len(pool._free) == len(free) and not free & cached
            assert free | cached == {page for page in range(pool.total) if not pool._owners[page]}
            assert cached <= set(pool._names) and not free & set(pool._names)
            assert {page: name for name, page in pool._pages.items()} == pool._names
            for page, owners in enumerate(pool._owners):
                assert owners <= 1 or page in pool._names or self._was_named(kind, page)
            for name, page in pool._pages.items():
                assert self.device.read(kind, page) == self.content(name), f"{kind} page {page}"
        for tier in cache.tiers:
            for (_, name), payload in getattr(tier, "pages", getattr(tier, "_pages", {})).items():
                assert payload == self.content(name), "a tier holds what its key does not say"

    def _was_named(self, kind, page):
        """Shared, and its name dropped while it was: the content is still that of a name."""
        return list(array("q", self.device.read(kind, page))) in list(self.truth.values())

    def _check_plan(self, step):
        policy = self.policy
        assert 0 < step.plan.rows <= policy.max_rows
        everybody = [*step.decoding, *(sequence for sequence, _ in step.chunks)]
        assert everybody and len(set(everybody)) == len(everybody)
        # The others' last token was on its way.
        assert set(everybody) <= set(policy.running)
        assert {*policy.running} - {*everybody} <= {*self.over}
        for chunk, (sequence, _) in zip(step.plan.chunks, step.chunks, strict=True):
            assert chunk.end == sequence.computed and chunk.replay is sequence.replay
            assert chunk.end <= len(sequence.tokens) and len(chunk.token_ids) <= policy.chunk
            assert len(chunk.pages) == policy.blocks.pages_for(chunk.end)
            assert not chunk.restore or chunk.start == chunk.replay.first > 0

    @property
    def idle(self):
        """Has everything come back?"""
        pools = self.prefix._pools.values()
        return (
            all(pool.free == pool.total and not any(pool._owners) for pool in pools)
            and self.policy.slots_in_use == 0
            and not self.policy.running + self.policy.waiting
        )

    def found(self, kind, sequence):
        """Indices of a sequence's pages that others can find on the device."""
        pool = self.prefix._pools[kind]
        return [i for i, name in enumerate(sequence.names) if pool.find(name) is not None]
