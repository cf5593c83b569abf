"""How good a drafter is, from acceptance probabilities along text that the backbone wrote.

Comes in: for every place of a text and every slot, the probability that the next token of the text
is accepted there, given that those before it were, and the drafter's confidence. Goes out: accepted
length, acceptance by slot, calibration and ranking of the confidences, and how far chance moves
them: texts are drawn again with replacement. Exact for greedy (where probabilities are 0 or 1) and
for rejection sampling: the accepted length of a step is then a function of the emitted text alone,
min(1, q / p) at each token. It must not know torch or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
TEMPERATURES = np.geomspace(0.4, 2.5, 64)
DRAWS = 400  # of the texts, for an interval


def walk(accept: np.ndarray, tokens: int) -> tuple[float, np.ndarray]:
    """(expected target steps, visits [A]) of one text.

    accept float [A, B]: at place i the newest token is the text's number i (0: the one that the
    prefill gave), and slot k offers token i + 1 + k. ``tokens``: how many tokens after the first
    are committed, at most A; what a step accepts beyond them does not count.
    """
    slots = accept.shape[1]
    visits = np.zeros(len(accept))
    visits[0] = 1.0 if tokens else 0.0
    for i in range(tokens):
        reach = visits[i]
        for k in range(slots + 1):
            stay = 1.0 if k == slots else 1.0 - accept[i, k]
            place = i + 1 + k
            if place < tokens:
                visits[place] += reach * stay
            if k < slots:
                reach = reach * accept[i, k]
    return float(visits[:tokens].sum()), visits


def summary(accepts: list[np.ndarray], tokens: list[int]) -> dict[str, object]:
    """Accepted length (bonus token counted) and acceptance by slot, given that it is reached."""
    steps = []
    slots = accepts[0].shape[1]
    reached, passed = np.zeros(slots), np.zeros(slots)
    for accept, count in zip(accepts, tokens, strict=True):
        expected, visits = walk(accept, count)
        steps.append(expected)
        for k in range(slots):
            room = max(0, count - k)  # a slot beyond the last token is no draft of the text
            reach = visits[:room] * accept[:room, :k].prod(1)
            reached[k] += reach.sum()
            passed[k] += (reach * accept[:room, k]).sum()
    return {
        "texts": len(accepts),
        "tokens": int(sum(tokens)),
        "accepted_length": round(sum(tokens) / max(sum(steps), 1e-9), 4),
        "interval": interval(tokens, steps),
        "acceptance": [round(float(x), 4) for x in passed / np.maximum(reached, 1e-9)],
    }


def draws(count: int) -> np.ndarray:
    """[DRAWS, count]: how often each of ``count`` texts is in a draw with replacement; the same
    for the same count, so that drafters are compared on the same draws."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)


def interval(above, below) -> list[float]:
    """[2.5 %, 97.5 %] of sum(above) / sum(below), both a number per text."""
    often = draws(len(above))
    found = (often @ np.asarray(above, float)) / np.maximum(often @ np.asarray(below, float), 1e-9)
    return [round(float(x), 4) for x in np.percentile(found, (2.5, 97.5))]


def ece(confidence: np.ndarray, accept: np.ndarray, weight: np.ndarray) -> float:
    """Expected calibration error in 15 equal bins; accept may be a probability."""
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(index, weight * (confidence - accept), BINS)
    return float(np.abs(gaps).sum() / max(weight.sum(), 1e-12))


def auc(confidence: np.ndarray, accept: np.ndarray, weight: np.ndarray) -> float:
    """Chance that an accepted token had a higher confidence than a rejected one; ties half."""
    values, index = np.unique(confidence, return_inverse=True)
    good = np.bincount(index, weight * accept, len(values))
    bad = np.bincount(index, weight * (1 - accept), len(values))
    below = np.cumsum(bad) - bad / 2
    return float((good * below).sum() / max(good.sum() * bad.sum(), 1e-12))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60, 60)))


