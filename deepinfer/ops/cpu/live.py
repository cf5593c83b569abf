"""The running requests in the cpu back end. Meaning and shapes: `deepinfer.ops.torch.live`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import LONG, PTR, Library


def live_rows(library: Library):
    call = library.op(
        "live_rows", PTR, PTR, LONG, LONG, PTR, PTR, PTR, LONG, PTR, PTR, LONG, LONG, PTR, PTR, PTR
    )

    def live_rows(
        slots: torch.Tensor,
        allotted: torch.Tensor,
        length: torch.Tensor,
        last: torch.Tensor,
        drafts: torch.Tensor,
        pages: torch.Tensor,
        windows: torch.Tensor,
        total: int,
        columns: int,
    ) -> tuple[torch.Tensor, ...]:
        slots, allotted, requests = slots.contiguous(), allotted.contiguous(), len(slots)
        of_request = torch.empty((3, requests), dtype=torch.int64)
        of_row = torch.empty((4, total), dtype=torch.int64)
        tables = torch.empty((2, requests, columns), dtype=torch.int64)
        call(
            slots.data_ptr(), allotted.data_ptr(), requests, total, length.data_ptr(),
            last.data_ptr(), drafts.data_ptr(), drafts.shape[1], pages.data_ptr(),
            windows.data_ptr(), pages.shape[1], columns, of_request.data_ptr(), of_row.data_ptr(),
            tables.data_ptr(),
        )  # fmt: skip
        return *of_request.unbind(), *of_row.unbind(), *tables.unbind()

    return live_rows


def ends(library: Library):
    call = library.op("ends", PTR, LONG, LONG, PTR, PTR, LONG, PTR)

    def ends(tokens: torch.Tensor, slots: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        tokens, slots = tokens.contiguous(), slots.contiguous()
        out = torch.empty(tokens.shape, dtype=torch.bool)
        call(
            tokens.data_ptr(), *tokens.shape, slots.data_ptr(), stops.data_ptr(), stops.shape[1],
            out.data_ptr(),
        )  # fmt: skip
        return out

    return ends


def append(library: Library):
    call = library.op(
        "append", PTR, PTR, PTR, LONG, LONG, PTR, PTR, LONG, PTR, PTR, PTR, PTR, PTR
    )  # fmt: skip

    def append(
        tokens: torch.Tensor,
        accepted: torch.Tensor,
        broken: torch.Tensor,
        slots: torch.Tensor,
        stops: torch.Tensor,
        end: torch.Tensor,
        length: torch.Tensor,
        last: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, slots = tokens.contiguous(), slots.contiguous()
        accepted, broken = accepted.contiguous(), broken.contiguous()
        counts, look = torch.empty_like(slots), torch.empty_like(broken)
        call(
            tokens.data_ptr(), accepted.data_ptr(), broken.data_ptr(), *tokens.shape,
            slots.data_ptr(), stops.data_ptr(), stops.shape[1], end.data_ptr(), length.data_ptr(),
            last.data_ptr(), counts.data_ptr(), look.data_ptr(),
        )  # fmt: skip
        return counts, look

    return append
