"""The two Triton kernels behind `sinkhorn`: all rounds forward, and the walk back.

Comes in: contiguous float32 tensors on one GPU (or the Triton interpreter). Goes out: the matrices
and, for the way back, every round's denominators [2 * iters - 1, N, C]. It must not know autograd.
Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 64  # matrices a program


@triton.jit
def _forward(logits, out, denominators, n, eps, ITERS: tl.constexpr, C: tl.constexpr,
             ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    valid = rows < n
    at = rows[:, None, None] * (C * C) + c[None, :, None] * C + c[None, None, :]
    mask = valid[:, None, None] & (at >= 0)
    line = rows[:, None] * C + c[None, :]
    line_mask = valid[:, None] & (line >= 0)
    a = tl.load(logits + at, mask=mask, other=0.0)
    a = tl.exp(a - tl.max(a, 2)[:, :, None])
    a = a / tl.sum(a, 2)[:, :, None] + eps
    d = tl.sum(a, 1) + eps
    tl.store(denominators + line, d, mask=line_mask)
    a = a / d[:, None, :]
    for i in range(ITERS - 1):
        slot = (2 * i + 1) * n * C
        d = tl.sum(a, 2) + eps
        tl.store(denominators + slot + line, d, mask=line_mask)
        a = a / d[:, :, None]
        d = tl.sum(a, 1) + eps
        tl.store(denominators + slot + n * C + line, d, mask=line_mask)
        a = a / d[:, None, :]
    tl.store(out + at, a, mask=mask)


@triton.jit
def _backward(grad, logits, out, denominators, grad_logits, n, ITERS: tl.constexpr,
              C: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    valid = rows < n
    at = rows[:, None, None] * (C * C) + c[None, :, None] * C + c[None, None, :]
    mask = valid[:, None, None] & (at >= 0)
    line = rows[:, None] * C + c[None, :]
    line_mask = valid[:, None] & (line >= 0)
    y = tl.load(out + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0)
    for i in range(ITERS - 1):
        slot = (2 * (ITERS - 2 - i) + 1) * n * C
        # y = x / d with d = sum(x) + eps: x = y d, dx = (dy - sum(dy y)) / d
        d = tl.load(denominators + slot + n * C + line, mask=line_mask, other=1.0)[:, None, :]
        g = (g - tl.sum(g * y, 1)[:, None, :]) / d
        y = y * d
        d = tl.load(denominators + slot + line, mask=line_mask, other=1.0)[:, :, None]
        g = (g - tl.sum(g * y, 2)[:, :, None]) / d
        y = y * d
    d = tl.load(denominators + line, mask=line_mask, other=1.0)[:, None, :]
    g = (g - tl.sum(g * y, 1)[:, None, :]) / d
    p = tl.load(logits + at, mask=mask, other=0.0)
    p = tl.exp(p - tl.max(p, 2)[:, :, None])
    p = p / tl.sum(p, 2)[:, :, None]
    g = p * (g - tl.sum(g * p, 2)[:, :, None])
    tl.store(grad_logits + at, g, mask=mask)


def forward(logits: torch.Tensor, iters: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, C, C] -> matrices [N, C, C], denominators [2 * iters - 1, N, C]."""
    n, c, _ = logits.shape
    out = torch.empty_like(logits)
    denominators = torch.empty(2 * iters - 1, n, c, device=logits.device)
    _forward[(triton.cdiv(n, ROWS),)](logits, out, denominators, n, eps, iters, c, ROWS)
    return out, denominators


def backward(
    grad: torch.Tensor, logits: torch.Tensor, out: torch.Tensor, denominators: torch.Tensor
) -> torch.Tensor:
    """Gradient of the logits [N, C, C] from the gradient of the matrices."""
    n, c, _ = logits.shape
    grad_logits = torch.empty_like(logits)
    iters = (denominators.shape[0] + 1) // 2
    grid = (triton.cdiv(n, ROWS),)
    _backward[grid](grad, logits, out, denominators, grad_logits, n, iters, c, ROWS)
    return grad_logits
