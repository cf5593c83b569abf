"""Reference router and experts.

Comes in: normed rows. Goes out: expert ids and weights, or the combined output. Experts run one
after the other in id order, so a row's sum has one order. Source: model spec §3.9.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch import blocked
from deepinfer.ops.torch.linear import Weight, activation
from deepinfer.ops.torch.rowwise import silu, softplus


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
        weights = weights / (blocked.row_sum(weights).float().unsqueeze(-1) + 1e-20)
    return ids, weights * scale


def _hidden(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """Clamped SwiGLU, float32."""
    return silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


def expert(
    x: torch.Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float, row_weight=None
) -> torch.Tensor:
    """SwiGLU of x [M, H] with clamps, in x's dtype.

    ``row_weight`` [M] multiplies before w2's input is rounded.
    """
    left = activation(x, w1.quantised)
    gate, up = (blocked.matmul(left, w.columns()).to(x.dtype) for w in (w1, w3))
    h = _hidden(gate, up, limit)
    if row_weight is not None:
        h = h * row_weight.unsqueeze(-1)
    return blocked.matmul(activation(h.to(x.dtype), w2.quantised), w2.columns()).to(x.dtype)


def _routed(left: torch.Tensor, ids: list[int], counts: list[int], weight: Weight) -> torch.Tensor:
    """Rows ``left`` [P, G, B], sorted by expert, each times its expert's matrix."""
    parts = zip(ids, left.split(counts), strict=True)
    return torch.cat([blocked.matmul(x, weight.columns(e)) for e, x in parts])


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: tuple[Weight, Weight, Weight],
    shared: tuple[Weight, Weight, Weight],
    limit: float,
) -> torch.Tensor:
    """Routed experts (w1, w3, w2 stacks [E, ...]) in id order, then the shared one; one rounding
    at the end."""
    if not x.shape[0]:
        return x
    w1, w3, w2 = experts
    k = ids.shape[1]
    ids, order = ids.sort(-1)
    # (row, choice) pairs sorted by expert; ``back`` finds them again.
    pairs = ids.flatten().sort(stable=True).indices
    back = pairs.argsort()
    names, counts = (t.tolist() for t in torch.unique(ids, return_counts=True))
    left = activation(x, w1.quantised)[pairs // k]
    gate, up = (_routed(left, names, counts, w).to(x.dtype) for w in (w1, w3))
    h = _hidden(gate, up, limit) * weights.gather(-1, order).flatten()[pairs].unsqueeze(-1)
    y = _routed(activation(h.to(x.dtype), w2.quantised), names, counts, w2).to(x.dtype)
    y = y[back].unflatten(0, (-1, k)).float()
    total = y[:, 0]
    for choice in range(1, k):
        total = total + y[:, choice]
    return (total + expert(x, *shared, limit).float()).to(x.dtype)
