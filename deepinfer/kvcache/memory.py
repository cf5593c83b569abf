"""The engine's ``Memory``: one step's view of the pools for ragged rows of many requests.

Comes in: the chunks that run, with their replay plans and page tables, and the rows of decoding
requests. Goes out: what the model asks for (``model.memory.Memory``). A row's key list is always W
window columns, oldest first, then index_topk entries, ascending, -1 at the end of each part: it
depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepinfer.core.step import Chunk
from deepinfer.kvcache.live import LiveRows
from deepinfer.kvcache.pools import Pools
from deepinfer.kvcache.rows import StepRows
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.memory import Ops


@dataclass(frozen=True)
class _Groups:
    """Compression groups of one ratio in this step."""

    closed: torch.Tensor  # [E, r] indices into [open rows, new rows]
    first: torch.Tensor  # [E] position of each group's first token
    entry: torch.Tensor  # [E] where the entry goes in the pool
    open_rows: torch.Tensor  # new rows that an open group may need ...
    open_places: torch.Tensor  # ... and their places in the rings


@dataclass(frozen=True)
class _Windows:
    """Window keys of the rows of one half of the layers."""

    past: torch.Tensor  # ring rows of the W - 1 positions before each sequence's rows
    slots: torch.Tensor  # [N, W] into [past, new rows]
    ring_rows: torch.Tensor  # new rows that stay in the ring ...
    ring_places: torch.Tensor  # ... and where


@dataclass(frozen=True)
class _Batch:
    """Requests with equally many rows: R requests, T rows each, n entries."""

    places: torch.Tensor  # [R, T] the row of each cell, N in a void one
    visible: torch.Tensor  # [R, T] entries that each row may see
    table: torch.Tensor  # [R, n] pool slot of each entry
    most: Sequence[int]  # [T] no row of the column sees more
    rows: torch.Tensor | None = None  # [R, T] to read from: any in a void cell; None: all in order


class StepMemory:
    """See ``model.memory.Memory``. One object per forward pass, which never waits for the device:
    all sizes follow from what the host knows."""

    def __init__(
        self,
        config: ModelConfig,
        pools: Pools,
        ops: Ops,
        chunks: Sequence[Chunk],
        mapped: torch.Tensor,
        live: LiveRows | None = None,
    ):
        """Live rows come first, then those of the chunks; ``mapped``: int64 [N] mapped ids of all
        (empty without Engram).

        A live row runs in every layer and sees from position 0: a prompt is never cut, nor resumed,
        with less than a window before its end.
        """
        self.config, self.pools, self.ops = config, pools, ops
        ratios = {*config.compress_ratios} - {0}
        self._step = step = StepRows(chunks, live, config.num_hidden_layers, ratios, pools)
        start = config.decoder_start
        alike = step.rows[0] is step.rows[1]  # no prompt is cut: one half has all layers
        self._boundary = config.num_hidden_layers if start is None or alike else start
        self.positions = step.rows[0].positions
        self.kept = step.upper()
        self.ends = step.ends
        self._windows = [self._window(half) for half in range(1 if alike else 2)]
        self._copies = step.windows(ops)
        self.ngrams = self._ngrams(mapped)
        self._ratio_groups = {ratio: self._groups(ratio) for ratio in ratios}
        self._batches = {
            of: self._batched(*of)
            for of in {
                (self._half(layer), layer.ratio) for layer in config.layers if layer.owns_index
            }
        }
        self._chosen: dict[int, torch.Tensor] = {}
        self._candidates: list[torch.Tensor] = []

    def _half(self, layer: LayerSpec) -> int:
        """Which half a layer belongs to."""
        return int(layer.index >= self._boundary)

    # window

    def _window(self, half: int) -> _Windows:
        """Slot lists over [history of each sequence, new rows], and where new rows go."""
        step = self._step
        return _Windows(
            *self.ops.window_places(
                step.rows[half].all, step.ring(half).each, step.slots, step.sees[half],
                self.config.sliding_window, self.pools.ring,
            )
        )  # fmt: skip

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        formats, ring = self.pools.formats, self.pools.windows[layer.index]
        windows = self._windows[self._half(layer)]
        copies = None
        if self._copies is not None and layer.index < len(self.pools.snapshots):
            copies = self.pools.snapshots[layer.index], *self._copies
        window = self.ops.extend(
            kv, formats.window, ring, windows.past, (windows.ring_rows, windows.ring_places), copies
        )
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
        window, places = self.pools.formats.window, self._windows[-1].ring_places
        for ring, new in zip(self.pools.drafts, keys, strict=True):
            self.ops.store(new, window, ring, places)

    # n-grams

    def _ngrams(self, mapped: torch.Tensor) -> torch.Tensor:
        """Mapped ids [N, n] of each row and the n - 1 before it; those kept are a ring per slot."""
        history, step = self.pools.history, self._step
        ring = history.shape[1]
        if not ring:
            return mapped.unsqueeze(-1)
        return self.ops.ngrams(
            step.rows[0].all, step.history().each, step.slots, mapped, history,
            ring - self.pools.rollback, self.pools.mapped_pad,
        )  # fmt: skip

    # compressed entries

    def _groups(self, ratio: int) -> _Groups:
        step, pools = self._step, self.pools
        ring = ratio - 1 + pools.rollback if ratio > 1 else 0  # a group of one is never open
        # Where a live row ends no group it stands for its missing members.
        return _Groups(
            *self.ops.group_places(
                step.rows[0].all, step.open(ratio).each, step.groups(ratio), step.slots,
                step.pages, ratio, ring, pools.page_tokens, pools.pages,
            )
        )  # fmt: skip

    def close_groups(
        self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        groups = self._ratio_groups[layer.ratio]
        if z is None:  # every row is a group; a replayed one has its entry already
            closed = v.unsqueeze(1) if len(groups.first) == len(v) else v[groups.closed]
            return closed, None, groups.first
        state, kept = self.pools.open[layer.index], (groups.open_rows, groups.open_places)
        members = self.ops.group_rows(v, z, state, self._step.slots, groups.closed, kept)
        return *members, groups.first

    def store_entries(self, layer: LayerSpec, entries: torch.Tensor, keys: torch.Tensor) -> None:
        pools, places = self.pools, self._ratio_groups[layer.ratio].entry
        self.ops.store(entries, pools.formats.entry, pools.entries[layer.index], places)
        self.ops.store(keys, pools.formats.index, pools.index[layer.index], places)

    # selection

    def _batched(self, half: int, ratio: int) -> list[_Batch]:
        """Batches of the rows of a half: live requests together, then chunks of equal length."""
        rows, live, chunks = self._step.rows[half], self._step.live, self._step.chunks
        batches = []
        if live is not None:
            most = [live.longest // ratio] * live.most
            spans = live.starts, live.offsets, live.counts
            batches.append(self._batch(spans, live.pages, len(rows.of), ratio, most))
        first = 0 if live is None else len(live.slots)
        for (of, count), alike in chunks.alike.items() if chunks else ():
            if of != half:
                continue
            members = alike + first
            spans = rows.starts[members], rows.offsets[members], rows.counts[members]
            starts = chunks.starts[half][chunks.counts[half] == count]
            most = ((starts.max() + 1 + np.arange(count)) // ratio).tolist()
            batches.append(self._batch(spans, self._step.pages[members], len(rows.of), ratio, most))
        if len(batches) == 1 and batches[0].places.numel() == len(rows.of):
            return batches
        return [replace(b, rows=b.places.clamp_max(len(rows.of) - 1)) for b in batches]

    def _batch(
        self,
        spans: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pages: torch.Tensor,
        total: int,
        ratio: int,
        most: Sequence[int],
    ) -> _Batch:
        """spans: starts, offsets and counts of R requests; pages [R, P]."""
        places, visible, table = self.ops.entry_table(
            *spans, pages, total, len(most), most[-1], ratio, self.pools.page_tokens
        )
        return _Batch(places, visible, table, most)

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        config = self.config
        batches = self._batches[self._half(layer), layer.ratio]
        if len(batches) != 1 or batches[0].rows is not None:
            chosen = self.positions.new_full((q.shape[0] + 1, config.index_topk), -1)
            self._chosen[layer.index] = chosen[:-1]
        assert layer.kv_source is not None, "an index source has a KV source"
        records, fmt = self.pools.index[layer.kv_source], self.pools.formats.index
        candidates = within = None
        if layer.candidate_source or layer.uses_candidates:
            candidates = config.candidate_topk_blocks, config.candidate_block_size
        if layer.candidate_source:
            self._candidates = []
        for number, batch in enumerate(batches):
            if layer.uses_candidates:
                within = self._candidates[number]
            if batch.rows is None:
                shape = batch.places.shape
                rows = q.view(*shape, *q.shape[1:]), weights.view(*shape, *weights.shape[1:])
            else:
                rows = q[batch.rows], weights[batch.rows]
            best, kept = self.ops.choose(
                *rows, records, fmt, batch.table, batch.visible, batch.most, config.index_topk,
                candidates, within,
            )  # fmt: skip
            if batch.rows is None:
                self._chosen[layer.index] = best.flatten(0, 1)
            else:
                chosen[batch.places] = best
            if layer.candidate_source:
                self._candidates.append(kept)
