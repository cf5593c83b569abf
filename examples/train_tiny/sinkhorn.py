"""Sinkhorn normalisation of the residual-mixing matrices, with a gradient that is fast on a GPU.

Comes in: logits [N, C, C] in float32. Goes out: the doubly normalised matrices of the model spec
(§3.3), differentiable. Where Triton runs, one small kernel does all rounds and keeps its
denominators, and one walks back through them; elsewhere a plain torch loop is differentiated. It
must not know layers, streams or training.
"""

from __future__ import annotations

import torch


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """softmax over the last index + eps, then columns, then (iters - 1) times rows and columns.

    logits [N, C, C] float32 -> [N, C, C] float32. Source: model spec §3.3.
    """
    if _kernels_run_on(logits):
        return _Sinkhorn.apply(logits, iters, eps)
    return sinkhorn_loop(logits, iters, eps)


def sinkhorn_loop(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """The same by a torch loop: the meaning of the kernel, and the path without a GPU."""
    a = torch.softmax(logits, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def _kernels_run_on(x: torch.Tensor) -> bool:
    return x.is_cuda and x.shape[-1] & (x.shape[-1] - 1) == 0


class _Sinkhorn(torch.autograd.Function):
    """The kernel pair of `sinkhorn_kernels` as one differentiable step."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
        from examples.train_tiny import sinkhorn_kernels

        logits = logits.contiguous()
        result, denominators = sinkhorn_kernels.forward(logits, iters, eps)
        ctx.save_for_backward(logits, result, denominators)
        return result

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        from examples.train_tiny import sinkhorn_kernels

        return sinkhorn_kernels.backward(grad.contiguous(), *ctx.saved_tensors), None, None
