"""Reference router and experts.

Comes in: normed rows. Goes out: expert ids and weights, or the combined output. Experts run one
after the other in id order, so a row's sum has one order. Source: model spec §3.9.
"""

from __future__ import annotations

import torch

from deepinfer.device import sync
from deepinfer.ops.torch import blocked
from deepinfer.ops.torch.linear import Weight, activation
from deepinfer.ops.torch.rowwise import silu, softplus

# Copies of unpacked matrices held at once (bytes).
_LIMIT = 256 << 20


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


class _Runs:
    """Products of rows sorted by expert: the rows of an expert at once, in place."""

    def __init__(self, experts: torch.Tensor):
        """``experts``: int64 [P], ascending."""
        names, counts = torch.unique_consecutive(experts, return_counts=True)
        self._names, self._counts = names.tolist(), counts.tolist()

    def times(self, left: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Each of the rows ``left`` [P, G, B] times its expert's matrix."""
        parts = zip(self._names, left.split(self._counts), strict=True)
        return torch.cat([blocked.matmul(x, weight.columns(e)) for e, x in parts])


class _Tiles:
    """The same where the host does not know how many rows an expert has, nor waits to learn it.

    The rows of an expert are cut into tiles of one size, the last filled up with zeros; each tile
    meets a copy of its expert's matrix. There are no more tiles than rows, and less than twice as
    many as experts.
    """

    def __init__(self, experts: torch.Tensor, count: int):
        """``experts``: int64 [P], ascending, below ``count``."""
        pairs, device = len(experts), experts.device
        self._size = size = -(-pairs // count)
        busy = min(pairs, count)
        self._tiles = tiles = busy + (pairs - busy) // size
        every = torch.arange(count, device=device)
        first = torch.searchsorted(experts, every)
        rows = torch.searchsorted(experts, every, right=True) - first
        ends = ((rows + size - 1) // size).cumsum(0)  # of each expert's tiles
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        self._cells = (begins * size - first)[experts] + torch.arange(pairs, device=device)
        owners = torch.searchsorted(ends, torch.arange(tiles, device=device), right=True)
        self._owners = owners.clamp_max(count - 1)

    def times(self, left: torch.Tensor, weight: Weight) -> torch.Tensor:
        cells = left.new_zeros(self._tiles * self._size, *left.shape[1:])
        cells[self._cells] = left
        rows, columns = weight.source.shape[-2:]
        step = max(1, _LIMIT // (8 * rows * columns))
        parts = zip(
            cells.unflatten(0, (self._tiles, self._size)).split(step),
            self._owners.split(step),
            strict=True,
        )
        products = [blocked.matmul(x, weight.columns(owners)) for x, owners in parts]
        return torch.cat(products).flatten(0, 1)[self._cells]


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: tuple[Weight, Weight, Weight],
    shared: tuple[Weight, Weight, Weight],
    limit: float,
) -> torch.Tensor:
    """Routed experts (w1, w3, w2 stacks [E, ...]) in id order, then the shared one; one rounding
    at the end. The host never waits."""
    if not x.shape[0]:
        return x
    w1, w3, w2 = experts
    k = ids.shape[1]
    ids, order = ids.sort(-1)
    # (row, choice) pairs sorted by expert; ``back`` finds them again.
    named, pairs = ids.flatten().sort(stable=True)
    back = pairs.argsort()
    routed = _Tiles(named, w1.source.shape[0]) if sync.waits(x) else _Runs(named)
    left = activation(x, w1.quantised)[pairs // k]
    gate, up = (routed.times(left, w).to(x.dtype) for w in (w1, w3))
    h = _hidden(gate, up, limit) * weights.gather(-1, order).flatten()[pairs].unsqueeze(-1)
    y = routed.times(activation(h.to(x.dtype), w2.quantised), w2).to(x.dtype)
    y = y[back].unflatten(0, (-1, k)).float()
    total = y[:, 0]
    for choice in range(1, k):
        total = total + y[:, choice]
    return (total + expert(x, *shared, limit).float()).to(x.dtype)
