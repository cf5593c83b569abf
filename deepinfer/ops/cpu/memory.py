"""Ops of the cpu back end on what attention remembers. Meaning and shapes:
`deepinfer.ops.torch.memory`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.ops.cpu.library import INT, LONG, PTR, TYPES, Library
from deepinfer.quant.records import RecordFormat

# As csrc/include/deepinfer/codec.h numbers them.
_KINDS = {"window": 2, "entry": 3, "index": 4}


def _kind(fmt: RecordFormat) -> int:
    return TYPES[fmt.dtype] if fmt.kind == "plain" else _KINDS[fmt.kind]


def store(library: Library):
    call = library.op("store", PTR, INT, INT, LONG, LONG, PTR, PTR)

    def store(
        x: torch.Tensor, fmt: RecordFormat, target: torch.Tensor, places: torch.Tensor
    ) -> None:
        (x, kind), places = _rows(x, fmt), places.contiguous()
        call(x.data_ptr(), TYPES[x.dtype], kind, *x.shape, target.data_ptr(), places.data_ptr())

    return store


def extend(library: Library):
    call = library.op(
        "extend", PTR, INT, INT, LONG, LONG, PTR, PTR, LONG, PTR, PTR, LONG, PTR, PTR, PTR, LONG,
        PTR,
    )  # fmt: skip

    def extend(
        x: torch.Tensor,
        fmt: RecordFormat,
        ring: torch.Tensor,
        past: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
        copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        (x, kind), past = _rows(x, fmt), past.contiguous()
        out = torch.empty((past.numel() + x.shape[0], ring.shape[1]), dtype=torch.uint8)
        ours = theirs = 0, 0, 0
        if kept is not None:
            rows, places = (p.contiguous() for p in kept)
            ours = rows.data_ptr(), places.data_ptr(), rows.numel()
        target = 0
        if copies is not None:
            elsewhere, from_rows, to_places = (p.contiguous() for p in copies)
            target = elsewhere.data_ptr()
            theirs = from_rows.data_ptr(), to_places.data_ptr(), from_rows.numel()
        call(
            x.data_ptr(), TYPES[x.dtype], kind, *x.shape, ring.data_ptr(), past.data_ptr(),
            past.numel(), *ours, target, *theirs, out.data_ptr(),
        )  # fmt: skip
        return out

    return extend


def _rows(x: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, int]:
    """Rows to encode, and the number of the record's kind."""
    if fmt.kind == "plain":
        return x.to(fmt.dtype).contiguous(), TYPES[fmt.dtype]
    return x.contiguous(), _KINDS[fmt.kind]


