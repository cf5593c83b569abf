"""Sums and matrix products whose bits depend on nothing but their operands.

K is cut into blocks of 128. Inside a block both operands are rounded to integers of 23 bits times
one power of two, so their 128 products sum to at most 2^53: a float64 matmul is *exact*, in any
order, with any blocking, on any device. The block sums are added in K order, in float64, and the
total is rounded to float32 once. No row can therefore feel the number of rows, a chunk boundary or
the BLAS that ran. The rounding is an error of at most 2^-23 of the block's largest magnitude,
twice that of a float32. Operands of FP8, FP4 and bf16 nearly always are such integers already.
"""

from __future__ import annotations

import torch

BLOCK = 128
_BITS = 23
_EXPONENT = 0x7FF << 52
# Float64 block sums held at once (bytes); rows are processed in slices to stay below it.
_LIMIT = 16 << 20
_DEVICE_LIMIT = 2 << 30


def power_below(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each magnitude of float64 ``x`` (0 for 0)."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)


def fix(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 ``x`` [..., n] rounded to integers of ``bits`` bits times one power of two a row.

    The unit is 2^(e - bits) where 2^e is above the largest magnitude of the row; bits <= 51.
    """
    top = power_below(x.abs().amax(-1, keepdim=True))
    # Adding and taking away 1.5 * 2^(e - bits + 52) rounds to its last place, 2^(e - bits).
    magic = top * (1.5 * 2.0 ** (53 - bits))
    return (x + magic) - magic


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (n numbers), in float64: exact, so in any order.

    The numbers are first rounded to integers of 53 - ceil(log2 n) bits (at most 51) times one
    power of two.
    """
    x = x.double()
    return fix(x, min(51, 53 - (x.shape[-1] - 1).bit_length())).sum(-1)


def split(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> float64 [..., ceil(K / 128), min(K, 128)], padded with zeros; exact."""
    k = x.shape[-1]
    x = x.double()
    if k <= BLOCK:
        return x.unsqueeze(-2)
    if k % BLOCK:
        x = torch.nn.functional.pad(x, (0, BLOCK - k % BLOCK))
    return x.unflatten(-1, (-1, BLOCK))


def snap(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> float64 [..., G, B], each block rounded to integers of 23 bits (``fix``)."""
    return fix(split(x), _BITS)


def columns(w: torch.Tensor) -> torch.Tensor:
    """Weights [..., N, K] -> right operand float64 [..., G, B, N] of ``matmul``."""
    return snap(w).movedim(-3, -1).contiguous()


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 blocks a [..., M, G, B] x b [..., G, B, N] -> float32 [..., M, N].

    Leading dimensions broadcast. Both operands must come from ``snap`` for the promise of the
    module to hold.
    """
    rows, groups, width = a.shape[-3], b.shape[-3], b.shape[-1]
    limit = _LIMIT if a.device.type == "cpu" else _DEVICE_LIMIT
    step = max(1, limit // max(1, 8 * groups * width * a.shape[:-3].numel()))
    if rows <= step:
        return _matmul(a, b)
    return torch.cat([_matmul(x, b) for x in a.split(step, -3)], -2)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total, *others = torch.matmul(a.transpose(-2, -3), b).unbind(-3)
    for sums in others:
        total = total + sums
    return total.float()
