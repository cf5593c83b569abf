"""Compressed KV of a source layer: pooled latents, their entries, and their index keys.

Comes in: normed rows. Goes out: nothing; entries and keys go to the memory. Source: model spec
§3.6 and the keys of §3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.memory import Memory, Ops
from deepinfer.model.norm_rope import Rotary
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class CompressorWeights:
    """``attn.compressor.*`` and the key side of ``attn.indexer.*``; no gate at ratio 1."""

    wkv: Any
    wgate: Any | None
    norm: torch.Tensor
    wk: Any
    k_norm: torch.Tensor

    @classmethod
    def of(cls, source: Source, layer: LayerSpec) -> CompressorWeights:
        return cls(
            wkv=source.matrix("compressor.wkv.weight"),
            wgate=source.matrix("compressor.wgate.weight") if layer.ratio > 1 else None,
            norm=source.vector("compressor.norm.weight"),
            wk=source.matrix("indexer.wk.weight"),
            k_norm=source.vector("indexer.k_norm.weight"),
        )


def compress(
    x: torch.Tensor,
    w: CompressorWeights,
    layer: LayerSpec,
    config: ModelConfig,
    memory: Memory,
    rotary: Rotary,
    ops: Ops,
) -> None:
    """Close the groups that x [N, H] completes and store their entries and index keys."""
    eps = config.rms_norm_eps
    v = ops.linear_f32(x, w.wkv)
    z = None if w.wgate is None else ops.linear_f32(x, w.wgate)
    v, z, positions = memory.close_groups(layer, v, z)
    pooled = v[:, 0] if z is None else ops.pool(v, z)
    latent = ops.rmsnorm(pooled.to(x.dtype), w.norm, eps)
    table = ops.rope_table(positions, rotary.compressed)
    # The key reads the latent before rotation and quantisation.
    key = ops.rope(ops.rmsnorm(ops.linear(latent, w.wk), w.k_norm, eps), table)
    memory.store_entries(layer, ops.rope(latent, table), key)