def pool(library: Library):
    call = library.op("pool", PTR, PTR, LONG, LONG, LONG, PTR)

    def pool(v: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        v, z = v.contiguous(), z.contiguous()
        groups, tokens, n = v.shape
        out = v.new_empty(groups, n)
        call(v.data_ptr(), z.data_ptr(), groups, tokens, n, out.data_ptr())
        return out

    return pool


def quantise_index(library: Library):
    call = library.op("quantise_index", PTR, INT, LONG, PTR)

    def quantise_index(q: torch.Tensor) -> torch.Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        call(q.data_ptr(), TYPES[q.dtype], q.numel() // 32, out.data_ptr())
        return out

    return quantise_index


def index_scores(library: Library):
    call = library.op("index_scores", PTR, PTR, PTR, INT, LONG, LONG, LONG, LONG, LONG, PTR)

    def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        q, k, weights = q.contiguous(), k.contiguous(), weights.contiguous()
        requests, rows, heads, width = q.shape
        out = q.new_empty((requests, rows, k.shape[1]))
        call(
            q.data_ptr(), k.data_ptr(), weights.data_ptr(), TYPES[q.dtype],
            requests, rows, heads, width, k.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    return index_scores


def select(library: Library):
    call = library.op("select", PTR, INT, PTR, PTR, LONG, LONG, LONG, PTR)

    def select(
        scores: torch.Tensor, visible: torch.Tensor, k: int, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores, visible = scores.contiguous(), visible.contiguous()
        if allowed is not None:
            allowed = allowed.contiguous()
        n = scores.shape[-1]
        out = torch.empty((*scores.shape[:-1], k), dtype=torch.int64)
        call(
            scores.data_ptr(), TYPES[scores.dtype], visible.data_ptr(),
            None if allowed is None else allowed.data_ptr(), visible.numel(), n, k, out.data_ptr(),
        )  # fmt: skip
        return out

    return select


def candidate_blocks(library: Library):
    call = library.op("candidate_blocks", PTR, INT, PTR, LONG, LONG, LONG, LONG, PTR)

    def candidate_blocks(
        scores: torch.Tensor, visible: torch.Tensor, count: int, size: int
    ) -> torch.Tensor:
        scores, visible = scores.contiguous(), visible.contiguous()
        n = scores.shape[-1]
        out = torch.empty((*scores.shape[:-1], -(-n // size)), dtype=torch.bool)
        call(
            scores.data_ptr(), TYPES[scores.dtype], visible.data_ptr(), visible.numel(), n,
            count, size, out.data_ptr(),
        )  # fmt: skip
        return out

    return candidate_blocks


def choose(library: Library):
    call = library.op(
        "choose", PTR, PTR, INT, PTR, INT, PTR, PTR, LONG, LONG, LONG, LONG, LONG, LONG, PTR, PTR,
        LONG, LONG, PTR,
    )  # fmt: skip

    def choose(
        q: torch.Tensor,
        weights: torch.Tensor,
        records: torch.Tensor,
        fmt: RecordFormat,
        table: torch.Tensor,
        visible: torch.Tensor,
        most: Sequence[int],
        k: int,
        candidates: tuple[int, int] | None = None,
        within: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, weights, records = q.contiguous(), weights.contiguous(), records.contiguous()
        table, visible = table.contiguous(), visible.contiguous()
        requests, rows, heads, width = q.shape
        n = table.shape[1]
        count, size = (0, 0) if candidates is None else candidates
        out = torch.empty((requests, rows, k), dtype=torch.int64)
        kept = None
        if within is not None:
            within = within.contiguous()
        elif size:
            kept = torch.empty((requests, rows, -(-n // size)), dtype=torch.bool)
        call(
            q.data_ptr(), weights.data_ptr(), TYPES[q.dtype], records.data_ptr(), _kind(fmt),
            table.data_ptr(), visible.data_ptr(), requests, rows, heads, width, n, k,
            None if within is None else within.data_ptr(),
            None if kept is None else kept.data_ptr(), count, size, out.data_ptr(),
        )  # fmt: skip
        return out, kept

    return choose


def sparse_attention(library: Library):
    call = library.op(
        "sparse_attention", PTR, INT, LONG, LONG, LONG, PTR, LONG, PTR, LONG, INT, PTR, LONG, PTR,
        LONG, INT, PTR, PTR,
    )  # fmt: skip

    def sparse_attention(
        q: torch.Tensor,
        window: torch.Tensor,
        window_slots: torch.Tensor,
        window_format: RecordFormat,
        entries: torch.Tensor | None,
        entry_slots: torch.Tensor | None,
        entry_format: RecordFormat | None,
        sink: torch.Tensor,
    ) -> torch.Tensor:
        q, window, window_slots = q.contiguous(), window.contiguous(), window_slots.contiguous()
        rows, heads, width = q.shape
        out = torch.empty_like(q)
        if entries is None:
            far = 0, 0, 0, 0, 0
        else:
            entries, entry_slots = entries.contiguous(), entry_slots.contiguous()
            far = (
                entries.data_ptr(), entries.shape[0], entry_slots.data_ptr(),
                entry_slots.shape[1], _kind(entry_format),
            )  # fmt: skip
        call(
            q.data_ptr(), TYPES[q.dtype], rows, heads, width,
            window.data_ptr(), window.shape[0], window_slots.data_ptr(), window_slots.shape[1],
            _kind(window_format), *far, sink.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    return sparse_attention
