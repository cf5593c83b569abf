"""The contract between the model and whatever remembers the past of its rows.

The model computes rows; a ``Memory`` decides where keys of earlier rows live and which of them a
row may see. The engine's memory keeps packed records in pools; the training recipe's keeps whole
sequences. Both run the same model code. Must not know requests or pages.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from deepinfer.model.config import LayerSpec


class Memory(Protocol):
    """One forward pass over N rows. ``positions`` int64 [N]; ``ngrams`` int64 [N, n]: the mapped
    id of each row and of the n - 1 tokens before it, the mapped pad where there is none."""

    positions: torch.Tensor
    ngrams: torch.Tensor
    kept: torch.Tensor | None
    """Indices int64 of the rows that run in the decoder half (``config.decoder_start`` and after),
    ascending; None: all of them. From there on, N is their number."""

    def close_groups(
        self, layer: LayerSpec, v: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Add v, z [N, D] of all rows to the open groups of a KV source; return the groups that
        are now complete, v and z [E, r, D], and the positions int64 [E] of their first tokens."""
        ...

    def store_entries(self, layer: LayerSpec, entries: torch.Tensor, keys: torch.Tensor) -> None:
        """Keep compressed entries [E, D] and index keys [E, d] of the groups just closed, both
        rotated and not yet quantised."""
        ...

    def select(self, layer: LayerSpec, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Choose each row's entries from index queries q [N, h, d] (quantised) and head weights
        [N, h]; the choice holds for this index source until the next pass."""
        ...

    def attend(
        self, layer: LayerSpec, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        """Attention [N, heads, D] of q over each row's window (kv [N, D], rotated, not yet
        quantised, is added to it first) and its chosen entries."""
        ...


class DraftMemory(Protocol):
    """One draft block of B slots for each of R requests, whose last accepted positions it knows."""

    def attend(
        self, stage: int, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        """Attention [R * B, heads, D] of q over the stage's context keys of the W positions up to
        each request's last one, and over all B keys of its block: kv [R * B, D], rotated, not yet
        quantised, requests one after the other. No row of a block is hidden from another."""
        ...


Ops = Any
