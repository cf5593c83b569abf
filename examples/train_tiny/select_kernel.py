"""A Triton kernel that marks the k best scores of every row, without sorting.

Comes in: float32 scores [..., J], J a power of two, on one GPU (or the interpreter). Goes out: a
bool mask of the same shape; ties of the k-th score are all marked, scores of -inf never. The k-th
score is found bit by bit: 32 counts over a row that stays in registers. It must not know what is
scored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _choose(scores, mask, k, J: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * J + tl.arange(0, J)
    score = tl.load(scores + at)
    bits = score.to(tl.int32, bitcast=True)
    # Order-preserving: as unsigned numbers the keys compare like the floats.
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    best = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        trial = best | bit
        enough = tl.sum((key >= trial).to(tl.int32), 0) >= k
        best = tl.where(enough, trial, best)
        bit = bit >> 1
    chosen = (key >= best) & (score > float("-inf"))
    tl.store(mask + at, chosen.to(tl.int8))


def choose(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool mask [..., J] of the k best scores of each row."""
    scores = scores.contiguous()
    mask = torch.empty(scores.shape, dtype=torch.int8, device=scores.device)
    j = scores.shape[-1]
    _choose[(scores.numel() // j,)](scores, mask, k, j, num_warps=max(1, j // 2048))
    return mask.view(torch.bool)
