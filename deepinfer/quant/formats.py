"""The packed tensor type: codes plus UE8M0 block scales, and the size rules they obey.

Comes in: code and scale tensors as a checkpoint stores them. Goes out: one object with a logical
shape. Must not know how values are computed (``codec``) or which layer they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def blocks(size: int, block: int) -> int:
    """Number of blocks of ``block`` elements that cover ``size`` (the last may be partial)."""
    return -(-size // block)


@dataclass(frozen=True)
class Packed:
    """A quantised matrix, or a stack of matrices (leading dimensions).

    ``codes``: ``fp8``: float8_e4m3fn [..., rows, cols]; ``fp4``: uint8 [..., rows, cols / 2], the
    even element in the low nibble. ``scales``: uint8 E8M0 bytes
    [..., ceil(rows / block[0]), ceil(cols / block[1])]; byte b means 2^(b - 127).
    Source: model spec §2.3.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in elements."""
        *lead, rows, cols = self.codes.shape
        return (*lead, rows, cols * 2 if self.kind == "fp4" else cols)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __getitem__(self, index) -> Packed:
        """Select along the leading (stack) dimensions, e.g. one expert."""
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        return Packed(codes, self.scales[index], self.block, self.kind)

    def to(self, device: torch.device | str) -> Packed:
        return Packed(self.codes.to(device), self.scales.to(device), self.block, self.kind)
