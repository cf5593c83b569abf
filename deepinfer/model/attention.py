"""Attention of one layer: projections, the sources' indexer, grouped output.

Comes in: normed rows x [N, H]. Goes out: rows [N, H]. Source: model spec §3.5-3.8. Must not know
where keys are kept (``memory``) nor how they are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.compressor import CompressorWeights
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.indexer import IndexerWeights, index
from deepinfer.model.memory import Memory, Ops
from deepinfer.model.norm_rope import Table
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class AttentionWeights:
    """Handles and vectors of ``layers.L.attn.*`` (model spec §2.2)."""

    wq_a: Any
    q_norm: torch.Tensor
    wq_b: Any
    wkv: Any
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: Any
    wo_b: Any
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None

    @classmethod
    def of(cls, source: Source, layer: LayerSpec) -> AttentionWeights:
        return cls(
            wq_a=source.matrix("wq_a.weight"),
            q_norm=source.vector("q_norm.weight"),
            wq_b=source.matrix("wq_b.weight"),
            wkv=source.matrix("wkv.weight"),
            kv_norm=source.vector("kv_norm.weight"),
            sink=source.vector("attn_sink"),
            wo_a=source.matrix("wo_a.weight"),
            wo_b=source.matrix("wo_b.weight"),
            compressor=CompressorWeights.of(source, layer) if layer.owns_kv else None,
            indexer=IndexerWeights.of(source.under("indexer")) if layer.owns_index else None,
        )


def window_keys(
    x: torch.Tensor, w: AttentionWeights, config: ModelConfig, table: Table, ops: Ops
) -> torch.Tensor:
    """Key = value rows [N, D] of x [N, H], rotated, not yet quantised."""
    return ops.rope(ops.rmsnorm(ops.linear(x, w.wkv), w.kv_norm, config.rms_norm_eps), table)


def attention(
    x: torch.Tensor,
    w: AttentionWeights,
    layer: LayerSpec,
    config: ModelConfig,
    memory: Memory,
    table: Table,
    ops: Ops,
) -> torch.Tensor:
    """x [N, H] -> [N, H]; ``table`` is the layer's rotary table at the rows' positions."""
    latent, q, kv = ops.qkv(
        x, w.wq_a, w.q_norm, w.wq_b, w.wkv, w.kv_norm, config.rms_norm_eps,
        config.num_attention_heads, table,
    )  # fmt: skip
    if w.indexer is not None:
        index(x, latent, w.indexer, layer, config, memory, table, ops)
    o = memory.attend(layer, q, kv, w.sink)
    return ops.attention_output(o, table, w.wo_a, w.wo_b, config.o_groups)
