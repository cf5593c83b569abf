"""The tensors that hold the past: window rings of layers and draft stages, paged entries and index
keys, open groups, n-grams, and pages of window rows kept for reuse.

Comes in: the configuration and how many slots and pages to hold. Goes out: storage, packed as
model spec §4 has it, and the bytes of pages that move to another tier. Must not know who owns a
slot or a page, nor what a page is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.device.transfer import send
from deepinfer.errors import InternalError
from deepinfer.model.config import ModelConfig
from deepinfer.quant.records import RecordFormat


@dataclass(frozen=True)
class Formats:
    """Record formats of window entries, compressed entries and index keys."""

    window: RecordFormat
    entry: RecordFormat
    index: RecordFormat

    @classmethod
    def of(cls, config: ModelConfig) -> Formats:
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        window, entry, index = ("window", "entry", "index") if config.quantised else ("plain",) * 3
        return cls(
            RecordFormat(window, config.head_dim, dtype),
            RecordFormat(entry, config.head_dim, dtype),
            RecordFormat(index, config.index_head_dim, dtype),
        )


def bytes_per_token(config: ModelConfig) -> float:
    """Growing bytes per context token: 890 at the real sizes (model spec §4)."""
    formats = Formats.of(config)
    record = formats.entry.nbytes + formats.index.nbytes
    return sum(record / config.compress_ratios[i] for i in config.kv_source_layer_ids)


def bytes_per_slot(config: ModelConfig, rollback: int = 0, stages: int = 0) -> int:
    """Fixed bytes per running request: window rings of layers and draft ``stages``, open groups,
    n-gram history."""
    rows = config.sliding_window + rollback
    rings = (config.num_hidden_layers + stages) * rows * Formats.of(config).window.nbytes
    ratios = (config.compress_ratios[i] for i in config.kv_source_layer_ids)
    open_rows = sum(_kept_rows(r - 1, rollback) for r in ratios)
    history = _kept_rows(config.engram_max_ngram_size - 1, rollback)
    return rings + open_rows * 2 * 4 * config.head_dim + 8 * history


def _kept_rows(needed: int, rollback: int) -> int:
    """Rows to keep so that the last ``needed`` are there after ``rollback`` are taken back."""
    return needed + rollback if needed > 0 else 0


def bytes_per_window_page(config: ModelConfig, page_tokens: int, layers: int) -> int:
    """Bytes of one page of window rows of the first ``layers`` layers."""
    return page_tokens * layers * Formats.of(config).window.nbytes


class Pools:
    """Storage for ``slots`` requests and ``pages`` pages of ``page_tokens`` tokens.

    A ring row of position p lies at p mod (window + rollback); entry j of ratio r lies in page
    j // (page_tokens / r) of its request, the same page number in every source's pool. A window
    page holds the rows of page_tokens positions of each of the first ``stateful`` layers. A request
    may go on up to ``rollback`` positions before the end of its last chunk: everything keeps so
    many rows more. Behind the last page (number ``pages``) and the last window page
    (``window_pages``) is one more, scratch: it takes what belongs nowhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        page_tokens: int,
        device: torch.device | str = "cpu",
        rollback: int = 0,
        mapped_pad: int = 0,
        stateful: int = 0,
        window_pages: int = 0,
        stages: int = 0,
    ):
        """``mapped_pad``: the mapped id that stands where an n-gram reaches before position 0.
        ``stages``: draft stages with a ring of context keys."""
        self.formats = Formats.of(config)
        self.rollback = rollback
        self.ring = config.sliding_window + rollback
        self.page_tokens, self.pages, self.window_pages = page_tokens, pages, window_pages
        self.mapped_pad = mapped_pad
        self._ratios = ratios = {i: config.compress_ratios[i] for i in config.kv_source_layer_ids}

        def records(fmt: RecordFormat, rows: int) -> torch.Tensor:
            # Unwritten storage is never read, so it need not be cleared.
            return torch.empty((rows, fmt.nbytes), dtype=torch.uint8, device=device)

        self.windows = [
            records(self.formats.window, slots * self.ring) for _ in range(config.num_hidden_layers)
        ]
        self.drafts = [records(self.formats.window, slots * self.ring) for _ in range(stages)]
        self.entries = {
            i: records(self.formats.entry, (pages + 1) * page_tokens // r)
            for i, r in ratios.items()
        }
        self.index = {
            i: records(self.formats.index, (pages + 1) * page_tokens // r)
            for i, r in ratios.items()
        }
        self.snapshots = [
            records(self.formats.window, (window_pages + 1) * page_tokens) for _ in range(stateful)
        ]
        # Rows of the open group, rings by position: (v, z) float32 [slots, r - 1 + rollback, D].
        self.open = {
            i: torch.zeros((2, slots, _kept_rows(r - 1, rollback), config.head_dim), device=device)
            for i, r in ratios.items()
        }
        depth = _kept_rows(config.engram_max_ngram_size - 1, rollback)
        self.history = torch.zeros((slots, depth), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, pages of window rows included, scratch pages not."""
        fixed = [*self.windows, *self.drafts, *self.open.values(), self.history]
        paged = [part[:-1] for kind in ("entries", "windows") for part in self._paged(kind)]
        return sum(t.nbytes for t in (*fixed, *paged))

    def restore(
        self, slot: int, start: int, pages: Sequence[int], history: torch.Tensor | None
    ) -> None:
        """Fill a slot as if the tokens before ``start`` had just run: ring rows from window
        ``pages``, which end there, and the mapped ids int64 [n - 1] of the tokens before it."""
        size = self.page_tokens
        count = min(self.ring, len(pages) * size)
        p = np.arange(start - count, start)
        place = slot * self.ring + p % self.ring
        first = start - len(pages) * size
        source = np.array(pages, dtype=np.int64)[(p - first) // size] * size + p % size
        place, source = send([place, source], self.history.device)
        for ring, snapshot in zip(self.windows, self.snapshots, strict=False):
            ring[place] = snapshot[source]
        depth = self.history.shape[1]
        if history is not None and depth:
            p = torch.arange(start - len(history), start, device=self.history.device)
            self.history[slot, p % depth] = history

    def gather(self, kind: str, pages: Sequence[int]) -> torch.Tensor:
        """The bytes of each page, uint8 [pages, bytes] on the device: of entries and index keys, or
        ("windows") of window rows."""
        [places] = send([np.array(pages, dtype=np.int64)], self.history.device)
        return torch.cat([part[places].flatten(1) for part in self._paged(kind)], 1)

    def read(self, kind: str, pages: Sequence[int]) -> list[bytes]:
        """The same on the host, which waits for them."""
        return [row.tobytes() for row in self.gather(kind, pages).cpu().numpy()]

    def write(self, kind: str, page: int, payload: bytes) -> None:
        """Put back what ``read`` gave."""
        held = sum(part[page].numel() for part in self._paged(kind))
        if len(payload) != held:
            raise InternalError("page-size", f"{len(payload)} bytes for a {kind} page of {held}")
        [data], at = send([np.frombuffer(payload, dtype=np.uint8)], self.history.device), 0
        for part in self._paged(kind):
            size = part[page].numel()
            part[page] = data[at : at + size].view_as(part[page])
            at += size

    def _paged(self, kind: str) -> list[torch.Tensor]:
        """Views [pages, records of a page, bytes]."""
        size = self.page_tokens
        if kind == "windows":
            return [t.view(-1, size, t.shape[-1]) for t in self.snapshots]
        return [
            t.view(t.shape[0] * r // size, size // r, t.shape[-1])
            for pool in (self.entries, self.index)
            for t, r in ((pool[i], self._ratios[i]) for i in pool)
        ]

    def poison(self) -> None:
        """Fill everything with NaN patterns: a test that reads unwritten storage shows it."""
        packed = (*self.windows, *self.drafts, *self.entries.values(), *self.index.values())
        for t in (*packed, *self.snapshots):
            t.fill_(0xFF)
        for t in self.open.values():
            t.fill_(torch.nan)
