"""Logits to ids: each processing step, exact arithmetic, the law of the draws, row independence."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer.core.request import SamplingParams  # noqa: E402
from deepinfer.sampling import rng, sampler  # noqa: E402
from deepinfer.sampling.logits import Row, exp, log_normaliser, process  # noqa: E402


def row(position: int = 5, seed: int = 7, *, forbidden=(), seen=(), counts=None, **params) -> Row:
    return Row(SamplingParams(**params), seed, position, forbidden, seen, counts or {})


def processed(values, one: Row) -> list[float]:
    return process(torch.tensor([values], dtype=torch.float32), [one])[0].tolist()


def kept(values, **params) -> list[int]:
    return [at for at, x in enumerate(processed(values, row(**params))) if x > -math.inf]


def test_exponential_and_normaliser_are_accurate():
    x = -torch.rand(20_000, dtype=torch.float64) * 700
    assert ((exp(x) - x.exp()).abs() <= 1e-14 * x.exp() + 1e-300).all()
    assert exp(torch.tensor([0.0, -math.inf], dtype=torch.float64)).tolist() == [1.0, exp_of(-700)]
    logits = torch.randn(50, 4096, dtype=torch.float64) * 8
    ours = torch.tensor(log_normaliser(logits), dtype=torch.float64)
    assert (ours - logits.logsumexp(-1)).abs().max() < 4096 * 2.0**-44


def exp_of(x: float) -> float:
    return exp(torch.tensor([x], dtype=torch.float64)).item()


def test_bias_and_forbidden_ids():
    out = processed([1, 2, 3, 4], row(logit_bias={0: 5.0, 2: -math.inf}, forbidden=(3,)))
    assert out == [6, 2, -math.inf, -math.inf]


def test_penalties():
    one = row(
        seen=(0, 1), counts={1: 2, 3: 1},
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25,
    )  # fmt: skip
    # prompt only; prompt and twice generated; neither; generated once, negative logit
    assert processed([4, 4, 4, -4], one) == [2, 2 - 1 - 0.25, 4, -8 - 0.5 - 0.25]


def test_bias_comes_before_penalties_and_temperature_after():
    one = row(logit_bias={0: 3.0}, seen=(0,), repetition_penalty=2.0, temperature=0.5)
    assert processed([1, 0], one) == [4.0, 0.0]


def test_top_k_keeps_exactly_k_lowest_ids_on_ties():
    assert kept([1, 3, 3, 3, 0], top_k=2) == [1, 2]
    assert kept([1, 3, 3, 3, 0], top_k=4) == [0, 1, 2, 3]
    assert kept([1, 2], top_k=9) == [0, 1]


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert kept(logits, top_p=0.49) == [0]
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.9) == [0, 1, 2]
    assert kept(logits, top_p=1e-9) == [0], "never empty"
    assert kept([1, 1, 1, 1], top_p=0.5) == [0, 1]
    # the share is of what top-k left
    assert kept(logits, top_k=2, top_p=0.62) == [0]
    assert kept([100.0, 0.0, 0.0]) == [0, 1, 2], "top_p = 1 keeps the tail"


def test_min_p_is_relative_to_the_best():
    logits = [math.log(p) for p in (0.6, 0.3, 0.07, 0.03)]
    assert kept(logits, min_p=0.1) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_cuts_equal_a_plain_sort(scale):
    """Nuclei wider than the first look, ties and both limits at once, against numpy."""
    generator = np.random.default_rng(3)
    for vocab in (3, 200, 900):
        logits = (generator.normal(size=(12, vocab)) * scale).round(2).astype(np.float32)
        chosen = [
            SamplingParams(top_k=int(k), top_p=float(p))
            for k, p in zip(
                generator.choice([0, 1, 5, 300, 2000], 12),
                generator.choice([1, 0.987, 0.913, 0.51, 0.013], 12),
                strict=True,
            )
        ]
        got = torch.isfinite(process(torch.tensor(logits), [Row(p, 0, 0) for p in chosen]))
        for x, params, mask in zip(logits.astype(np.float64), chosen, got.numpy(), strict=True):
            order = np.argsort(-x, kind="stable")[: params.top_k or vocab]
            share = np.exp(x[order]) / np.exp(x[order]).sum()
            stay = order[np.cumsum(share) - share < params.top_p - 1e-12]
            assert set(np.flatnonzero(mask)) == set(stay if params.top_p < 1 else order)


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, 0.0]])
    assert sampler.sample(logits, [row(temperature=0)] * 2) == [1, 0]
    assert sampler.sample(logits[:1], [row(temperature=0, logit_bias={2: 1.0})]) == [2]


def test_a_draw_is_the_largest_logit_plus_noise():
    logits = torch.randn(6, 500) * 2
    rows = [row(position, seed=position * 11) for position in range(6)]
    ids = sampler.sample(logits, rows)
    for x, one, token in zip(logits.numpy(), rows, ids, strict=True):
        noise = rng.gumbel(rng.key(one.seed, one.position), 500)
        assert token == int(np.argmax(x.astype(np.float64) + noise))


@pytest.mark.parametrize(
    ("params", "law"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.658, 0.237, 0.105]),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
    ],
)
def test_draws_follow_the_law(params, law):
    """DI-18 with speculation off."""
    count = 40_000
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(count, 3)
    shared = SamplingParams(**params)
    ids = sampler.sample(logits, [Row(shared, seed, 3) for seed in range(count)])
    share = np.bincount(ids, minlength=3) / count
    assert np.abs(share - law).max() < 0.01


MIX = [
    dict(),
    dict(temperature=0),
    dict(temperature=0.3, top_k=40),
    dict(top_p=0.9),
    dict(top_p=0.99, temperature=3.0),
    dict(min_p=0.05),
    dict(logit_bias={3: 2.0}, temperature=0),
    dict(top_k=3, top_p=0.5, min_p=0.1, temperature=0.7),
]


def test_a_row_alone_has_the_bits_it_has_in_a_batch():
    logits = torch.randn(40, 3001) * 3
    rows = [row(at, seed=at % 3, seen=(1, 2), counts={5: 2}, repetition_penalty=1.1,
                **MIX[at % len(MIX)]) for at in range(40)]  # fmt: skip
    together = process(logits, rows)
    ids = sampler.sample(logits, rows)
    entries = sampler.logprobs(logits, ids, [at % 4 for at in range(40)])
    order = list(reversed(range(40)))
    backwards = process(logits[order], [rows[at] for at in order])
    for at in range(40):
        alone = logits[at : at + 1].clone()
        assert torch.equal(process(alone, [rows[at]])[0], together[at])
        assert torch.equal(backwards[39 - at], together[at])
        assert sampler.sample(alone, [rows[at]]) == [ids[at]]
        assert sampler.logprobs(alone, [ids[at]], [at % 4]) == [entries[at]]


def test_broken_rows_are_none_and_harm_nobody():
    logits = torch.randn(4, 50)
    clean = sampler.sample(logits, [row(at) for at in range(4)])
    logits[1, 7], logits[2, 3] = math.nan, math.inf
    ids = sampler.sample(logits, [row(at) for at in range(4)])
    assert ids == [clean[0], None, None, clean[3]]
    entries = sampler.logprobs(logits, [0] * 4, [2] * 4)
    assert entries[1] is None and entries[2] is None and entries[0] and entries[3]
    nothing = [row(forbidden=tuple(range(50))), row(forbidden=tuple(range(50)), temperature=0)]
    assert sampler.sample(torch.zeros(2, 50), nothing) == [None, None]


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    [entry] = sampler.logprobs(logits, [3], [3])
    expected = torch.log_softmax(logits.double(), -1)[0]
    assert entry.token_id == 3 and entry.logprob == pytest.approx(expected[3].item(), abs=1e-9)
    assert [token for token, _ in entry.top] == [0, 1, 2], "best first, lower id on ties"
    assert [value for _, value in entry.top] == pytest.approx(expected[:3].tolist(), abs=1e-9)
    [none] = sampler.logprobs(logits, [0], [0])
    assert none.top == ()
    [everything] = sampler.logprobs(logits, [0], [99])
    assert len(everything.top) == 4


def test_a_logprob_is_zero_only_for_certainty():
    sure, nearly = torch.tensor([[900.0, 0.0]]), torch.tensor([[20.0, 0.0]])
    assert sampler.logprobs(sure, [0], [0])[0].logprob == 0.0
    assert -1e-8 < sampler.logprobs(nearly, [0], [0])[0].logprob < 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_the_bits_of_the_host():
    logits = torch.randn(40, 3001) * 3
    rows = [row(at, seed=at % 3, **MIX[at % len(MIX)]) for at in range(40)]
    streams = [rng.key(one.seed, one.position) for one in rows]
    there = rng.gumbel_rows(streams, 3001, "cuda").cpu()
    assert torch.equal(there, rng.gumbel_rows(streams, 3001, "cpu"))
    assert torch.equal(process(logits.cuda(), rows).cpu(), process(logits, rows))
    ids = sampler.sample(logits, rows)
    assert sampler.sample(logits.cuda(), rows) == ids
    assert sampler.logprobs(logits.cuda(), ids, [5] * 40) == sampler.logprobs(logits, ids, [5] * 40)
