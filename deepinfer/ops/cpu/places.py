"""Ops of the cpu back end on places. Meaning and shapes: `deepinfer.ops.torch.places`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import LONG, PTR, Library
from deepinfer.ops.torch.places import Kept, Spans

_SPANS = PTR, PTR, PTR, PTR, LONG, LONG  # the four of them, S, N
_KEPT = PTR, PTR, LONG


def _held(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Contiguous tensors, and where they are."""
    held = [t.contiguous() for t in tensors]
    return held, [t.data_ptr() for t in held]


def _new(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


def window_places(library: Library):
    call = library.op(
        "window_places", *_SPANS, *_KEPT, PTR, PTR, LONG, LONG, PTR, PTR, PTR, PTR
    )  # fmt: skip

    def window_places(
        rows: Spans, kept: Kept, slots: torch.Tensor, sees: torch.Tensor, width: int, ring: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        held, at = _held(*rows, *kept, slots, sees)
        sequences, count, stay = len(slots), len(rows[2]), len(kept[0])
        past, columns = _new(sequences * (width - 1)), _new(count, width)
        numbers, places = _new(stay), _new(stay)
        call(
            *at[:4], sequences, count, *at[4:6], stay, *at[6:], width, ring, past.data_ptr(),
            columns.data_ptr(), numbers.data_ptr(), places.data_ptr(),
        )  # fmt: skip
        return past, columns, numbers, places

    return window_places


def page_places(library: Library):
    call = library.op("page_places", *_KEPT, PTR, LONG, LONG, PTR)

    def page_places(kept: Kept, pages: torch.Tensor, size: int) -> torch.Tensor:
        held, at = _held(*kept, pages)
        out = _new(len(kept[0]))
        call(*at[:2], len(out), at[2], pages.shape[1], size, out.data_ptr())
        return out

    return page_places


def group_places(library: Library):
    call = library.op(
        "group_places", *_SPANS, *_KEPT, *_KEPT, PTR, PTR, LONG, LONG, LONG, LONG, LONG, PTR, PTR,
        PTR, PTR, PTR,
    )  # fmt: skip

    def group_places(
        rows: Spans,
        kept: Kept,
        ends: Kept,
        slots: torch.Tensor,
        pages: torch.Tensor,
        ratio: int,
        ring: int,
        page_tokens: int,
        scratch: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        held, at = _held(*rows, *kept, *ends, slots, pages)
        stay, groups = len(kept[0]), len(ends[0])
        closed, first, entry = _new(groups, ratio), _new(groups), _new(groups)
        numbers, places = _new(stay), _new(stay)
        call(
            *at[:4], len(slots), len(rows[2]), *at[4:6], stay, *at[6:8], groups, *at[8:],
            pages.shape[1], ratio, ring, page_tokens, scratch, closed.data_ptr(), first.data_ptr(),
            entry.data_ptr(), numbers.data_ptr(), places.data_ptr(),
        )  # fmt: skip
        return closed, first, entry, numbers, places

    return group_places


def group_rows(library: Library):
    call = library.op(
        "group_rows", PTR, PTR, PTR, PTR, LONG, LONG, LONG, LONG, PTR, LONG, *_KEPT, PTR, PTR
    )

    def group_rows(
        v: torch.Tensor,
        z: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        closed: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held, at = _held(v, z, slots, closed, *kept)
        shape = (*closed.shape, v.shape[-1])
        members = torch.empty(shape), torch.empty(shape)
        call(
            *at[:2], state.data_ptr(), at[2], len(slots), *state.shape[1:], at[3], closed.numel(),
            *at[4:], len(kept[0]), members[0].data_ptr(), members[1].data_ptr(),
        )  # fmt: skip
        return members

    return group_rows


def entry_table(library: Library):
    call = library.op(
        "entry_table", PTR, PTR, PTR, PTR, LONG, LONG, LONG, LONG, LONG, LONG, LONG, PTR, PTR, PTR
    )

    def entry_table(
        starts: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        pages: torch.Tensor,
        total: int,
        most: int,
        entries: int,
        ratio: int,
        page_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        held, at = _held(starts, offsets, counts, pages)
        requests = len(starts)
        places, visible = _new(requests, most), _new(requests, most)
        table = _new(requests, entries)
        call(
            *at, requests, pages.shape[1], total, most, entries, ratio, page_tokens,
            places.data_ptr(), visible.data_ptr(), table.data_ptr(),
        )  # fmt: skip
        return places, visible, table

    return entry_table


def ngrams(library: Library):
    call = library.op("ngrams", *_SPANS, *_KEPT, PTR, PTR, PTR, LONG, LONG, LONG, PTR)

    def ngrams(
        rows: Spans,
        kept: Kept,
        slots: torch.Tensor,
        mapped: torch.Tensor,
        history: torch.Tensor,
        depth: int,
        pad: int,
    ) -> torch.Tensor:
        held, at = _held(*rows, *kept, slots, mapped)
        out = _new(len(mapped), depth + 1)
        call(
            *at[:4], len(slots), len(mapped), *at[4:6], len(kept[0]), *at[6:], history.data_ptr(),
            history.shape[1], depth, pad, out.data_ptr(),
        )  # fmt: skip
        return out

    return ngrams
