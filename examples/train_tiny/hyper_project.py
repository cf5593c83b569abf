"""The projection behind the residual mixes: fn times the flattened streams over their rms.

Comes in: streams [N, C, H] and fn [M, C H] float32. Goes out: m [N, M] float32 (model spec §3.3),
differentiable. On a GPU one kernel reads the bfloat16 streams once; elsewhere plain torch. It must
not know what the mixes are used for.
"""

from __future__ import annotations

import torch


def project(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """m = (fn . u) rsqrt(mean(u^2) + eps) with u the float32 stream of all copies."""
    u = streams.flatten(1).float()
    rho = torch.rsqrt((u * u).mean(-1, keepdim=True) + eps)
    return (u @ fn.t()) * rho
