"""Who runs in the next step: admission, decode first, chunked prefill, preemption.

Sequences come in with `add`, steps go out of `next_step`, counts of their tokens come back by
`settle`, and pages and slots return by `remove`. It decides from counts alone: no tensor, no text,
no sampling parameter, no clock.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer.core.sequence import Sequence
from deepinfer.core.step import Chunk, Decoding, Growth, Load, StepPlan
from deepinfer.kvcache.prefix import PrefixCache
from deepinfer.scheduler.batch import Batch

# After this many preemptions a sequence waits until nobody can take its pages again.
PATIENCE = 2
# Most rows of one request in a step that all deliver logits: they are as wide as the vocabulary.
LOGIT_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Verify:
    """Which drafts a step verifies: most of one request, rows for them in all, and the sequences
    that verify all they have."""

    drafts: int = 0
    extra: int = 0
    whole: tuple[Sequence, ...] = ()


class Speculates(Protocol):
    """Who decides about drafts: at most `length` of a request."""

    @property
    def length(self) -> int: ...
    def wanted(self, number: int) -> bool:
        """Are drafts made after this step?"""

    def choose(self, number: int, sequences: tuple[Sequence, ...], most: int, spare: int) -> Verify:
        """What this step verifies of `most` drafts of each sequence, in `spare` rows at most."""


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and who is behind it.

    number: of the step. decoding: sequences of `plan.decoding`, in its order. chunks: the sequence
    of each chunk, and how often it had lost its memory then. finishing: indices of the chunks
    whose last row chooses a token. choosing: all sequences that get a token: decoding, finishing.
    """

    number: int
    plan: StepPlan
    decoding: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]
    finishing: tuple[int, ...]
    choosing: tuple[Sequence, ...]


