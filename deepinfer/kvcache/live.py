"""Rows whose places only the device knows: those of decoding requests.

Comes in: tensors of the device, whose sizes alone the host knows. Goes out: which row belongs to
which request, and its position; nothing here waits for the device. It must not know pools, tokens'
meaning, or which of the rows will count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Spans:
    """Consecutive positions of S sequences, one sequence after the other, N in all; int64.

    starts, counts [S]: the first position of each sequence and how many it has; offsets [S]: where
    it stands among the N. of [N]: the sequence of each, ascending; positions [N].
    """

    starts: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    of: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def over(cls, starts: torch.Tensor, counts: torch.Tensor, total: int) -> Spans:
        """``counts`` int64 [S] positions of each sequence, ``total`` of all."""
        offsets = counts.cumsum(0) - counts
        of = torch.repeat_interleave(counts, output_size=total)
        positions = (starts - offsets)[of] + torch.arange(total, device=starts.device)
        return cls(starts, counts, offsets, of, positions)

    def before(self, others: Spans) -> Spans:
        """These sequences, then the others."""
        return Spans(
            torch.cat((self.starts, others.starts)),
            torch.cat((self.counts, others.counts)),
            torch.cat((self.offsets, others.offsets + len(self.of))),
            torch.cat((self.of, others.of + len(self.starts))),
            torch.cat((self.positions, others.positions)),
        )

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the ops on places take them: starts, offsets, of, positions."""
        return self.starts, self.offsets, self.of, self.positions

    @property
    def each(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and position of each of the N."""
        return self.of, self.positions

    def row(self, of: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Which of the N is at a position of a sequence; anything where none is."""
        return positions + (self.offsets - self.starts)[of]


@dataclass(frozen=True)
class LiveRows(Spans):
    """R decoding requests with N rows: each with its newest token and drafts behind it.

    slots int64 [R]: state slots, no two alike. ids int64 [N]: token ids, any valid one where a
    draft is void: such rows are computed, and nothing that counts depends on them. behind int64
    [N]: how far each is behind the first of its request. pages int64 [R, P]: the page of each page
    index, `Pools.pages` where the request owns none. windows int64 [R, P]: likewise the window
    page, `Pools.window_pages` where none is kept; None: nothing is kept of these rows. most: rows
    of one request at most, no more than 1 + rollback. longest: no row's position is as high; the P
    pages cover so many tokens.
    """

    slots: torch.Tensor
    ids: torch.Tensor
    behind: torch.Tensor
    pages: torch.Tensor
    windows: torch.Tensor | None
    most: int
    longest: int

    def apart(self) -> tuple[tuple[int, int, tuple[str, ...]], list[torch.Tensor]]:
        """What the host knows, and the tensors; `of_parts` puts them together again."""
        names = [f.name for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)]
        return (self.most, self.longest, tuple(names)), [getattr(self, name) for name in names]

    @classmethod
    def of_parts(
        cls, known: tuple[int, int, tuple[str, ...]], tensors: Iterable[torch.Tensor]
    ) -> LiveRows:
        most, longest, names = known
        given = dict(zip(names, tensors, strict=True))
        return cls(**{"windows": None, **given}, most=most, longest=longest)
