"""Reference of the op that draws tokens. Comes in: logits or scores, what a grammar allows of them
and streams of noise. Goes out: ids.

Must not know requests or grammars (serving semantics §4, coupled verification).
"""

from __future__ import annotations

import functools
import math
from itertools import repeat

import torch

from deepinfer.ops import noise

_BLOCK = 1 << 18  # elements worked on at once: float64 temporaries that stay in a cache
_BLOCK_DEVICE = 1 << 22  # where starting work costs more than its temporaries


def draw(
    x: torch.Tensor,
    allowed: torch.Tensor | None = None,
    streams: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [rows]: the first arg-max of x [rows, vocab]; -1 where nothing is left.

    x: float32 logits, -1 for a row that is not finite; or float64 scores, no NaN, -inf for what is
    left out. allowed: see `masked`. streams int64 and temperature float64 [rows]: rows with a
    temperature above 0 are drawn, x over it plus the noise of their stream. positions int64 [rows]:
    streams are seeds, with these they name the streams (`noise.named`).
    """
    if streams is not None and len(x) > (size := rows_at_once(x)):
        columns = (x, allowed, streams, temperature, positions)
        parts = zip(*(repeat(None) if c is None else c.split(size) for c in columns), strict=False)
        return torch.cat([draw(*part) for part in parts])
    if positions is not None:
        streams = noise.named(streams, positions, 0)
    fine = finite(x) if x.dtype == torch.float32 else torch.ones_like(x[:, 0], dtype=torch.bool)
    x = x if allowed is None else masked(x, allowed)
    if streams is not None:
        warm = temperature > 0
        x = x.to(torch.float64) / temperature.masked_fill(~warm, 1.0)[:, None]
        x += gumbel(streams, x.shape[-1]).masked_fill_(~warm[:, None], 0.0)
    # torch promises the first of equal maxima, hence the lowest id
    best = x.argmax(dim=-1)
    fine &= x.gather(-1, best[:, None])[:, 0] > float("-inf")
    return torch.where(fine, best, -1)


def rows_at_once(x: torch.Tensor) -> int:
    """How many rows of x [rows, vocab] to work on at once: parts that bound float64 temporaries."""
    return max(1, (_BLOCK if x.device.type == "cpu" else _BLOCK_DEVICE) // x.shape[-1])


def finite(x: torch.Tensor) -> torch.Tensor:
    """Which rows of [rows, vocab] are finite, bool [rows]: 0 times anything else is NaN."""
    return (x * 0).sum(dim=-1) == 0


def masked(x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """float32 logits [rows, vocab], -inf where the bits of a row, uint8 [rows, bytes], leave an id
    out: bit i % 8 of byte i // 8 is that of id i."""
    rows, vocab = x.shape
    # Adding is ten times as fast as filling; what is added to is finite.
    bits = allowed.flatten().to(torch.int32)
    added = _of_bits(str(x.device)).index_select(0, bits)
    return x + added.view(rows, 8 * allowed.shape[1])[:, :vocab]


@functools.lru_cache(maxsize=8)
def _of_bits(device: str) -> torch.Tensor:
    """0 for each bit of a byte that is set and -inf for the others, float32 [256, 8]."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -math.inf)


def gumbel(streams: torch.Tensor, count: int) -> torch.Tensor:
    """One row of noise per stream, float64 [streams, count], on their device."""
    words = noise.mixed(streams[:, None] + _counters(count, str(streams.device)))
    fraction = noise.shifted(words, 12).to(torch.float64)
    return noise.gumbel(fraction, torch.int64, torch.float64, lambda x: x.to(torch.float64))


@functools.lru_cache(maxsize=8)
def _counters(count: int, device: str) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * noise.signed(noise.G)
