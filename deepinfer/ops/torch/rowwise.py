"""Row-wise reference ops: transcendental functions, RMSNorm and RoPE.

Comes in: rows [tokens, ...]. Goes out: rows. Only functions whose vectorised and scalar code paths
agree are used: exp, log1p, cos, sin, sqrt. torch's own sigmoid, silu and softplus give an element
other bits in the tail of a vector than in its body. Source: model spec §3.0.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch.blocked import row_sum


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of float32 ``x``."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of float32 ``x``."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of float32 ``x``, the identity above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp_max(20))))


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension of ``x``; float32 [...]."""
    x = x.double()
    return (1.0 / torch.sqrt(row_sum(x * x) / x.shape[-1] + eps)).float()


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] * rsqrt(mean(x^2) + eps) * weight, float32 inside, one rounding to x's dtype."""
    x32 = x.float()
    return (x32 * inverse_rms(x32, eps).unsqueeze(-1) * weight.float()).to(x.dtype)


def rope_table(positions: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [tokens, rotary / 2]; the angle is rounded to float32 first."""
    angle = positions.float().unsqueeze(-1) * freqs
    return angle.cos(), angle.sin()


def rope(
    x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], inverse: bool = False
) -> torch.Tensor:
    """Rotate the last R channels of x [tokens, D] or [tokens, heads, D] as adjacent pairs."""
    cos, sin = table
    if inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary = 2 * cos.shape[-1]
    even, odd = x[..., -rotary:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rotary], turned.to(x.dtype)), -1)
