"""Temperatures of the confidence head, and the measures of a prediction."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.speculative.calibration import fit, quality

TRUE = (2.0, 0.6, 1.0, 1.5, 0.8)


def blocks(count, seed=1, temperatures=TRUE, varlen=False):
    """Confidence logits, drafts verified and accepted, where the head is off by `temperatures`."""
    rng = np.random.default_rng(seed)
    real = rng.normal(1.5, 1.5, (count, len(temperatures)))
    stands = rng.random(real.shape) < 1 / (1 + np.exp(-real))
    logits = real * np.array(temperatures)
    verified = np.full(count, len(temperatures))
    if varlen:  # by confidence: the less sure, the fewer
        verified = 1 + (np.cumsum(logits, 1)[:, :-1] > 2).sum(1)
    accepted = np.minimum(np.cumprod(stands, 1).sum(1), verified)
    return logits, verified, accepted


def survivals(logits, temperatures):
    return np.cumprod(1 / (1 + np.exp(-logits / np.array(temperatures))), 1)


@pytest.mark.parametrize("varlen", [False, True])
def test_fit_finds_the_temperatures_and_calibrates(varlen):
    found = fit(*blocks(25_000, varlen=varlen))
    assert found[:2] == pytest.approx(TRUE[:2], rel=0.12)
    logits, verified, accepted = blocks(25_000, seed=2)
    for at in range(len(TRUE)):
        stood = (accepted > at).astype(float)
        before = quality(survivals(logits, [1.0] * 5)[:, at], stood)
        after = quality(survivals(logits, found)[:, at], stood)
        assert after.ece <= 0.01
        assert after.ece < before.ece or before.ece < 0.01
        assert after.brier <= before.brier + 1e-4


def test_too_few_outcomes_leave_a_position_alone():
    logits, verified, accepted = blocks(800)
    verified[:] = 1
    found = fit(logits, verified, np.minimum(accepted, 1))
    assert found[0] != 1.0 and found[1:] == (1.0,) * 4
    assert fit(logits[:50], verified[:50] * 5, accepted[:50]) == (1.0,) * 5


def test_broken_logits_are_left_out():
    logits, verified, accepted = blocks(5000)
    hurt = logits.copy()
    hurt[::7, 0] = np.nan
    kept = np.arange(5000) % 7 > 0
    assert fit(hurt, verified, accepted)[0] == fit(logits[kept], verified[kept], accepted[kept])[0]


def test_measures():
    sure = quality(np.array([1.0, 1.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0, 0.0]))
    assert (sure.count, sure.ece, sure.brier, sure.auroc) == (4, 0.0, 0.0, 1.0)
    wrong = quality(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    assert (wrong.ece, wrong.brier, wrong.auroc) == (1.0, 1.0, 0.0)
    half = quality(np.array([0.5, 0.5, 0.5]), np.array([1.0, 0.0, 1.0]))
    assert half.ece == pytest.approx(1 / 6) and half.auroc == 0.5
    some = quality(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]))
    assert some.auroc == 0.75
    assert quality(np.array([0.3]), np.array([1.0])).auroc is None
