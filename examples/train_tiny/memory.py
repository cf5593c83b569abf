"""What the rows of a training batch remember: whole sequences, densely, with gradients.

Comes in: what the model hands its memory (`deepinfer.model.memory.Memory`), for B sequences of T
rows each. Goes out: attention over the window and the visible or chosen entries, and on the side
the losses that teach the indexer. Barriers cut the window as a replay does (model spec §5.1). It
must not know weights, tokens or the optimiser.
"""

from __future__ import annotations

import torch

from deepinfer.model.config import LayerSpec, ModelConfig
from examples.train_tiny import attention_core as core
from examples.train_tiny.losses import index_loss
from examples.train_tiny.ops import StraightThrough, TrainingOps


class SequenceMemory:
    """`Memory` of B x T rows. Make it once per batch shape; call `start` before each pass."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        token_map: torch.Tensor,
        ops: TrainingOps,
        fused: bool,
    ):
        device = token_map.device
        self.config, self.ops, self.batch, self.length = config, ops, batch, length
        self.sparse = False
        self.token_map = token_map
        self.positions = torch.arange(length, device=device).repeat(batch)
        self.kept = None  # barriers narrow the window instead
        self.ngrams = torch.zeros(
            batch * length, max(config.engram_max_ngram_size, 1), dtype=torch.int64, device=device
        )
        # What changes from step to step lives in buffers that never move. `barriers` int64
        # [2, B, K]: where replays start in the encoder and in the decoder half, T for none.
        # `sampled` int64 [B, R]: rows whose index choice is taught.
        self.barriers = torch.full((2, batch, 1), length, device=device)
        self.sampled = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.teach = False
        self.window = core.window_start(length, config.sliding_window, device)
        start = config.decoder_start
        self.decoder = config.num_hidden_layers if start is None else start
        self.starts = {
            r: torch.arange(0, length - length % r, r, device=device).repeat(batch)
            for r in set(config.compress_ratios) - {0}
        }
        self.visible = {r: core.visible(length, r, device) for r in self.starts}
        # Without a choice every visible entry is chosen; one layout, so that nothing recompiles.
        self.everything = {
            r: seen.expand(batch, -1, -1).contiguous() for r, seen in self.visible.items()
        }
        self.cores = {
            r: core.make(config, length, r, device, ops.piece, fused)
            for r in set(config.compress_ratios[: config.num_hidden_layers])
        }
        self.plain = core.make_plain(config, lambda f: f)
        self._scores = ops.piece(core.index_scores)
        self._index_loss = ops.piece(index_loss)
        self.start()

    def start(self) -> None:
        """Forgets the previous pass."""
        self.entries: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.queries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.chosen: dict[int, torch.Tensor] = {}
        self.candidates: torch.Tensor | None = None
        self.index_losses: list[torch.Tensor] = []
        self.lower = core.cut(self.window, self.barriers)

    def read(self, tokens: torch.Tensor) -> None:
        """Mapped ids around each of tokens int64 [B, T]; the pad stands before the first."""
        if not self.config.engram_layer_ids:
            return
        mapped = self.token_map[tokens]
        pad = self.token_map[self.config.engram_pad_token_id]
        for s in range(self.ngrams.shape[1]):
            shifted = mapped
            if s:
                shifted = torch.cat((pad.expand(self.batch, s), mapped[:, :-s]), 1)
            self.ngrams[:, s] = shifted.flatten()

    def fall_back(self) -> None:
        """Plain attention from here on."""
        plain = core.make_plain(self.config, self.ops.piece)
        self.cores = dict.fromkeys(self.cores, plain)

    def check(self) -> float:
        """Runs the cores on random rows, forward and back, beside plain torch on two sequences;
        returns the largest relative difference."""
        config, worst = self.config, 0.0
        rows = min(2, self.batch)
        heads, dim, device = config.num_attention_heads, config.head_dim, self.lower.device
        for ratio, fast in self.cores.items():
            def values(*shape: int) -> torch.Tensor:
                x = torch.randn(self.batch, *shape, device=device, dtype=torch.bfloat16)
                return x.requires_grad_()

            q, kv = values(self.length, heads, dim), values(self.length, dim)
            e = values(self.length // ratio, dim) if ratio else None
            chosen = self.everything[ratio] if ratio else None
            sink = torch.randn(heads, device=device, requires_grad=True)
            weight = torch.randn_like(q)
            weight[rows:] = 0.0
            given = [x for x in (q, kv, e, sink) if x is not None]
            results = []
            for core_, n in ((fast, self.batch), (self.plain, rows)):
                o, lse = core_(q[:n], kv[:n], self.lower[1][:n], None if e is None else e[:n],
                               None if chosen is None else chosen[:n], sink)
                loss = (o[:rows] * weight[:rows]).float().sum() + lse[:rows].sum()
                results.append([o[:rows], lse[:rows], *torch.autograd.grad(loss, given)])
            for got, want in zip(*results, strict=True):
                got, want = got.float(), want.float()
                worst = max(worst, ((got - want).norm() / want.norm()).item())
        return worst

    # the contract of the model

    def close_groups(self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None):
        r, whole = layer.ratio, self.length - self.length % layer.ratio

        def grouped(x: torch.Tensor) -> torch.Tensor:
            x = x.view(self.batch, self.length, -1)[:, :whole]
            return x.reshape(-1, r, x.shape[-1])

        return grouped(v), None if z is None else grouped(z), self.starts[r]

    def store_entries(self, layer: LayerSpec, entries: torch.Tensor, keys: torch.Tensor) -> None:
        if self.config.quantised:
            entries = StraightThrough.apply(entries, self.ops.fp4_kv)
            keys = StraightThrough.apply(keys, self.ops.fp4_index)
        self.entries[layer.index] = entries.view(self.batch, -1, entries.shape[-1])
        self.keys[layer.index] = keys.view(self.batch, -1, keys.shape[-1])

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        q = q.view(self.batch, self.length, *q.shape[1:])
        weights = weights.view(self.batch, self.length, -1)
        self.queries[layer.index] = (q, weights)
        seen = self.visible[layer.ratio]
        if not self.sparse:
            self.chosen[layer.index] = self.everything[layer.ratio]
            return
        assert layer.kv_source is not None
        with torch.no_grad():
            scores = self._scores(q, self.keys[layer.kv_source], weights, seen)
            config = self.config
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
            kv = StraightThrough.apply(kv, self.ops.fp8)
        q = q.view(self.batch, self.length, *q.shape[1:])
        kv = kv.view(self.batch, self.length, -1)
        lower = self.lower[int(layer.index >= self.decoder)]
        entries = chosen = None
        if layer.ratio:
            assert layer.kv_source is not None and layer.index_source is not None
            entries, chosen = self.entries[layer.kv_source], self.chosen[layer.index_source]
        o, lse = self.cores[layer.ratio](q, kv, lower, entries, chosen, sink)
        if layer.owns_index and self.teach:
            self._teach(layer, q, entries, lse)
        return o.reshape(-1, *o.shape[2:])

    def _teach(self, layer: LayerSpec, q, entries, lse) -> None:
        """The indexer should rank entries as attention weighs them; only the indexer learns."""
        rows = self.sampled

        def take(x: torch.Tensor) -> torch.Tensor:
            index = rows.view(*rows.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
            return x.gather(1, index)

        iq, weights = self.queries[layer.index]
        self.index_losses.append(
            self._index_loss(
                take(q.detach()), entries.detach(), take(lse.detach()),
                self.visible[layer.ratio][0][rows],
                take(iq), self.keys[layer.kv_source], take(weights),
            )  # fmt: skip
        )
