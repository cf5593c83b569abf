"""What is trained when: the kinds of segments, a plan of them by the clock, and the rate factor.

Comes in: a plan such as "dense@250,sparse@540". Goes out: segments with their end in seconds since
the start of the command, and the learning-rate factor at a moment. It must not know torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of segment. `first`, `last`: rate factor at its ends; `share`: batch rows against
    the base batch (long rows come in smaller batches); `fresh`: forgets the momenta before it."""

    length: int
    share: float
    sparse: bool
    quantised: bool
    barriers: bool
    first: float
    last: float
    fresh: bool


KINDS = {
    "dense": Kind(2048, 1.0, False, False, False, 1.0, 1.0, True),
    "sparse": Kind(2048, 1.0, True, False, False, 1.0, 1.0, False),
    "quantised": Kind(2048, 1.0, True, True, True, 1.0, 0.22, True),
    "tail": Kind(8192, 0.25, True, True, True, 0.22, 0.02, False),
    # For a budget without a tail: the decay ends at the short length.
    "finish": Kind(2048, 1.0, True, True, True, 1.0, 0.02, True),
}


@dataclass(frozen=True)
class Segment:
    """A kind of training until `end` seconds after the start of the command."""

    name: str
    kind: Kind
    end: float


def parse_plan(text: str) -> list[Segment]:
    """Segments of "kind@end,kind@end"; ends must rise. Raises `ValueError`."""
    plan: list[Segment] = []
    for item in text.split(","):
        name, _, end = item.strip().partition("@")
        if name not in KINDS:
            raise ValueError(f"--plan: {name!r} is none of {', '.join(KINDS)}")
        try:
            seconds = float(end)
        except ValueError:
            raise ValueError(f"--plan: {item!r} is not kind@seconds") from None
        if plan and seconds <= plan[-1].end:
            raise ValueError(f"--plan: {item!r} ends before the segment in front of it")
        plan.append(Segment(name, KINDS[name], seconds))
    return plan


def factor(kind: Kind, progress: float, steps_since_reset: int, warmup: int) -> float:
    """Rate factor at a share of the segment's time, after a linear warm-up in steps."""
    progress = min(max(progress, 0.0), 1.0)
    rise = min(1.0, (steps_since_reset + 1) / warmup)
    return rise * (kind.first + (kind.last - kind.first) * progress)
