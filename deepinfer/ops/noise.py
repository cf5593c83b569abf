"""The arithmetic of random words and Gumbel noise, for numpy and torch arrays alike.

Words come in, words and noise go out. One IEEE operation at a time, hence the same bits in every
library and on every device. It must not know what is drawn.

All arithmetic is modulo 2^64, ``G = 0x9E3779B97F4A7C15``, ``mix`` the finaliser of SplitMix64
(Steele, Lea, Flood 2014)::

    word(key, v)  = mix(key + G * (v + 1))       # v-th of SplitMix64 from key
    uniform(word) = ((word >> 12) + 0.5) * 2^-52 # inside (0, 1), never 0 or 1
    gumbel(word)  = -log(-log(uniform(word)))    # standard Gumbel

and of a seed, a position and what the noise is for::

    key           = mix(mix(mix(seed + G) ^ purpose) + G * (position + 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

G = 0x9E3779B97F4A7C15
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB

_LN2 = math.log(2.0)
_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52
_SQRT2_MANTISSA = 0x6A09E667F3BCD


def signed(word: int) -> int:
    """The same 64 bits as a signed number: torch multiplies int64 modulo 2^64."""
    return word - (1 << 64) if word >> 63 else word


def mixed(x: Any) -> Any:
    """``mix`` of int64 words of a tensor."""
    x = (x ^ shifted(x, 30)) * signed(M1)
    x = (x ^ shifted(x, 27)) * signed(M2)
    return x ^ shifted(x, 31)


def named(seeds: Any, positions: Any, purpose: Any) -> Any:
    """``key`` of int64 words of tensors; purpose: of all, or a tensor too."""
    return mixed(mixed(mixed(seeds + signed(G)) ^ purpose) + signed(G) * (positions + 1))


def shifted(x: Any, bits: int) -> Any:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(fraction: Any, int64: Any, float64: Any, to_float: Callable[[Any], Any]) -> Any:
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
