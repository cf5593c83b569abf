"""Drawing tokens in the cpu back end. Meaning and shapes: `deepinfer.ops.torch.sampling`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import LONG, PTR, Library


def draw(library: Library):
    call = library.op("draw", PTR, PTR, PTR, LONG, LONG, PTR)

    def draw(x: torch.Tensor, streams: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        x, streams, drawn = x.contiguous(), streams.contiguous(), drawn.contiguous()
        rows, vocab = x.shape
        ids = torch.empty(rows, dtype=torch.int64)
        if rows:
            call(x.data_ptr(), streams.data_ptr(), drawn.data_ptr(), rows, vocab, ids.data_ptr())
        return ids

    return draw
