"""Reference linear ops: quantised, float32-output and grouped, all on exact block sums.

Comes in: rows and weight handles from ``prepare``. Goes out: rows. A quantised weight means that
the input is FP8-quantised too (model spec §3.0). Must not know layers or checkpoints.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch import blocked
from deepinfer.quant import Packed, codec


class Weight:
    """A matrix [..., N, K] ready for ``blocked.matmul``.

    ``keep``: hold the unpacked float64 blocks (eight bytes a weight). Without it they are made
    anew at each use, so that a model that barely fits stays packed in memory.
    """

    def __init__(self, source: Packed | torch.Tensor, keep: bool):
        self.source = source
        self.quantised = isinstance(source, Packed)
        self._keep = keep
        self._kept: torch.Tensor | None = None

    def columns(
        self, index: int | torch.Tensor | None = None, groups: int | None = None
    ) -> torch.Tensor:
        """float64 [..., G, B, N]; with ``index``, of one matrix of the stack, or of several int64
        [M], copied; with ``groups``, of the matrix seen as a stack of that many (a weight is always
        used with the same)."""
        if self._kept is None:
            if not self._keep:
                return self._unpacked(self.source if index is None else self.source[index], groups)
            self._kept = self._unpacked(self.source, groups)
        return self._kept if index is None else self._kept[index]

    def _unpacked(self, source: Packed | torch.Tensor, groups: int | None) -> torch.Tensor:
        values = codec.unpack(source, torch.float32) if isinstance(source, Packed) else source
        if groups is not None:
            values = values.unflatten(-2, (groups, -1))
        return blocked.columns(values)


def prepare(source: Packed | torch.Tensor, keep: bool) -> Weight:
    """The handle that the other ops take for a stored weight."""
    return Weight(source, keep)


def activation(x: torch.Tensor, quantised: bool) -> torch.Tensor:
    """Left operand float64 [..., M, G, B] of x, FP8-quantised first if ``quantised``."""
    return blocked.snap(codec.fp8_rounded(x) if quantised else x)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """y [M, N] = x [M, K] W^T in x's dtype; x is FP8-quantised if the weight is quantised."""
    return blocked.matmul(activation(x, weight.quantised), weight.columns()).to(x.dtype)


def linear_f32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """y [M, N] = x [M, K] W^T in float32; x is taken as it is."""
    return blocked.matmul(activation(x, False), weight.columns())


def grouped_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Block-diagonal y [M, G * r] of x [M, G, K] and W [G * r, K]; x is taken as it is."""
    w = weight.columns(groups=x.shape[1])
    y = blocked.matmul(activation(x.transpose(0, 1), False), w)
    return y.transpose(0, 1).flatten(1).to(x.dtype)
