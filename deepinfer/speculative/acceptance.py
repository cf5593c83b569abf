"""What a trace adds up to: accepted length, acceptance by position, how true the confidences were.

A `Trace` comes in, plain numbers for a JSON document go out; and the calibration that its raw
logits call for. Counting is that of serving semantics §8. It must not know models, views or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.errors import UsageError
from deepinfer.speculative.proposal import Counts
from deepinfer.speculative.schedule import confidences, survivals
from deepinfer.speculative.trace import Trace, TraceStep

if TYPE_CHECKING:
    import numpy as np


def summary(trace: Trace) -> dict[str, Any]:
    """The `summary` of `spec-trace --json`.

    tokens: committed by the traced steps; the first token of an answer comes with its prompt and is
    not among them. histogram: steps by tokens committed, from 0. by_position: of the drafts there
    `acceptance` is accepted / drafted; of those verified before the end of the answer `observed`
    is the share that stood and `predicted` the mean survival. saved_passes: steps that plain
    decoding would have run besides. ece, brier, auroc: of the survivals of all these drafts, None
    where there are none.
    """
    steps = trace.steps
    counts = Counts(
        steps=len(steps),
        drafted=sum(len(step.draft_ids) for step in steps),
        verified=sum(step.verified for step in steps),
        accepted=sum(step.accepted for step in steps),
        discarded=sum(step.discarded for step in steps),
        committed=sum(step.committed for step in steps),
    )
    by_tokens = Counter(step.committed for step in steps)
    found = outcomes(steps)
    everything = [pair for pairs in found for pair in pairs]
    return {
        "steps": counts.steps,
        "tokens": counts.committed,
        "accepted_length": counts.accepted_length,
        "acceptance_rate": counts.acceptance_rate,
        "drafted": counts.drafted,
        "verified": counts.verified,
        "accepted": counts.accepted,
        "discarded": counts.discarded,
        "by_position": [_position(steps, at, pairs) for at, pairs in enumerate(found)],
        "histogram": [by_tokens[tokens] for tokens in range(max(by_tokens, default=0) + 1)],
        **_quality(everything),
        "outcomes": len(everything),
        "saved_passes": counts.committed - counts.steps,
        "lossless": trace.header.get("lossless"),
    }


def outcomes(steps: Sequence[TraceStep]) -> list[list[tuple[float, bool]]]:
    """By draft position: predicted survival, and whether the draft and all before it stood, of
    each draft that was verified before the end of the answer. The others' fate is not known."""
    most = max((len(step.draft_ids) for step in steps), default=0)
    return _judged(steps, [step.survival for step in steps], most)


def reliability(pairs: Sequence[tuple[float, bool]]) -> list[dict[str, float]]:
    """Bins of equal width that have drafts: low, high, count, predicted and observed mean."""
    from deepinfer.speculative.calibration import BINS

    out = []
    for at in range(BINS):
        inside = [pair for pair in pairs if min(int(pair[0] * BINS), BINS - 1) == at]
        if inside:
            out.append(
                {
                    "low": at / BINS,
                    "high": (at + 1) / BINS,
                    "count": len(inside),
                    "predicted": sum(survival for survival, _ in inside) / len(inside),
                    "observed": sum(stood for _, stood in inside) / len(inside),
                }
            )
    return out


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures by position; outcomes; calibration error of the survivals on those that were not
    fitted to, with the confidences of the trace and with the new ones; the errors over all."""

    temperatures: tuple[float, ...]
    counts: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    ece: tuple[float, float]


def calibrate(trace: Trace) -> Calibration:
    """Fit temperatures to the raw logits of every second step of a trace, one for each of the `mtp`
    drafts, and judge them on the other steps.

    Where these find no smaller calibration error, or a larger squared one, the temperatures of the
    trace stay: such a fit is one to chance. Raises UsageError where a position has fewer than 1,000
    verified drafts.
    """
    from deepinfer.speculative.calibration import LEAST, fit

    enough = 2 * LEAST  # half to fit, half to judge
    rule = trace.header["speculation"]
    drafts = rule["mtp"]
    steps = sorted(trace.steps, key=lambda step: (step.seq, step.pos))
    counts = tuple(sum(step.judged > at for step in steps) for at in range(drafts))
    few = next((at for at, count in enumerate(counts) if count < enough), None)
    if few is not None or not counts:
        at = few or 0
        raise UsageError(
            "calibration-too-few", "too few drafts were verified to fit temperatures",
            [f"draft {at + 1} was verified {counts[at] if counts else 0:,} times, "
             f"{enough:,} are needed at each position"],
            "more prompts (-f PROMPTS.jsonl), more tokens (-n 1024), or --no-mtp-varlen",
        )  # fmt: skip
    temperatures = fit(*_arrays(steps[::2], drafts))
    judged = steps[1::2]
    old = _judged(judged, [step.survival for step in judged], drafts)
    new = _judged(judged, [_survivals(step, temperatures) for step in judged], drafts)
    before, after = (_quality([pair for pairs in some for pair in pairs]) for some in (old, new))
    if after["ece"] >= before["ece"] or after["brier"] > before["brier"]:
        temperatures = (*rule["temperatures"],) * drafts
        temperatures, new, after = temperatures[:drafts], old, before
    return Calibration(
        temperatures,
        counts,
        tuple(_quality(pairs)["ece"] for pairs in old),
        tuple(_quality(pairs)["ece"] for pairs in new),
        (before["ece"], after["ece"]),
    )


def _judged(
    steps: Sequence[TraceStep], survivals: Sequence[Sequence[float]], drafts: int
) -> list[list[tuple[float, bool]]]:
    """`outcomes` with other survivals."""
    return [
        [
            (some[at], step.accepted > at)
            for some, step in zip(survivals, steps, strict=True)
            if step.judged > at
        ]
        for at in range(drafts)
    ]


def _arrays(steps: Sequence[TraceStep], drafts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw logits [steps, drafts] (not a number where there was no draft), judged, accepted."""
    import numpy as np

    logits = np.full((len(steps), drafts), np.nan)
    for row, step in zip(logits, steps, strict=True):
        row[: len(step.logits)] = step.logits
    judged = np.array([step.judged for step in steps])
    return logits, judged, np.array([step.accepted for step in steps])


def _survivals(step: TraceStep, temperatures: tuple[float, ...]) -> tuple[float, ...]:
    return survivals(confidences(step.logits, temperatures[: len(step.logits)]))


def _position(
    steps: Sequence[TraceStep], at: int, pairs: Sequence[tuple[float, bool]]
) -> dict[str, Any]:
    drafted = sum(len(step.draft_ids) > at for step in steps)
    accepted = sum(step.accepted > at for step in steps)
    return {
        "position": at + 1,
        "drafted": drafted,
        "verified": len(pairs),
        "accepted": accepted,
        "acceptance": accepted / drafted,
        "predicted": sum(survival for survival, _ in pairs) / len(pairs) if pairs else None,
        "observed": sum(stood for _, stood in pairs) / len(pairs) if pairs else None,
        **_quality(pairs),
    }


def _quality(pairs: Sequence[tuple[float, bool]]) -> dict[str, float | None]:
    """ece, brier and auroc of predictions; None for all of nothing."""
    if not pairs:
        return {"ece": None, "brier": None, "auroc": None}
    import numpy as np

    from deepinfer.speculative.calibration import quality

    predicted, stood = zip(*pairs, strict=True)
    found = quality(np.array(predicted), np.array(stood, dtype=float))
    return {"ece": found.ece, "brier": found.brier, "auroc": found.auroc}
