"""What bounded replay saves of a prompt: layer-token rows and FLOPs, as planned and as counted.

Comes in: a configuration, the plan of a prompt, and what a run of it really did. Goes out: shares
of what the same prompt would take uncut, resumed at the same token; all layers of the model count
(serving semantics §8). It must not know the engine; nothing here may import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import ReplayPlan

__all__ = ["Measured", "savings"]


class Measured(Protocol):
    """`replay.meter.Measured`, of which only sums are read."""

    @property
    def layer_rows(self) -> int: ...
    @property
    def total_flops(self) -> int: ...


def savings(
    config: ModelConfig, plan: ReplayPlan, measured: Measured
) -> dict[str, dict[str, float]]:
    """`prefill_saved_rows` and `prefill_saved_flops` of a row, each planned and measured."""
    uncut = _uncut(plan)
    rows, flops = cost.plan_rows(uncut), cost.total_flops(config, uncut)
    return {
        "prefill_saved_rows": _both(cost.plan_rows(plan), measured.layer_rows, rows),
        "prefill_saved_flops": _both(cost.total_flops(config, plan), measured.total_flops, flops),
    }


def _uncut(plan: ReplayPlan) -> ReplayPlan:
    return replace(plan, mode="off", kept=0)


def _both(planned: int, measured: int, full: int) -> dict[str, float]:
    return {"planned": _share(planned, full), "measured": _share(measured, full)}


def _share(part: int, full: int) -> float:
    return round(1 - part / full, 6) if full else 0.0
