"""The reference path of the tests: one sequence, everything at once, nothing stored.

`PlainMemory` answers what the model asks of its memory from whole tensors and loops over rows, as
the model spec words it (§3.4, §3.6 to §3.8): no pages, rings, records, batches or chunks. `logits`
runs a model over it. Only for checkpoints without quantisation.
"""

from __future__ import annotations

import torch

from deepinfer.model import engram_tables
from deepinfer.model.config import LayerSpec, ModelConfig
from deepinfer.model.transformer import Transformer


def engram_rows(config: ModelConfig, token_map, ids: list[int]) -> list[list[int]]:
    """Table rows of every position for the first Engram layer, in Python integers."""
    multipliers = engram_tables.multipliers(config)[0]
    primes = engram_tables.primes(config)[0]
    rows = []
    for at in range(len(ids)):
        mixed, row, offset = 0, [], 0
        for shift, multiplier in enumerate(multipliers):
            known = ids[at - shift] if shift <= at else config.engram_pad_token_id
            mixed ^= token_map[known] * multiplier
            for prime in primes[shift - 1] if shift else ():
                row.append(mixed % prime + offset)
                offset += prime
        rows.append(row)
    return rows


class PlainMemory:
    """`deepinfer.model.memory.Memory` of one whole sequence."""

    def __init__(self, config: ModelConfig, token_map, ids: list[int]) -> None:
        self.config = config
        self.positions = torch.arange(len(ids))
        self.kept = None
        depth = config.engram_max_ngram_size if config.engram_layer_ids else 1
        pad = config.engram_pad_token_id
        self.ngrams = torch.tensor(
            [
                [token_map[ids[at - s] if s <= at else pad] for s in range(depth)]
                for at in range(len(ids))
            ]
        )
        self.entries: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.chosen: dict[int, list[list[int]]] = {}
        self.candidates: list[set[int]] = []

    def close_groups(self, layer: LayerSpec, v, z):
        ratio = layer.ratio
        whole = len(v) - len(v) % ratio

        def grouped(x):
            return x[:whole].unflatten(0, (-1, ratio))

        starts = torch.arange(0, whole, ratio)
        return grouped(v), None if z is None else grouped(z), starts

    def store_entries(self, layer: LayerSpec, entries, keys) -> None:
        self.entries[layer.index], self.keys[layer.index] = entries, keys

    def select(self, layer: LayerSpec, q, weights) -> None:
        config, keys = self.config, self.keys[layer.kv_source]
        size = config.candidate_block_size
        self.chosen[layer.index] = []
        if layer.candidate_source:
            self.candidates = []
        for at in range(len(q)):
            visible = (at + 1) // layer.ratio
            dots = torch.einsum("hd,nd->nh", q[at], keys[:visible])
            scores = (dots.relu() * weights[at]).sum(-1).tolist()
            if layer.candidate_source:
                best = {}
                for j, score in enumerate(scores):
                    best[j // size] = max(score, best.get(j // size, -float("inf")))
                if best:
                    best[(visible - 1) // size] = float("inf")
                order = sorted(best, key=lambda b: (-best[b], b))
                self.candidates.append(set(order[: config.candidate_topk_blocks]))
            allowed = [
                j
                for j in range(visible)
                if not layer.uses_candidates or j // size in self.candidates[at]
            ]
            allowed.sort(key=lambda j: (-scores[j], j))
            self.chosen[layer.index].append(sorted(allowed[: config.index_topk]))

    def attend(self, layer: LayerSpec, q, kv, sink):
        out = []
        for at in range(len(q)):
            keys = kv[max(0, at + 1 - self.config.sliding_window) : at + 1]
            if layer.kv_source is not None:
                chosen = self.chosen[layer.index_source][at]
                keys = torch.cat((keys, self.entries[layer.kv_source][chosen]))
            keys = keys.double()
            scores = q[at].double() @ keys.T * keys.shape[1] ** -0.5
            share = torch.cat((scores, sink.double()[:, None]), 1).softmax(-1)[:, :-1]
            out.append(share @ keys)
        return torch.stack(out).to(q.dtype)


@torch.inference_mode()
def logits(model: Transformer, token_map, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]: every row of one sequence."""
    return model.forward(torch.tensor(ids), PlainMemory(model.config, token_map, ids))
