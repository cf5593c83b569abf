"""The DSpark draft network: context keys, the bidirectional block, Markov and confidence heads.

Comes in: target rows of the backbone, anchor tokens and a ``DraftMemory``. Goes out: context keys,
base logits of the block's slots, and what the heads add to them. Source: model spec §6. Must not
know rings, sampling, acceptance or calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer.model.attention import window_keys
from deepinfer.model.block import BlockWeights, block
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.hyper import first_pre
from deepinfer.model.memory import DraftMemory, Ops
from deepinfer.model.norm_rope import Rotary
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class _StageMemory:
    """What a stage, a layer of ratio 0, asks of a memory: attention, and nothing else."""

    stage: int
    draft: DraftMemory

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        return self.draft.attend(self.stage, q, kv, sink)


class Draft:
    """The draft stages of a checkpoint (``mtp.*``) over the backbone's embedding and head."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], ops: Ops, embed: Any, head: Any
    ):
        """``weights``: as for the backbone. ``embed``, ``head``: those of the ``Transformer``."""
        self.config, self.ops = config, ops
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.embed, self.head = embed, head
        # The stages are layers of the backbone's kind with experts of their own number.
        self._layer_config = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        source = Source(weights, ops)
        first = source.under("mtp.0")
        last = source.under(f"mtp.{len(config.stages) - 1}")
        self.blocks = [
            BlockWeights.of(source.under(f"mtp.{s}"), layer, config)
            for s, layer in enumerate(config.stages)
        ]
        self.main_proj = first.matrix("main_proj.weight")
        self.main_norm = first.vector("main_norm.weight")
        self.norm = last.vector("norm.weight")
        self.markov_embed = last.stored("markov_head.embed.weight")
        self.markov_head = last.matrix("markov_head.head.weight")
        self.confidence_proj = last.matrix("confidence_head.proj.weight")
        self.rotary = Rotary.of(config, source.device)

    @property
    def context_weights(self) -> list[Any]:
        """Handles of the matrices that `context` multiplies by."""
        return [self.main_proj, *(w.attention.wkv for w in self.blocks)]

    def context(self, targets: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Context keys [N, D] of every stage, rotated, not yet quantised, of backbone rows with
        ``targets`` [N, T * H] at ``positions`` int64 [N] (model spec §6.2)."""
        ops, config = self.ops, self.config
        table = ops.rope_table(positions, self.rotary.plain)
        m = ops.rmsnorm(ops.linear(targets, self.main_proj), self.main_norm, config.rms_norm_eps)
        return tuple(window_keys(m, w.attention, config, table, ops) for w in self.blocks)

    def block(
        self, anchors: torch.Tensor, last: torch.Tensor, memory: DraftMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x [R, B, H] before the final norm, base logits float32 [R, B, V]).

        ``anchors`` int64 [R]: the newest token of each request, not in the context yet; ``last``
        int64 [R]: the position before it. Slot i is at position last + 1 + i and its logits are
        of the token after it (model spec §6.3, steps 1 to 3).
        """
        config, ops, slots = self._layer_config, self.ops, self.config.dspark_block_size
        tokens = anchors.new_full((len(anchors), slots), config.dspark_noise_token_id)
        tokens[:, 0] = anchors
        positions = last.unsqueeze(1) + 1 + torch.arange(slots, device=last.device)
        table = ops.rope_table(positions.flatten(), self.rotary.plain)
        x = self.embed[tokens.flatten()].to(self.dtype)
        streams = x.unsqueeze(1).expand(-1, config.hc_mult, -1)
        pre = first_pre(x.shape[0], config.hc_mult, x.device)
        for s, (layer, w) in enumerate(zip(config.stages, self.blocks, strict=True)):
            streams, pre = block(
                streams, pre, w, layer, config, _StageMemory(s, memory), self.rotary, table, ops
            )
        x = ops.hc_collapse(streams, pre)
        logits = ops.linear_f32(ops.rmsnorm(x, self.norm, config.rms_norm_eps), self.head)
        return x.unflatten(0, (-1, slots)), logits.unflatten(0, (-1, slots))

    def markov(self, tokens: torch.Tensor) -> torch.Tensor:
        """e [R, rank] of the tokens int64 [R] before the ones to be drafted (step 4)."""
        return self.markov_embed[tokens]

    def bias(self, e: torch.Tensor) -> torch.Tensor:
        """float32 [R, V], added to the base logits of the slot."""
        return self.ops.linear_f32(e, self.markov_head)

    def confidence(self, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """Logit float32 [R] that the token drafted at a slot will be accepted, from the slot's
        x [R, H] and e [R, rank]; neither sigmoid nor calibration (step 5)."""
        return self.ops.linear_f32(torch.cat((x, e), -1), self.confidence_proj).squeeze(-1)


@dataclass(frozen=True)
class DraftBlock:
    """What ``Draft.block`` gave, x [R, B, H] and base [R, B, V]; the sequential part follows slot
    by slot."""

    draft: Draft
    x: torch.Tensor
    base: torch.Tensor

    @torch.inference_mode()
    def slot(self, i: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [R, V] of draft i (0 is the first), given the tokens int64 [R] before it,
        and the raw confidence float32 [R] that it will be accepted."""
        e = self.draft.markov(tokens)
        return self.base[:, i] + self.draft.bias(e), self.draft.confidence(self.x[:, i], e)
