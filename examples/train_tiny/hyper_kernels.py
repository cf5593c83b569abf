"""The two Triton kernels behind `hyper_project`.

Comes in: contiguous bfloat16 streams [N, K] and float32 fn [M, K], M <= 32, K a multiple of 64, on
one GPU (or the interpreter). Goes out: projections and inverse rms; gradients of the streams. It
must not know autograd. Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, STEP, WIDTH = 64, 64, 32


@triton.jit
def _forward(u, fn, m, rho, n, eps, M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
             STEP: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.arange(0, WIDTH)
    inner = tl.arange(0, STEP)
    row_ok = rows < n
    start = rows * K
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for k in range(0, K, STEP):
        at = start[:, None] + (k + inner)[None, :]
        tile = tl.load(u + at, mask=row_ok[:, None], other=0.0).to(DOT)
        # fn transposed, [STEP, WIDTH], as the sum of two bfloat16 numbers: 16 bits of precision.
        part = tl.load(fn + outs[None, :] * K + (k + inner)[:, None], mask=(outs < M)[None, :],
                       other=0.0)
        high = part.to(DOT)
        low = (part - high.to(tl.float32)).to(DOT)
        total += tl.dot(tile, high)
        total += tl.dot(tile, low)
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    scale = tl.rsqrt(squares / K + eps)
    tl.store(rho + rows, scale, mask=row_ok)
    tl.store(m + rows[:, None] * M + outs[None, :], total * scale[:, None],
             mask=row_ok[:, None] & (outs < M)[None, :])


@triton.jit
def _backward(raw, pull, u, fn, grad, n, M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
              STEP: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.arange(0, WIDTH)
    inner = tl.arange(0, STEP)
    row_ok = rows < n
    start = rows * K
    g = tl.load(raw + rows[:, None] * M + outs[None, :],
                mask=row_ok[:, None] & (outs < M)[None, :], other=0.0).to(DOT)
    p = tl.load(pull + rows, mask=row_ok, other=0.0)
    for k in range(0, K, STEP):
        at = start[:, None] + (k + inner)[None, :]
        tile = tl.load(u + at, mask=row_ok[:, None], other=0.0).to(tl.float32)
        part = tl.load(fn + outs[:, None] * K + (k + inner)[None, :], mask=(outs < M)[:, None],
                       other=0.0)
        value = tl.dot(g, part.to(DOT)) + p[:, None] * tile
        tl.store(grad + at, value.to(tl.bfloat16), mask=row_ok[:, None])


def forward(
    u: torch.Tensor, fn: torch.Tensor, eps: float, dot: tl.dtype = tl.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """m [N, M] = (fn . u) rho and rho [N] = rsqrt(mean(u^2) + eps), float32.

    ``dot``: type of the products' operands; the interpreter only multiplies float32.
    """
    n, k = u.shape
    m = torch.empty(n, fn.shape[0], device=u.device)
    rho = torch.empty(n, device=u.device)
    grid = (triton.cdiv(n, ROWS),)
    _forward[grid](u, fn, m, rho, n, eps, fn.shape[0], k, ROWS, STEP, WIDTH, dot)
    return m, rho


def backward(
    raw: torch.Tensor,
    pull: torch.Tensor,
    u: torch.Tensor,
    fn: torch.Tensor,
    dot: tl.dtype = tl.bfloat16,
) -> torch.Tensor:
    """raw [N, M] bfloat16 . fn + pull [N] u: gradients [N, K] bfloat16."""
    n, k = u.shape
    grad = torch.empty_like(u)
    grid = (triton.cdiv(n, ROWS),)
    _backward[grid](raw, pull, u, fn, grad, n, fn.shape[0], k, ROWS, STEP, WIDTH, dot)
    return grad
