"""The engine's ``DraftMemory``: the context rings of the draft stages, read for a batch of blocks.

Comes in: which slot drafts from which position. Goes out: attention of the blocks. Nothing is
stored: the context keys come from the backbone's pass, and block keys live as long as the block.
Must not know tokens, sampling or how many drafts are used.
"""

from __future__ import annotations

import torch

from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops


class RingContext:
    """See ``model.memory.DraftMemory``. One object per draft pass; it never waits for the device.

    A row's key list is the request's context, oldest first, then the B keys of its block, then -1:
    it depends on the request alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        pools: Pools,
        ops: Ops,
        slots: torch.Tensor,
        last: torch.Tensor,
        first: torch.Tensor,
    ):
        """int64 [R]: the blocks of ``slots`` follow the positions ``last``; ``first``: the lowest
        positions whose context keys the rings may hold, those before were never written."""
        self.pools, self.ops = pools, ops
        width, block, ring = config.sliding_window, config.dspark_block_size, pools.ring
        slots, last, first = (x.unsqueeze(1) for x in (slots, last, first))
        counts = (last + 1 - first).clamp(0, width)
        column = torch.arange(width + block, device=slots.device)
        position = last + 1 - counts + column[:width]
        # Behind the context stand places that no column names.
        self._places = (slots * ring + position % ring).flatten()
        request = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        new = len(self._places) + request * block + column - counts
        columns = torch.where(column < counts, request * width + column, new)
        columns = torch.where(column < counts + block, columns, -1)
        self._columns = columns.repeat_interleave(block, 0)

    def attend(
        self, stage: int, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        fmt = self.pools.formats.window
        keys = self.ops.extend(kv, fmt, self.pools.drafts[stage], self._places)
        return self.ops.sparse_attention(q, keys, self._columns, fmt, None, None, None, sink)
