"""The decoding requests as columns: what the scheduler knows of each, one vector operation a step.

Sequences join once their prompt is planned to its end and leave when they must be over; token
counts come in step by step. Only a request that is due for something (pages, its end) is looked at
alone. It must not know pools, drafts or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from deepinfer.core.sequence import Sequence

_NEVER = np.iinfo(np.int64).max


class Batch:
    """Decoding sequences in the order in which they joined, their numbers in columns by slot.

    members, slots: tuples that stay the same objects while nobody comes or goes. Of each member it
    keeps its tokens as far as they were settled, and the count at which it is due. At planning time
    exactly one step of every member is on its way.
    """

    def __init__(self, slots: int) -> None:
        self.members: tuple[Sequence, ...] = ()
        self.slots: tuple[int, ...] = ()
        self._in: list[Sequence | None] = [None] * slots
        self._known = np.zeros(slots, dtype=np.int64)
        self._end = np.zeros(slots, dtype=np.int64)
        self._watch = np.full(slots, _NEVER)
        self._named: tuple[tuple[int, ...], np.ndarray] = (), np.zeros(0, dtype=np.int64)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and self._in[sequence.slot] is sequence

    def change(self, leaving: Iterable[Sequence], joining: Items[tuple[Sequence, int]]) -> None:
        """Some leave, others join with so many settled tokens; these are due at once."""
        for sequence in leaving:
            at, slot = self.members.index(sequence), sequence.slot
            self.members = self.members[:at] + self.members[at + 1 :]
            self.slots = self.slots[:at] + self.slots[at + 1 :]
            self._in[slot] = None
            self._known[slot], self._end[slot], self._watch[slot] = 0, 0, _NEVER
        if not joining:
            return
        self.members += tuple([sequence for sequence, _ in joining])
        self.slots += tuple([sequence.slot for sequence, _ in joining])
        for sequence, known in joining:
            slot = sequence.slot
            self._in[slot] = sequence
            self._known[slot], self._end[slot], self._watch[slot] = known, sequence.request.end, 0

    def known(self, sequence: Sequence) -> int:
        """Settled tokens of a member."""
        return int(self._known[sequence.slot])

    def settle(self, slots: tuple[int, ...], more: Items[int], counts: np.ndarray) -> None:
        """The requests in `slots`, then those in `more`, got so many tokens, int64, in a step. Some
        may have left since: who joins in their slot does so later, and its numbers begin anew."""
        if self._named[0] is not slots:
            self._named = slots, np.array(slots, dtype=np.int64)
        own = self._named[1]
        if more:
            own = np.concatenate((own, np.array(more, dtype=np.int64)))
        self._known[own] += counts

    def due(self) -> list[Sequence]:
        """Members whose count has reached the one they are watched for, oldest first."""
        late = (self._known >= self._watch).nonzero()[0]
        if not len(late):
            return []
        return sorted([self._in[slot] for slot in late.tolist()], key=lambda one: one.order)

    def watch(self, sequence: Sequence, count: int) -> None:
        """A member is due from so many tokens on."""
        self._watch[sequence.slot] = count

    @property
    def left(self) -> int:
        """Most tokens that a member may still get behind the settled ones; 0 for nobody."""
        return int((self._end - self._known).max())
