"""The rows of one step, numbered through: those of live requests first, then those of the chunks.

Comes in: what the host knows of the chunks, and the tensors of the live requests. Goes out: spans,
slots and pages of all of them on the device, by one copy and without waiting. It must not know what
is stored for a row, nor what the model asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from deepinfer.core.step import Chunk
from deepinfer.device.transfer import send
from deepinfer.kvcache.live import LiveRows, Spans
from deepinfer.kvcache.pools import Pools
from deepinfer.model.memory import Ops

Key = tuple[str, int]


class _ChunkRows:
    """Rows of C chunks, as the host knows them, and their spans on the device.

    starts, counts: of the rows in the lower (0) and in the upper half (1) of the layers. slots
    int64 [C]; pages int64 [C, P], the scratch page behind the end of a table; sees int64 [2, C] the
    first visible position in each half; kept int64 [2, K] chunk and window page of each span of
    ("kept", 0); alike: {(half, n): chunks with n rows there}.
    """

    def __init__(
        self, chunks: Sequence[Chunk], layers: int, ratios: Collection[int], pools: Pools
    ) -> None:
        starts = np.array([c.start for c in chunks])
        ends = np.array([c.end for c in chunks])
        plans = [c.replay for c in chunks]
        first = np.array([p.rows_from(layers - 1) if p else 0 for p in plans])
        cached = np.array([p.cached if p else 0 for p in plans])
        uppers = np.minimum(np.maximum(starts, first), ends)
        self.starts = starts, uppers
        self.counts = ends - starts, ends - uppers

        ranges: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        for half, begins in enumerate(self.starts):
            ranges["rows", half] = begins, ends
            ranges["ring", half] = np.maximum(begins, ends - pools.ring), ends
        ranges["history", 0] = np.maximum(starts, ends - pools.history.shape[1]), ends
        # A replayed row closes no group: the entries before `cached` are there.
        known = np.minimum(np.maximum(starts, cached), ends)
        for ratio in ratios:
            still = (ends - pools.rollback) // ratio * ratio
            ranges["open", ratio] = np.maximum(starts, still), ends
            ranges["groups", ratio] = known // ratio, ends // ratio
        kept = [(i, *window) for i, c in enumerate(chunks) for window in c.windows]
        of, index, page = np.array(kept, dtype=np.int64).reshape(-1, 3).T
        begins = np.maximum(starts[of], index * pools.page_tokens)
        stops = np.minimum(ends[of], (index + 1) * pools.page_tokens)
        ranges["kept", 0] = begins, np.maximum(begins, stops)

        pages = np.full((len(chunks), max(len(c.pages) for c in chunks)), pools.pages)
        for row, c in zip(pages, chunks, strict=True):
            row[: len(c.pages)] = c.pages
        sees = [[p.sees_from(layer) if p else 0 for p in plans] for layer in (0, layers - 1)]
        tables: dict[Key, np.ndarray] = {
            ("slots", 0): np.array([c.slot for c in chunks]),
            ("pages", 0): pages,
            ("sees", 0): np.array(sees),
            ("kept", 0): np.stack((of, page)),
        }
        alike = {
            (half, n): np.flatnonzero(counts == n)
            for half, counts in enumerate(self.counts)
            for n in {*counts.tolist()} - {0}
        }
        spans = {key: np.stack((begins, ends - begins)) for key, (begins, ends) in ranges.items()}
        self._totals = {key: int(span[1].sum()) for key, span in spans.items()}
        device = pools.history.device
        sent = send([*tables.values(), *alike.values(), *spans.values()], device)
        self.slots, self.pages, self.sees, self.kept = sent[: len(tables)]
        self.alike = dict(zip(alike, sent[len(tables) :], strict=False))
        self._spans = dict(zip(spans, sent[len(tables) + len(alike) :], strict=True))

    def spans(self, key: Key) -> Spans:
        starts, counts = self._spans[key]
        return Spans.over(starts, counts, self._totals[key])


class StepRows:
    """The rows of S sequences: ``slots`` int64 [S], ``pages`` int64 [S, P] with the scratch page
    where a sequence owns none; sees int64 [S] and ``rows`` in each half of the layers. ends: of the
    rows of each chunk in the upper half, on the host."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        live: LiveRows | None,
        layers: int,
        ratios: Collection[int],
        pools: Pools,
    ) -> None:
        """``ratios``: of the groups that close."""
        self.live, self._pools = live, pools
        self.chunks = made = _ChunkRows(chunks, layers, ratios, pools) if chunks else None
        if live is None:
            assert made is not None, "a step without rows"
            self.slots, self.pages, self.sees = made.slots, made.pages, [*made.sees]
        elif made is None:
            self.slots, self.pages = live.slots, live.pages
            self.sees = [torch.zeros_like(live.slots)] * 2
        else:
            self.slots = torch.cat((live.slots, made.slots))
            width = max(live.pages.shape[1], made.pages.shape[1])
            self.pages = torch.cat(
                [
                    pad(p, (0, width - p.shape[1]), value=pools.pages)
                    for p in (live.pages, made.pages)
                ]
            )
            self.sees = [pad(sees, (len(live.slots), 0)) for sees in made.sees]
        self.rows = self._spans("rows", 0), self._spans("rows", 1)
        first = 0 if live is None else len(live.of)
        self.ends = first + np.cumsum(made.counts[1]) if made else ()

    def _spans(self, name: str, which: int) -> Spans:
        """Live rows, all of them, and those of the chunks."""
        if self.chunks is None:
            return self.live
        spans = self.chunks.spans((name, which))
        return spans if self.live is None else self.live.before(spans)

    def upper(self) -> torch.Tensor | None:
        """Rows that run in the upper half, int64 indices into all; None: all of them."""
        if self.chunks is None or (self.chunks.counts[0] == self.chunks.counts[1]).all():
            return None
        return self.rows[0].row(self.rows[1].of, self.rows[1].positions)

    def ring(self, half: int) -> Spans:
        """Rows of a half whose window keys stay."""
        return self._spans("ring", half)

    def history(self) -> Spans:
        """Rows whose mapped ids stay."""
        return self._spans("history", 0)

    def open(self, ratio: int) -> Spans:
        """Positions that an open group may need."""
        return self._spans("open", ratio)

    def groups(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and position of each row that ends a group. Of live requests each row is there:
        the host does not know better."""
        if self.chunks is None:
            return self.live.each
        spans = self.chunks.spans(("groups", ratio))
        of = spans.of + len(self.slots) - len(self.chunks.slots)
        last = spans.positions * ratio + ratio - 1
        if self.live is not None:
            of, last = torch.cat((self.live.of, of)), torch.cat((self.live.positions, last))
        return of, last

    def windows(self, ops: Ops) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows whose window keys are kept for reuse, and their places; None if there are none."""
        size, rows, places = self._pools.page_tokens, [], []
        live, chunks = self.live, self.chunks
        if live is not None and live.windows is not None and self._pools.snapshots:
            rows.append(torch.arange(len(live.of), device=live.of.device))
            places.append(ops.page_places(live.each, live.windows, size))
        if chunks is not None and chunks.kept.numel():
            spans = chunks.spans(("kept", 0))
            of = chunks.kept[0, spans.of] + len(self.slots) - len(chunks.slots)
            rows.append(self.rows[0].row(of, spans.positions))
            places.append(chunks.kept[1, spans.of] * size + spans.positions % size)
        return (torch.cat(rows), torch.cat(places)) if rows else None
