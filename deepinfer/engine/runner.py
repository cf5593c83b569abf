"""Runs a step plan: ids to tensors, the model over the pools, logits of the rows asked for.

Comes in: ``StepPlan``s whose slots and pages the scheduler owns. Goes out: float32 logits. Must
not know sampling, stopping or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.core.step import StepPlan
from deepinfer.kvcache.memory import Rows, StepMemory
from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops
from deepinfer.model.transformer import Transformer
from deepinfer.tokenizer.mapping import TokenMap


class Runner:
    """A model and its pools. Thread-unsafe; one plan at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        ops: Ops,
        *,
        slots: int,
        pages: int,
        page_tokens: int,
        device: torch.device | str = "cpu",
        token_map: Sequence[int] | None = None,
        rollback: int = 0,
    ):
        """``token_map``: mapped id of every token id; needed if the model has Engram layers."""
        self.config, self.ops, self.device = config, ops, torch.device(device)
        self.model = Transformer(config, weights, ops)
        self.map = TokenMap.of(config, token_map)
        self.pools = Pools(
            config,
            slots=slots,
            pages=pages,
            page_tokens=page_tokens,
            device=device,
            rollback=rollback,
            mapped_pad=self.map.pad,
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """float32 [sum of chunk.logits, vocab], in chunk order."""
        ids = np.concatenate([np.asarray(c.token_ids, dtype=np.int64) for c in plan.chunks])
        chunks = [Rows(c.slot, c.start, len(c.token_ids), c.pages) for c in plan.chunks]
        ends = np.cumsum([c.count for c in chunks])
        wanted = [
            np.arange(end - chunk.logits, end)
            for end, chunk in zip(ends, plan.chunks, strict=True)
        ]
        mapped = torch.as_tensor(self.map.lookup(ids), device=self.device)
        memory = StepMemory(self.config, self.pools, self.ops, chunks, mapped)
        tokens = torch.as_tensor(ids, device=self.device)
        rows = torch.as_tensor(np.concatenate(wanted), device=self.device)
        return self.model.forward(tokens, memory, rows)
