"""Traces of the real engine on T6: they tell the whole answer, and are counted and re-scheduled as
the engine did it."""

from __future__ import annotations

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import UsageError
from deepinfer.speculative import acceptance, reschedule
from deepinfer.speculative.trace import Trace, lines
from tests import t6
from tests.engine.fakes import idle

SMALL = dict(page_tokens=t6.PAGE_TOKENS, accelerator="cpu", on_warning=print)
PROMPTS = [t6.prompt(5), t6.prompt(30, 3), t6.prompt(12, 9), t6.prompt(7, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("t6") / "float", quantised=False)


def params(**more):
    """Answers of several lengths, so that requests come and go."""
    common = {"ignore_eos": True, "temperature": 0.0, **more}
    return [SamplingParams(max_tokens=6 + 4 * at, **common) for at in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "settings", [{"mtp": 3, "mtp_threshold": 0.2}, {"mtp_varlen": True, "max_num_seqs": 3}], ids=str
)
def test_a_trace_tells_the_whole_answer(folder, settings):
    with LLM(folder, **SMALL, **settings) as llm:
        results, steps = llm.trace(PROMPTS, params())
        assert idle(llm)
        plain = llm.generate(PROMPTS, params())
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    answers = [(r.usage.prompt_tokens, r.token_ids) for r in results]
    found, _ = lines(steps, answers, lambda token: b"%d " % token)
    for seq, result in enumerate(results):
        mine = [line for line in found if line.step.seq == seq]
        told = [result.token_ids[0]]
        for line in mine:
            step = line.step
            assert step.pos == len(PROMPTS[seq]) + len(told)
            told += step.draft_ids[: step.accepted]
            told += [] if step.target_id is None else [step.target_id]
            assert step.committed == step.accepted + (step.target_id is not None)
        assert tuple(told) == result.token_ids
        made = [line.step for line in mine]
        assert result.speculation == {
            "steps": len(made), "drafted": sum(len(s.draft_ids) for s in made),
            "verified": sum(s.verified for s in made), "accepted": sum(s.accepted for s in made),
            "accepted_length": sum(s.committed for s in made) / len(made),
        }  # fmt: skip
    header = {"sequences": [{}] * len(results), "speculation": {"mtp": 5}}
    assert acceptance.summary(Trace(header, found))["steps"] == len(steps)


@pytest.mark.parametrize("seqs", [2, 256])
def test_the_live_curve_gives_the_live_choices(folder, seqs):
    with LLM(folder, mtp_varlen=True, max_num_seqs=seqs, **SMALL) as llm:
        times = llm.parts.times
        for rows in range(1, 40):
            for again in range(6):
                times.observe(rows, 1, 0.02 + 0.002 * max(0, rows - 5) + again / 1e5, 0.001)
        times.observe = lambda *measured: None
        _, steps = llm.trace(PROMPTS, params())
    found = reschedule.reschedule(steps, reschedule.Curve("live", times, times.noise, times.knows))
    assert {c.step for c in found} == {s.step for s in steps if s.draft_ids}
    # Who has ended is reckoned with for one more step, of which the trace knows nothing.
    late = {max(s.step for s in steps if s.seq == seq) + 1 for seq in range(len(PROMPTS))}
    found = [choice for choice in found if choice.step not in late]
    assert len(found) > 10
    budgets = {s.step: s.budget for s in steps if s.draft_ids and s.step not in late}
    assert {c.step: c.budget for c in found} == budgets
    for choice in found:
        together = {s.seq: s.split for s in steps if s.step == choice.step and s.draft_ids}
        assert choice.splits == together


def test_nothing_to_trace(folder):
    with LLM(folder, mtp=0, **SMALL) as llm, pytest.raises(UsageError, match="drafts nothing"):
        llm.trace(PROMPTS)
