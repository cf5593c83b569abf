"""Rotary frequencies (plain and YaRN) and their tables in one forward pass.

Comes in: the configuration and positions. Goes out: cos and sin per table. Layers with a
compression ratio rotate *everything* (queries, window keys, entries, index) with the second table
(model spec §1.3, §3.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.model.config import ModelConfig

Table = tuple[torch.Tensor, torch.Tensor]


def rope_frequencies(
    rotary: int,
    theta: float,
    factor: float = 1.0,
    beta_fast: float = 32,
    beta_slow: float = 1,
    original: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Angular frequencies float32 [rotary / 2]; YaRN when ``original`` (positions) is not 0."""
    i = torch.arange(0, rotary, 2, dtype=torch.float32)
    f = 1.0 / theta ** (i / rotary)
    if original:
        low, high = yarn_bounds(rotary, theta, beta_fast, beta_slow, original)
        index = torch.arange(rotary // 2, dtype=torch.float32)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        f = (f / factor) * ramp + f * (1 - ramp)
    return f.to(device)


def yarn_bounds(
    rotary: int, theta: float, beta_fast: float, beta_slow: float, original: int
) -> tuple[int, int]:
    """First and last index of the YaRN ramp (model spec §3.0)."""

    def dim(rotations: float) -> float:
        return rotary * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    return max(math.floor(dim(beta_fast)), 0), min(math.ceil(dim(beta_slow)), rotary - 1)


@dataclass(frozen=True)
class Rotary:
    """Frequencies float32 [R / 2] of the window-only layers and of the compressed ones."""

    plain: torch.Tensor
    compressed: torch.Tensor

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device | str) -> Rotary:
        rotary, scaling = config.qk_rope_head_dim, config.rope_scaling
        plain = rope_frequencies(rotary, config.rope_theta, device=device)
        theta = config.compress_rope_theta
        if scaling is None:
            return cls(plain, rope_frequencies(rotary, theta, device=device))
        return cls(
            plain,
            rope_frequencies(
                rotary,
                theta,
                scaling.factor,
                scaling.beta_fast,
                scaling.beta_slow,
                scaling.original_max_position_embeddings,
                device=device,
            ),
        )

    def tables(self, positions: torch.Tensor, ops: Any) -> tuple[Table, Table]:
        """cos and sin at ``positions`` for (window-only, compressed) layers."""
        return ops.rope_table(positions, self.plain), ops.rope_table(positions, self.compressed)
