"""State records: how one window entry, compressed entry or index key is stored, byte for byte.

Comes in: rows of floats. Goes out: uint8 records and back; without quantisation a record is the
row's own bytes. Source: model spec §3.11 and §4. Must not know where records are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.quant import codec


@dataclass(frozen=True)
class RecordFormat:
    """``kind``: "window" (E4M3, E8M0 a 32), "entry" (E2M1, E4M3 a 16), "index" (E2M1, E8M0 a 32)
    or "plain"; ``width``: elements of a row; ``dtype``: of the decoded row.
    """

    kind: str
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a record: 528, 288 and 68 at the real model's 512, 512 and 128 channels."""
        w = self.width
        return {
            "window": w + w // 32,
            "entry": w // 2 + w // 16,
            "index": w // 2 + w // 32,
            "plain": w * self.dtype.itemsize,
        }[self.kind]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] -> uint8 [..., nbytes]: codes, then scales."""
        if self.kind == "plain":
            return x.to(self.dtype).contiguous().view(torch.uint8)
        codes, scales = {
            "window": codec.fp8_groups,
            "entry": codec.fp4_kv_groups,
            "index": codec.fp4_index_groups,
        }[self.kind](x)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), -1)

    def decode(self, record: torch.Tensor) -> torch.Tensor:
        """uint8 [..., nbytes] -> rows [..., width] in ``dtype``; exact."""
        if self.kind == "plain":
            return record.contiguous().view(self.dtype)
        if self.kind == "window":
            codes = record[..., : self.width].contiguous().view(torch.float8_e4m3fn)
            return codec.fp8_values(codes, record[..., self.width :]).to(self.dtype)
        codes, scales = record[..., : self.width // 2], record[..., self.width // 2 :]
        if self.kind == "entry":
            scales = scales.contiguous().view(torch.float8_e4m3fn)
            return codec.fp4_kv_values(codes, scales).to(self.dtype)
        return codec.fp4_index_values(codes, scales).to(self.dtype)
