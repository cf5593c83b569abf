"""Drift: the figures themselves, and that nothing but the truncation can move them."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.core.step import Likelihoods
from deepinfer.replay import drift
from deepinfer.replay.drift import Trial, compare, joined
from deepinfer.sampling.sampler import likelihoods, logprobs
from tests import t6

DECODER_LAYERS, WINDOW = 3, 16
EXACT = 1 + (WINDOW - 1) * DECODER_LAYERS  # the keep from which on the last row is exact


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = t6.write(tmp_path_factory.mktemp("t6") / "m")
    more = dict(page_tokens=t6.PAGE_TOKENS, max_num_seqs=4, kv_cache_tokens=512)
    with LLM(folder, accelerator="cpu", max_model_len=256, **more) as engine:
        yield engine


@pytest.fixture
def trial(llm):
    return Trial(llm.parts.runner, llm.parts.sizes)


def prompt(length: int, start: int = 0) -> list[int]:
    return [11 + (start * 31 + at * at * 7 + at) % 256 for at in range(length)]


def test_compare_by_hand():
    full = torch.tensor([[0.0, math.log(3)], [5.0, 1.0]])
    cut = torch.tensor([[0.0, 0.0], [5.0, 1.0]])
    found = compare(full, cut)
    assert found.rows == 2
    assert found.max_abs_dlogit == pytest.approx(math.log(3))
    # 1/4 log(1/4 / 1/2) + 3/4 log(3/4 / 1/2), and a row without a difference
    assert found.kl == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
    assert found.top1_agreement == 0.5  # a tie goes to the lower id
    assert compare(full, full) == drift.Drift(2, 0.0, 0.0, 1.0)
    # The other direction is another number; a constant added to a row is none.
    assert compare(cut, full).kl != pytest.approx(found.kl)
    assert compare(full, full + 3.0).kl == pytest.approx(0.0, abs=1e-12)


def test_parts_join_by_rows():
    full, cut = torch.randn(7, 9), torch.randn(7, 9)
    whole = compare(full, cut)
    parts = joined([compare(full[:2], cut[:2]), compare(full[2:], cut[2:])])
    assert parts.rows == 7 and parts.max_abs_dlogit == whole.max_abs_dlogit
    assert parts.kl == pytest.approx(whole.kl)
    assert parts.top1_agreement == pytest.approx(whole.top1_agreement)


def test_greedy_tokens_are_the_engine_s(llm, trial):
    prompts = [prompt(40), prompt(61, 1), prompt(1, 2)]
    answers, logits = trial.greedy(prompts, 9)
    for at, ids in enumerate(prompts):
        rows = llm.logits([*ids, *answers[at]])[len(ids) - 1 : -1]
        assert torch.equal(rows, logits[at]), at
        assert rows.argmax(-1).tolist() == answers[at]


def test_forced_rows_are_those_that_were_decoded(trial):
    """One pass over prompt and answer gives the bits of prefill and decode steps, cut or not."""
    prompts = [prompt(61), prompt(90, 1), prompt(5, 2)]
    for keep in (None, t6.KEEP):
        answers, logits = trial.greedy(prompts, 7, keep)
        for a, b in zip(logits, trial.forced(prompts, answers, keep), strict=True):
            assert torch.equal(a, b)
    lengths = [answer[:size] for answer, size in zip(answers, (1, 7, 3), strict=True)]
    short = trial.forced(prompts, lengths, t6.KEEP)
    assert [len(rows) for rows in short] == [1, 7, 3]
    for a, b in zip(logits, short, strict=True):
        assert torch.equal(a[: len(b)], b)


def test_drift_of_a_cut_prompt(llm):
    prompts = [prompt(120, at) for at in range(3)]
    runner, sizes = llm.parts.runner, llm.parts.sizes
    found = drift.drift(runner, sizes, prompts, [t6.KEEP, EXACT, 120, 500], tokens=6)
    assert {part.rows for part in found.values()} == {18}
    assert found[t6.KEEP].max_abs_dlogit > 0 and found[t6.KEEP].kl > 0
    assert found[120] == found[500] == drift.Drift(18, 0.0, 0.0, 1.0)
    assert found[EXACT].kl < found[t6.KEEP].kl
    # Its whole window halo is kept: the last row of the prompt is exact, those behind it are not.
    first = drift.drift(runner, sizes, prompts, [EXACT - 1, EXACT], tokens=1)
    assert first[EXACT] == drift.Drift(3, 0.0, 0.0, 1.0)
    assert first[EXACT - 1].max_abs_dlogit > 0


def test_the_cut_is_the_engine_s(tmp_path, trial):
    """Forced rows of a keep are those of an engine with that setting, to the bit."""
    ids = prompt(90, 3)
    asked = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    folder = t6.write(tmp_path / "m")
    with LLM(folder, accelerator="cpu", swa_keep=t6.KEEP, page_tokens=t6.PAGE_TOKENS) as engine:
        [result] = engine.generate([ids], asked)
    [rows] = trial.forced([ids], [result.token_ids], t6.KEEP)
    targets = torch.tensor(result.token_ids)
    held = Likelihoods(**likelihoods(rows, torch.arange(6), targets, 1))
    assert result.logprobs == tuple(logprobs(held, 0, result.token_ids, 1))


def test_groups_fit_and_keep_the_order(trial):
    prompts = [prompt(length) for length in (10, 100, 250, 250, 10, 10, 10, 10, 10)]
    groups = trial.groups(prompts, 6)
    assert [ids for group in groups for ids in group] == prompts
    # 512 tokens in pages of 4, at most 4 requests
    assert [len(group) for group in groups] == [3, 4, 2]
