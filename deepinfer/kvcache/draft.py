"""The engine's ``DraftMemory``: the context rings of the draft stages, read for a batch of blocks.

Comes in: which slot drafts from which position. Goes out: attention of the blocks. Nothing is
stored: the context keys come from the backbone's pass, and block keys live as long as the block.
Must not know tokens, sampling or how many drafts are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.kvcache.pools import Pools
from deepinfer.model.config import ModelConfig
from deepinfer.model.memory import Ops


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One block to draft: the newest token ``anchor`` of ``slot`` follows position ``last``.

    first: the lowest position whose context keys the ring may hold; those before were never
    written in this slot.
    """

    slot: int
    anchor: int
    last: int
    first: int = 0


class RingContext:
    """See ``model.memory.DraftMemory``. One object per draft pass.

    A row's key list is the request's context, oldest first, then the B keys of its block, then -1:
    it depends on the request alone.
    """

    def __init__(
        self, config: ModelConfig, pools: Pools, ops: Ops, requests: Sequence[DraftRequest]
    ):
        self.pools, self.ops = pools, ops
        width, slots, ring = config.sliding_window, config.dspark_block_size, pools.ring
        counts = [max(0, min(width, r.last + 1 - r.first)) for r in requests]
        starts = np.cumsum([0, *counts])
        places = np.empty(starts[-1], dtype=np.int64)
        columns = np.full((len(requests), width + slots), -1)
        for i, (r, n) in enumerate(zip(requests, counts, strict=True)):
            mine = np.arange(starts[i], starts[i + 1])
            places[mine] = r.slot * ring + np.arange(r.last + 1 - n, r.last + 1) % ring
            columns[i, :n] = mine
            columns[i, n : n + slots] = starts[-1] + i * slots + np.arange(slots)
        device = pools.history.device
        self._places = torch.as_tensor(places, device=device)
        self._columns = torch.as_tensor(columns.repeat(slots, 0), device=device)

    def attend(
        self, stage: int, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        fmt = self.pools.formats.window
        keys = torch.cat((self.pools.drafts[stage][self._places], fmt.encode(kv)))
        return self.ops.sparse_attention(q, keys, self._columns, fmt, None, None, None, sink)
