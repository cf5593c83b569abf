"""How many drafts of each request the target looks at (serving semantics §4.1).

Confidences of drafts and a measured time go in; the number of extra rows that gives the most tokens
a second and their split over the requests come out. It must not know ids, tensors or clocks.

Two rules keep the target's law: the total comes from confidences at least two steps old, never from
those of the drafts it admits, and the split ranks a draft by what was known before it was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import itemgetter

Time = Callable[[int, int], float]
"""Seconds of a step by its rows and its requests."""

CLAMP = 60.0
_AGE = 2  # steps between the confidences that make a budget and the step it is for
_BLOCKS = 24  # blocks of drafts that a budget rests on, at least


@dataclass(frozen=True, slots=True)
class DraftRules:
    """How drafts are made and chosen: settings mtp, verify, mtp_varlen, mtp_threshold and
    mtp_temperature (one for all drafts, or one per draft).

    chance: for measuring alone, the chance that a draft stands if all before it do, whatever it
    says; confidences tell it then. None: the target decides.
    """

    length: int
    verify: str = "rejection"
    varlen: bool = False
    threshold: float | None = None
    temperatures: tuple[float, ...] = (1.0,)
    chance: float | None = None


def confidences(logits: Sequence[float], temperatures: Sequence[float]) -> list[float]:
    """Calibrated chances that each draft of a block stands if all before it do.

    logits: of the confidence head, one per draft. temperatures: one per draft or a single one; the
    quotient is clamped to +-60 (model spec §6.3). A logit that is not a number stays one.
    """
    if len(temperatures) == 1:
        temperatures = temperatures * len(logits)
    out = []
    for logit, temperature in zip(logits, temperatures, strict=True):
        x = logit / temperature
        out.append(x if math.isnan(x) else 1 / (1 + math.exp(-max(-CLAMP, min(CLAMP, x)))))
    return out


def survivals(
    chances: Sequence[float], on_warning: Callable[[str], object] = lambda line: None
) -> tuple[float, ...]:
    """For each draft the chance that it and all before it stand: products of the confidences.

    Not a number counts as 0, with a warning line; so nothing behind it is verified either.
    """
    if any(math.isnan(chance) for chance in chances):
        at = next(at for at, chance in enumerate(chances) if math.isnan(chance))
        on_warning(f"the confidence of draft {at + 1} is not a number; it counts as 0")
        chances = [0.0 if math.isnan(chance) else chance for chance in chances]
    return tuple(accumulate(chances, lambda so_far, chance: so_far * chance))


def budget(
    samples: Sequence[Sequence[float]],
    requests: int,
    time: Time,
    noise: float = 0.0,
    limit: int | None = None,
    knows: Callable[[int], bool] = lambda rows: True,
) -> int:
    """The number k of extra rows with the most (requests + survivals of the best k drafts) /
    time(requests + k, requests): the global maximum, the first of equal ones.

    samples: survivals of all drafts of the batch, in any order; of several such lists, all of one
    length, the mean of their sums counts. Then further rows that are free: as many as change the
    time by no more than the part `noise` of it, what its measurement can resolve. limit: most extra
    rows that may run. knows: was a step of so many rows measured? What was not cannot call others
    free. O(rows log rows) a sample.
    """
    most = len(samples[0]) if samples else 0
    if limit is not None:
        most = max(0, min(most, limit))
    sums = [accumulate(sorted(values, reverse=True), initial=0.0) for values in samples]
    gains = [sum(some) / len(some) for some in islice(zip(*sums, strict=True), most + 1)] or [0.0]
    seconds = [time(requests + k, requests) for k in range(most + 1)]
    rates = [(requests + gain) / cost for gain, cost in zip(gains, seconds, strict=True)]
    best = rates.index(max(rates))
    if not knows(requests + best):
        return best
    free = range(most, best, -1)
    return next((k for k in free if seconds[k] <= seconds[best] * (1 + noise)), best)


def split(values: Sequence[Sequence[float]], extra: int) -> list[int]:
    """Give `extra` rows to the drafts of highest survival: how many of each request are verified.

    values: survivals per request, none rising. Ties go to the earlier request, then to the earlier
    draft, so that the chosen ones of a request are its first. A survival of 0 is never chosen.
    """
    flat = [(value, at) for at, some in enumerate(values) for value in some if value > 0]
    out = [0] * len(values)
    for _, at in sorted(flat, key=itemgetter(0), reverse=True)[: max(0, extra)]:
        out[at] += 1
    return out


class Schedule:
    """Remembers survivals until they make a budget.

    A budget rests on what the requests drafted two steps ago. That is one draw of what they draft
    now: in a batch of a few requests a poor guide, with which a fixed draft length would often do
    better. So below 24 requests the steps before count too, as many as make 24 blocks in all.

    Steps are numbered, so that planning a step ahead of the device gives the same plans.
    """

    def __init__(self, time: Time, knows: Callable[[int], bool] = lambda rows: True) -> None:
        self.time, self.knows = time, knows
        self._steps: dict[int, Mapping[Hashable, Sequence[float]]] = {}

    def learn(self, step: int, drafted: Mapping[Hashable, Sequence[float]]) -> None:
        """Survivals of what was drafted in `step`, by request."""
        self._steps[step] = drafted
        for old in list(self._steps)[: -_AGE - _BLOCKS]:
            del self._steps[old]

    def budget(
        self,
        step: int,
        drafts: Mapping[Hashable, int],
        noise: float = 0.0,
        limit: int | None = None,
    ) -> int:
        """Extra rows of `step`, whose requests have so many drafts each."""
        samples = self.samples(step, drafts)
        return budget(samples, len(drafts), self.time, noise, limit, self.knows)

    def samples(self, step: int, drafts: Mapping[Hashable, int]) -> list[list[float]]:
        """What is known of the survivals of all these drafts, once for each old step that counts.

        Where a request drafted nothing in an old step, the next one that it drafted in stands in;
        where there is none, its drafts count as sure.
        """
        wanted = -(-_BLOCKS // max(1, len(drafts)))
        known: dict[Hashable, Sequence[float]] = {}
        samples = []
        usable = [made for old, made in reversed(self._steps.items()) if old <= step - _AGE]
        for made in usable[:wanted] or [{}]:
            known |= made
            samples.append(
                [
                    value
                    for request, count in drafts.items()
                    for value in (*known.get(request, ()), *(1.0,) * count)[:count]
                ]
            )
        return samples


def gain(samples: Sequence[Sequence[float]], extra: int) -> float:
    """Drafts expected to stand among the best `extra`: the mean over samples."""
    return sum(sum(sorted(some, reverse=True)[:extra]) for some in samples) / len(samples)