@dataclass(frozen=True)
class States:
    """What a drafter stood before at every place of the texts: confidence logits, chance that the
    text's next token is accepted, chance that a token drawn there would be, all [N, B]; expected
    visits [N]; the text of each place [N]."""

    logit: np.ndarray
    accept: np.ndarray
    chance: np.ndarray
    visits: np.ndarray
    text: np.ndarray

    @classmethod
    def of(cls, logits, accepts, chances, tokens) -> States:
        """From the arrays [A, B] of every text; a place needs all its slots within the text."""
        parts: list[tuple[np.ndarray, ...]] = []
        for i, (logit, accept, chance, count) in enumerate(
            zip(logits, accepts, chances, tokens, strict=True)
        ):
            room = max(0, count - logit.shape[1] + 1)
            _, visits = walk(accept, count)
            parts.append(
                (logit[:room], accept[:room], chance[:room], visits[:room], np.full(room, i))
            )
        return cls(*(np.concatenate(x) for x in zip(*parts, strict=True)))

    @property
    def reach(self) -> np.ndarray:
        """[N, B]: visits times the chance that the slot is reached."""
        passed = np.cumprod(self.accept[:, :-1], 1)
        return self.visits[:, None] * np.concatenate((np.ones((len(passed), 1)), passed), 1)

    def at(self, places: np.ndarray) -> States:
        return States(*(getattr(self, f)[places] for f in self.__dataclass_fields__))

    def sure(self, temperatures) -> np.ndarray:
        """Confidences [N, B]."""
        return sigmoid(self.logit / np.asarray(temperatures))


def fit(states: States) -> list[float]:
    """A temperature a slot, of least cross entropy. (Least calibration error is flat near its
    minimum: with 30,000 places the choice moves by a tenth, and other texts do not follow.)"""
    chosen: list[float] = []
    for k, reach in enumerate(states.reach.T):
        losses = []
        for t in TEMPERATURES:
            z = states.logit[:, k] / t
            losses.append((reach * (np.logaddexp(0, z) - states.chance[:, k] * z)).sum())
        chosen.append(round(float(TEMPERATURES[int(np.argmin(losses))]), 4))
    return chosen


def noise(confidence: np.ndarray, accept: np.ndarray, weight: np.ndarray, text: np.ndarray):
    """What calibration error chance alone gives: that of drawn texts, whose gap in every bin is
    counted from the gap in all texts. All arguments flat."""
    _, text = np.unique(text, return_inverse=True)
    count = text.max() + 1
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(text * BINS + index, weight * (confidence - accept), count * BINS)
    gaps, weights = gaps.reshape(count, BINS), np.bincount(text, weight, count)
    often = draws(count)
    moved = (often @ gaps) / (often @ weights)[:, None] - gaps.sum(0) / weights.sum()
    return float(np.abs(moved).sum(1).mean())


def calibration(states: States, kinds: list[str]) -> dict[str, object]:
    """Raw and calibrated confidences against acceptance, slot by slot.

    Temperatures are fitted on every second text and judged on the others, by the chance that a
    drawn token is accepted. ``noise``: what chance alone makes of the calibrated error. ``drawn``:
    the same error by the tokens of the text, as an observer of few steps would see it.
    ``survival``: of the products of confidences, over all steps. ``all``: every slot in one set of
    bins. kinds: of the texts, for the error within each.
    """
    half = states.text % 2
    chosen = fit(states.at(half == 0))
    test = states.at(half == 1)
    raw, sure, reach = test.sure(1.0), test.sure(chosen), test.reach

    visits = np.broadcast_to(test.visits[:, None], reach.shape)
    survived = reach * test.chance / np.maximum(visits, 1e-12)

    def each(measure, *columns) -> list[float]:
        return [round(measure(*(c[:, k] for c in columns)), 4) for k in range(reach.shape[1])]

    def flat(sure, places=slice(None)) -> tuple[np.ndarray, ...]:
        return tuple(x[places].ravel() for x in (sure, test.chance, reach))

    owner = np.broadcast_to(test.text[:, None], reach.shape)
    named = np.array(kinds)[test.text]
    return {
        "fitted_on": int((half == 0).sum()), "judged_on": len(test.text), "temperatures": chosen,
        "ece_raw": each(ece, raw, test.chance, reach),
        "ece": each(ece, sure, test.chance, reach),
        "survival": each(ece, np.cumprod(sure, 1), survived, visits),
        "noise": each(noise, sure, test.chance, reach, owner),
        "drawn": each(ece, sure, test.accept, reach),
        "drawn_noise": each(noise, sure, test.accept, reach, owner),
        "all": {
            "ece_raw": round(ece(*flat(raw)), 4), "ece": round(ece(*flat(sure)), 4),
            "noise": round(noise(*flat(sure), owner.ravel()), 4),
        },
        "kinds": {
            kind: round(ece(*flat(sure, named == kind)), 4)
            for kind in sorted(set(kinds)) if (named == kind).any()
        },
        "auc": each(auc, raw, test.accept, reach),
    }  # fmt: skip
