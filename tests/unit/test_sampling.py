"""Logits to ids: each processing step, exact arithmetic, the law of the draws, row independence."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer.core.request import SamplingParams  # noqa: E402
from deepinfer.core.step import Likelihoods  # noqa: E402
from deepinfer.device.sync import no_sync  # noqa: E402
from deepinfer.ops.torch import sampling as reference  # noqa: E402
from deepinfer.ops.torch.sampling import gumbel  # noqa: E402
from deepinfer.sampling import logits as logits_module  # noqa: E402
from deepinfer.sampling import rng, sampler  # noqa: E402
from deepinfer.sampling.logits import (  # noqa: E402
    WHOLE,
    Row,
    Rows,
    exp,
    log_normaliser,
    masses,
    process,
    reach,
)


def row(position: int = 5, seed: int = 7, *, forbidden=(), seen=(), counts=None, **params) -> Row:
    return Row(SamplingParams(**params), seed, position, forbidden, seen, counts or {})


def columns(rows) -> Rows:
    return Rows.of(rows, "cpu")


def processed(values, one: Row) -> list[float]:
    return process(torch.tensor([values], dtype=torch.float32), columns([one]))[0].tolist()


def sample(logits, rows) -> list[int]:
    return sampler.sample(logits, Rows.of(rows, logits.device)).tolist()


def logprobs(logits, targets, tops):
    """Computed by one batch operation on the device, made into records on the host."""
    targets, device = list(targets), logits.device
    asked = torch.tensor(targets, device=device), max(tops)
    with no_sync("cpu"):
        made = sampler.likelihoods(logits, torch.arange(len(targets), device=device), *asked)
    held = Likelihoods(**{name: x.cpu().numpy() for name, x in made.items()})
    return [sampler.logprobs(held, at, targets[at : at + 1], top)[0] for at, top in enumerate(tops)]


def kept(values, **params) -> list[int]:
    return [at for at, x in enumerate(processed(values, row(**params))) if x > -math.inf]


def test_exponential_and_normaliser_are_accurate():
    x = 60 - torch.rand(20_000, dtype=torch.float64) * 760
    assert ((exp(x) - x.exp()).abs() <= 1e-14 * x.exp() + 1e-300).all()
    assert exp(torch.tensor([0.0, -math.inf], dtype=torch.float64)).tolist() == [1.0, exp_of(-700)]
    logits = torch.randn(50, 4096, dtype=torch.float64) * 8
    ours = [log_normaliser(*row) for row in zip(*(x.tolist() for x in masses(logits)), strict=True)]
    ours = torch.tensor(ours, dtype=torch.float64)
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
        got = torch.isfinite(process(torch.tensor(logits), columns([Row(p, 0, 0) for p in chosen])))
        for x, params, mask in zip(logits.astype(np.float64), chosen, got.numpy(), strict=True):
            order = np.argsort(-x, kind="stable")[: params.top_k or vocab]
            share = np.exp(x[order]) / np.exp(x[order]).sum()
            stay = order[np.cumsum(share) - share < params.top_p - 1e-12]
            assert set(np.flatnonzero(mask)) == set(stay if params.top_p < 1 else order)


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, 0.0]])
    assert sample(logits, [row(temperature=0)] * 2) == [1, 0]
    assert sample(logits[:1], [row(temperature=0, logit_bias={2: 1.0})]) == [2]


def test_a_draw_is_the_largest_logit_plus_noise():
    logits = torch.randn(6, 500) * 2
    rows = [row(position, seed=position * 11) for position in range(6)]
    ids = sample(logits, rows)
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
    ids = sample(logits, [Row(shared, seed, 3) for seed in range(count)])
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
    together = process(logits, columns(rows))
    ids = sample(logits, rows)
    entries = logprobs(logits, ids, [at % 4 for at in range(40)])
    order = list(reversed(range(40)))
    backwards = process(logits[order], columns([rows[at] for at in order]))
    for at in range(40):
        alone = logits[at : at + 1].clone()
        assert torch.equal(process(alone, columns([rows[at]]))[0], together[at])
        assert torch.equal(backwards[39 - at], together[at])
        assert sample(alone, [rows[at]]) == [ids[at]]
        assert logprobs(alone, [ids[at]], [at % 4]) == [entries[at]]


def test_broken_rows_are_minus_one_and_harm_nobody():
    logits = torch.randn(4, 50)
    clean = sample(logits, [row(at) for at in range(4)])
    logits[1, 7], logits[2, 3] = math.nan, math.inf
    ids = sample(logits, [row(at) for at in range(4)])
    assert ids == [clean[0], -1, -1, clean[3]]
    entries = logprobs(logits, [0] * 4, [2] * 4)
    assert entries[1] is None and entries[2] is None and entries[0] and entries[3]
    nothing = [row(forbidden=tuple(range(50))), row(forbidden=tuple(range(50)), temperature=0)]
    assert sample(torch.zeros(2, 50), nothing) == [-1, -1]


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    [entry] = logprobs(logits, [3], [3])
    expected = torch.log_softmax(logits.double(), -1)[0]
    assert entry.token_id == 3 and entry.logprob == pytest.approx(expected[3].item(), abs=1e-9)
    assert [token for token, _ in entry.top] == [0, 1, 2], "best first, lower id on ties"
    assert [value for _, value in entry.top] == pytest.approx(expected[:3].tolist(), abs=1e-9)
    [none] = logprobs(logits, [0], [0])
    assert none.top == ()
    [everything] = logprobs(logits, [0], [99])
    assert len(everything.top) == 4


def test_a_logprob_is_zero_only_for_certainty():
    sure, nearly = torch.tensor([[900.0, 0.0]]), torch.tensor([[20.0, 0.0]])
    assert logprobs(sure, [0], [0])[0].logprob == 0.0
    assert -1e-8 < logprobs(nearly, [0], [0])[0].logprob < 0.0


def test_columns_are_the_rows():
    rows = [row(3, seed=2**64 - 1, **MIX[7]), row(4, top_k=10**30, temperature=0.5),
            row(5, temperature=0, top_k=9, min_p=0.5, forbidden=(1,))]  # fmt: skip
    got = columns(rows)
    assert len(got) == 3
    assert got.keys(5).tolist() == [rng.signed(rng.key(one.seed, one.position, 5)) for one in rows]
    assert got.uniform(1).tolist() == [rng.uniform(one.seed, one.position, 1) for one in rows]
    assert got.top_k.tolist() == [3, WHOLE, 9]
    assert got.warm.tolist() == [True, True, False]
    assert (got.drawn, got.floored, dict(got.changed)) == (True, True, {2: rows[2]})
    greedy = columns(rows[2:])
    assert (greedy.drawn, greedy.widest, greedy.floored) == (False, 0, False)
    none = columns([])
    assert len(none) == 0 and not none.drawn
    assert sampler.sample(torch.zeros(0, 5), none).tolist() == []


def test_a_reach_tells_what_the_cuts_keep():
    assert [reach(SamplingParams(**p)) for p in (
        {}, {"top_k": 7}, {"top_k": 7, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 10**30},
        {"top_k": 7, "temperature": 0},
    )] == [0, 7, 7, WHOLE, WHOLE, 0]  # fmt: skip


def test_rows_are_named_by_slice_numbers_or_the_device():
    rows = [row(at, seed=at, **MIX[at]) for at in range(8)]
    for which in (slice(2, 7), slice(6, 99), [7, 0, 6, 6, 3], [], slice(0, 0)):
        names = range(8)[which] if isinstance(which, slice) else which
        got, wanted = columns(rows).at(which), columns([rows[at] for at in names])
        assert torch.equal(got.keys(), wanted.keys())
        assert got.floor.tolist() == wanted.floor.tolist()
        assert got.changed == wanted.changed
    index = torch.tensor([5, 0, 0])
    with pytest.raises(ValueError, match="named by the host"):
        columns(rows).at(index)
    assert columns(rows[:6]).at(index).position.tolist() == [5, 0, 0]


CUTS = [dict(top_k=500, top_p=0.99), dict(top_k=300), dict(top_p=0.2), dict(top_k=300, top_p=0.3)]


def test_one_look_at_all_tokens_is_the_short_look(monkeypatch):
    """A device is not asked whether a nucleus is wide: it sorts what may count."""
    mix = [*MIX, *CUTS]
    for vocab, scale in ((40, 3.0), (3001, 3.0), (3001, 0.1), (700, 6.0)):
        logits = (torch.randn(36, vocab) * scale).round(decimals=1)
        rows = [row(at, seed=at, **mix[at % len(mix)]) for at in range(36)]
        alone = [process(logits[at][None], columns([rows[at]])) for at in range(36)]
        monkeypatch.setattr(logits_module, "_readable", lambda x: False)
        assert torch.equal(process(logits, columns(rows)), torch.cat(alone))
        monkeypatch.undo()


def test_rows_that_are_not_cut_stay_whole_beside_others():
    cold = dict(temperature=0, top_k=2, top_p=0.5, min_p=0.9)
    logits = torch.randn(4, 700)
    rows = [row(top_k=3), row(), row(**cold), row(temperature=0.5, min_p=0.01)]
    got = process(logits, columns(rows))
    assert torch.isfinite(got[0]).sum() == 3
    assert torch.equal(got[1:3], logits[1:3].double())
    for at in range(4):
        assert torch.equal(process(logits[at][None], columns([rows[at]]))[0], got[at])


def test_blocks_do_not_show(monkeypatch):
    logits = torch.randn(40, 3001) * 3
    logits[11, 5] = math.nan
    rows = [row(at, seed=at % 3, forbidden=(at,), **MIX[at % len(MIX)]) for at in range(40)]
    assert len(sampler.blocks(logits)) == 1
    together = sample(logits, rows)
    monkeypatch.setattr(reference, "_BLOCK", 7000)
    assert len(sampler.blocks(logits)) == 20
    assert sample(logits, rows) == together and together[11] == -1


def test_choosing_waits_for_no_device(monkeypatch):
    """All but the short look, which is the host's alone."""
    monkeypatch.setattr(logits_module, "_readable", lambda x: False)
    logits = torch.randn(40, 300)
    mixes = [
        [row(at, seed=at, forbidden=(1, 2), seen=(1, 2), counts={5: 2}, repetition_penalty=1.1,
             presence_penalty=0.5, **MIX[at % len(MIX)]) for at in range(40)],
        [row(at, temperature=0) for at in range(40)],
        [row(at, **MIX[at % 6]) for at in range(40)],
    ]  # fmt: skip
    with no_sync("cpu"):
        for rows in mixes:
            made = columns(rows)
            sampler.sample(logits, made)
        sampler.sample(logits[:3], made.at(torch.arange(3)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_the_bits_of_the_host():
    logits = torch.randn(40, 3001) * 3
    rows = [row(at, seed=at % 3, **MIX[at % len(MIX)]) for at in range(40)]
    here, there = columns(rows), Rows.of(rows, "cuda")
    assert torch.equal(gumbel(there.keys(), 3001).cpu(), gumbel(here.keys(), 3001))
    assert torch.equal(process(logits.cuda(), there).cpu(), process(logits, here))
    ids = sample(logits, rows)
    assert sample(logits.cuda(), rows) == ids
    on_device = logits.cuda()
    with no_sync("cuda"):
        sampler.sample(on_device, there)
        sampler.sample(on_device, Rows.of(rows, "cuda"))
    assert logprobs(logits.cuda(), ids, [5] * 40) == logprobs(logits, ids, [5] * 40)
