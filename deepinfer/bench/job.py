"""A row that is to be measured, how, and about how long that takes.

Axes and settings come in, a name, an engine's key and seconds go out. It must not know how a row is
run; nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.bench.axes import row_id, settings_axes
from deepinfer.errors import DeepinferError
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import ReplayRule
from deepinfer.settings import Settings

__all__ = ["Job", "Method", "estimate"]

# Seconds of a step that computes nothing, and plain FLOP/s: an ordinary machine of each kind.
_PACE = {"cpu": (0.05, 10e9), "nvidia": (0.15, 20e12), "ascend": (0.15, 20e12)}
_START = 8.0  # seconds of start-up and ceilings ...
_ENGINE = 1.5  # ... and of each engine


@dataclass(frozen=True)
class Job:
    """A row to measure. settings: of its engine. problem: why it cannot run, if it cannot."""

    axes: Mapping[str, Any]
    settings: Settings
    problem: DeepinferError | None = None

    @property
    def row_id(self) -> str:
        return row_id(self.axes)

    @property
    def engine(self) -> tuple[object, ...]:
        """Rows with the same have one engine."""
        names = (*settings_axes(), "model", "synthetic", "accepted_length")
        return tuple(self.axes.get(name) for name in names)


@dataclass(frozen=True)
class Method:
    """How rows are measured. together: engines in memory at once. patience: seconds that all
    repeats may take, by the warm-up, before any of them is run."""

    repeats: int = 5
    warmup: int = 1
    temperature: float = 0.0
    keep_going: bool = False
    together: int = 1
    patience: float | None = None


def estimate(config: ModelConfig, jobs: Iterable[Job], method: Method) -> float:
    """Seconds of a sweep, right to a factor of three or so: it rests on an ordinary machine."""
    jobs = list(jobs)
    total = _START + _ENGINE * len({job.engine for job in jobs})
    for job in jobs:
        step, rate = _PACE[job.axes["accelerator"]]
        length, tokens = job.axes["prompt_len"] or 512, job.axes["gen_len"]
        rule = ReplayRule.of(config, job.axes["replay_mode"], job.axes["swa_keep"])
        prefill = cost.total_flops(config, rule.plan(length), cost.PLAIN)
        token = prefill / length
        accepted = 2.0 if job.axes["mtp"] else 1.0
        count = job.axes["batch_size"]
        steps = tokens / accepted * (step + count * (1 + job.axes["mtp"]) * token / rate)
        # A prefill more is run to count it.
        once = steps + count * prefill / rate
        total += (method.repeats + method.warmup) * once + prefill / rate
    return total
