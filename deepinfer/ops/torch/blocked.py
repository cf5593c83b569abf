"""Matrix products whose bits depend on nothing but their operands: exact block sums, added in order.

K is cut into blocks of 32. Inside a block both operands are integers of at most 24 bits times one
power of two, so their 32 products sum to less than 2^53: a float64 matmul is *exact*, in any
order, with any blocking, on any device. The block sums are added in K order, in float64, and the
total is rounded to float32 once. No row can therefore feel the number of rows, a chunk boundary or the BLAS that ran.
Operands of FP8, FP4 and (nearly always) bf16 are such integers already; others are rounded to
them, an error of at most 2^-25 of the block's largest magnitude: float32's own resolution.
"""

from __future__ import annotations

import torch

BLOCK = 32
_BITS = 24
# Float64 block sums held at once (bytes); rows are processed in slices to stay below it.
_LIMIT = 128 << 20


def split(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> float64 [..., ceil(K / 32), 32], padded with zeros; exact."""
    k = x.shape[-1]
    x = x.double()
    if k % BLOCK:
        x = torch.nn.functional.pad(x, (0, BLOCK - k % BLOCK))
    return x.unflatten(-1, (-1, BLOCK))


def snap(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> float64 [..., G, 32], each block rounded to multiples of 2^(e - 24), |x| < 2^e."""
    x = split(x)
    e = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent.long()
    # Adding and taking away 1.5 * 2^(e + 28) rounds to its last place, which is 2^(e - 24).
    magic = ((e + (52 - _BITS + 1023)) << 52).view(torch.float64) * 1.5
    return (x + magic) - magic


def columns(w: torch.Tensor) -> torch.Tensor:
    """Weights [..., N, K] -> right operand float64 [..., G, 32, N] of ``matmul``."""
    return snap(w).movedim(-3, -1).contiguous()


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 blocks a [..., M, G, 32] x b [..., G, 32, N] -> float32 [..., M, N].

    Leading dimensions broadcast. Both operands must be integers of at most 24 bits within each
    block, up to a power of two (``snap``), for the promise of the module to hold.
    """
    rows, groups, width = a.shape[-3], b.shape[-3], b.shape[-1]
    lead = a.shape[:-3].numel()
    step = max(1, _LIMIT // max(1, 8 * groups * width * lead))
    if rows <= step:
        return _matmul(a, b)
    return torch.cat([_matmul(a[..., i : i + step, :, :], b) for i in range(0, rows, step)], -2)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sums = torch.matmul(a.transpose(-2, -3), b)
    total = sums.select(-3, 0)
    for g in range(1, sums.shape[-3]):
        total = total + sums.select(-3, g)
    return total.float()
