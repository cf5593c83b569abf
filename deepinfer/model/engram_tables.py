"""The fixed numbers behind the Engram hash: table primes and odd multipliers.

Comes in: the Engram keys of a model configuration. Goes out: plain Python integers, the same on
every machine. It must not know token maps, rows or gates; torch is not needed, numpy only for the
multipliers, because the published tables were drawn from numpy's PCG64 bounded integers (model spec
§3.4).
"""

from __future__ import annotations

import math
from typing import Protocol

__all__ = ["EngramSizes", "multipliers", "primes"]


class EngramSizes(Protocol):
    """The configuration keys that decide the tables (`ModelConfig` has them)."""

    @property
    def engram_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def engram_max_ngram_size(self) -> int: ...
    @property
    def engram_n_heads(self) -> int: ...
    @property
    def engram_vocab_size(self) -> int: ...
    @property
    def engram_compressed_vocab_size(self) -> int: ...


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def primes(config: EngramSizes) -> list[list[list[int]]]:
    """Rows of every hash table: `primes(config)[table][n - 2][head]` (model spec §3.4).

    Tables come in the order of `engram_layer_ids`, n-grams from 2 to `engram_max_ngram_size`. For
    each (table, n) the search restarts below `engram_vocab_size` and hands out the next prime that
    no earlier table, n or head was given.
    """
    used: set[int] = set()
    tables = []
    for _ in config.engram_layer_ids:
        per_n = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            heads: list[int] = []
            candidate = config.engram_vocab_size - 1
            while len(heads) < config.engram_n_heads:
                candidate += 1
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    heads.append(candidate)
            per_n.append(heads)
        tables.append(per_n)
    return tables


def multipliers(config: EngramSizes) -> list[list[int]]:
    """Odd multipliers per table, one per look-back shift from 0 on (model spec §3.4).

    They depend on the layer id and on the size of the compressed vocabulary, so that no product of
    a mapped id and its multiplier leaves the range of int64.
    """
    import numpy as np

    if not config.engram_layer_ids:
        return []
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    tables = []
    for layer in config.engram_layer_ids:
        draws = np.random.default_rng(10007 * layer).integers(
            0, bound, size=config.engram_max_ngram_size, dtype=np.int64
        )
        tables.append([2 * int(draw) + 1 for draw in draws])
    return tables
