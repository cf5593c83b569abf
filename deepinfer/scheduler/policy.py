"""Who runs in the next step: admission, decode first, chunked prefill, preemption.

Sequences come in with `add`, steps go out of `next_step`, and pages and slots return by `remove`.
It decides from counts alone: no tensor, no text, no sampling parameter, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.core.sequence import Sequence
from deepinfer.core.step import Chunk, Load, StepPlan
from deepinfer.kvcache.prefix import PrefixCache

# After this many preemptions a sequence waits until nobody can take its pages again.
PATIENCE = 2
# Most rows of one request in a step that all deliver logits: they are as wide as the vocabulary.
LOGIT_ROWS = 1024


Wants = Callable[[Sequence], bool]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequence behind each of its chunks."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]


class Policy:
    """Continuous batching over `slots` state slots and a pool of pages.

    Every running sequence gets at least one row in every step, so at most `max_rows` run. Decoding
    rows come first, oldest request first, with the drafts that there are rows and idle pages for;
    then prompts, at most `chunk` rows of one request in a step; then new requests in order of
    arrival, never past one that does not fit yet. Memory for a whole prompt is taken at admission,
    less what others have computed already, for the answer page by page. When a decoding sequence
    finds no page, the newest running one gives everything up and is computed again later. The
    oldest is never preempted by another, and any sequence alone fits (who calls `add` has made
    sure), so every step makes progress.
    """

    def __init__(self, prefix: PrefixCache, *, slots: int, max_rows: int, chunk: int) -> None:
        self.prefix = prefix
        self.blocks = prefix.entries
        self.slots = slots
        self.max_rows = max_rows
        self.chunk = chunk
        self.waiting: list[Sequence] = []  # both lists are sorted by arrival
        self.running: list[Sequence] = []
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def slots_in_use(self) -> int:
        return self.slots - len(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; alone in the pool, all of it must fit."""
        insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and take its memory back. Twice is harmless."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take the memory of a running sequence; it waits and is computed again from its tokens."""
        self._release(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=_arrival)

    def next_step(self, want_all_rows: Wants = lambda sequence: False) -> Step | None:
        """The next step, or None if nothing is left to run.

        want_all_rows(sequence): must every row of its next chunk deliver logits?
        """
        taken: list[tuple[Sequence, int]] = []
        rows = self.max_rows
        for sequence in tuple(self.running):
            # a sequence after this one may have been preempted by it meanwhile
            if sequence.slot is not None and sequence.pending == 1 and self._grow(sequence):
                taken.append((sequence, 1))
        rows -= len(self.running)
        for at, (sequence, _) in enumerate(taken):
            self._trim_drafts(sequence, rows)
            taken[at] = sequence, 1 + len(sequence.drafts)
            rows -= len(sequence.drafts)
        rows += len(self.running) - len(taken)
        prefilling = [sequence for sequence in self.running if sequence.pending > 1]
        for behind, sequence in enumerate(prefilling, start=1):
            spare = rows - (len(prefilling) - behind)  # one row for each prompt after this one
            size = min(sequence.pending, self._limit(sequence, want_all_rows), spare)
            taken.append((sequence, size))
            rows -= size
        loads: list[Load] = []
        while rows > 0 and self.waiting and (more := self._admit(self.waiting[0])) is not None:
            loads += more
            sequence = self.waiting.pop(0)
            size = min(sequence.pending, self._limit(sequence, want_all_rows), rows)
            taken.append((sequence, size))
            rows -= size
        if not taken:
            return None
        chunks = tuple(self._chunk(sequence, size, want_all_rows) for sequence, size in taken)
        return Step(StepPlan(chunks, tuple(loads)), tuple(sequence for sequence, _ in taken))

    def _limit(self, sequence: Sequence, want_all_rows: Wants) -> int:
        return min(self.chunk, LOGIT_ROWS) if want_all_rows(sequence) else self.chunk

    def _chunk(self, sequence: Sequence, size: int, want_all_rows: Wants) -> Chunk:
        start = sequence.computed
        end = start + size
        drafts = sequence.drafts
        if want_all_rows(sequence) or drafts:
            logits = size
        else:
            logits = 1 if end == len(sequence.tokens) else 0
        known = tuple(sequence.tokens[start : end - len(drafts)])
        begins = start == sequence.replay.first
        context = self.prefix.reuse.context if begins else 0
        return Chunk(
            slot=sequence.slot,
            start=start,
            token_ids=known + drafts,
            pages=tuple(sequence.pages[: self.blocks.pages_for(end)]),
            logits=logits,
            drafts=len(drafts),
            replay=sequence.replay,
            windows=self.prefix.windows_of(sequence, start, end),
            restore=tuple(sequence.restore),
            context=tuple(sequence.tokens[max(start - context, 0) : start]),
        )

    def _grow(self, sequence: Sequence) -> bool:
        """Pages for all its tokens, at the cost of newer sequences. False: it had to go itself."""
        while (missing := self._missing(sequence, len(sequence.tokens))) > self.blocks.free:
            newest = self.running[-1]
            self.preempt(newest)
            if newest is sequence:
                return False
        sequence.pages += self.blocks.take(missing)
        return True

    def _trim_drafts(self, sequence: Sequence, rows: int) -> None:
        """Keep as many of its drafts as there are rows for, and pages that nobody else needs."""
        room = (len(sequence.pages) + self.blocks.free) * self.blocks.page_tokens
        room -= len(sequence.tokens)
        sequence.drafts = sequence.drafts[: max(min(rows, room), 0)]
        more = self._missing(sequence, len(sequence.tokens) + len(sequence.drafts))
        sequence.pages += self.blocks.take(more)

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return max(self.blocks.pages_for(tokens) - len(sequence.pages), 0)

    def _admit(self, sequence: Sequence) -> list[Load] | None:
        """Let a sequence run if there is a slot, and memory for what is known of it while the
        running ones grow on. Returns what must be loaded for it; None: not now."""
        if len(self.running) >= min(self.slots, self.max_rows):
            return None
        growth = [self._missing(running, running.request.need) for running in self.running]
        if sequence.preemptions < PATIENCE:
            reserve = sum(min(pages, 1) for pages in growth)
        else:
            reserve = sum(growth) + self.blocks.pages_for(sequence.request.need)
            reserve -= self.blocks.pages_for(len(sequence.tokens))
        hit = self.prefix.find(sequence, reserve)
        if hit is None:
            return None
        sequence.slot = self._free_slots.pop()
        insort(self.running, sequence, key=_arrival)
        return self.prefix.adopt(sequence, hit)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.prefix.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.drafts = ()


def _arrival(sequence: Sequence) -> int:
    return sequence.order
