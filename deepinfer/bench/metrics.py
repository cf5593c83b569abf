"""Numbers of a repeat and of a row, from what was delivered when.

Comes in: for each request when it was submitted and what was delivered at which time, its token
counts. Goes out: one sample per repeat, medians with spread per row. Counting is that of serving
semantics §8 and is written down here alone. It must not know the engine, clocks or files; nothing
here may import torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.speculative.proposal import Counts

__all__ = [
    "MEASURED", "STEADY", "Heard", "Window", "outliers", "quantile", "sample", "self_ratio",
    "spread", "summary", "window",
]  # fmt: skip

STEADY = (0.98, 1.02)
"""A series whose halves differ by more says nothing about a ratio (performance rules §4.1)."""

LEAST = 4
"""Steps of a decode window; of fewer a rate is noise."""

# Ten standard deviations, by the median absolute deviation of a normal law.
_FAR = 14.826

MEASURED = (
    "ttft_ms", "tpot_ms", "queue_ms", "prompt_tok_s", "output_tok_s", "output_tok_s_per_card",
    "total_tok_s", "host_ms_per_step", "host_work_ms_per_step", "accepted_length", "elapsed_ms",
    "decode_tok_s", "decode_step_ms", "accepted_length_uncut",
)  # fmt: skip
"""Fields of a row that are {median, p5, p95, n} over its repeats, or null with a `why`."""

SAMPLED = (
    "ttft_ms", "tpot_ms", "output_tok_s", "prompt_tok_s", "elapsed_ms", "ready_ms", "decode_tok_s",
    "decode_step_ms",
)  # fmt: skip

_NO_SECOND = "one delivery: no token came after the first"
_NO_DRAFTS = "nothing is drafted"
_NONE_DONE = "no request was completed"
_NO_WINDOW = "no decode window: the first answer ended before the last one began"
_SHORT_WINDOW = f"no decode window: fewer than {LEAST} steps in which all requests decode"
_ALL_CUT = "no step had room for all drafts"
_PAUSED = "some steps had no drafts"


@dataclass(slots=True)
class Heard:
    """One request as its caller sees it; times in seconds of one clock.

    deliveries: (time, tokens) of each. queue: seconds until it was scheduled, if known. counts: of
    its drafts, None without speculation.
    """

    submitted: float
    prompt_tokens: int = 0
    cached: int = 0
    replayed: int = 0
    computed: int = 0
    queue: float | None = None
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    counts: Counts | None = None

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.deliveries)

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first delivery, thinking included."""
        return self.deliveries[0][0] - self.submitted if self.deliveries else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first delivery; None if there is none."""
        behind = self.tokens - self.deliveries[0][1] if self.deliveries else 0
        if not behind:
            return None
        return (self.deliveries[-1][0] - self.deliveries[0][0]) / behind

    def uncut(self, drafts: int) -> list[int]:
        """Tokens of each step that `drafts` drafts and a token of the target fitted into. Those
        near the end have less room: they would make any mean shorter than it is."""
        left, steps = self.tokens, []
        for at, (_, tokens) in enumerate(self.deliveries):
            if at and left > drafts:
                steps.append(tokens)
            left -= tokens
        return steps


@dataclass(frozen=True, slots=True)
class Window:
    """From the last first token to the first finish: the time in which all requests decode and
    nobody's prompt runs (performance rules §2.7).

    steps: of each request; tokens: of all of them; behind: tokens of an answer in its middle.
    """

    seconds: float
    steps: int
    tokens: int
    behind: float


def window(requests: Sequence[Heard]) -> Window | None:
    """None where the first answer ends before the last one begins."""
    start = max(one.deliveries[0][0] for one in requests)
    first = min(requests, key=lambda one: one.deliveries[-1][0])
    steps = sum(time > start for time, _ in first.deliveries)
    if not steps:
        return None
    # A step's deliveries reach the caller one by one: those of the last step may come later.
    later = [[n for time, n in one.deliveries if time > start][:steps] for one in requests]
    tokens = sum(map(sum, later))
    before = sum(n for one in requests for time, n in one.deliveries if time <= start)
    behind = (before + tokens / 2) / len(requests)
    return Window(first.deliveries[-1][0] - start, steps, tokens, behind)


def sample(requests: Sequence[Heard], *, cards: int = 1, drafts: int = 0) -> dict[str, Any]:
    """One repeat: all that ran at once, from the first submission to the last delivery.

    ttft_ms, tpot_ms, queue_ms: medians over the requests. prompt_tok_s: computed prompt tokens over
    the time until every request had its first token; reused ones are never in a rate but
    total_tok_s. output_tok_s: generated tokens over the whole time. decode_tok_s, decode_step_ms:
    of the `window`, null where it is empty or shorter than `LEAST` steps. drafts: most of a step;
    what is told of steps that could hold them all (`uncut`) has no answers' ends in it.
    {"completed": 0} where nothing was delivered.
    """
    done = [one for one in requests if one.deliveries]
    if not done:
        return {"completed": 0}
    start = min(one.submitted for one in done)
    begun = max(one.deliveries[0][0] for one in done)
    ready = begun - start
    elapsed = max(one.deliveries[-1][0] for one in done) - start
    made = sum(one.tokens for one in done)
    computed, cached = sum(one.computed for one in done), sum(one.cached for one in done)
    out: dict[str, Any] = {
        "completed": len(done),
        "ttft_ms": _middle(one.ttft for one in done),
        "tpot_ms": _middle(one.tpot for one in done),
        "queue_ms": _middle(one.queue for one in done),
        "elapsed_ms": _rounded(elapsed * 1e3),
        "ready_ms": _rounded(ready * 1e3),
        "prompt_tok_s": _rate(computed, ready),
        "output_tok_s": _rate(made, elapsed),
        "output_tok_s_per_card": _rate(made / cards, elapsed),
        "total_tok_s": _rate(made + computed + cached, elapsed),
        "accepted_length": None,
        "prompt_tokens": {
            "cached": cached, "computed": computed, "replayed": sum(one.replayed for one in done),
        },
        "output_tokens": made,
        "prefill_in_tpot": any(time <= begun for one in done for time, _ in one.deliveries[1:]),
        **_decoding(window(done)),
    }  # fmt: skip
    counts = [one.counts for one in done if one.counts is not None]
    if counts:
        names = ("steps", "drafted", "verified", "accepted", "discarded", "committed")
        total = Counts(*(sum(getattr(one, name) for one in counts) for name in names))
        out["accepted_length"] = total.accepted_length
        out["speculation"] = {name: getattr(total, name) for name in names}
        out |= _uncut([size for one in done for size in one.uncut(drafts)], drafts, total.drafted)
    return out


def _decoding(found: Window | None) -> dict[str, Any]:
    """What a sample says of its window."""
    long = found is not None and found.steps >= LEAST and found.seconds > 0
    return {
        "decode_tok_s": _rate(found.tokens, found.seconds) if long and found else None,
        "decode_step_ms": _rounded(found.seconds / found.steps * 1e3) if long and found else None,
        "decode_steps": found.steps if found else 0,
        "decode_behind": found.behind if found else None,
    }


def _uncut(sizes: Sequence[int], drafts: int, drafted: int) -> dict[str, Any]:
    """Accepted length and acceptance by position of steps of so many tokens, of which each had all
    its drafts; drafted: of all steps, by which pauses are noticed."""
    if not sizes:
        return {"accepted_length_uncut": None, "acceptance_by_position": None}
    shares = [_rounded(sum(n > at for n in sizes) / len(sizes)) for at in range(1, drafts + 1)]
    paused = drafted < drafts * len(sizes)
    return {
        "accepted_length_uncut": _rounded(sum(sizes) / len(sizes)),
        "acceptance_by_position": None if paused else shares,
    }


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The measured part of a row: spreads, counts, samples, and how far they can be trusted.

    Every field of `MEASURED` is there; null ones have their reason under `why`. acceptance_rate is
    accepted / drafted, verified_length verified drafts a step, both over all repeats;
    acceptance_by_position has a spread each. prefill_in_tpot: some steps of requests that decoded
    ran prompts of others too, and are in their time per token.
    """
    good = [one for one in samples if one.get("completed")]
    out: dict[str, Any] = {"status": "ok" if good else "empty"}
    why = {}
    for name in MEASURED:
        values = [one[name] for one in good if one.get(name) is not None]
        out[name] = spread(values) if values else None
        if not values:
            why[name] = _NONE_DONE if not good else _why(name, good)
    out["prefill_in_tpot"] = any(one["prefill_in_tpot"] for one in good)
    counts = [one["speculation"] for one in good if "speculation" in one]
    steps, drafted, verified, accepted = (
        sum(one[name] for one in counts) for name in ("steps", "drafted", "verified", "accepted")
    )
    out["acceptance_rate"] = accepted / drafted if drafted else None
    out["verified_length"] = verified / steps if steps else None
    out["accepted_drafts_per_step"] = accepted / steps if steps else None
    for name in ("acceptance_rate", "verified_length", "accepted_drafts_per_step"):
        if out[name] is None:
            why[name] = why.get("accepted_length", _NO_DRAFTS)
    known = [one["acceptance_by_position"] for one in good if one.get("acceptance_by_position")]
    out["acceptance_by_position"] = [spread(at) for at in zip(*known, strict=True)] or None
    if not known:
        why["acceptance_by_position"] = why.get("accepted_length_uncut", _PAUSED)
    elapsed = [one["elapsed_ms"] for one in good]
    ratio = self_ratio(elapsed)
    out |= {
        "self_ratio": ratio,
        "steady": ratio is not None and STEADY[0] <= ratio <= STEADY[1],
        "outliers": len(outliers(elapsed)),
        "samples": {name: [one.get(name) for one in good] for name in SAMPLED},
    }
    if ratio is None:
        why["self_ratio"] = "two repeats are needed"
    if good:
        out["cached_tokens"] = spread([one["prompt_tokens"]["cached"] for one in good])
        out["prompt_tokens"] = good[-1]["prompt_tokens"]
        out["output_tokens"] = good[-1]["output_tokens"]
    if why:
        out["why"] = why
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": _rounded(statistics.median(values)),
        "p5": _rounded(quantile(values, 0.05)),
        "p95": _rounded(quantile(values, 0.95)),
        "n": len(values),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the order statistics."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def self_ratio(values: Sequence[float]) -> float | None:
    """Median of the even repeats over that of the odd ones: one version against itself."""
    if len(values) < 2:
        return None
    return round(statistics.median(values[::2]) / statistics.median(values[1::2]), 4)


