"""Engram of the cpu back end. Meaning and shapes: `deepinfer.ops.torch.engram`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import DOUBLE, INT, LONG, PTR, TYPES, Library
from deepinfer.ops.torch import engram as reference
from deepinfer.quant import Packed


def engram_rows(library: Library):
    call = library.op("engram_rows", PTR, PTR, PTR, LONG, LONG, LONG, PTR)

    def engram_rows(
        ngrams: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor
    ) -> torch.Tensor:
        ngrams, (orders, heads) = ngrams.contiguous(), primes.shape
        out = torch.empty((len(ngrams), orders * heads), dtype=torch.int64)
        call(
            ngrams.data_ptr(), multipliers.data_ptr(), primes.data_ptr(), len(ngrams), orders,
            heads, out.data_ptr(),
        )  # fmt: skip
        return out

    return engram_rows


def engram_lookup(library: Library):
    call = library.op("engram_lookup", PTR, PTR, PTR, LONG, LONG, LONG, INT, PTR)

    def engram_lookup(table: Packed | torch.Tensor, rows: torch.Tensor, dtype: torch.dtype):
        if not isinstance(table, Packed) or table.block[0] != 1:
            return reference.engram_lookup(table, rows, dtype)
        rows, width = rows.contiguous(), table.shape[-1]
        out = torch.empty((len(rows), rows.shape[1] * width), dtype=dtype)
        call(
            table.codes.data_ptr(), table.scales.data_ptr(), rows.data_ptr(), rows.numel(), width,
            table.block[1], TYPES[dtype], out.data_ptr(),
        )  # fmt: skip
        return out

    return engram_lookup


def engram_gate(library: Library):
    call = library.op(
        "engram_gate", PTR, INT, PTR, PTR, PTR, INT, PTR, LONG, LONG, LONG, DOUBLE, PTR, PTR
    )

    def engram_gate(
        streams: torch.Tensor,
        kv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        image: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        streams, kv = streams.contiguous(), kv.contiguous()
        image = None if image is None else image.contiguous()
        rows, copies, hidden = streams.shape
        out = torch.empty_like(streams)
        gates = torch.empty((rows, copies), dtype=torch.float32)
        call(
            streams.data_ptr(), TYPES[streams.dtype], kv.data_ptr(), q_weight.data_ptr(),
            k_weight.data_ptr(), TYPES[q_weight.dtype], None if image is None else image.data_ptr(),
            rows, copies, hidden, eps, out.data_ptr(), gates.data_ptr(),
        )  # fmt: skip
        return out, gates

    return engram_gate
