"""Simulated acceptance, and random weights in the engine: as asked for, and the same each time."""

import statistics

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.bench import synthetic
from deepinfer.bench.synthetic import Size, simulated
from deepinfer.engine.assembly import assemble
from deepinfer.settings import resolve
from tests import t6

SETTINGS = {"accelerator": "cpu", "max_num_seqs": 8, "max_model_len": 256, "kv_cache_tokens": 2048}
GREEDY = SamplingParams(max_tokens=60, temperature=0, seed=3, ignore_eos=True)
WARM = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """`parts(**settings)` of a small random checkpoint that drafts four tokens."""
    folder = t6.write(tmp_path_factory.mktemp("t6") / "t6")

    def make(**more):
        settings = resolve({**SETTINGS, "mtp": 4, **more, "model_dir": folder}, environ={})
        return assemble(settings, lambda line: None)

    return make


def answers(parts, length, params=GREEDY, prompts=8):
    with LLM.from_parts(simulated(parts, length, 4)) as llm:
        results = llm.generate([[0, 20 + n, 30, 40] for n in range(prompts)], params)
    assert all(len(result.token_ids) == params.max_tokens for result in results)
    return results


def mean_length(results):
    return statistics.mean(result.speculation["accepted_length"] for result in results)


@pytest.mark.parametrize(("rule", "params"), [("coupled", GREEDY), ("rejection", WARM)])
def test_drafts_stand_as_often_as_asked(parts, rule, params):
    """A hundred and sixty steps or more: the mean lies within 0.5 of what was asked for."""
    made = parts(verify=rule)
    for length in (1.0, 3.0, 5.0):
        found = mean_length(answers(made, length, params))
        assert abs(found - length) < 0.5, (length, found)


def test_the_draw_is_seeded(parts):
    made = parts(verify="coupled")
    once, again = (answers(made, 3.0) for _ in range(2))
    assert [r.token_ids for r in once] == [r.token_ids for r in again]
    assert [r.speculation for r in once] == [r.speculation for r in again]
    assert len({r.speculation["steps"] for r in once}) > 1


def test_confidences_tell_the_chance(parts):
    """So that a budget of rows rests on what will happen."""
    chance = synthetic.chance_of(3.0, 4)
    made = parts(mtp_varlen=True, verify="coupled", mtp_temperature=(2.0,))
    with LLM.from_parts(simulated(made, 3.0, 4)) as llm:
        _, steps = llm.trace([[0, 21, 30, 40]], GREEDY)
    full = [step for step in steps if step.useful == 4]
    assert full
    for step in full:
        assert step.survival == pytest.approx([chance ** (j + 1) for j in range(4)], rel=1e-5)


def test_without_drafts_there_is_nothing_to_simulate(parts):
    plain = parts(mtp=0)
    assert simulated(plain, 3.0, 4) is plain


def test_random_weights_give_finite_and_equal_answers_twice():
    found = []
    for _ in range(2):
        settings = resolve({**SETTINGS, "mtp": 0}, environ={})
        parts = synthetic.parts(settings, Size(), lambda line: None)
        with LLM.from_parts(parts) as llm:
            found.append(llm.logits([0, *range(20, 28)]))
    assert found[0].isfinite().all() and torch.equal(*found)
    assert found[0].std() > 0.1
