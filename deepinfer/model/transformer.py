"""The whole forward pass: embedding, layers, head.

Comes in: token ids of N rows and a memory. Goes out: float32 logits of the rows asked for. Source:
model spec §3.1. Must not know requests, pages, scheduling or which back end an op runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer.model.block import BlockWeights, block
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram import engram
from deepinfer.model.hyper import first_pre, mean_pre
from deepinfer.model.memory import Memory, Ops
from deepinfer.model.norm_rope import Rotary
from deepinfer.model.weights import Source


class Transformer:
    """The backbone of a DeepSeek-V4.1 checkpoint."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], ops: Ops):
        """``weights``: checkpoint name -> tensor or packed tensor, all on one device."""
        self.config, self.ops = config, ops
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        source = Source(weights, ops)
        self.embed = source.stored("embed.weight")
        self.blocks = [
            BlockWeights.of(source.under(f"layers.{layer.index}"), layer, config)
            for layer in config.layers
        ]
        self.norm = source.vector("norm.weight")
        self.head = source.matrix("head.weight")
        self.rotary = Rotary.of(config, self.embed.device)

    def forward(
        self, tokens: torch.Tensor, memory: Memory, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits float32 [rows, vocab] of tokens int64 [N]; ``rows``: which of the rows that reach
        the end (``memory.kept``), int64, None = all of them."""
        x = self.hidden(tokens, memory)
        return self.logits(x if rows is None else x[rows])

    def hidden(self, tokens: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Collapsed streams [kept rows, H] after the last layer, before the final norm."""
        return self._run(tokens, memory, None)

    def hidden_and_targets(
        self, tokens: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` and what the draft stages see of the same rows: [kept rows, T * H], the mean
        over the copies at the entry of each target layer (model spec §3.1)."""
        found: list[torch.Tensor] = []
        x = self._run(tokens, memory, found)
        if not x.shape[0]:  # the later layers did not run
            width = len(self.config.dspark_target_layer_ids) * self.config.hidden_size
            return x, x.new_empty(0, width)
        # What was taken before rows were dropped has all of them.
        rows = [t if len(t) == len(x) else t[memory.kept] for t in found]
        return x, torch.cat(rows, -1)

    def _run(
        self, tokens: torch.Tensor, memory: Memory, targets: list[torch.Tensor] | None
    ) -> torch.Tensor:
        config, ops = self.config, self.ops
        streams = self.embed[tokens].to(self.dtype).unsqueeze(1).expand(-1, config.hc_mult, -1)
        pre = first_pre(tokens.shape[0], config.hc_mult, streams.device)
        plain, compressed = self.rotary.tables(memory.positions, ops)
        for layer, w in zip(config.layers, self.blocks, strict=True):
            if w.engram is not None:
                streams = engram(streams, memory.ngrams, w.engram, config, ops)
            if targets is not None and layer.target:
                targets.append(ops.hc_collapse(streams, mean_pre(streams)))
            kept = memory.kept if layer.index == config.decoder_start else None
            if kept is not None:
                plain, compressed = self.rotary.tables(memory.positions[kept], ops)
            table = compressed if layer.ratio else plain
            streams, pre = block(
                streams, pre, w, layer, config, memory, self.rotary, table, ops, kept
            )
            if not streams.shape[0]:
                break  # no row goes on, and no later layer stores anything for the others
        return ops.hc_collapse(streams, pre)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of collapsed streams x [rows, H]."""
        x = self.ops.rmsnorm(x, self.norm, self.config.rms_norm_eps)
        return self.ops.linear_f32(x, self.head)
