"""The FFN of one layer: router, routed experts, shared expert.

Comes in: normed rows x [N, H]. Goes out: rows [N, H]. Source: model spec §3.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class MoEWeights:
    """``ffn.*``: expert stacks and the shared expert as (w1, w3, w2)."""

    gate: Any
    bias: torch.Tensor
    experts: tuple[Any, Any, Any]
    shared: tuple[Any, Any, Any]

    @classmethod
    def of(cls, source: Source) -> MoEWeights:
        w1, w3, w2 = (source.matrix(f"experts.{n}") for n in ("w1", "w3", "w2"))
        s1, s3, s2 = (source.matrix(f"shared_experts.{n}.weight") for n in ("w1", "w3", "w2"))
        return cls(
            gate=source.matrix("gate.weight"),
            bias=source.vector("gate.bias"),
            experts=(w1, w3, w2),
            shared=(s1, s3, s2),
        )


def moe(x: torch.Tensor, w: MoEWeights, config: ModelConfig, ops: Ops) -> torch.Tensor:
    """x [N, H] -> [N, H]."""
    return ops.ffn(
        x, w.gate, w.bias, config.gate_temp, config.num_experts_per_tok,
        config.routed_scaling_factor, w.experts, w.shared, config.swiglu_limit,
    )  # fmt: skip
