"""Runs a step plan: ids to tensors, the model over the pools, logits of the rows asked for.

Comes in: ``StepPlan``s whose slots and pages the scheduler owns, and the rows of decoding requests,
which only the device knows. Goes out: float32 logits. Must not know sampling, stopping or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.core.step import Chunk, StepPlan
from deepinfer.device.transfer import receive, send
from deepinfer.kvcache.draft import RingContext
from deepinfer.kvcache.live import LiveRows
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
        self._mapped = torch.from_numpy(self.map.table).to(self.device)
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

    @property
    def graphs(self) -> Any:
        """Where steps of fixed shapes are kept, or None: see `deepinfer.ops.registry.Ops`."""
        return self.ops.graphs

    @torch.inference_mode()
    def forward(self, plan: StepPlan, live: LiveRows | None = None) -> torch.Tensor:
        """float32 [live rows + sum of chunk.logits, vocab]: of every live row, then of the chunks
        in their order. Live rows alone are run without waiting for the device."""
        for load in plan.loads:
            self.pools.write(load.kind, load.page, load.payload)
        for chunk in plan.chunks:
            if chunk.restore or chunk.context:
                self._restore(chunk)
        if plan.chunks or self.graphs is None:
            return self._logits(plan.chunks, live)
        key, inputs = live.apart()
        found = self.graphs.run(
            ("rows", *key),
            lambda *own: {"logits": self._logits((), LiveRows.of_parts(key, own))},
            *inputs,
        )
        return found["logits"]

    def _logits(self, chunks: Sequence[Chunk], live: LiveRows | None) -> torch.Tensor:
        tokens, mapped = self._tokens(chunks, live)
        memory = StepMemory(self.config, self.pools, self.ops, chunks, mapped, live)
        rows = self._wanted(chunks, live, memory.ends)
        if self.draft is None:
            return self.model.forward(tokens, memory, rows)
        x, targets = self.model.hidden_and_targets(tokens, memory)
        kept, positions = memory.context_rows()
        if kept.numel():
            memory.store_context(self.draft.context(targets[kept], positions))
        return self.model.logits(x if rows is None else x[rows])

    @torch.inference_mode()
    def draft_block(
        self, slots: torch.Tensor, anchors: torch.Tensor, last: torch.Tensor, first: torch.Tensor
    ) -> DraftBlock:
        """``Draft.block`` of requests, int64 [R] each: the newest token ``anchors`` of ``slots``
        follows position ``last``; ``first``: see `RingContext`. Needs ``draft``."""
        assert self.draft is not None, "a runner without draft stages"
        draft = self.draft

        def block(slots, anchors, last, first):
            memory = RingContext(self.config, self.pools, self.ops, slots, last, first)
            x, base = draft.block(anchors, last, memory)
            return {"x": x, "base": base}

        inputs = slots, anchors, last, first
        found = self.graphs.run(("block",), block, *inputs) if self.graphs else block(*inputs)
        return DraftBlock(draft, **found)

    def _tokens(
        self, chunks: Sequence[Chunk], live: LiveRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mapped ids int64 of all rows."""
        if not chunks:
            return live.ids, self._mapped[live.ids]
        ids = np.concatenate([np.asarray(c.token_ids, dtype=np.int64) for c in chunks])
        tokens, mapped = send([ids, self.map.lookup(ids)], self.device)
        if live is None:
            return tokens, mapped
        return torch.cat((live.ids, tokens)), torch.cat((self._mapped[live.ids], mapped))

    def _wanted(
        self, chunks: Sequence[Chunk], live: LiveRows | None, ends: Sequence[int]
    ) -> torch.Tensor | None:
        """Which of the rows that reach the end need logits; None: all."""
        if not chunks:
            return None
        rows = [np.arange(0 if live is None else len(live.of))]
        rows += [np.arange(end - c.logits, end) for end, c in zip(ends, chunks, strict=True)]
        return send([np.concatenate(rows)], self.device)[0]

    def _restore(self, chunk: Chunk) -> None:
        mapped = self.map.lookup(np.asarray(chunk.context, dtype=np.int64))
        [history] = send([mapped], self.device)
        self.pools.restore(chunk.slot, chunk.start, chunk.restore, history)

    def fetch(self, kind: str, pages: Sequence[int]) -> torch.Tensor:
        """The bytes of pages of a kind, uint8 [pages, bytes], on their way to the host."""
        return receive(self.pools.gather(kind, pages))

    def read(self, kind: str, pages: Sequence[int]) -> list[bytes]:
        """The same, once they are there."""
        return self.pools.read(kind, pages)
