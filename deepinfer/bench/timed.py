"""What a step takes of the host: its own work, and how long it lets the device stand still.

The engine's device comes in, with a clock; milliseconds a step go out. A device that works beside
the host is watched once, by torch's profiler: marks around a step would count the time in which it
waits for its next kernel. It must not know rows, files or how a number is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.core.request import SamplingParams
from deepinfer.engine.assembly import Parts
from deepinfer.engine.device import Clock, Device, Flight
from deepinfer.engine.engine import LLM
from deepinfer.scheduler.policy import Step

__all__ = ["Busy", "Spent", "Timed", "kernels", "union", "watched"]

_WATCHED = 6  # steps behind the prompts: all do about the same, and each takes seconds to read


class _Waiting(Clock):
    """A clock that adds up the seconds in which the host waits for the device."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        super().__init__(device, clock)
        self.now, self.waited = clock, 0.0

    def wait(self, mark: object) -> None:
        start = self.now()
        super().wait(mark)
        self.waited += self.now() - start


class Timed(Device):
    """A device that counts its steps and adds up what the host cannot use of them.

    beside: it works beside the host, so the host waits for it; else the host computes the steps.
    """

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(parts, clock)
        self.beside = self.live.device.type != "cpu"
        self.clock: _Waiting = _Waiting(self.live.device, clock)
        self.steps = 0
        self._marks: list[list[Any]] = []

    def judge(self, step: Step, *rest: Any) -> Flight:
        flight = super().judge(step, *rest)
        self.steps += 1
        if not self.beside:
            self._marks.append(flight.marks)  # it grows when the step drafts
        return flight

    def spent(self) -> Spent:
        """Since the last call."""
        marks, self._marks = self._marks, []
        computing = sum(times[-1] - times[0] for times in marks)
        found = Spent(self.steps, self.clock.waited if self.beside else computing, self.beside)
        self.steps, self.clock.waited = 0, 0.0
        return found


@dataclass(frozen=True)
class Busy:
    """Seconds in which kernels ran: until the first token of every prompt, in so many steps, and in
    a step behind them."""

    prompts: float
    steps: int
    step: float

    def of(self, steps: int) -> float:
        """Of a run of the same prompts."""
        return self.prompts + max(steps - self.steps, 0) * self.step


@dataclass(frozen=True)
class Spent:
    """Steps of a run, and seconds in which the host waited for the device (beside) or computed the
    steps itself."""

    steps: int
    away: float
    beside: bool

    def per_step(self, seconds: float, busy: Busy | None) -> dict[str, float | None]:
        """Milliseconds a step of a run that took so many seconds.

        host_ms_per_step: the device had nothing to do, host's overhead: what is left of the run
        beside kernels; None where nobody watched them. host_work_ms_per_step: the host worked and
        did not wait; it plans, launches and reads results, also while the device is busy. Where
        the host is the device both are what is left beside the steps.
        """
        if not self.steps:
            return {"host_ms_per_step": None, "host_work_ms_per_step": None}
        work: float | None = seconds - self.away
        idle = work if not self.beside else seconds - busy.of(self.steps) if busy else None
        return {
            "host_ms_per_step": _ms(idle, self.steps),
            "host_work_ms_per_step": _ms(work, self.steps),
        }


def _ms(seconds: float | None, steps: int) -> float | None:
    """0.0 where two clocks differ by more than is left."""
    return None if seconds is None else float(f"{max(seconds, 0.0) / steps * 1e3:.6g}")


def watched(
    llm: LLM, device: Timed, prompts: Sequence[tuple[int, ...]], params: SamplingParams,
    profile: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Busy | None:  # fmt: skip
    """Run prompts with every kernel noted, those of the first steps behind them too; None: there is
    no profiler for this device, or it saw nothing.

    Kernels take as long as without it; only the host is slower, and its time is not used.
    """
    if profile is None:
        if device.live.device.type != "cuda":
            return None
        profile = _profile
    begun: set[int] = set()
    stream: Any = llm.stream(prompts, params)
    device.spent()

    def until(enough: Callable[[], bool]) -> float:
        with profile() as watch:
            for delta in stream:
                if delta.token_ids:
                    begun.add(delta.index)
                if enough():
                    break
            if device.live.device.type == "cuda":
                torch.cuda.synchronize()
        return union(kernels(watch)) / 1e9

    first = until(lambda: len(begun) == len(prompts))
    steps = device.steps
    behind = until(lambda: device.steps - steps >= _WATCHED)
    more = device.steps - steps
    stream.close()
    return Busy(first, steps, behind / more if more else 0.0) if first else None


def _profile() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def kernels(profile: Any) -> list[tuple[int, int]]:
    """When kernels and copies ran on a GPU: (start, end) of each in nanoseconds, in order."""
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )


def union(spans: Iterable[tuple[int, int]]) -> int:
    """What spans cover, each moment once; they come in order."""
    covered = end = 0
    for start, stop in spans:
        covered += max(stop - max(start, end), 0)
        end = max(end, stop)
    return covered
