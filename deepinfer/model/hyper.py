"""Hyper-connections of one sublayer: where its input comes from and how its output returns.

Comes in: streams [N, C, H]. Goes out: mixes. The mixes' ``pre`` serves the *next* sublayer, their
``post`` and ``comb`` this one (model spec §3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class HyperWeights:
    """``hc_attn_*`` or ``hc_ffn_*``."""

    fn: Any
    scale: torch.Tensor
    base: torch.Tensor

    @classmethod
    def of(cls, source: Source, sublayer: str) -> HyperWeights:
        return cls(
            fn=source.matrix(f"hc_{sublayer}_fn"),
            scale=source.vector(f"hc_{sublayer}_scale"),
            base=source.vector(f"hc_{sublayer}_base"),
        )


def mixes(
    streams: torch.Tensor, w: HyperWeights, config: ModelConfig, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [N, C], post [N, C], comb [N, C, C], float32."""
    return ops.hc_mix(
        streams, w.fn, w.scale, w.base,
        config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps,
    )  # fmt: skip


def enter(
    streams: torch.Tensor,
    pre: torch.Tensor,
    norm: torch.Tensor,
    w: HyperWeights,
    config: ModelConfig,
    ops: Ops,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sublayer's input [N, H], read with the ``pre`` before it, and `mixes`."""
    return ops.hc_enter(
        streams, pre, norm, config.rms_norm_eps,
        w.fn, w.scale, w.base, config.hc_sinkhorn_iters, config.hc_eps,
    )  # fmt: skip


def first_pre(rows: int, copies: int, device: torch.device) -> torch.Tensor:
    """The incoming ``pre`` of the first layer: the first copy alone."""
    pre = torch.zeros(rows, copies, device=device)
    pre[:, 0] = 1.0
    return pre


def mean_pre(streams: torch.Tensor) -> torch.Tensor:
    """The ``pre`` [N, C] that collapses streams [N, C, H] to the mean of their copies."""
    rows, copies = streams.shape[:2]
    return torch.full((rows, copies), 1 / copies, device=streams.device)
