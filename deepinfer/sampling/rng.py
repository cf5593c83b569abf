"""The only source of randomness: a counter-based generator, a pure function of its arguments.

A seed, an absolute position and a purpose name a stream; the token id counts within it. So no draw
depends on the batch, the step, a neighbour or on what was drawn before. It knows nothing of
requests or logits.

The rule, all arithmetic modulo 2^64, with `ops.noise`'s ``mix`` and what it makes of a word::

    key(seed, position, purpose) = mix(mix(mix(seed + G) ^ purpose) + G * (position + 1))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.ops import noise
from deepinfer.ops.noise import M1, M2, G, mixed, shifted, signed

if TYPE_CHECKING:
    import torch

_WORD = (1 << 64) - 1

# purposes; a new use of randomness takes the next number
TARGET = 0  # noise of a chosen token, shared by draft and target in coupled verification
ACCEPT = 1  # acceptance of a draft
RESIDUAL = 2  # redraw after a rejected draft
DRAFT = 3  # noise of a drafted token in rejection sampling

_SEED_BITS = (1 << 53) - 1  # drawn and derived seeds survive JSON readers that use doubles


def mix(x: int) -> int:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    x = ((x ^ (x >> 30)) * M1) & _WORD
    x = ((x ^ (x >> 27)) * M2) & _WORD
    return x ^ (x >> 31)


def key(seed: int, position: int, purpose: int = TARGET) -> int:
    """The 64-bit name of a stream. `position`: index in the sequence of the token drawn for."""
    return mix((mix(mix((seed + G) & _WORD) ^ purpose) + G * (position + 1)) & _WORD)


def derive_seed(seed: int, prompt: int, sample: int) -> int:
    """Seed of one sequence of a call that has a single `seed`.

    (prompt 0, sample 0) keeps the seed, so one prompt alone means what was typed. Any other pair
    gets ``mix(mix(mix(seed + G) ^ (prompt + 1)) ^ (sample + 1)) mod 2^53``. `prompt` counts the
    prompts that share one SamplingParams; where each prompt brings its own, it is 0 for all of
    them.
    """
    if prompt == 0 and sample == 0:
        return seed
    return mix(mix(mix((seed + G) & _WORD) ^ (prompt + 1)) ^ (sample + 1)) & _SEED_BITS


def random_seed() -> int:
    """A seed nobody chose, from the operating system; 53 bits."""
    return int.from_bytes(os.urandom(8), "little") & _SEED_BITS


def uniform(seed: int, position: int, purpose: int) -> float:
    """One number in (0, 1) per (seed, position, purpose)."""
    return ((mix((key(seed, position, purpose) + G) & _WORD) >> 12) + 0.5) * 2.0**-52


def words(stream: int, count: int) -> np.ndarray:
    """The first `count` words of a stream, uint64 [count]."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(G) + np.uint64(stream)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(M2)
    return x ^ (x >> np.uint64(31))


def gumbel(stream: int, count: int) -> np.ndarray:
    """Noise of tokens 0 .. count-1, float64 [count]: what the op `draw` adds, without torch."""
    fraction = (words(stream, count) >> np.uint64(12)).astype(np.float64)
    return noise.gumbel(fraction, np.int64, np.float64, lambda x: x.astype(np.float64))


def keys(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor = TARGET
) -> torch.Tensor:
    """`key` of many streams: int64 [rows], the 64 bits as a signed number.

    seeds: int64 [rows], the bits of the seed (`signed`); positions: int64 [rows]; purpose: of all,
    or int64 [rows].
    """
    return noise.named(seeds, positions, purpose)


def uniform_rows(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor
) -> torch.Tensor:
    """`uniform` of many streams, float64 [rows]."""
    word = mixed(keys(seeds, positions, purpose) + signed(G))
    return (shifted(word, 12).double() + 0.5) * 2.0**-52
