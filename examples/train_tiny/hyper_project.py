"""The projection behind the residual mixes: fn times the flattened streams over their rms.

Comes in: streams [N, C, H] and fn [M, C H] float32. Goes out: m [N, M] float32 (model spec §3.3),
differentiable. On a GPU one kernel reads the bfloat16 streams once; elsewhere plain torch. It must
not know what the mixes are used for.
"""

from __future__ import annotations

import torch


def project(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """m = (fn . u) rsqrt(mean(u^2) + eps) with u the float32 stream of all copies."""
    u = streams.flatten(1)
    if u.is_cuda and fn.shape[0] <= 32 and fn.shape[1] % 64 == 0:
        return _Project.apply(u, fn, eps)
    return project_plain(u, fn, eps)


def project_plain(u: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in torch: the meaning of the kernels, and the path without a GPU."""
    u = u.float()
    rho = torch.rsqrt((u * u).mean(-1, keepdim=True) + eps)
    return (u @ fn.t()) * rho


class _Project(torch.autograd.Function):
    """The kernel pair of `hyper_kernels` as one differentiable step."""

    @staticmethod
    def forward(ctx, u: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
        from examples.train_tiny import hyper_kernels

        u = u.contiguous()
        m, rho = hyper_kernels.forward(u, fn, eps)
        ctx.save_for_backward(u, fn, m, rho)
        return m

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        from examples.train_tiny import hyper_kernels

        u, fn, m, rho = ctx.saved_tensors
        grad = grad.contiguous()
        raw = (grad * rho.unsqueeze(-1)).to(torch.bfloat16)
        # m = (fn . u) rho and d rho / du = -rho^3 u / K.
        pull = -(grad * m).sum(-1) * rho * rho / u.shape[1]
        grad_u = hyper_kernels.backward(raw, pull, u, fn)
        return grad_u, (raw.t() @ u).float(), None
