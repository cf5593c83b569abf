"""The backbone's own text: many sequences continued at once, one token a step.

Comes in: a frozen backbone and prompts. Goes out: rows of tokens, greedy or sampled. The memory
keeps whole buffers of one length, so that a step has the same shape at every position and can be
recorded. It must not know what the text is for.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.transformer import Transformer
from examples.train_tiny import attention_core as core
from examples.train_tiny.frozen import DraftOps, Recorded


class StepMemory:
    """`Memory` of B sequences that all stand at position ``t`` (int64 [1], on the device)."""

    def __init__(
        self, config: ModelConfig, batch: int, length: int, token_map: torch.Tensor, ops: DraftOps
    ):
        device = token_map.device
        self.config, self.ops, self.batch, self.token_map = config, ops, batch, token_map
        self.t = torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.kept = None
        size = max(config.engram_max_ngram_size, 1)
        self.ngrams = torch.zeros(batch, size, dtype=torch.int64, device=device)

        def buffer(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        dim, window = config.head_dim, config.sliding_window
        self.windows = [buffer(window, dim) for _ in config.layers]
        self.slots = torch.arange(window, device=device)
        sources = [layer for layer in config.layers if layer.owns_kv]
        # Groups hold the last r rows: v, and z beside it where rows are weighed.
        self.groups = {s.index: buffer(s.ratio, 2, dim, dtype=torch.float32) for s in sources}
        self.entries = {s.index: buffer(length // s.ratio, dim) for s in sources}
        self.keys = {s.index: buffer(length // s.ratio, config.index_head_dim) for s in sources}
        self.chosen: dict[int, torch.Tensor] = {}
        self.candidates: torch.Tensor | None = None

    def restart(self) -> None:
        """Before the first token of new sequences."""
        self.t.zero_()
        if self.config.engram_layer_ids:
            self.ngrams.fill_(self.token_map[self.config.engram_pad_token_id])

    def read(self, tokens: torch.Tensor) -> None:
        """The tokens int64 [B] at position ``t``."""
        self.positions.copy_(self.t.expand(self.batch))
        if self.config.engram_layer_ids:
            mapped = self.token_map[tokens].unsqueeze(1)
            self.ngrams.copy_(torch.cat((mapped, self.ngrams[:, :-1]), 1))

    # the contract of the model

    def close_groups(self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None):
        """Every step closes the group as far as it is: an open one is written to a place that no
        row sees until its last token has overwritten it."""
        r, group = layer.ratio, self.groups[layer.index]
        group.index_copy_(1, self.t % r, torch.stack((v, v if z is None else z), 1).unsqueeze(1))
        starts = ((self.t // r) * r).expand(self.batch)
        return group[:, :, 0], None if z is None else group[:, :, 1], starts

    def store_entries(self, layer: LayerSpec, entries: torch.Tensor, keys: torch.Tensor) -> None:
        if self.config.quantised:
            entries, keys = self.ops.fp4_kv(entries), self.ops.fp4_index(keys)
        at = self.t // layer.ratio
        # The last open group of an odd length has no place, and nobody will see it.
        at = at.clamp_max(self.entries[layer.index].shape[1] - 1)
        self.entries[layer.index].index_copy_(1, at, entries.unsqueeze(1))
        self.keys[layer.index].index_copy_(1, at, keys.unsqueeze(1))

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        assert layer.kv_source is not None
        config, keys = self.config, self.keys[layer.kv_source]
        count = torch.arange(keys.shape[1], device=keys.device)
        seen = (count < (self.t + 1) // layer.ratio).view(1, 1, -1)
        scores = core.index_scores(q.unsqueeze(1), keys, weights.unsqueeze(1), seen)
        if layer.candidate_source:
            self.candidates = core.candidate_entries(
                scores, seen, config.candidate_topk_blocks, config.candidate_block_size
            )
        if layer.uses_candidates and self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, -torch.inf)
        self.chosen[layer.index] = core.choose(scores, config.index_topk)

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        if self.config.quantised:
            kv = self.ops.fp8(kv)
        window = self.windows[layer.index]
        window.index_copy_(1, self.t % window.shape[1], kv.unsqueeze(1))
        # A slot is filled from the first time the position has reached it.
        mask = (self.slots <= self.t).view(1, 1, -1).expand(self.batch, -1, -1)
        keys = window
        if layer.ratio:
            assert layer.kv_source is not None and layer.index_source is not None
            keys = torch.cat((window, self.entries[layer.kv_source]), 1)
            mask = torch.cat((mask, self.chosen[layer.index_source]), -1)
        logits = torch.bmm(q, keys.mT).float() * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~mask, -torch.inf)
        lse = torch.logaddexp(torch.logsumexp(logits, -1), sink)
        return torch.bmm((logits - lse.unsqueeze(-1)).exp().to(q.dtype), keys)


class Writer:
    """Continues batches of prompts with one backbone. ``error``: why its step is not recorded."""

    @torch.no_grad()
    def __init__(self, model: Transformer, memory: StepMemory, length: int, graph: bool = True):
        self.model, self.memory, self.length = model, memory, length
        device = memory.positions.device
        self.tokens = torch.zeros(memory.batch, length + 1, dtype=torch.int64, device=device)
        self.prompts = torch.ones(memory.batch, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(memory.batch, 1, device=device)
        memory.restart()
        self._step = Recorded(self._advance, device, graph=graph)
        self.error = self._step.error

    @torch.no_grad()
    def write(
        self,
        rows: np.ndarray,
        prompts: np.ndarray,
        temperatures: np.ndarray,
        until: float = float("inf"),
    ) -> tuple[np.ndarray, int]:
        """(int64 [N, length + 1], how many of them are written): rows int64 [N, length + 1], of
        which the first ``prompts`` int64 [N] tokens stand; N is at most the batch.

        Ends at ``until`` (monotonic seconds), whatever is written by then. A prompt has at least
        one token.
        """
        count = len(rows)
        self.tokens[:count].copy_(torch.from_numpy(rows))
        self.prompts[:count].copy_(torch.from_numpy(prompts))
        self.temperatures[:count, 0].copy_(torch.from_numpy(temperatures))
        self.memory.restart()
        for t in range(self.length):
            self._step()
            if t % 16 == 15:
                if self.tokens.is_cuda:
                    torch.cuda.synchronize()
                if time.monotonic() > until:
                    break
        # A copy: the buffer is written again. The step at t writes token t + 1.
        return self.tokens[:count].cpu().numpy().copy(), t + 2

    @torch.no_grad()
    def _advance(self) -> None:
        memory, t = self.memory, self.memory.t
        now = self.tokens.index_select(1, t).squeeze(1)
        self.memory.ops.start()
        memory.read(now)
        logits = self.model.forward(now, memory).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
        drawn = (logits + self.temperatures * noise).argmax(-1)
        given = self.tokens.index_select(1, t + 1).squeeze(1)
        chosen = torch.where(t + 1 < self.prompts, given, drawn)
        self.tokens.index_copy_(1, t + 1, chosen.unsqueeze(1))
        t.add_(1)