def outliers(values: Sequence[float]) -> list[int]:
    """Places of values that lie ten standard deviations from the median, by the median absolute
    deviation; of fewer than three none can be told."""
    if len(values) < 3:
        return []
    middle = statistics.median(values)
    apart = [abs(value - middle) for value in values]
    usual = statistics.median(apart)
    return [at for at, far in enumerate(apart) if usual and far / usual > _FAR]


def _middle(seconds: Iterable[float | None]) -> float | None:
    """Milliseconds of the median of those that are known."""
    known = [value for value in seconds if value is not None]
    return _rounded(statistics.median(known) * 1e3) if known else None


def _rate(tokens: float, seconds: float) -> float | None:
    return _rounded(tokens / seconds) if seconds > 0 and tokens else None


def _rounded(value: float) -> float:
    """Six significant digits: more is noise, and files are read by people too."""
    return float(f"{value:.6g}")


def _why(name: str, samples: Sequence[Mapping[str, Any]]) -> str:
    """Why no sample has it."""
    if name.startswith("decode"):
        if max(one["output_tokens"] // one["completed"] for one in samples) < 2:
            return _NO_SECOND
        return _SHORT_WINDOW if any(one["decode_steps"] for one in samples) else _NO_WINDOW
    if name == "accepted_length_uncut" and any("speculation" in one for one in samples):
        return _ALL_CUT
    return {
        "tpot_ms": _NO_SECOND,
        "accepted_length": _NO_DRAFTS,
        "accepted_length_uncut": _NO_DRAFTS,
        "queue_ms": "the engine did not tell",
        "prompt_tok_s": "every prompt token was reused",
        "host_ms_per_step": "no step was timed, or nobody could watch the device's kernels",
    }.get(name, "no time passed")
