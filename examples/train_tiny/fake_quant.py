"""Fake quantisation for training: the values of the formats, with straight-through gradients.

Comes in: float tensors. Goes out: bfloat16 tensors holding exactly the values that the formats of
the model spec (§3.0, §2.3) can hold; the gradient passes as if nothing had happened. The arithmetic
equals `deepinfer.quant.codec` bit for bit but never builds codes, so a compiler can fuse it.
"""

from __future__ import annotations

import torch

from deepinfer.quant.codec import E2M1_MAX, E4M3_MAX, exponent_ceil, power_of_two

# The float32 nearest to 1/448 and 1/6, as Python numbers.
_PER_E4M3 = torch.tensor(1 / E4M3_MAX, dtype=torch.float32).item()
_PER_E2M1 = torch.tensor(1 / E2M1_MAX, dtype=torch.float32).item()


def fp8(x: torch.Tensor) -> torch.Tensor:
    """FP8 activation values: E4M3 with one power-of-two scale per 32 channels."""
    g = x.float().unflatten(-1, (-1, 32))
    amax = g.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two(exponent_ceil(amax * _PER_E4M3))
    q = (g / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return q.flatten(-2).to(torch.bfloat16)


def fp4_index(x: torch.Tensor) -> torch.Tensor:
    """FP4 values of index queries and keys: E2M1, power-of-two scale per 32 channels."""
    g = x.float().unflatten(-1, (-1, 32))
    amax = g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two(exponent_ceil(amax * _PER_E2M1))
    return (e2m1(g / scale) * scale).flatten(-2).to(torch.bfloat16)


def fp4_kv(x: torch.Tensor) -> torch.Tensor:
    """FP4 values of compressed entries: E2M1, E4M3 scale per 16 channels."""
    g = x.float().unflatten(-1, (-1, 16))
    amax = g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (e2m1(g / scale) * scale).flatten(-2).to(torch.bfloat16)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest value of {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code, clamped at 6."""
    a = x.abs().clamp_max(E2M1_MAX)
    # Steps of 0.5 below 2, of 1 below 4, of 2 up to 6; torch.round takes ties to even, as wanted.
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def weight(x: torch.Tensor, kind: str, block: tuple[int, int]) -> torch.Tensor:
    """Values of a stored weight [count, rows, cols]: the smallest fitting scale a block."""
    count, rows, cols = x.shape
    br, bc = min(block[0], rows), min(block[1], cols)
    g = x.float().view(count, rows // br, br, cols // bc, bc)
    limit = E2M1_MAX if kind == "fp4" else E4M3_MAX
    amax = g.abs().amax((2, 4), keepdim=True)
    k = exponent_ceil((amax / limit).clamp_min(2.0**-126)).clamp(-126, 126)
    scale = power_of_two(k)
    q = (g / scale).clamp(-limit, limit)
    q = e2m1(q) if kind == "fp4" else q.to(torch.float8_e4m3fn).float()
    return (q * scale).view(count, rows, cols).to(torch.bfloat16)


def through(x: torch.Tensor, quantiser) -> torch.Tensor:
    """quantiser(x) forward, identity backward."""
    return x + (quantiser(x.detach()).float() - x.detach().float()).to(x.dtype)

