"""Reference router and experts.

Comes in: normed rows. Goes out: expert ids and weights, or the combined output. Experts run one
after the other in id order, so a row's sum has one order. Source: model spec §3.9.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch import blocked
from deepinfer.ops.torch.linear import Weight, activation
from deepinfer.ops.torch.rowwise import row_sum, silu, softplus


def router(
    logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int64 [N, k] (descending biased score, ties: lower id) and weights [N, k].

    s = sqrt(softplus(logits)); chosen by s + bias, weighted by the unbiased s over its sum (not
    with k = 1) times ``scale``.
    """
    s = softplus(logits).sqrt()
    ids = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = s.gather(-1, ids)
    if normalise and k > 1:
        weights = weights / (row_sum(weights).unsqueeze(-1) + 1e-20)
    return ids, weights * scale


def expert(
    x: torch.Tensor,
    row_weight: torch.Tensor | None,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    quantised: bool,
    limit: float,
) -> torch.Tensor:
    """SwiGLU of x [M, H] with clamps; ``row_weight`` [M] multiplies before w2's input is rounded.

    w1, w3, w2 are right operands of ``blocked.matmul``. Returns x's dtype [M, H].
    """
    left = activation(x, quantised)
    gate = blocked.matmul(left, w1).to(x.dtype).float().clamp_max(limit)
    up = blocked.matmul(left, w3).to(x.dtype).float().clamp(-limit, limit)
    h = silu(gate) * up
    if row_weight is not None:
        h = h * row_weight.unsqueeze(-1)
    return blocked.matmul(activation(h.to(x.dtype), quantised), w2).to(x.dtype)


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: tuple[Weight, Weight, Weight],
    shared: tuple[Weight, Weight, Weight],
    limit: float,
) -> torch.Tensor:
    """Routed experts (w1, w3, w2 stacks [E, ...]) plus the shared one; one rounding at the end."""
    w1, w3, w2 = experts
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in torch.unique(ids).tolist():
        rows, choice = (ids == e).nonzero(as_tuple=True)
        y = expert(
            x[rows], weights[rows, choice], w1.columns(e), w3.columns(e), w2.columns(e),
            w1.quantised, limit,
        )  # fmt: skip
        total[rows] += y.float()
    s1, s3, s2 = shared
    y = expert(x, None, s1.columns(), s3.columns(), s2.columns(), s1.quantised, limit)
    return (total + y.float()).to(x.dtype)
