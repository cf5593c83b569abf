"""What the machine can do, measured now, and the least time that a model's work takes on it.

Comes in: a torch device type; a configuration with a plan or a number of rows. Goes out: rates of
copying and of matrix products, and floors in seconds by two rules: bytes over the copy's rate,
FLOPs over the products' (performance rules §4). It must not know engines or rows; torch is imported
when something is measured.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import ReplayPlan

__all__ = ["MOVED", "Floors", "conditions", "measure", "moved"]

MOVED = 0.03
"""Ceilings that moved by more say that the machine was not the same all along."""

_SECONDS = 0.25  # of measuring, each rate
# Bytes that are copied, and sides of the matrices, small ones first, by device type.
_SIZES = {"cpu": (256 << 20, (256, 1024)), "cuda": (1 << 30, (2048, 8192))}


def measure(device: str) -> dict[str, float] | None:
    """GB/s of a copy (bytes read plus bytes written) and GFLOP/s of matrix products on random
    numbers, by number format; None for a device type nobody has described."""
    if device not in _SIZES:
        return None
    size, sides = _SIZES[device]
    found = {"copy_gb_per_s": 2 * size / _best(_copy(size, device), device) / 1e9}
    for name in ("float32", "bf16", "fp8"):
        for side in sides:
            try:
                seconds = _best(_product(name, side, device), device)
            except (AttributeError, RuntimeError, TypeError):
                break  # this device or torch has no such product
            found[f"{name}_gflop_per_s"] = 2 * side**3 / seconds / 1e9
            if seconds * 64 > _SECONDS:
                break  # slow products are as fast in small matrices
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _copy(size: int, device: str) -> Callable[[], Any]:
    import torch

    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(name: str, side: int, device: str) -> Callable[[], Any]:
    """A product of two square matrices of random numbers in a format."""
    import torch

    a = torch.randn(side, side, device=device)
    if name == "fp8":
        if device == "cpu":
            raise RuntimeError("a cpu has none")
        coded = a.clamp(-8, 8).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            coded, coded.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    a = a.to(torch.bfloat16) if name == "bf16" else a
    return lambda: a @ a


def _best(work: Callable[[], Any], device: str) -> float:
    """Seconds of the fastest of the repeats that fit into a quarter of a second, at least two."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    wait()
    best, until, count = float("inf"), time.perf_counter() + _SECONDS, 0
    while count < 2 or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def moved(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> float | None:
    """By what share the ceiling moved that moved most."""
    if not before or not after:
        return None
    ratios = [after[name] / before[name] for name in before if after.get(name)]
    return round(max(max(r, 1 / r) for r in ratios) - 1, 4)


def conditions(accelerator: str) -> dict[str, Any]:
    """What a machine was like: load average, and a device's clocks and temperature if it tells."""
    out: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    if accelerator != "nvidia":
        return out
    fields = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "temperature.gpu": "celsius",
              "power.draw": "watt"}  # fmt: skip
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        words = done.stdout.splitlines()[0].split(",")
        out |= {name: float(word) for name, word in zip(fields.values(), words, strict=True)}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        pass  # a device that does not tell its clocks
    return out


@dataclass(frozen=True)
class Floors:
    """Least seconds of a model's work under measured ceilings.

    On a cpu everything is multiplied in one format, so plain FLOPs meet its best rate; elsewhere
    FP8-equivalent FLOPs meet the rate of FP8, or twice that of bf16. Draft stages count nothing.
    """

    config: ModelConfig
    ceilings: Mapping[str, float]
    device: str

    @property
    def rate(self) -> float:
        """FLOP/s."""
        found = self.ceilings
        if self.device == "cpu":
            return 1e9 * max(found.get("float32_gflop_per_s", 0), found.get("bf16_gflop_per_s", 0))
        return 1e9 * max(found.get("fp8_gflop_per_s", 0), 2 * found.get("bf16_gflop_per_s", 0))

    def prefill(self, plan: ReplayPlan, count: int) -> float:
        """Of `count` prompts with that plan; weights are read once."""
        flops = count * cost.total_flops(self.config, plan, self.rates)
        rows = count * (plan.tokens - plan.first)
        return self.op(self._weights(rows), flops)

    def decode(self, context: float, requests: int, rows: float) -> float:
        """Of a step of `requests` at `context` tokens each, which runs `rows` rows of each."""
        config, tokens = self.config, max(int(context), 1)
        one = ReplayPlan("off", config.num_hidden_layers, config.num_hidden_layers, tokens,
                         cached=tokens - 1)  # fmt: skip
        flops = requests * rows * cost.total_flops(config, one, self.rates)
        layers = range(config.num_hidden_layers)
        state = sum(sum(cost.state_bytes(config, i, tokens).values()) for i in layers)
        return self.op(self._weights(round(requests * rows)) + requests * state, flops)

    def op(self, moved: float, flops: float) -> float:
        """Of some bytes and FLOPs."""
        return max(flops / self.rate, moved / self._copy)

    @property
    def rates(self) -> Mapping[str, int] | None:
        """What a FLOP counts here, see `cost.rates`; None: FP8-equivalent."""
        return cost.PLAIN if self.device == "cpu" else None

    @property
    def _copy(self) -> float:
        return 1e9 * self.ceilings["copy_gb_per_s"]

    def _weights(self, rows: int) -> float:
        """Bytes of weights that some rows touch, the head's with them."""
        config = self.config
        layers = range(config.num_hidden_layers)
        wide = 4 if config.dtype == "float32" else 2
        head = wide * config.vocab_size * config.hidden_size
        return head + sum(sum(cost.weight_bytes(config, i, rows).values()) for i in layers)
