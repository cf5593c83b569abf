"""One layer: compressed KV, attention and FFN in single-pass hyper-connections.

Comes in: streams [N, C, H] and the previous sublayer's ``pre``. Goes out: the same. Source: model
spec §3.2; where rows are dropped, §5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.model.attention import AttentionWeights, attention
from deepinfer.model.compressor import compress
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.engram import EngramWeights
from deepinfer.model.hyper import HyperWeights, enter, mixes
from deepinfer.model.memory import Memory, Ops
from deepinfer.model.moe import MoEWeights, moe
from deepinfer.model.norm_rope import Rotary, Table
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class BlockWeights:
    """``layers.L.*``."""

    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    ffn: MoEWeights
    engram: EngramWeights | None

    @classmethod
    def of(cls, source: Source, layer: LayerSpec, config: ModelConfig) -> BlockWeights:
        table = layer.engram
        return cls(
            attn_norm=source.vector("attn_norm.weight"),
            ffn_norm=source.vector("ffn_norm.weight"),
            hc_attn=HyperWeights.of(source, "attn"),
            hc_ffn=HyperWeights.of(source, "ffn"),
            attention=AttentionWeights.of(source.under("attn"), layer),
            ffn=MoEWeights.of(source.under("ffn")),
            engram=None
            if table is None
            else EngramWeights.of(source.under("engram"), config, table),
        )


def block(
    streams: torch.Tensor,
    pre: torch.Tensor,
    w: BlockWeights,
    layer: LayerSpec,
    config: ModelConfig,
    memory: Memory,
    rotary: Rotary,
    table: Table,
    ops: Ops,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(streams, pre) after the layer; each sublayer reads with the ``pre`` before it.

    kept: indices int64 of the rows that go on once the compressed KV of all is stored, None = all;
    ``table`` is at the positions of these.
    """
    if kept is None:
        x, attn_pre, post, comb = enter(streams, pre, w.attn_norm, w.hc_attn, config, ops)
    else:
        x = ops.hc_norm(streams, pre, w.attn_norm, config.rms_norm_eps)
    if w.attention.compressor is not None:
        compress(x, w.attention.compressor, layer, config, memory, rotary, ops)
    if kept is not None:
        x, streams = x[kept], streams[kept]
        if not kept.numel():
            return streams, pre[kept]
        attn_pre, post, comb = mixes(streams, w.hc_attn, config, ops)
    x = attention(x, w.attention, layer, config, memory, table, ops)
    streams = ops.hc_expand(x, streams, post, comb)
    x, ffn_pre, post, comb = enter(streams, attn_pre, w.ffn_norm, w.hc_ffn, config, ops)
    x = moe(x, w.ffn, config, ops)
    return ops.hc_expand(x, streams, post, comb), ffn_pre
