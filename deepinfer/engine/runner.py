"""Runs a step plan: ids to tensors, the model over the pools, logits of the rows asked for.

Comes in: ``StepPlan``s whose slots and pages the scheduler owns. Goes out: float32 logits. Must
not know sampling, stopping or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.core.step import Chunk, StepPlan
from deepinfer.kvcache.draft import DraftRequest, RingContext
from deepinfer.kvcache.memory import StepMemory
from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import ModelConfig
from deepinfer.model.draft import Draft, DraftBlock
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
        stateful: int = 0,
        window_pages: int = 0,
        draft: bool = False,
    ):
        """``token_map``: mapped id of every token id; needed if the model has Engram layers.

        ``window_pages``: pages of window rows of the first ``stateful`` layers kept for reuse.
        ``draft``: load the draft stages too, and keep their context in every pass.
        """
        self.config, self.ops, self.device = config, ops, torch.device(device)
        self.model = model = Transformer(config, weights, ops)
        self.draft = Draft(config, weights, ops, model.embed, model.head) if draft else None
        self.map = TokenMap.of(config, token_map)
        self.pools = Pools(
            config,
            slots=slots,
            pages=pages,
            page_tokens=page_tokens,
            device=device,
            rollback=rollback,
            mapped_pad=self.map.pad,
            stateful=stateful,
            window_pages=window_pages,
            stages=len(config.stages) if draft else 0,
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """float32 [sum of chunk.logits, vocab], in chunk order."""
        for load in plan.loads:
            self.pools.write(load.kind, load.page, load.payload)
        for chunk in plan.chunks:
            if chunk.restore or chunk.context:
                self._restore(chunk)
        ids = np.concatenate([np.asarray(c.token_ids, dtype=np.int64) for c in plan.chunks])
        mapped = torch.as_tensor(self.map.lookup(ids), device=self.device)
        memory = StepMemory(self.config, self.pools, self.ops, plan.chunks, mapped)
        wanted = [
            np.arange(end - chunk.logits, end)
            for end, chunk in zip(memory.ends, plan.chunks, strict=True)
        ]
        tokens = torch.as_tensor(ids, device=self.device)
        rows = torch.as_tensor(np.concatenate(wanted), device=self.device)
        if self.draft is None:
            return self.model.forward(tokens, memory, rows)
        x, targets = self.model.hidden_and_targets(tokens, memory)
        kept, positions = memory.context_rows()
        if kept.numel():
            memory.store_context(self.draft.context(targets[kept], positions))
        return self.model.logits(x[rows])

    @torch.inference_mode()
    def draft_block(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        """``Draft.block`` of these requests; needs ``draft``."""
        assert self.draft is not None, "a runner without draft stages"
        anchors = torch.tensor([r.anchor for r in requests], device=self.device)
        last = torch.tensor([r.last for r in requests], device=self.device)
        memory = RingContext(self.config, self.pools, self.ops, requests)
        return DraftBlock(self.draft, *self.draft.block(anchors, last, memory))

    def _restore(self, chunk: Chunk) -> None:
        mapped = self.map.lookup(np.asarray(chunk.context, dtype=np.int64))
        history = torch.as_tensor(mapped, device=self.device)
        self.pools.restore(chunk.slot, chunk.start, chunk.restore, history)

    def read(self, kind: str, pages: Sequence[int]) -> list[bytes]:
        """The bytes of pages of a kind, to be kept elsewhere."""
        return self.pools.read(kind, pages)
