"""Drawing tokens in the cpu back end. Meaning and shapes: `deepinfer.ops.torch.sampling`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import LONG, PTR, Library


def draw(library: Library):
    call = library.op("draw", PTR, PTR, PTR, PTR, PTR, LONG, LONG, LONG, LONG, PTR)

    def draw(
        x: torch.Tensor,
        allowed: torch.Tensor | None = None,
        streams: torch.Tensor | None = None,
        temperature: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, vocab = x.shape
        if allowed is not None and 8 * allowed.shape[1] < vocab:
            raise ValueError(f"{8 * allowed.shape[1]} bits of a mask for {vocab} ids")
        x, *rest = (
            None if part is None else part.contiguous()
            for part in (x, allowed, streams, temperature, positions)
        )
        ids = torch.empty(rows, dtype=torch.int64)
        if rows:
            call(
                x.data_ptr(), *(None if part is None else part.data_ptr() for part in rest), rows,
                vocab, 0 if allowed is None else allowed.shape[1], x.dtype == torch.float64,
                ids.data_ptr(),
            )  # fmt: skip
        return ids

    return draw
