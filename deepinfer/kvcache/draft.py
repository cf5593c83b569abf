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

    A row's key list is always W context columns, oldest first, -1 at the end where there are fewer,
    then the B columns of its block: it depends on the request alone.
    """

    def __init__(
        self, config: ModelConfig, pools: Pools, ops: Ops, requests: Sequence[DraftRequest]
    ):
        self.pools, self.ops = pools, ops
        width, slots, ring = config.sliding_window, config.dspark_block_size, pools.ring
        past, columns = [], []
        for i, r in enumerate(requests):
            key = max(r.first, r.last - width + 1) + np.arange(width)
            seen = key <= r.last
            past.append(np.where(seen, r.slot * ring + key % ring, r.slot * ring))
            context = np.where(seen, i * width + np.arange(width), -1)
            block = len(requests) * width + i * slots + np.arange(slots)
            columns.append(np.tile(np.concatenate((context, block)), (slots, 1)))
        device = pools.history.device
        self._past = torch.as_tensor(np.concatenate(past), device=device)
        self._columns = torch.as_tensor(np.concatenate(columns), device=device)

    def attend(
        self, stage: int, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        fmt = self.pools.formats.window
        keys = torch.cat((self.pools.drafts[stage][self._past], fmt.encode(kv)))
        return self.ops.sparse_attention(q, keys, self._columns, fmt, None, None, None, sink)
