"""Row-wise ops of the cpu back end. Meaning and shapes: `deepinfer.ops.torch.rowwise`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import DOUBLE, INT, LONG, PTR, TYPES, Library


def rmsnorm(library: Library):
    call = library.op("rmsnorm", PTR, INT, PTR, INT, LONG, LONG, DOUBLE, PTR)

    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, n = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        call(
            x.data_ptr(), TYPES[x.dtype], weight.data_ptr(), TYPES[weight.dtype],
            x.numel() // n, n, eps, out.data_ptr(),
        )  # fmt: skip
        return out

    return rmsnorm


def rope(library: Library):
    call = library.op("rope", PTR, INT, PTR, PTR, LONG, LONG, LONG, LONG, INT, PTR)

    def rope(
        x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], inverse: bool = False
    ) -> torch.Tensor:
        x, (cos, sin) = x.contiguous(), table
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty_like(x)
        call(
            x.data_ptr(), TYPES[x.dtype], cos.data_ptr(), sin.data_ptr(), x.shape[0],
            x.shape[1] if x.dim() == 3 else 1, x.shape[-1], cos.shape[-1], -1 if inverse else 1,
            out.data_ptr(),
        )  # fmt: skip
        return out

    return rope


def rope_table(library: Library):
    call = library.op("rope_table", PTR, PTR, LONG, LONG, PTR, PTR)

    def rope_table(
        positions: torch.Tensor, freqs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions, rows, pairs = positions.contiguous(), len(positions), len(freqs)
        cos, sin = torch.empty(2, rows, pairs).unbind()
        call(positions.data_ptr(), freqs.data_ptr(), rows, pairs, cos.data_ptr(), sin.data_ptr())
        return cos, sin

    return rope_table
