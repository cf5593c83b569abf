"""Router and experts of the cpu back end. Meaning and shapes: `deepinfer.ops.torch.moe`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import DOUBLE, FLOAT, INT, LONG, PTR, Library
from deepinfer.ops.cpu.linear import Panels, together
from deepinfer.ops.torch import moe as reference
from deepinfer.ops.torch.linear import Weight

Matrices = tuple[Weight, Weight, Weight]


def router(library: Library):
    call = library.op("router", PTR, PTR, LONG, LONG, LONG, FLOAT, INT, PTR, PTR)

    def router(
        logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float, normalise: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        rows, experts = logits.shape
        ids = torch.empty((rows, k), dtype=torch.int64)
        weights = torch.empty((rows, k), dtype=torch.float32)
        call(
            logits.data_ptr(), bias.data_ptr(), rows, experts, k, scale, normalise,
            ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    return router


def moe(library: Library):
    call = library.op("moe", PTR, LONG, PTR, PTR, LONG, PTR, PTR, PTR, PTR, PTR, PTR, DOUBLE, PTR)

    def moe(
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Matrices,
        shared: Matrices,
        limit: float,
    ) -> torch.Tensor:
        held = together(library.level, *experts, *shared)
        if x.dtype != torch.bfloat16 or not alike(held):
            return reference.moe(x, ids, weights, experts, shared, limit)
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.float().contiguous()
        rows, out = x.shape[0], torch.empty_like(x)
        if rows:
            call(
                x.data_ptr(), rows, ids.data_ptr(), weights.data_ptr(), ids.shape[1],
                *(w.address for w in held), limit, out.data_ptr(),
            )  # fmt: skip
        return out

    return moe


def alike(held: list[Panels | None]) -> bool:
    """Whether the kernel holds them all: quantised ones, or bf16 ones."""
    return all(p is not None and p.quantised == held[0].quantised for p in held) and all(
        p.kind != torch.float32 for p in held
    )