class Policy:
    """Continuous batching over `slots` state slots and a pool of pages.

    A step is planned from what is known after the step before the last, so the last one may still
    be running. Every decoding or prefilling sequence gets at least one row in every step, so at
    most `max_rows` run. Decoding rows come first, with the drafts that there are rows and idle
    pages for; then prompts, at most `chunk` rows of one request in a step; then new requests in
    order of arrival, never past one that does not fit yet. Beyond a row for each, drafts take no
    more than half while prompts run or wait that can use the rest.

    Memory for a whole prompt is taken at admission, less what others have computed already, for the
    answer page by page. When a decoding sequence finds no page, the newest running one gives
    everything up and is computed again later. The oldest is never preempted by another, and any
    sequence alone fits (who calls `add` has made sure), so every step makes progress.

    Work is proportional to what changed: a step in which nobody comes, goes or needs a page costs
    a few vector operations, however many run.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        *,
        slots: int,
        max_rows: int,
        chunk: int,
        drafts: Speculates | None = None,
    ) -> None:
        self.prefix = prefix
        self.blocks = prefix.entries
        self.slots = slots
        self.max_rows = max_rows
        self.chunk = chunk
        self.waiting: list[Sequence] = []  # both lists are sorted by arrival
        self.running: list[Sequence] = []
        self.batch = Batch(slots)
        self.planned = 0  # steps planned so far; their numbers count from 0
        self.settled = 0  # steps whose tokens are known
        self.preempted: list[Sequence] = []  # since somebody took the list
        self._drafts = drafts
        self._length = drafts.length if drafts else 0
        self._drafted = 0  # drafts that a request may have from the step before
        self._free_slots = list(range(slots - 1, -1, -1))
        self._prefilling: list[Sequence] = []
        self._joining: list[tuple[Sequence, int]] = []  # their first token is on its way
        self._grown: list[Growth] = []
        self._pages = 0  # of the longest in the batch, when it had these members
        self._measured: tuple[Sequence, ...] = ()
        self._growing = 0  # running sequences that may need more pages than they have
        self._decoding: Decoding | None = None
        self._refused: Sequence | None = None  # did not fit, and nothing has changed since

    @property
    def slots_in_use(self) -> int:
        return self.slots - len(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; alone in the pool, all of it must fit."""
        insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and take its memory back. Twice is harmless."""
        if sequence.slot is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take the memory of a running sequence; it waits and is computed again from its tokens."""
        self._release(sequence)
        self.preempted.append(sequence)
        sequence.preemptions += 1
        sequence.ready = self.planned
        insort(self.waiting, sequence, key=_arrival)

    def drop(self) -> None:
        """A step broke off and what was planned is void: all that run are preempted."""
        self.settled = self.planned
        self._drafted = 0
        for sequence in tuple(self.running):
            self.preempt(sequence)

    def settle(self, step: Step, counts: np.ndarray) -> None:
        """The tokens of a step are known: so many of each of `step.choosing`, int64."""
        self.settled = step.number + 1
        plan = step.plan
        slots = plan.decoding.slots if plan.decoding else ()
        self.batch.settle(slots, [plan.chunks[at].slot for at in step.finishing], counts)

    def advance(self, sequence: Sequence, end: int) -> None:
        """The state of all tokens before `end` is in memory for good: others may find it."""
        self.prefix.advance(sequence, end)
        self._refused = None

    def next_step(self) -> Step | None:
        """The next step, or None if nothing is left to run."""
        self._tend()
        members = self.batch.members
        rows = self.max_rows - len(members) - len(self._prefilling)
        decoding = self._plan_decoding(members, rows - self._left_by_drafts(rows))
        if decoding:
            rows -= decoding.extra
        rows += len(self._prefilling)
        if self._prefilling or self.waiting:
            taken, loads = self._prompts(rows)
        else:
            taken, loads = (), ()
        if not taken and not members:
            return None
        number, self.planned = self.planned, self.planned + 1
        chunks: tuple[Chunk, ...] = ()
        ran: tuple[tuple[Sequence, int], ...] = ()
        finishing: tuple[int, ...] = ()
        choosing = members
        if taken:
            chunks = tuple([self._chunk(sequence, size) for sequence, size in taken])
            ran = tuple([(sequence, sequence.preemptions) for sequence, _ in taken])
            finishing = tuple([at for at, (one, _) in enumerate(taken) if _finishes(one)])
            ending = [taken[at][0] for at in finishing]
            self._prefilling = sorted([s for s, _ in taken if s.pending], key=_arrival)
            self._joining = [(sequence, len(sequence.tokens)) for sequence in ending]
            choosing = (*members, *ending) if ending else members
        self._drafted = self._to_draft(number)
        grown, self._grown = tuple(self._grown), []
        plan = StepPlan(chunks, tuple(loads), decoding, grown, self._drafted)
        return Step(number, plan, members, ran, finishing, choosing)

    def _left_by_drafts(self, rows: int) -> int:
        """How many of so many rows prompts get before drafts do."""
        if not self._drafted:
            return 0
        if self.waiting and self._may_run(self.waiting[0]):
            wanted = rows
        else:
            wanted = sum(min(s.pending, self._limit(s)) - 1 for s in self._prefilling)
        return min(wanted, rows - rows // 2)

    def _prompts(self, rows: int) -> tuple[list[tuple[Sequence, int]], list[Load]]:
        """Which prompts run how many of so many rows, and what must be loaded for new ones."""
        taken: list[tuple[Sequence, int]] = []
        for behind, sequence in enumerate(self._prefilling, start=1):
            spare = rows - (len(self._prefilling) - behind)  # a row for each prompt after this one
            size = min(sequence.pending, self._limit(sequence), spare)
            taken.append((sequence, size))
            rows -= size
        loads: list[Load] = []
        while rows > 0 and self.waiting and (more := self._admit(self.waiting[0])) is not None:
            loads += more
            sequence = self.waiting.pop(0)
            size = min(sequence.pending, self._limit(sequence), rows)
            taken.append((sequence, size))
            rows -= size
        return taken, loads

    # decoding

    def _tend(self) -> None:
        """Let those join that got their first token, and look after those that are due."""
        batch = self.batch
        batch.change((), self._joining)
        self._joining = []
        over = []
        for sequence in batch.due():
            if sequence.slot is None:  # one before it has taken its memory
                continue
            known, end = batch.known(sequence), sequence.request.end
            if known + 1 >= end:  # the token on its way is the last one
                over.append(sequence)
            elif self._grow(sequence, known):
                room = len(sequence.pages) * self.blocks.page_tokens
                due = room - 2 * self._length
                batch.watch(sequence, end - 1 if room >= sequence.request.need else due)
                self._pages = max(self._pages, len(sequence.pages))
        batch.change(over, ())
        if batch.members is not self._measured:
            self._measured = batch.members
            self._pages = max((len(s.pages) for s in batch.members), default=0)

    def _grow(self, sequence: Sequence, known: int) -> bool:
        """Pages for the tokens that a sequence may have, at the cost of newer ones, and for its
        drafts, from what is idle. False: it had to go itself."""
        need, length = sequence.request.need, self._length
        most = known + 1 + length  # with what is on its way
        while (missing := self._missing(sequence, min(most, need))) > self.blocks.free:
            newest = self.running[-1]
            self.preempt(newest)
            if newest is sequence:
                return False
        drafts = self._missing(sequence, min(most + length, need))
        size = self.blocks.page_tokens
        for page in self.blocks.take(max(missing, min(drafts, self.blocks.free))):
            at = len(sequence.pages)
            sequence.pages.append(page)
            kept = dict(self.prefix.windows_of(sequence, at * size, (at + 1) * size))
            self._grown.append(Growth(sequence.slot, at, page, kept.get(at)))
            self._growing -= not self._grows(sequence)
        return True

    def _plan_decoding(self, members: tuple[Sequence, ...], spare: int) -> Decoding | None:
        if not members:
            return None
        verify = _NO_DRAFTS
        if self._drafted:
            verify = self._drafts.choose(self.planned, members, self._drafted, spare)
        old = self._decoding
        slots, whole = self.batch.slots, tuple([sequence.slot for sequence in verify.whole])
        if (
            old is None
            or old.slots is not slots
            or (old.pages, old.drafts, old.extra) != (self._pages, verify.drafts, verify.extra)
            or old.whole != whole
        ):
            self._decoding = Decoding(slots, self._pages, verify.drafts, verify.extra, whole)
        return self._decoding

    def _to_draft(self, number: int) -> int:
        """Most tokens worth drafting for one request after a step: the last one is never a draft,
        and every step on its way gives one."""
        if not self._length or not self._drafts.wanted(number):
            return 0
        left = self.batch.left - 2 if self.batch.members else 0
        for sequence, known in self._joining:
            left = max(left, sequence.request.end - known - 1)
        return max(min(self._length, left - 1), 0)

    # prompts

    def _limit(self, sequence: Sequence) -> int:
        return min(self.chunk, LOGIT_ROWS) if sequence.full else self.chunk

    def _chunk(self, sequence: Sequence, size: int) -> Chunk:
        start = sequence.computed
        end = sequence.computed = start + size
        logits = size if sequence.full else int(end == len(sequence.tokens))
        begins = start == sequence.replay.first
        context = self.prefix.reuse.context if begins else 0
        return Chunk(
            slot=sequence.slot,
            start=start,
            token_ids=tuple(sequence.tokens[start:end]),
            pages=tuple(sequence.pages[: self.blocks.pages_for(end)]),
            logits=logits,
            replay=sequence.replay,
            windows=self.prefix.windows_of(sequence, start, end),
            restore=tuple(sequence.restore) if begins else (),
            context=tuple(sequence.tokens[max(start - context, 0) : start]),
        )

    def _grows(self, sequence: Sequence) -> bool:
        """May it need more pages than it has?"""
        return self._missing(sequence, sequence.request.need) > 0

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return max(self.blocks.pages_for(tokens) - len(sequence.pages), 0)

    def _may_run(self, sequence: Sequence) -> bool:
        """May it run now, if there is memory?"""
        if len(self.running) >= min(self.slots, self.max_rows):
            return False
        return sequence is not self._refused and sequence.ready <= self.settled

    def _admit(self, sequence: Sequence) -> list[Load] | None:
        """Let a sequence run if there is a slot, and memory for what is known of it while the
        running ones grow on. Returns what must be loaded for it; None: not now."""
        if not self._may_run(sequence):
            return None
        if sequence.preemptions < PATIENCE:
            reserve = self._growing
        else:
            reserve = sum(self._missing(one, one.request.need) for one in self.running)
            reserve += self.blocks.pages_for(sequence.request.need)
            reserve -= self.blocks.pages_for(len(sequence.tokens))
        hit = self.prefix.find(sequence, reserve)
        if hit is None:
            self._refused = sequence
            return None
        sequence.slot = self._free_slots.pop()
        insort(self.running, sequence, key=_arrival)
        loads = self.prefix.adopt(sequence, hit)
        self._growing += self._grows(sequence)
        return loads

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._growing -= self._grows(sequence)
        if sequence in self.batch:
            self.batch.change((sequence,), ())
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        else:
            self._joining = [one for one in self._joining if one[0] is not sequence]
        self._grown = [grown for grown in self._grown if grown.slot != sequence.slot]
        self.prefix.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        self._refused = None


_NO_DRAFTS = Verify()


def as_many(sequences: tuple[Sequence, ...], most: int, spare: int) -> Verify:
    """Verify as many drafts of each sequence as there are rows for."""
    drafts = min(most, spare // len(sequences))
    return Verify(drafts, drafts * len(sequences))


def _finishes(sequence: Sequence) -> bool:
    """Does the chunk planned last choose a token?"""
    return not sequence.pending and sequence.request.max_new > 0


def _arrival(sequence: Sequence) -> int:
    return sequence.order
