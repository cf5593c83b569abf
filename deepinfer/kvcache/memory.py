"""The engine's ``Memory``: one step's view of the pools for ragged rows of many requests.

Comes in: the chunks that run, with their replay plans and page tables. Goes out: what the model
asks for (``model.memory.Memory``). A row's key list is always W window columns, oldest first, then
index_topk entries, ascending, -1 at the end of each part: it depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.core.step import Chunk
from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.memory import Ops

# Index scores held at once: rows x entries; on an accelerator, where calls are dear, more.
_SCORES = 1 << 18
_DEVICE_SCORES = 1 << 25


@dataclass(frozen=True)
class _Groups:
    """Compression groups of one ratio in this step; indices into [open rows, new rows]."""

    closed: torch.Tensor  # [E, r]
    first: torch.Tensor  # [E] position of each group's first token
    entry: torch.Tensor  # [E] where the entry goes in the pool
    open_rows: torch.Tensor  # new rows that an open group may need ...
    open_slots: torch.Tensor  # ... their slots ...
    open_places: torch.Tensor  # ... and places in the ring


@dataclass(frozen=True)
class _Windows:
    """Window keys of the rows of one half of the layers."""

    past: torch.Tensor  # ring rows of the W - 1 positions before each chunk's rows
    slots: torch.Tensor  # [N, W] into [past, new rows]
    ring_rows: torch.Tensor  # new rows that stay in the ring ...
    ring_places: torch.Tensor  # ... and where


@dataclass(frozen=True)
class _Batch:
    """Some rows of requests with equally many of them: R requests, T rows each, n entries."""

    rows: torch.Tensor  # [R, T]
    visible: torch.Tensor  # [R, T] entries that each row may see
    table: torch.Tensor  # [R, n] pool slot of each entry
    whole: torch.Tensor  # [R, m] the same for all rows of these requests, m >= n


class _Half:
    """The rows of a step that run in one half of the layers.

    ``starts``: first row of each chunk there, at most its end; ``sees``: first visible position.
    """

    def __init__(self, chunks: Sequence[Chunk], starts: list[int], sees: list[int]) -> None:
        self.chunks, self.starts, self.sees = chunks, starts, sees
        counts = [c.end - start for c, start in zip(chunks, starts, strict=True)]
        self.counts = counts
        self.offsets = np.cumsum([0, *counts])
        self.batches: dict[int, list[_Batch]] = {}


class StepMemory:
    """See ``model.memory.Memory``. One object per forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        pools: Pools,
        ops: Ops,
        chunks: Sequence[Chunk],
        mapped: torch.Tensor,
    ):
        """``mapped``: int64 [N] mapped ids of the rows (empty without Engram)."""
        self.config, self.pools, self.ops, self.chunks = config, pools, ops, chunks
        self.device = pools.history.device
        start = config.decoder_start
        self._boundary = config.num_hidden_layers if start is None else start
        first, last = self._half(0, everything=True), self._half(config.num_hidden_layers - 1)
        self._halves = first, last
        self.offsets = first.offsets
        self.ends = last.offsets[1:]  # of each chunk among the rows that reach the end
        self.positions = self._tensor(np.concatenate([np.arange(c.start, c.end) for c in chunks]))
        self.kept: torch.Tensor | None = None
        if last.counts != first.counts:
            rows = [
                np.arange(end - count, end)
                for end, count in zip(first.offsets[1:], last.counts, strict=True)
            ]
            self.kept = self._tensor(np.concatenate(rows))
        self._slots = self._tensor([c.slot for c in chunks])
        self._windows = [self._window(half) for half in self._halves]
        self._copies = self._snapshot_rows()
        self.ngrams = self._ngrams(mapped)
        self._ratio_groups = {r: self._groups(r) for r in {*config.compress_ratios} - {0}}
        self._chosen: dict[int, torch.Tensor] = {}
        self._candidates: list[torch.Tensor] = []

    def _tensor(self, values) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.device)

    def _half(self, layer: int, everything: bool = False) -> _Half:
        starts, sees = [], []
        for c in self.chunks:
            first = c.start if everything or c.replay is None else c.replay.rows_from(layer)
            starts.append(min(max(c.start, first), c.end))
            sees.append(0 if c.replay is None else c.replay.sees_from(layer))
        return _Half(self.chunks, starts, sees)

    def _of(self, layer: LayerSpec) -> int:
        """Which half a layer belongs to."""
        return int(layer.index >= self._boundary)

    # window

    def _window(self, half: _Half) -> _Windows:
        """Slot lists over [history of each chunk, new rows], and where new rows go."""
        width, ring = self.config.sliding_window, self.pools.ring
        kept = width - 1
        past, columns, rows, places = [], [], [], []
        for i, (c, start, sees) in enumerate(zip(self.chunks, half.starts, half.sees, strict=True)):
            before = np.arange(start - kept, start)
            past.append(np.where(before >= 0, c.slot * ring + before % ring, 0))
            p = np.arange(start, c.end)[:, None]
            key = np.maximum(p - kept, sees) + np.arange(width)
            old = i * kept + (key - (start - kept))
            new = len(self.chunks) * kept + half.offsets[i] + (key - start)
            columns.append(np.where(key > p, -1, np.where(key < start, old, new)))
            last = np.arange(max(start, c.end - ring), c.end)
            rows.append(half.offsets[i] + last - start)
            places.append(c.slot * ring + last % ring)
        joined = (np.concatenate(x) for x in (past, columns, rows, places))
        return _Windows(*(self._tensor(x) for x in joined))

    def _snapshot_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows whose window entries are kept for reuse, and where; None if there are none."""
        size = self.pools.page_tokens
        rows, places = [], []
        for i, c in enumerate(self.chunks):
            for index, page in c.windows:
                p = np.arange(max(c.start, index * size), min(c.end, (index + 1) * size))
                rows.append(self.offsets[i] + p - c.start)
                places.append(page * size + p % size)
        if not rows:
            return None
        return self._tensor(np.concatenate(rows)), self._tensor(np.concatenate(places))

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        formats, ring = self.pools.formats, self.pools.windows[layer.index]
        windows = self._windows[self._of(layer)]
        new = formats.window.encode(kv)
        # Load the old rows before storing the new ones: their places overlap.
        window = torch.cat((ring[windows.past], new))
        ring[windows.ring_places] = new[windows.ring_rows]
        if self._copies is not None and layer.index < len(self.pools.snapshots):
            rows, places = self._copies
            self.pools.snapshots[layer.index][places] = new[rows]
        if layer.kv_source is None or layer.index_source is None:
            entries = slots = None
        else:
            entries = self.pools.entries[layer.kv_source]
            slots = self._chosen[layer.index_source]
        return self.ops.sparse_attention(
            q, window, windows.slots, formats.window, entries, slots, formats.entry, sink
        )

    # draft context

    def context_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose draft context keys stay, int64 indices into those that reach the end, and
        their positions."""
        rows = self._windows[-1].ring_rows
        positions = self.positions if self.kept is None else self.positions[self.kept]
        return rows, positions[rows]

    def store_context(self, keys: Sequence[torch.Tensor]) -> None:
        """Keep each stage's context keys [rows, D] of ``context_rows``."""
        for ring, new in zip(self.pools.drafts, keys, strict=True):
            ring[self._windows[-1].ring_places] = self.pools.formats.window.encode(new)

    # n-grams

    def _ngrams(self, mapped: torch.Tensor) -> torch.Tensor:
        """Mapped ids [N, n] of each row and the n - 1 before it; those kept are a ring per slot."""
        history = self.pools.history
        ring = history.shape[1]
        if not ring:
            return mapped.unsqueeze(-1)
        depth = ring - self.pools.rollback
        source, rows, places = [], [], []
        size = len(self.chunks) * ring
        for i, c in enumerate(self.chunks):
            p = np.arange(c.start, c.end)[:, None] - np.arange(depth + 1)
            old = i * ring + p % ring
            new = size + self.offsets[i] + (p - c.start)
            source.append(np.where(p < 0, -1, np.where(p < c.start, old, new)))
            last = np.arange(max(c.start, c.end - ring), c.end)
            rows.append(self.offsets[i] + last - c.start)
            places.append(c.slot * ring + last % ring)
        pad = mapped.new_full((1,), self.pools.mapped_pad)
        pool = torch.cat((history[self._slots].flatten(), mapped, pad))
        ngrams = pool[self._tensor(np.concatenate(source))]
        history.view(-1)[self._tensor(np.concatenate(places))] = mapped[
            self._tensor(np.concatenate(rows))
        ]
        return ngrams

    # compressed entries

    def _groups(self, ratio: int) -> _Groups:
        rollback = self.pools.rollback
        ring = ratio - 1 + rollback if ratio > 1 else 0  # a group of one row is never open
        per_page = self.pools.page_tokens // ratio
        size = len(self.chunks) * ring
        closed, first, entry, rows, slots, places = [], [], [], [], [], []
        for i, c in enumerate(self.chunks):
            # A replayed row closes no group: the entries before `cached` are there.
            known = c.start if c.replay is None else max(c.start, c.replay.cached)
            j = np.arange(min(known, c.end) // ratio, c.end // ratio)
            p = j[:, None] * ratio + np.arange(ratio)
            new = size + self.offsets[i] + (p - c.start)
            closed.append(np.where(p < c.start, i * ring + p % max(1, ring), new))
            first.append(j * ratio)
            pages = np.asarray(c.pages, dtype=np.int64)
            entry.append(pages[j // per_page] * per_page + j % per_page)
            still = np.arange(max(c.start, (c.end - rollback) // ratio * ratio), c.end)
            rows.append(self.offsets[i] + still - c.start)
            slots.append(np.full_like(still, c.slot))
            places.append(still % max(1, ring))
        joined = [np.concatenate(x) for x in (closed, first, entry, rows, slots, places)]
        return _Groups(*(self._tensor(x) for x in joined))

    def close_groups(
        self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        groups = self._ratio_groups[layer.ratio]
        if z is None:  # every row is a group; a replayed one has its entry already
            closed = v.unsqueeze(1) if len(groups.first) == len(v) else v[groups.closed]
            return closed, None, groups.first
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

    def _batches(self, half: _Half, ratio: int) -> list[_Batch]:
        per_page = self.pools.page_tokens // ratio
        by_count: dict[int, list[int]] = {}
        for i, count in enumerate(half.counts):
            if count:
                by_count.setdefault(count, []).append(i)
        batches = []
        for count, members in by_count.items():
            chunks = [self.chunks[i] for i in members]
            n = max(c.end // ratio for c in chunks)
            table = np.zeros((len(chunks), n), dtype=np.int64)
            for row, c in zip(table, chunks, strict=True):
                j = np.arange(c.end // ratio)
                pages = np.asarray(c.pages, dtype=np.int64)
                row[: j.size] = pages[j // per_page] * per_page + j % per_page
            starts = np.array([half.starts[i] for i in members])[:, None]
            rows = half.offsets[members][:, None] + np.arange(count)
            visible = (starts + np.arange(count) + 1) // ratio
            whole = self._tensor(table)
            most = _SCORES if self.device.type == "cpu" else _DEVICE_SCORES
            step = max(1, most // max(1, n * len(chunks)))
            for t in range(0, count, step):
                batches.append(
                    _Batch(
                        self._tensor(rows[:, t : t + step]),
                        self._tensor(visible[:, t : t + step]),
                        whole[:, : visible[:, t : t + step].max()],
                        whole,
                    )
                )
        return batches

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        config = self.config
        half = self._halves[self._of(layer)]
        if layer.ratio not in half.batches:
            half.batches[layer.ratio] = self._batches(half, layer.ratio)
        chosen = self.positions.new_full((q.shape[0], config.index_topk), -1)
        self._chosen[layer.index] = chosen
        if layer.candidate_source:
            self._candidates = []
        assert layer.kv_source is not None, "an index source has a KV source"
        records = self.pools.index[layer.kv_source]
        limit = config.candidate_topk_blocks * config.candidate_block_size
        whole = keys = None
        for number, batch in enumerate(half.batches[layer.ratio]):
            blocks = self._candidates[number] if layer.uses_candidates else None
            if blocks is not None and batch.table.shape[1] > limit:
                best = self._select_within(batch, blocks, records, q, weights)
            else:
                if whole is not batch.whole:  # once for all rows of a request
                    whole = batch.whole
                    keys = self.pools.formats.index.decode(records[whole])
                best = self._select(layer, batch, blocks, keys, q, weights)
            chosen[batch.rows] = best

    def _select(
        self,
        layer: LayerSpec,
        batch: _Batch,
        blocks: torch.Tensor | None,
        keys: torch.Tensor,
        q: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Pool slots [R, T, k] of the best entries, of all or of candidate ``blocks``; ``keys``
        [R, m, d] of the whole table."""
        config, n = self.config, batch.table.shape[1]
        scores = self.ops.index_scores(q[batch.rows], keys[:, :n], weights[batch.rows])
        allowed = None
        if layer.candidate_source:
            self._candidates.append(
                self.ops.candidate_blocks(
                    scores,
                    batch.visible,
                    config.candidate_topk_blocks,
                    config.candidate_block_size,
                )  # fmt: skip
            )
        elif blocks is not None:
            allowed = blocks.repeat_interleave(config.candidate_block_size, -1)[..., :n]
        best = self.ops.select(scores, batch.visible, config.index_topk, allowed)
        if not n:
            return best
        flat = batch.table.unsqueeze(1).expand(-1, best.shape[1], -1)
        return torch.where(best >= 0, flat.gather(-1, best.clamp_min(0)), -1)

    def _select_within(
        self,
        batch: _Batch,
        blocks: torch.Tensor,
        records: torch.Tensor,
        q: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The same, scoring nothing but the entries of each row's own candidate ``blocks``."""
        config, device = self.config, self.device
        count, size = config.candidate_topk_blocks, config.candidate_block_size
        none = blocks.shape[-1]
        order = torch.where(blocks, torch.arange(none, device=device), none).sort(-1).values
        entries = order[..., :count, None] * size + torch.arange(size, device=device)
        entries = entries.flatten(-2)  # ascending; past the end where a row has fewer blocks
        allowed = (entries < batch.visible.unsqueeze(-1)).flatten(0, 1).unsqueeze(1)
        table = batch.table.unsqueeze(1).expand(-1, entries.shape[1], -1)
        slots = table.gather(-1, entries.clamp_max(table.shape[-1] - 1))
        # Every row has keys of its own: R x T requests of one row each.
        keys = self.pools.formats.index.decode(records[slots.flatten(0, 1)])
        rows = batch.rows.flatten()[:, None]
        scores = self.ops.index_scores(q[rows], keys, weights[rows])
        everything = torch.full_like(rows, entries.shape[-1])
        best = self.ops.select(scores, everything, config.index_topk, allowed)
        best = best.view(*entries.shape[:2], -1)
        return torch.where(best >= 0, slots.gather(-1, best.clamp_min(0)), -1)
