"""What confidence would have had verified on another machine: a trace under another time curve.

The steps of a trace and a curve come in; for each step its budget, the split and what both choices
are expected to give go out. It must not know models, texts or views.

The drafts and confidences are those of the trace. A different choice would have changed how many
tokens a step commits, and so where the next begins: what is shown is each step's choice by itself.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError
from deepinfer.speculative import timing
from deepinfer.speculative.schedule import Schedule, Time, split
from deepinfer.speculative.trace import TraceStep

_LONGEST = 1e9


def _always(rows: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step by rows and requests, the part of them that means nothing, and whether
    those of so many rows were measured."""

    name: str
    time: Time
    noise: float
    knows: Callable[[int], bool] = _always


@dataclass(frozen=True, slots=True)
class Choice:
    """One step. budget, splits: the other curve's; splits by request. tokens, ms: expected of the
    choice that was made and of the other one, both at the other curve and by the survivals."""

    step: int
    budget: int
    splits: Mapping[int, int]
    tokens: tuple[float, float]
    ms: tuple[float, float]


def reschedule(steps: Sequence[TraceStep], curve: Curve) -> list[Choice]:
    """The choices of `Schedule` for the steps of a trace, one per step with drafts.

    What a step verifies was drafted in the step before it, so that is when it was learned. Live, a
    request that has just ended is still reckoned with for a step; here nobody knows of it.
    """
    schedule = Schedule(curve.time, curve.knows)
    length = max((len(step.draft_ids) for step in steps), default=0)
    out = []
    for number, at_once in groupby(sorted(steps, key=lambda s: s.step), key=lambda s: s.step):
        together = sorted(at_once, key=lambda s: s.seq)
        drafted = [step for step in together if step.draft_ids]
        if not drafted:
            continue
        requests = drafted[0].requests
        values = [step.survival for step in drafted]
        schedule.learn(
            number - 1, {step.seq: (*step.survival, *(0.0,) * length) for step in together}
        )
        counts = {step.seq: length for step in together}
        budget = schedule.budget(number, counts, curve.noise, drafted[0].limit)
        shares = [
            min(share, step.useful)
            for share, step in zip(split(values, budget), drafted, strict=True)
        ]
        both = ([step.verified for step in drafted], shares)
        tokens = [
            requests + sum(sum(some[:n]) for some, n in zip(values, chosen, strict=True))
            for chosen in both
        ]
        ms = [curve.time(requests + sum(chosen), requests) * 1e3 for chosen in both]
        splits = {step.seq: share for step, share in zip(drafted, shares, strict=True)}
        out.append(Choice(number, budget, splits, (tokens[0], tokens[1]), (ms[0], ms[1])))
    return out


def totals(choices: Sequence[Choice], curve: Curve) -> dict[str, Any]:
    """Mean verified drafts of a step and expected tokens a second of the choice that was made,
    and with `replayed_` before it of the other curve's. None without steps."""
    out: dict[str, Any] = {"curve": curve.name, "steps": len(choices)}
    for which, name in enumerate(("", "replayed_")):
        tokens = sum(choice.tokens[which] for choice in choices)
        ms = sum(choice.ms[which] for choice in choices)
        out[f"{name}tokens_per_step"] = tokens / len(choices) if choices else None
        out[f"{name}tokens_per_s"] = tokens / ms * 1e3 if ms else None
    out["replayed_verified_per_step"] = (
        sum(sum(choice.splits.values()) for choice in choices) / len(choices) if choices else None
    )
    return out


def load(path: Path) -> Curve:
    """A curve from a file: step times as `StepTimes.save` writes them, or {"rows": ms, ...}, with
    straight lines between these.

    Raises UsageError.
    """
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as problem:
        raise _refused(f"{path} cannot be read", problem.strerror or str(problem)) from None
    except (ValueError, RecursionError):
        raise _refused(f"{path.name} is not JSON") from None
    times = timing.StepTimes()
    try:
        if "schema" not in document:
            points = {_count(rows): _seconds(rows, ms) * 1e-3 for rows, ms in document.items()}
            if not points or not all(points.values()):
                raise ValueError("no times, or one of 0")
            return Curve(path.name, _lines(points), 0.0)
        if document["schema"] != timing.SCHEMA:
            raise ValueError(f"schema {str(document['schema'])[:60]}")
        for name in ("target", "rest"):
            for count, some in document[name].items():
                for value in some:
                    getattr(times, name).observe(_count(count), _seconds(count, value))
    except ValueError as problem:
        raise _refused(f"{path.name} is not a time curve", str(problem)) from None
    except (AttributeError, KeyError, TypeError):
        raise _refused(f"{path.name} is not a time curve") from None
    if not times.target.samples:
        raise _refused(f"{path.name} has no times")
    return Curve(path.name, times, times.noise, times.knows)


def _count(word: str) -> int:
    if not (word.isdecimal() and len(word) < 10 and int(word)):
        raise ValueError(f"{word[:20]!r} is no number of rows")
    return int(word)


def _seconds(count: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LONGEST:
        raise ValueError(f"{count}: {str(value)[:20]} is no duration")
    return value


def _lines(points: Mapping[int, float]) -> Time:
    """Seconds by rows: level up to the first point, beyond the last on with the slope of all."""
    counts = sorted(points)
    low, high = counts[0], counts[-1]
    rise = max(0.0, points[high] - points[low]) / max(1, high - low)

    def time(rows: int, requests: int) -> float:
        if rows <= low or rows >= high:
            return points[low] if rows <= low else points[high] + rise * (rows - high)
        right = bisect_left(counts, rows)
        before, behind = counts[right - 1], counts[right]
        share = (rows - before) / (behind - before)
        return points[before] + (points[behind] - points[before]) * share

    return time


def _refused(message: str, *facts: str) -> UsageError:
    return UsageError(
        "curve-invalid", message,
        [*facts, "from --replay-curve", f"accepted: a {timing.SCHEMA} file, or rows to ms"],
        'a file such as {"1": 20, "6": 24, "64": 60}',
    )  # fmt: skip
