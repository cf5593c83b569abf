"""How the model reads a checkpoint's weights: by their own names, through the ops' ``prepare``.

Comes in: a mapping from checkpoint names to tensors or packed tensors. Goes out: handles. Must not
know files or formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.memory import Ops


@dataclass(frozen=True)
class Source:
    """A mapping seen from one prefix, e.g. ``layers.3.attn.``."""

    weights: Mapping[str, Any]
    ops: Ops
    prefix: str = ""

    def under(self, name: str) -> Source:
        return Source(self.weights, self.ops, f"{self.prefix}{name}.")

    def stored(self, name: str) -> Any:
        """The tensor as the mapping holds it."""
        return self.weights[self.prefix + name]

    def matrix(self, name: str) -> Any:
        """A handle for the ops that multiply with it.

        A mapping whose tensors may be taken loses this one: the handle may hold its matrix in
        another form, beside which the first need not stay.
        """
        take = getattr(self.weights, "take", self.weights.__getitem__)
        return self.ops.prepare(take(self.prefix + name))

    def vector(self, name: str) -> torch.Tensor:
        return self.stored(name)

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.values())).device
