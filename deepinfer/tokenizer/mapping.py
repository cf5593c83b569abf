"""Mapped ids for Engram: token ids through the compressed vocabulary, checked.

Comes in: token ids. Goes out: mapped ids of the same shape. Must not know text or n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.errors import CheckpointError, UsageError
from deepinfer.model.config import ModelConfig

# Stands for "no token here" in a list of ids; maps to the pad entry.
NO_TOKEN = -1


@dataclass(frozen=True)
class TokenMap:
    """``table`` int64 [vocab]: mapped ids; ``pad``: the mapped padding id."""

    table: np.ndarray
    pad: int

    @classmethod
    def of(cls, config: ModelConfig, token_map: Sequence[int] | None) -> TokenMap:
        """Raises ``CheckpointError`` if an Engram model's map is missing or of another size."""
        if not config.engram_layer_ids:
            return cls(np.zeros(config.vocab_size, dtype=np.int64), 0)
        if token_map is None or len(token_map) != config.vocab_size:
            raise CheckpointError(
                "token-map-invalid",
                "the Engram token map does not fit the model",
                facts=[
                    f"got {'none' if token_map is None else len(token_map)} entries, "
                    f"expected {config.vocab_size} (vocab_size)"
                ],
                hint="put engram_token_map.json or tokenizer.json beside config.json",
            )
        table = np.asarray(token_map, dtype=np.int64)
        if table.min() < 0 or table.max() >= config.engram_compressed_vocab_size:
            raise CheckpointError(
                "token-map-invalid",
                "the Engram token map does not fit the model",
                facts=[
                    f"mapped ids reach from {table.min()} to {table.max()}, expected 0 to "
                    f"{config.engram_compressed_vocab_size - 1} (engram_compressed_vocab_size)"
                ],
                hint="use the token map that the checkpoint was trained with",
            )
        return cls(table, int(table[config.engram_pad_token_id]))

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Mapped ids int64. ``NO_TOKEN`` is the pad; raises ``UsageError`` on other foreign ids."""
        ids = np.asarray(ids, dtype=np.int64)
        bad = ids[((ids < 0) | (ids >= self.table.size)) & (ids != NO_TOKEN)]
        if bad.size:
            raise UsageError(
                "token-id-invalid",
                f"token id {bad[0]} is outside the vocabulary",
                facts=[f"ids reach from 0 to {self.table.size - 1}"],
                hint="encode the prompt with this checkpoint's tokenizer",
            )
        return np.where(ids == NO_TOKEN, self.pad, self.table[np.maximum(ids, 0)])
