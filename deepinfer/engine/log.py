"""What the last steps gave to each slot, until somebody reads it.

Outcomes go in, a vector operation each; a request's part comes out when it is due: its text is
followed, a page of it is complete, or it ends. It must not know requests, text or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.core.step import Outcome


@dataclass(frozen=True, slots=True)
class Entry:
    """Some steps of one slot: their tokens, and sums of the drafts that were made, verified and
    accepted."""

    tokens: list[int]
    steps: int
    drafted: int = 0
    verified: int = 0
    accepted: int = 0


class TokenLog:
    """Tokens of the last `depth` steps of `slots` slots, at most `most` a step.

    length: tokens of the request in each slot; a slot is due when it reaches `tell`.
    """

    def __init__(self, slots: int, depth: int, most: int) -> None:
        self.length = np.zeros(slots, dtype=np.int64)
        self.tell = np.zeros(slots, dtype=np.int64)
        self._depth, self._most = depth, most
        self._tokens = np.zeros((depth, slots, most), dtype=np.int64)
        # tokens, drafts made, verified, accepted
        self._counts = np.zeros((4, depth, slots if most > 1 else 0), dtype=np.int64)
        self._places = np.arange(most)
        self._since = [0] * slots
        self._at = 0

    def begin(self, slot: int, length: int) -> None:
        """A request of so many tokens is in a slot now, and due with its next one."""
        self.length[slot], self.tell[slot], self._since[slot] = length, 0, self._at

    def write(self, slots: np.ndarray, outcome: Outcome) -> list[int]:
        """Add a step of these slots; the places in it of those that are due."""
        row = self._at % self._depth
        self._at += 1
        counts = outcome.counts
        if self._most == 1:
            self._tokens[row][slots] = outcome.tokens
        else:
            self._tokens[row, slots, : outcome.tokens.shape[1]] = outcome.tokens
            held = (counts, outcome.drafted, outcome.verified, outcome.accepted)
            self._counts[:, row, slots] = held
        length = self.length[slots] + counts
        self.length[slots] = length
        return ((length >= self.tell[slots]) | outcome.look).nonzero()[0].tolist()

    def read(self, slot: int, but: int = 0) -> Entry:
        """The steps of a slot that were not read yet, less the last `but`, which count as read.

        Of these each gave one token where nothing is drafted: only the last can have given none.
        """
        since = self._since[slot]
        end = max(since, self._at - but)
        self._since[slot] = self._at
        if self._most == 1:
            column = self._tokens[:, slot, 0]
            first, last = since % self._depth, end % self._depth
            whole = first + end - since <= self._depth
            tokens = column[first : first + end - since].tolist()
            return Entry(tokens if whole else tokens + column[:last].tolist(), end - since)
        rows = np.arange(since, end)
        tokens = self._tokens[:, slot].take(rows, axis=0, mode="wrap")
        counts = self._counts[:, :, slot].take(rows, axis=1, mode="wrap")
        own = tokens[self._places < counts[0][:, None]].tolist()
        _, drafted, verified, _ = counts.sum(1).tolist()
        accepted = int(np.minimum(counts[0], counts[3]).sum())
        return Entry(own, end - since, drafted, verified, accepted)
