"""The engine's ``Memory``: one step's view of the pools for ragged rows of many requests.

Comes in: which rows of which slots run, and their page tables. Goes out: what the model asks for
(``model.memory.Memory``). A row's key list is always W window columns, oldest first, then
index_topk entries, ascending, -1 at the end of each part: it depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.memory import Ops

# Index scores held at once: rows x entries.
_SCORES = 1 << 18


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one request: state slot, first position, count, page table."""

    slot: int
    start: int
    count: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Groups:
    """Compression groups of one ratio in this step; indices into [open rows, new rows]."""

    closed: torch.Tensor  # [E, r]
    first: torch.Tensor  # [E] position of each group's first token
    entry: torch.Tensor  # [E] where the entry goes in the pool
    open_rows: torch.Tensor  # new rows that stay open ...
    open_slots: torch.Tensor  # ... their slots ...
    open_places: torch.Tensor  # ... and places in the group


@dataclass(frozen=True)
class _Batch:
    """Requests with equally many rows: R requests, T rows each, up to n entries."""

    rows: torch.Tensor  # [R, T]
    visible: torch.Tensor  # [R, T] entries that each row may see
    table: torch.Tensor  # [R, n] pool slot of each entry


class StepMemory:
    """See ``model.memory.Memory``. One object per forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        pools: Pools,
        ops: Ops,
        chunks: Sequence[Rows],
        mapped: torch.Tensor,
    ):
        """``mapped``: int64 [N] mapped ids of the rows (empty without Engram)."""
        self.config, self.pools, self.ops, self.chunks = config, pools, ops, chunks
        self.device = pools.history.device
        self.offsets = np.cumsum([0] + [c.count for c in chunks])
        positions = [np.arange(c.start, c.end) for c in chunks]
        self.positions = self._tensor(np.concatenate(positions))
        self._slots = self._tensor([c.slot for c in chunks])
        self._window()
        self.ngrams = self._ngrams(mapped)
        self._ratio_groups = {r: self._groups(r) for r in {*config.compress_ratios} - {0}}
        self._ratio_batches = {r: self._batches(r) for r in self._ratio_groups}
        self._chosen: dict[int, torch.Tensor] = {}
        self._candidates: list[torch.Tensor] = []

    def _tensor(self, values) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.device)

    # window

    def _window(self) -> None:
        """Slot lists over [history of each request, new rows], and where new rows go."""
        width, ring = self.config.sliding_window, self.pools.ring
        kept = width - 1
        past, columns, rows, places = [], [], [], []
        for i, c in enumerate(self.chunks):
            before = np.arange(c.start - kept, c.start)
            past.append(np.where(before >= 0, c.slot * ring + before % ring, 0))
            p = np.arange(c.start, c.end)[:, None]
            key = np.maximum(p - kept, 0) + np.arange(width)
            old = i * kept + (key - (c.start - kept))
            new = len(self.chunks) * kept + self.offsets[i] + (key - c.start)
            columns.append(np.where(key > p, -1, np.where(key < c.start, old, new)))
            last = np.arange(max(c.start, c.end - ring), c.end)
            rows.append(self.offsets[i] + last - c.start)
            places.append(c.slot * ring + last % ring)
        self._past = self._tensor(np.concatenate(past))
        self._window_slots = self._tensor(np.concatenate(columns))
        self._ring_rows = self._tensor(np.concatenate(rows))
        self._ring_places = self._tensor(np.concatenate(places))

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        formats, ring = self.pools.formats, self.pools.windows[layer.index]
        new = formats.window.encode(kv)
        # Load the old rows before storing the new ones: their places overlap.
        window = torch.cat((ring[self._past], new))
        ring[self._ring_places] = new[self._ring_rows]
        if layer.kv_source is None or layer.index_source is None:
            entries = slots = None
        else:
            entries = self.pools.entries[layer.kv_source]
            slots = self._chosen[layer.index_source]
        return self.ops.sparse_attention(
            q, window, self._window_slots, formats.window, entries, slots, formats.entry, sink
        )

    # n-grams

    def _ngrams(self, mapped: torch.Tensor) -> torch.Tensor:
        """Mapped ids [N, n] of each row and the n - 1 before it; kept modulo n - 1 per slot."""
        history = self.pools.history
        depth = history.shape[1]
        if not depth:
            return mapped.unsqueeze(-1)
        source, rows, places = [], [], []
        size = len(self.chunks) * depth
        for i, c in enumerate(self.chunks):
            p = np.arange(c.start, c.end)[:, None] - np.arange(depth + 1)
            old = i * depth + p % depth
            new = size + self.offsets[i] + (p - c.start)
            source.append(np.where(p < 0, -1, np.where(p < c.start, old, new)))
            last = np.arange(max(c.start, c.end - depth), c.end)
            rows.append(self.offsets[i] + last - c.start)
            places.append(c.slot * depth + last % depth)
        pad = mapped.new_full((1,), self.pools.mapped_pad)
        pool = torch.cat((history[self._slots].flatten(), mapped, pad))
        ngrams = pool[self._tensor(np.concatenate(source))]
        history.view(-1)[self._tensor(np.concatenate(places))] = mapped[
            self._tensor(np.concatenate(rows))
        ]
        return ngrams

    # compressed entries

    def _groups(self, ratio: int) -> _Groups:
        place = ratio - 1
        per_page = self.pools.page_tokens // ratio
        size = len(self.chunks) * place
        closed, first, entry, rows, slots, places = [], [], [], [], [], []
        for i, c in enumerate(self.chunks):
            j = np.arange(c.start // ratio, c.end // ratio)
            p = j[:, None] * ratio + np.arange(ratio)
            new = size + self.offsets[i] + (p - c.start)
            closed.append(np.where(p < c.start, i * place + p % ratio, new))
            first.append(j * ratio)
            pages = np.asarray(c.pages, dtype=np.int64)
            entry.append(pages[j // per_page] * per_page + j % per_page)
            still = np.arange(max(c.start, c.end // ratio * ratio), c.end)
            rows.append(self.offsets[i] + still - c.start)
            slots.append(np.full_like(still, c.slot))
            places.append(still % ratio)
        joined = [np.concatenate(x) for x in (closed, first, entry, rows, slots, places)]
        return _Groups(*(self._tensor(x) for x in joined))

    def close_groups(
        self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        groups = self._ratio_groups[layer.ratio]
        if z is None:
            return v.unsqueeze(1), None, groups.first
        state = self.pools.open[layer.index]
        both = torch.stack((v, z))
        known = torch.cat((state[:, self._slots].flatten(1, 2), both), 1)
        state[:, groups.open_slots, groups.open_places] = both[:, groups.open_rows]
        closed = known[:, groups.closed]
        return closed[0], closed[1], groups.first

    def store_entries(self, layer: LayerSpec, entries: torch.Tensor, keys: torch.Tensor) -> None:
        pools, places = self.pools, self._ratio_groups[layer.ratio].entry
        pools.entries[layer.index][places] = pools.formats.entry.encode(entries)
        pools.index[layer.index][places] = pools.formats.index.encode(keys)

    # selection

    def _batches(self, ratio: int) -> list[_Batch]:
        per_page = self.pools.page_tokens // ratio
        by_count: dict[int, list[int]] = {}
        for i, c in enumerate(self.chunks):
            by_count.setdefault(c.count, []).append(i)
        batches = []
        for count, members in by_count.items():
            chunks = [self.chunks[i] for i in members]
            n = max(c.end // ratio for c in chunks)
            table = np.zeros((len(chunks), n), dtype=np.int64)
            for row, c in zip(table, chunks, strict=True):
                j = np.arange(c.end // ratio)
                pages = np.asarray(c.pages, dtype=np.int64)
                row[: j.size] = pages[j // per_page] * per_page + j % per_page
            starts = np.array([c.start for c in chunks])[:, None]
            rows = self.offsets[members][:, None] + np.arange(count)
            visible = (starts + np.arange(count) + 1) // ratio
            step = max(1, _SCORES // max(1, n * len(chunks)))
            for t in range(0, count, step):
                batches.append(
                    _Batch(
                        self._tensor(rows[:, t : t + step]),
                        self._tensor(visible[:, t : t + step]),
                        self._tensor(table[:, : visible[:, t : t + step].max()]),
                    )
                )
        return batches

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        config, pools = self.config, self.pools
        chosen = self.positions.new_full((q.shape[0], config.index_topk), -1)
        self._chosen[layer.index] = chosen
        if layer.candidate_source:
            self._candidates = []
        assert layer.kv_source is not None, "an index source has a KV source"
        for number, batch in enumerate(self._ratio_batches[layer.ratio]):
            n = batch.table.shape[1]
            keys = pools.formats.index.decode(pools.index[layer.kv_source][batch.table])
            scores = self.ops.index_scores(q[batch.rows], keys, weights[batch.rows])
            allowed = None
            if layer.candidate_source:
                self._candidates.append(
                    self.ops.candidate_blocks(
                        scores, batch.visible,
                        config.candidate_topk_blocks, config.candidate_block_size,
                    )  # fmt: skip
                )
            elif layer.uses_candidates:
                blocks = self._candidates[number]
                allowed = blocks.repeat_interleave(config.candidate_block_size, -1)[..., :n]
            best = self.ops.select(scores, batch.visible, config.index_topk, allowed)
            if n:
                flat = batch.table.unsqueeze(1).expand(-1, best.shape[1], -1)
                best = torch.where(best >= 0, flat.gather(-1, best.clamp_min(0)), -1)
            chosen[batch.rows] = best
