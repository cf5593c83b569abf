"""Reference of the op that draws tokens. Comes in: scores and streams of noise. Goes out: ids.

Must not know seeds, temperatures or requests (serving semantics §4, coupled verification).
"""

from __future__ import annotations

import functools

import torch

from deepinfer.ops import noise


def draw(x: torch.Tensor, streams: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first arg-max of scores x, float64 [rows, vocab], no NaN; of the rows that
    are ``drawn``, bool [rows], after the noise of their stream, int64 [rows], is added."""
    added = gumbel(streams, x.shape[-1]).masked_fill(~drawn[:, None], 0.0)
    return (x + added).argmax(dim=-1)


def gumbel(streams: torch.Tensor, count: int) -> torch.Tensor:
    """One row of noise per stream, float64 [streams, count], on their device."""
    words = noise.mixed(streams[:, None] + _counters(count, str(streams.device)))
    fraction = noise.shifted(words, 12).to(torch.float64)
    return noise.gumbel(fraction, torch.int64, torch.float64, lambda x: x.to(torch.float64))


@functools.lru_cache(maxsize=8)
def _counters(count: int, device: str) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * noise.signed(noise.G)
