"""The indexer of a source layer: queries and head weights that choose compressed entries.

Comes in: normed rows and their query latent. Goes out: nothing; the choice stays in the memory,
where the layers that reuse it find it. Source: model spec §3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.memory import Memory, Ops
from deepinfer.model.norm_rope import Table
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class IndexerWeights:
    """The query side of ``attn.indexer.*``."""

    wq_b: Any
    weights_proj: Any

    @classmethod
    def of(cls, source: Source) -> IndexerWeights:
        return cls(source.matrix("wq_b.weight"), source.matrix("weights_proj.weight"))


def index(
    x: torch.Tensor,
    latent: torch.Tensor,
    w: IndexerWeights,
    layer: LayerSpec,
    config: ModelConfig,
    memory: Memory,
    table: Table,
    ops: Ops,
) -> None:
    """Choose entries for the rows x [N, H] with query latents [N, q_lora_rank]."""
    heads, dim = config.index_n_heads, config.index_head_dim
    q = ops.rope(ops.linear(latent, w.wq_b).view(-1, heads, dim), table)
    if config.quantised:
        q = ops.quantise_index(q)
    weights = ops.linear(x, w.weights_proj) * (dim * heads) ** -0.5
    memory.select(layer, q, weights)
