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

    past: torch.Tensor  # ring rows of the W - 1 positions before each sequence's rows
    slots: torch.Tensor  # [N, W] into [past, new rows]
    ring_rows: torch.Tensor  # new rows that stay in the ring ...
    ring_places: torch.Tensor  # ... and where


@dataclass(frozen=True)
class _Batch:
    """Requests with equally many rows: R requests, T rows each, n entries."""

    rows: torch.Tensor | None  # [R, T] to read from; any row in a void cell; None: all in order
    places: torch.Tensor  # [R, T] to write to: the same, but N in a void cell
    visible: torch.Tensor  # [R, T] entries that each row may see
    table: torch.Tensor  # [R, n] pool slot of each entry
    most: Sequence[int]  # [T] no row of the column sees more


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
        self.device = pools.history.device
        ratios = {*config.compress_ratios} - {0}
        self._step = step = StepRows(chunks, live, config.num_hidden_layers, ratios, pools)
        start = config.decoder_start
        alike = step.rows[0] is step.rows[1]  # no prompt is cut: one half has all layers
        self._boundary = config.num_hidden_layers if start is None or alike else start
        self.positions = step.rows[0].positions
        self.kept = step.upper()
        self.ends = step.ends
        self._windows = [self._window(half) for half in range(1 if alike else 2)]
        self._copies = step.windows()
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

    def _arange(self, *bounds: int) -> torch.Tensor:
        return torch.arange(*bounds, device=self.device)

    # window

    def _window(self, half: int) -> _Windows:
        """Slot lists over [history of each sequence, new rows], and where new rows go."""
        width, ring = self.config.sliding_window, self.pools.ring
        kept, rows, slots = width - 1, self._step.rows[half], self._step.slots
        before = rows.starts.unsqueeze(1) + self._arange(-kept, 0)
        past = torch.where(before >= 0, slots.unsqueeze(1) * ring + before % ring, 0)
        of, p = rows.of.unsqueeze(1), rows.positions.unsqueeze(1)
        start = rows.starts[of]
        key = torch.maximum(p - kept, self._step.sees[half][of]) + self._arange(width)
        old = of * kept + key - (start - kept)
        new = len(slots) * kept + rows.row(of, key)
        columns = torch.where(key > p, -1, torch.where(key < start, old, new))
        return _Windows(past.flatten(), columns, *self._step.ring(half))

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
        history = self.pools.history
        ring = history.shape[1]
        if not ring:
            return mapped.unsqueeze(-1)
        rows, slots = self._step.rows[0], self._step.slots
        of, depth = rows.of.unsqueeze(1), ring - self.pools.rollback
        p = rows.positions.unsqueeze(1) - self._arange(depth + 1)
        new = len(slots) * ring + rows.row(of, p)
        source = torch.where(p < rows.starts[of], of * ring + p % ring, new)
        pad = mapped.new_full((1,), self.pools.mapped_pad)
        pool = torch.cat((history[slots].flatten(), mapped, pad))
        ngrams = pool[torch.where(p < 0, -1, source)]
        kept, places = self._step.history()
        history.view(-1)[places] = mapped[kept]
        return ngrams

    # compressed entries

    def _groups(self, ratio: int) -> _Groups:
        rows, slots = self._step.rows[0], self._step.slots
        ring = ratio - 1 + self.pools.rollback if ratio > 1 else 0  # a group of one is never open
        per_page = self.pools.page_tokens // ratio
        of, last = self._step.groups(ratio)
        number = last // ratio
        # Where a live row ends no group it stands for its missing members.
        member = number.unsqueeze(1) * ratio + self._arange(ratio)
        member = torch.minimum(member, last.unsqueeze(1))
        old = of.unsqueeze(1) * ring + member % max(1, ring)
        new = len(slots) * ring + rows.row(of.unsqueeze(1), member)
        page = self._step.pages[of, last // self.pools.page_tokens]
        page = torch.where((last + 1) % ratio == 0, page, self.pools.pages)
        still = self._step.open(ratio)
        return _Groups(
            closed=torch.where(member < rows.starts[of].unsqueeze(1), old, new),
            first=number * ratio,
            entry=page * per_page + number % per_page,
            open_rows=rows.row(still.of, still.positions),
            open_slots=slots[still.of],
            open_places=still.positions % max(1, ring),
        )

    def close_groups(
        self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        groups = self._ratio_groups[layer.ratio]
        if z is None:  # every row is a group; a replayed one has its entry already
            closed = v.unsqueeze(1) if len(groups.first) == len(v) else v[groups.closed]
            return closed, None, groups.first
        state = self.pools.open[layer.index]
        both = torch.stack((v, z))
        known = torch.cat((state[:, self._step.slots].flatten(1, 2), both), 1)
        state[:, groups.open_slots, groups.open_places] = both[:, groups.open_rows]
        closed = known[:, groups.closed]
        return closed[0], closed[1], groups.first

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
            cells = live.of * live.most + live.positions - live.starts[live.of]
            places = live.of.new_full((len(live.slots) * live.most,), len(rows.of))
            places[cells] = self._arange(len(live.of))
            places = places.view(-1, live.most)
            visible = (live.starts.unsqueeze(1) + 1 + self._arange(live.most)) // ratio
            visible = torch.where(places < len(rows.of), visible, 0)
            most = [live.longest // ratio] * live.most
            batches.append(self._batch(half, ratio, places, visible, live.pages, most))
        first = 0 if live is None else len(live.slots)
        for (of, count), alike in chunks.alike.items() if chunks else ():
            if of != half:
                continue
            members = alike + first
            steps = self._arange(count)
            places = rows.offsets[members].unsqueeze(1) + steps
            visible = (rows.starts[members].unsqueeze(1) + 1 + steps) // ratio
            starts = chunks.starts[half][chunks.counts[half] == count]
            most = ((starts.max() + 1 + np.arange(count)) // ratio).tolist()
            pages = self._step.pages[members]
            batches.append(self._batch(half, ratio, places, visible, pages, most))
        if len(batches) == 1 and batches[0].places.numel() == len(rows.of):
            return [replace(batches[0], rows=None)]
        return batches

    def _batch(
        self,
        half: int,
        ratio: int,
        places: torch.Tensor,
        visible: torch.Tensor,
        pages: torch.Tensor,
        most: Sequence[int],
    ) -> _Batch:
        """places, visible [R, T]; pages [R, P]."""
        per_page = self.pools.page_tokens // ratio
        entry = self._arange(most[-1])
        table = pages[:, entry // per_page] * per_page + entry % per_page
        rows = places.clamp_max(len(self._step.rows[half].of) - 1)
        return _Batch(rows, places, visible, table, most)

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
                rows = (x.unflatten(0, batch.places.shape) for x in (q, weights))
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
