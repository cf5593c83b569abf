"""The only source of randomness: a counter-based generator, a pure function of its arguments.

A seed, an absolute position and a purpose name a stream; the token id counts within it. So no draw
depends on the batch, the step, a neighbour or on what was drawn before. It knows nothing of
requests or logits.

The rule, all arithmetic modulo 2^64, ``G = 0x9E3779B97F4A7C15``, ``mix`` the finaliser of
SplitMix64 (Steele, Lea, Flood 2014)::

    key(seed, position, purpose) = mix(mix(mix(seed + G) ^ purpose) + G * (position + 1))
    word(key, v)                 = mix(key + G * (v + 1))       # v-th of SplitMix64 from key
    uniform(word)                = ((word >> 12) + 0.5) * 2^-52 # inside (0, 1), never 0 or 1
    gumbel(word)                 = -log(-log(uniform(word)))    # standard Gumbel

The logarithm is built from IEEE additions, multiplications and divisions in float64, hence numpy
and torch on any device give the same bits.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

G = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1

# purposes; a new use of randomness takes the next number
TARGET = 0  # noise of a chosen token, shared by draft and target in coupled verification
ACCEPT = 1  # acceptance of a draft
RESIDUAL = 2  # redraw after a rejected draft
DRAFT = 3  # noise of a drafted token in rejection sampling

_SEED_BITS = (1 << 53) - 1  # drawn and derived seeds survive JSON readers that use doubles


def mix(x: int) -> int:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    x = ((x ^ (x >> 30)) * _M1) & _WORD
    x = ((x ^ (x >> 27)) * _M2) & _WORD
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
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def gumbel(stream: int, count: int) -> np.ndarray:
    """Noise of tokens 0 .. count-1, float64 [count]; the torch-free twin of `gumbel_rows`."""
    fraction = (words(stream, count) >> np.uint64(12)).astype(np.float64)
    return _gumbel(fraction, np.int64, np.float64, lambda x: x.astype(np.float64))


def keys(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor = TARGET
) -> torch.Tensor:
    """`key` of many streams: int64 [rows], the 64 bits as a signed number.

    seeds: int64 [rows], the bits of the seed (`signed`); positions: int64 [rows]; purpose: of all,
    or int64 [rows].
    """
    return _mixed(_mixed(_mixed(seeds + signed(G)) ^ purpose) + signed(G) * (positions + 1))


def uniform_rows(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor
) -> torch.Tensor:
    """`uniform` of many streams, float64 [rows]."""
    word = _mixed(keys(seeds, positions, purpose) + signed(G))
    return (_shifted(word, 12).double() + 0.5) * 2.0**-52


def gumbel_rows(keys: torch.Tensor, count: int) -> torch.Tensor:
    """One row of noise per stream, float64 [streams, count], on the device of `keys`."""
    import torch

    words = _mixed(keys[:, None] + _counters(count, str(keys.device)))
    fraction = _shifted(words, 12).to(torch.float64)
    return _gumbel(fraction, torch.int64, torch.float64, lambda x: x.to(torch.float64))


@functools.lru_cache(maxsize=8)
def _counters(count: int, device: str) -> torch.Tensor:
    import torch

    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * signed(G)


def signed(word: int) -> int:
    """The same 64 bits as a signed number: torch multiplies int64 modulo 2^64."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """`mix` of int64 words."""
    x = (x ^ _shifted(x, 30)) * signed(_M1)
    x = (x ^ _shifted(x, 27)) * signed(_M2)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_LN2 = math.log(2.0)
_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52
_SQRT2_MANTISSA = 0x6A09E667F3BCD


def _gumbel(fraction: Any, int64: Any, float64: Any, to_float: Callable[[Any], Any]) -> Any:
    """-log(-log((fraction + 0.5) / 2^52)), the same code for numpy and torch arrays."""
    u = (fraction + 0.5) * 2.0**-52
    return -_log(-_log(u, int64, float64, to_float), int64, float64, to_float)


def _log(x: Any, int64: Any, float64: Any, to_float: Callable[[Any], Any]) -> Any:
    """Natural logarithm of positive normal float64, relative error below 1e-10.

    x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1),
    |s| < 0.172. One operation at a time: fused ones would round differently between libraries.
    """
    bits = x.view(int64)
    mantissa = bits & _MANTISSA
    high = mantissa >= _SQRT2_MANTISSA
    exponent = (bits >> 52) - 1023 + high
    m = (mantissa | _ONE).view(float64)
    m = m - m * 0.5 * high
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = square * (1 / 13) + 1 / 11
    for odd in (9, 7, 5, 3, 1):
        series = series * square + 1 / odd
    return s * 2.0 * series + to_float(exponent) * _LN2
