"""The generator: known values, statistics, seeds, and numpy and torch with the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.ops import noise
from deepinfer.sampling import rng


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, straight from its definition."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_words_are_splitmix64():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published
    for stream in (0, 1234567, 2**64 - 1, rng.key(5, 9)):
        assert rng.words(stream, 50).tolist() == splitmix64(stream, 50)


def test_recorded_values_never_change():
    """A seed means the same for ever: these numbers are part of the interface."""
    assert rng.key(0, 0) == 0x568A9B0B1A2C05EC
    assert rng.key(7, 41, rng.ACCEPT) == 0xA4433297DC063547
    assert rng.derive_seed(1, 1, 0) == 6416490825943564
    assert rng.gumbel(rng.key(7, 3), 3).tolist() == [
        1.0066885762243043,
        0.6516004066031312,
        -0.2958838587226858,
    ]


def test_gumbel_is_accurate_and_standard():
    drawn = rng.gumbel(rng.key(3, 11), 200_000)
    u = ((rng.words(rng.key(3, 11), 200_000) >> np.uint64(12)).astype(float) + 0.5) * 2.0**-52
    assert np.abs(drawn + np.log(-np.log(u))).max() < 1e-9
    assert abs(drawn.mean() - 0.5772156649) < 0.01
    assert abs(drawn.var() - math.pi**2 / 6) < 0.03
    edges = noise.gumbel(np.array([0.0, 2.0**52 - 1]), np.int64, np.float64, np.float64)
    assert np.isfinite(edges).all() and edges[0] < -3.5 and edges[1] > 36


def test_streams_do_not_repeat_or_correlate():
    keys = {rng.key(s, t, p) for s in range(30) for t in range(30) for p in range(4)}
    assert len(keys) == 3600
    rows = np.stack([rng.gumbel(rng.key(s, t), 2000) for s in range(5) for t in range(5)])
    assert np.abs(np.corrcoef(rows) - np.eye(25)).max() < 0.12


def test_uniform_is_open_and_even():
    draws = np.array([rng.uniform(9, t, rng.ACCEPT) for t in range(20_000)])
    assert 0 < draws.min() and draws.max() < 1
    assert np.abs(np.histogram(draws, 20, (0, 1))[0] - 1000).max() < 150


def test_derived_seeds():
    assert rng.derive_seed(2**64 - 1, 0, 0) == 2**64 - 1, "one sequence alone keeps the seed"
    seeds = {rng.derive_seed(s, i, k) for s in range(20) for i in range(20) for k in range(20)}
    assert len(seeds) == 8000 and max(seeds) < 2**53
    assert len({rng.random_seed() for _ in range(100)}) == 100


WORDS = [0, 1, 7, 2**31, 2**53 - 1, 2**63 - 1, 2**63, 2**64 - 1, rng.G]


def streams(torch):
    """Seeds of every size, positions and purposes; as numbers and as tensors."""
    rows = [(seed, at * at * 1009, at << 8) for at, seed in enumerate(WORDS)]
    columns = [[rng.signed(seed) for seed, _, _ in rows], *list(zip(*rows, strict=True))[1:]]
    return rows, [torch.tensor(column, dtype=torch.int64) for column in columns]


def test_torch_has_the_same_keys_and_uniforms():
    torch = pytest.importorskip("torch")
    rows, (seeds, positions, purposes) = streams(torch)
    named = rng.keys(seeds, positions, purposes).tolist()
    assert named == [rng.signed(rng.key(*row)) for row in rows]
    named = rng.keys(seeds, positions, rng.ACCEPT).tolist()
    assert named == [rng.signed(rng.key(s, t, rng.ACCEPT)) for s, t, _ in rows]
    draws = rng.uniform_rows(seeds, positions, purposes).tolist()
    assert draws == [rng.uniform(*row) for row in rows]
    assert rng.uniform_rows(seeds, positions, 2).tolist() == [
        rng.uniform(s, t, 2) for s, t, _ in rows
    ]


def test_signed_keeps_the_bits():
    assert [rng.signed(word) % 2**64 for word in WORDS] == WORDS
    assert all(-(2**63) <= rng.signed(word) < 2**63 for word in WORDS)


@pytest.mark.parametrize("count", [1, 7, 4096, 10_001])
def test_torch_has_the_same_bits(count):
    torch = pytest.importorskip("torch")
    rows, columns = streams(torch)
    from deepinfer.ops.torch.sampling import gumbel

    found = gumbel(rng.keys(*columns), count).numpy()
    for some, row in zip(found, rows, strict=True):
        assert (some == rng.gumbel(rng.key(*row), count)).all()
