"""The drafters that DSpark is compared with: without a Markov head, and one token at a time.

Comes in: the same anchors as for the draft block. Goes out: the same logits. *Parallel* is the same
block whose slots do not know each other's tokens. *Autoregressive* is one layer, run once per
drafted token: it reads the newest token beside the hidden state before it (the projected targets
at first, then its own output) and attends to the same context keys. Both are equal to DSpark in
parameters by more experts. They have no place in a checkpoint and must not know training.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from deepinfer.checkpoint.names import parameters
from deepinfer.model.block import block
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.draft import Draft
from deepinfer.model.hyper import first_pre
from examples.train_tiny.draft_parts import AnchorMemory, Anchors
from examples.train_tiny.frozen import DraftOps
from examples.train_tiny.parameters import Leaf

JOIN = "mtp.0.join.weight"


def parallel_config(config: ModelConfig) -> ModelConfig:
    """The stages of ``config`` with more experts in place of the Markov head, whose tensors have
    rank 1 and stay unused."""
    return _filled(replace(config, dspark_markov_rank=1), _size(config))


def autoregressive_config(config: ModelConfig) -> ModelConfig:
    """One stage, with as many experts as make it as large as the stages of ``config``; its Markov
    tensors have rank 1 and stay unused."""
    one = replace(
        config,
        compress_ratios=config.compress_ratios[: config.num_hidden_layers + 1],
        num_nextn_predict_layers=1,
        dspark_n_routed_experts=config.dspark_num_experts_per_tok,
        dspark_markov_rank=1,
    )
    return _filled(one, _size(config) - 2 * config.hidden_size**2)


def _filled(config: ModelConfig, size: int) -> ModelConfig:
    """With as many experts more as bring the stages to about ``size`` parameters."""
    expert = (3 * config.moe_intermediate_size + 1) * config.hidden_size  # and its router row
    more = round((size - _size(config)) / (expert * config.num_nextn_predict_layers))
    return replace(config, dspark_n_routed_experts=config.dspark_n_routed_experts + max(0, more))


def _size(config: ModelConfig) -> int:
    stages = (p for p in parameters(config, vision=False).values() if p.group == "draft")
    return sum(math.prod(p.shape) for p in stages)


def join_leaf(config: ModelConfig) -> Leaf:
    """The matrix that joins token and hidden state: [H, 2 H]."""
    shape = (config.hidden_size, 2 * config.hidden_size)
    quant = None if config.quantization is None else ("fp8", config.quantization.weight_block_size)
    return Leaf(JOIN, shape, "muon", 0.01, shape[1] ** -0.5, quant, shape)


class _Steps:
    """The memory of one anchor after the other step: the context and the keys of all steps."""

    def __init__(self, memory: AnchorMemory):
        self.memory, self.keys = memory, []

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        self.keys.append(self.memory.quantise(kv))
        return self.memory.attend_to(0, q, torch.stack(self.keys, 1), sink)


def autoregressive(
    draft: Draft, join, ops: DraftOps, anchors: Anchors
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [R, B, V], what the confidence is read from [R, B, H + 1]) with the true token before
    every step."""
    config, eps = draft.config, draft.config.rms_norm_eps
    targets = anchors.targets.flatten(0, 1)
    contexts = draft.context(targets, anchors.positions)
    steps = _Steps(AnchorMemory(config, ops, anchors, contexts))
    layer_config = replace(
        config,
        n_routed_experts=config.dspark_n_routed_experts,
        num_experts_per_tok=config.dspark_num_experts_per_tok,
    )
    g = ops.rmsnorm(ops.linear(targets[anchors.flat], draft.main_proj), draft.main_norm, eps)
    ones = torch.ones(config.hidden_size, device=g.device)
    logits, hidden = [], []
    for i in range(config.dspark_block_size):
        token = ops.rmsnorm(draft.embed[anchors.tokens[:, i]], ones, eps)
        x = ops.linear(torch.cat((token, g), -1), join)
        table = ops.rope_table(anchors.last.flatten() + 1 + i, draft.rotary.plain)
        streams = x.unsqueeze(1).expand(-1, config.hc_mult, -1)
        pre = first_pre(len(x), config.hc_mult, x.device)
        streams, pre = block(
            streams, pre, draft.blocks[0], config.stages[0], layer_config, steps, draft.rotary,
            table, ops,
        )  # fmt: skip
        x = ops.hc_collapse(streams, pre)
        g = ops.rmsnorm(x, draft.norm, eps)
        hidden.append(x)
        logits.append(ops.linear_f32(g, draft.head))
    x = torch.stack(hidden, 1)
    return torch.stack(logits, 1), torch.cat((x, x.new_zeros(*x.shape[:2], 1)), -1)
