"""How good a drafter is, from acceptance probabilities along text that the backbone wrote.

Comes in: for every place of a text and every slot, the probability that the next token of the text
is accepted there, given that those before it were, and the drafter's confidence. Goes out: accepted
length, acceptance by slot, calibration and ranking of the confidences. Exact for greedy (where
probabilities are 0 or 1) and for rejection sampling: the accepted length of a step is then a
function of the emitted text alone, min(1, q / p) at each token. It must not know torch or models.
"""

from __future__ import annotations

import numpy as np

BINS = 15
TEMPERATURES = np.geomspace(0.4, 2.5, 64)


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
    steps = committed = 0.0
    slots = accepts[0].shape[1]
    reached, passed = np.zeros(slots), np.zeros(slots)
    for accept, count in zip(accepts, tokens, strict=True):
        expected, visits = walk(accept, count)
        steps, committed = steps + expected, committed + count
        for k in range(slots):
            room = max(0, count - k)  # a slot beyond the last token is no draft of the text
            reach = visits[:room] * accept[:room, :k].prod(1)
            reached[k] += reach.sum()
            passed[k] += (reach * accept[:room, k]).sum()
    return {
        "texts": len(accepts),
        "tokens": int(committed),
        "accepted_length": round(committed / max(steps, 1e-9), 4),
        "acceptance": [round(float(x), 4) for x in passed / np.maximum(reached, 1e-9)],
    }


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


def calibration(
    logits: list[np.ndarray], accepts: list[np.ndarray], tokens: list[int]
) -> dict[str, object]:
    """Raw and calibrated confidences against acceptance, slot by slot.

    logits [A, B] per text. Temperatures are fitted left to right on every second text, so that the
    product of the confidences up to a slot has the least calibration error, and judged on the
    others. Weights are expected visits.
    """
    slots = logits[0].shape[1]
    parts: list[tuple[np.ndarray, ...]] = []
    for text, (logit, accept, count) in enumerate(zip(logits, accepts, tokens, strict=True)):
        room = max(0, count - slots + 1)
        _, visits = walk(accept, count)
        parts.append((logit[:room], accept[:room], visits[:room], np.full(room, text % 2)))
    logit, accept, visits, half = (np.concatenate(x) for x in zip(*parts, strict=True))
    fit, test = half == 0, half == 1
    survived = np.concatenate((np.ones((len(accept), 1)), np.cumprod(accept, 1)), 1)
    chosen: list[float] = []
    known = np.ones(len(accept))
    out: dict[str, object] = {}
    raw, calibrated, ranking, product = [], [], [], []
    for k in range(slots):
        errors = [
            ece((known * sigmoid(logit[:, k] / t))[fit], survived[fit, k + 1], visits[fit])
            for t in TEMPERATURES
        ]
        best = float(TEMPERATURES[int(np.argmin(errors))])
        chosen.append(round(best, 4))
        weight = (visits * survived[:, k])[test]
        before, after = sigmoid(logit[:, k])[test], sigmoid(logit[:, k] / best)[test]
        raw.append(round(ece(before, accept[test, k], weight), 4))
        calibrated.append(round(ece(after, accept[test, k], weight), 4))
        ranking.append(round(auc(before, accept[test, k], weight), 4))
        known = known * sigmoid(logit[:, k] / best)
        product.append(round(ece(known[test], survived[test, k + 1], visits[test]), 4))
    out["temperatures"] = chosen
    out["ece_raw"], out["ece"], out["ece_survival"] = raw, calibrated, product
    out["auc"] = ranking
    return out
