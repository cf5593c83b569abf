"""How true confidences are, and the temperatures that make them truer (model spec §6.5, STS).

Raw confidence logits and what became of their drafts go in, a temperature per draft position or the
measures of a prediction come out. It must not know a model, a schedule or where the logits came
from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 65))  # 1.0 is its middle
BINS = 15
LEAST = 500  # outcomes below which a position keeps temperature 1


@dataclass(frozen=True, slots=True)
class Quality:
    """Of predicted chances against outcomes: expected calibration error over 15 bins of equal
    width, mean squared error, and the chance that a success was given more than a failure (None if
    there is only one kind)."""

    count: int
    ece: float
    brier: float
    auroc: float | None


def fit(logits: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> tuple[float, ...]:
    """One temperature per position, left to right: each makes the *survival* up to there truest,
    those before it being fixed.

    logits: float [blocks, drafts]. verified, accepted: how many drafts of each block were looked at
    and stood, whole numbers [blocks]. What was not looked at is not counted; that it was not may
    have depended on confidences, never on the outcome. Least logarithmic loss on a grid from 0.2 to
    5: a proper score, where calibration error of few outcomes is mostly chance.
    """
    out: list[float] = []
    before = np.ones(len(logits))
    for at in range(logits.shape[1]):
        seen = (verified > at) & np.isfinite(logits[:, at])
        stood = (accepted > at)[seen].astype(np.float64)
        best = 1.0
        if len(stood) >= LEAST:
            best = min(
                _GRID, key=lambda t: _loss(before[seen] * _chance(logits[seen, at], t), stood)
            )
        out.append(float(best))
        before = before * np.nan_to_num(_chance(logits[:, at], best))
    return tuple(out)


def quality(predicted: np.ndarray, stood: np.ndarray) -> Quality:
    """predicted: chances in [0, 1]; stood: 0 or 1; both [n], n > 0."""
    return Quality(
        len(stood),
        _ece(predicted, stood),
        float(np.mean((predicted - stood) ** 2)),
        _auroc(predicted, stood),
    )


def _chance(logits: np.ndarray, temperature: float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(logits / temperature, -60, 60)))


def _loss(predicted: np.ndarray, stood: np.ndarray) -> float:
    inside = np.clip(predicted, 1e-12, 1 - 1e-12)
    return float(-np.mean(stood * np.log(inside) + (1 - stood) * np.log1p(-inside)))


def _ece(predicted: np.ndarray, stood: np.ndarray) -> float:
    """sum over bins of |sum of chances - sum of outcomes| / n."""
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, predicted - stood, BINS)
    return float(np.abs(gaps).sum() / len(stood))


def _auroc(predicted: np.ndarray, stood: np.ndarray) -> float | None:
    good = int(stood.sum())
    bad = len(stood) - good
    if not good or not bad:
        return None
    _, place, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal chances share a rank
    return float((ranks[stood > 0].sum() - good * (good + 1) / 2) / (good * bad))
