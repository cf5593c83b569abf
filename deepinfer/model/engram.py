"""Engram of one layer: hashed n-gram rows, gated into the streams at the layer's entry.

Comes in: streams and the mapped ids around each row. Goes out: streams. Source: model spec §3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model import engram_tables
from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops
from deepinfer.model.weights import Source


@dataclass(frozen=True)
class EngramWeights:
    """``engram.*`` and the layer's hash constants."""

    table: Any
    wkv: Any
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    multipliers: torch.Tensor
    primes: torch.Tensor

    @classmethod
    def of(cls, source: Source, config: ModelConfig, index: int) -> EngramWeights:
        device = source.device
        return cls(
            table=source.stored("embed.weight"),
            wkv=source.matrix("wkv.weight"),
            q_weight=source.vector("q_weight"),
            k_weight=source.vector("k_weight"),
            multipliers=torch.tensor(engram_tables.multipliers(config)[index], device=device),
            primes=torch.tensor(engram_tables.primes(config)[index], device=device),
        )


def engram(
    streams: torch.Tensor, ngrams: torch.Tensor, w: EngramWeights, config: ModelConfig, ops: Ops
) -> torch.Tensor:
    """streams [N, C, H] with the gated values of mapped ids ``ngrams`` int64 [N, n] added."""
    rows = ops.engram_rows(ngrams, w.multipliers, w.primes)
    values = ops.engram_lookup(w.table, rows, streams.dtype)
    kv = ops.linear(values, w.wkv)
    return ops.engram_gate(streams, kv, w.q_weight, w.k_weight, config.rms_norm_eps)[0]
