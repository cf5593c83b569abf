"""Batch-invariant mode on T6: kept over batch, order, budget and chunks, refused by name."""

from __future__ import annotations

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import UsageError
from tests import t6
from tests.engine.fakes import idle

PROMISE = dict(batch_invariant=True, page_tokens=t6.PAGE_TOKENS, accelerator="cpu")


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("t6") / "m")


def bits(results):
    assert all(r.batch_invariant and r.error is None for r in results)
    return [(r.token_ids, r.logprobs) for r in results]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_di_36_twenty_prompts(tmp_path, dtype):
    """Alone, together and reversed in budgets of 8, 16 and 64 rows; three times in the last."""
    folder = t6.write(tmp_path / "m", dtype="float32" if dtype == "fp32" else "bfloat16")
    prompts = [t6.prompt(1 + n * 7 % 13 + (24 if n % 10 == 3 else 0), n) for n in range(20)]
    asked = [
        SamplingParams(max_tokens=3, temperature=n % 2, seq_seed=n, ignore_eos=True, logprobs=2)
        for n in range(20)
    ]
    sizes = {**PROMISE, "dtype": dtype, "swa_keep": 20, "max_num_seqs": 20, "mtp": 0}
    with LLM(folder, **sizes, prefix_cache=False) as llm:
        alone = [bits(llm.generate([p], a))[0] for p, a in zip(prompts, asked, strict=True)]
    for budget in (8, 16, 64):
        with LLM(folder, **sizes, max_num_batched_tokens=budget) as llm:
            for turn in (1, -1, 1, 1) if budget == 64 else (1, -1):
                got = bits(llm.generate(prompts[::turn], asked[::turn]))
                assert got == alone[::turn], (budget, turn)
            assert idle(llm)


def test_di_36_the_result_says_whether_the_promise_was_active(floats):
    ids = [t6.prompt(5)]
    with LLM(floats, page_tokens=4, accelerator="cpu") as llm:
        [result] = llm.generate(ids, SamplingParams(max_tokens=1))
        assert result.batch_invariant is False and result.as_json()["batch_invariant"] is False
    with LLM(floats, **PROMISE) as llm:
        [result] = llm.generate(ids, SamplingParams(max_tokens=1))
        assert result.as_json()["batch_invariant"] is True
        assert result.settings["DEEPINFER_VERIFY"]["value"] == "coupled"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(verify="rejection"), "--verify rejection"),
        (dict(encoder_replay=True), "--encoder-replay"),
        (dict(backend={"linear": "nothing"}), "nothing"),
    ],
)
def test_di_36_what_breaks_the_promise_is_refused_by_name(floats, more, words):
    with pytest.raises(UsageError, match=words) as caught:
        LLM(floats, **PROMISE, **more)
    assert caught.value.hint


def test_preemption_keeps_the_promise(floats):
    """Also with truncation on."""
    prompts = [t6.prompt(40 + n, n) for n in range(3)]
    asked = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
    sizes = {**PROMISE, "swa_keep": t6.KEEP, "max_num_seqs": 4, "mtp": 0}
    with LLM(floats, **sizes, prefix_cache=False) as llm:
        alone = [bits(llm.generate([ids], asked))[0] for ids in prompts]
    with LLM(floats, **sizes, kv_cache_tokens=100) as llm:
        results = llm.generate(prompts, asked)
        assert sum(r.usage.recomputed_tokens for r in results) > 0
        assert bits(results) == alone


def test_di_38_nan_leaves_the_bits_of_the_others(floats):
    """In the logits of one request at its third step, and in storage that nobody owns."""
    prompts = [t6.prompt(n, n) for n in (9, 14, 11, 20)]
    asked = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
    seen, victim = [], []
    with LLM(floats, **PROMISE, mtp=0) as llm:
        runner = llm.parts.runner
        plain = runner.ops.linear_f32

        def head(x, weight):
            logits = plain(x, weight)
            if weight is runner.model.head:
                seen.append(x)
                for row in victim:  # the row is known by its bits: they are those it has alone
                    logits[(x == row).all(-1)] = torch.nan
            return logits

        runner.ops.linear_f32 = head
        clean = llm.generate(prompts, asked)
        seen.clear()
        llm.generate(prompts[1:2], asked)
        victim.append(seen[2][-1])
        got = llm.generate(prompts, asked)
        assert got[1].error.code == "numeric-error"
        assert got[1].token_ids == clean[1].token_ids[:2]
        assert [bits([got[n]]) for n in (0, 2, 3)] == [bits([clean[n]]) for n in (0, 2, 3)]
        victim.clear()
        assert bits(llm.generate(prompts, asked)) == bits(clean)
        assert idle(llm)
    with LLM(floats, **PROMISE, mtp=0) as llm:
        llm.parts.runner.pools.poison()
        assert bits(llm.generate(prompts, asked)) == bits(clean)
