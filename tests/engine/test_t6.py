"""The whole engine on the tiny checkpoint T6: text in, text out, whatever runs beside it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import CapacityError, DeepinferError, UsageError
from tests import t6
from tests.engine.fakes import idle

PAGE = t6.PAGE_TOKENS
SMALL = dict(page_tokens=PAGE, max_num_seqs=6, accelerator="cpu", verify="coupled")


@pytest.fixture(scope="module", params=["float", "quantised"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("t6") / request.param
    return t6.write(path, quantised=request.param == "quantised")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm
        assert idle(llm)


def sampled(seed: int, **more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": seed, **more})


def prompt(length: int, start: int = 20) -> list[int]:
    return [11 + (start * 7 + at * at) % 256 for at in range(length)]


def test_text_in_text_out(llm):
    [result] = llm.generate("hello", sampled(1))
    assert result.usage.prompt_tokens == 6, "one BOS and five bytes"
    assert len(result.token_ids) == 12 and result.text == llm.parts.tokenizer.decode(
        result.token_ids
    )
    deltas = list(llm.stream("hello", sampled(1)))
    assert "".join(delta.text for delta in deltas) == result.text
    assert result.seed == 1 and result.replay == "compact"
    drafts = result.speculation
    assert drafts["steps"] + drafts["accepted"] == 11, "the first token comes from the prompt"
    [by_ids] = llm.generate([[0, *t6.ids("hello")]], sampled(1))
    assert by_ids.token_ids == result.token_ids, "ids are used as given"


def test_greedy_logprobs_are_those_of_a_plain_forward(llm):
    """DI-23: every decode step against one run of the whole sequence, bit for bit."""
    ids = prompt(21)
    [result] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=9, logprobs=5,
                                                  prompt_logprobs=0, ignore_eos=True))  # fmt: skip
    rows = llm.logits([*ids, *result.token_ids])
    norm = rows.double().log_softmax(-1)
    for at, entry in enumerate(result.logprobs):
        row = norm[len(ids) - 1 + at]
        assert entry.token_id == int(row.argmax())
        assert entry.logprob == pytest.approx(row.max().item(), abs=1e-9)
        best = row.topk(5).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-9)
    for at, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry.logprob == pytest.approx(norm[at, ids[at + 1]].item(), abs=1e-9)


def test_context_limit(folder):
    """DI-23: the limit is never exceeded, and the last token before it is like any other."""
    ids = prompt(10)
    with LLM(folder, max_model_len=32, **SMALL) as llm:
        [short] = llm.generate([ids], sampled(3, max_tokens=20, logprobs=5))
        [long] = llm.generate([ids], sampled(3, max_tokens=40, logprobs=5))
        [full] = llm.generate([prompt(32)], sampled(3))
    assert len(short.token_ids) == 20 and len(long.token_ids) == 22
    assert long.token_ids[:20] == short.token_ids and long.logprobs[:20] == short.logprobs
    assert long.finish_reason == "length" and full.error.code == "prompt-too-long"


def test_seeds_do_not_depend_on_neighbours(llm):
    """DI-19."""
    ids, mine = prompt(17), sampled(7)
    [alone] = llm.generate([ids], mine)
    neighbours = [prompt(5), prompt(30), prompt(12)]
    free = SamplingParams(max_tokens=14, ignore_eos=True)
    first = llm.generate([ids, *neighbours], [mine, free, free, free])[0]
    last = llm.generate([*neighbours, ids], [free, free, free, mine])[-1]
    assert alone.token_ids == first.token_ids == last.token_ids
    [other] = llm.generate([ids], sampled(8))
    one, two = llm.generate([ids, ids], free)
    assert other.token_ids != alone.token_ids and one.token_ids != two.token_ids


def test_the_schedule_shows_nowhere(folder, llm):
    """Chunks, budgets, preemption and slot reuse: the same bits, logits included."""
    prompts = [prompt(n) for n in (1, 2, 19, 38)]
    params = sampled(5, logprobs=2, max_tokens=6)
    expected = llm.generate(prompts, params)
    rows = llm.logits(prompts[-1])
    for sizes in (
        dict(prefill_chunk=7),
        dict(max_num_batched_tokens=8),
        dict(max_num_seqs=1, prefill_chunk=3),
        dict(kv_cache_tokens=64),
    ):
        with LLM(folder, **{**SMALL, **sizes}) as other:
            got = other.generate(prompts, params)
            assert [r.token_ids for r in got] == [r.token_ids for r in expected], sizes
            assert [r.logprobs for r in got] == [r.logprobs for r in expected], sizes
            assert torch.equal(other.logits(prompts[-1]), rows), sizes
            assert idle(other)


def test_preempted_requests_go_on_where_they_were(folder, llm):
    """DI-32 and DI-09 (c), truncation and speculation off."""
    prompts = [prompt(24, start) for start in range(4)]
    params = sampled(2, max_tokens=16, logprobs=0, min_tokens=14, presence_penalty=0.5)
    expected = llm.generate(prompts, params)
    with LLM(folder, **SMALL, kv_cache_tokens=24 * PAGE) as small:
        got = small.generate(prompts, params)
        assert sum(r.usage.recomputed_tokens for r in got) > 0 and idle(small)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert [r.logprobs for r in got] == [r.logprobs for r in expected]


def test_nan_stays_where_it_is(folder, llm):
    """DI-38: in the logits of one request, and in storage that nobody owns."""
    prompts, params = [prompt(n) for n in (9, 14, 11, 20)], sampled(4, max_tokens=6)
    clean = llm.generate(prompts, params)
    with LLM(folder, **SMALL) as other:
        other.parts.runner.pools.poison()
        got = other.generate(prompts, params)
        assert [r.token_ids for r in got] == [r.token_ids for r in clean]
        forward, steps = other.parts.runner.forward, []

        def hooked(plan, live=None):
            logits = forward(plan, live).clone()
            steps.append(plan)
            if len(steps) == 3:
                logits[live.offsets[2], 5] = math.nan
            return logits

        other.parts.runner.forward = hooked
        got = other.generate(prompts, params)
        assert got[2].error.code == "numeric-error" and got[2].finish_reason == "error"
        assert got[2].token_ids == clean[2].token_ids[:2]
        for at in (0, 1, 3):
            assert got[at].token_ids == clean[at].token_ids
        assert idle(other)


def test_bad_members(llm):
    """DI-35."""
    ids, params = prompt(8), SamplingParams(seq_seed=1, max_tokens=4)
    results = llm.generate([ids, "", prompt(5000), ids, "   "], params)
    assert [r.error.code if r.error else None for r in results] == [
        None, "prompt-empty", "prompt-too-long", None, None,
    ]  # fmt: skip
    [alone] = llm.generate([ids], params)
    assert results[0].token_ids == results[3].token_ids == alone.token_ids
    with pytest.raises(UsageError):
        llm.generate([ids] * 5, [params] * 3)


def test_requests_that_cannot_fit(folder):
    """DI-31."""
    sizes = [(200, 10), (60, 10), (20, 5), (40, 5), (40, 5)]
    with LLM(folder, kv_cache_tokens=64, **SMALL) as llm:
        results = llm.generate(
            [prompt(n) for n, _ in sizes], [sampled(1, max_tokens=new) for _, new in sizes]
        )
        assert idle(llm)
    assert [r.error.code if r.error else None for r in results] == [
        "kv-too-small", "kv-too-small", None, None, None,
    ]  # fmt: skip
    assert "capacity 64" in results[0].error.message
    assert sum(r.usage.computed_tokens + r.usage.recomputed_tokens for r in results) <= 200


def test_sizes_that_do_not_fit_are_refused(folder):
    with pytest.raises(CapacityError) as caught:
        LLM(folder, kv_cache_tokens=10**15, **SMALL)
    error = caught.value
    assert error.code == "kv-too-small" and error.exit_status == 5
    assert "1,000,000,000,000,000 tokens do not fit" in error.message
    assert "free after weights" in error.facts[0] and error.hint.startswith("--kv-cache-tokens")
    for bad in (dict(page_tokens=3), dict(max_model_len=10**6), dict(nonsense=1)):
        with pytest.raises(UsageError):
            LLM(folder, **{**SMALL, **bad})


def test_a_checkpoint_without_a_tokenizer_takes_ids(tmp_path):
    with LLM(t6.write(tmp_path / "m", tokenizer=False), **SMALL) as llm:
        text, ids = llm.generate(["hello", prompt(4)], sampled(1, max_tokens=3))
    assert text.error.code == "no-tokenizer"
    assert ids.text == "" and len(ids.token_ids) == 3 and ids.error is None


def test_results_carry_their_settings(folder):
    with LLM(folder, **SMALL) as llm:
        [result] = llm.generate([prompt(3)], sampled(1, max_tokens=1))
    entry = result.settings["DEEPINFER_PAGE_TOKENS"]
    assert entry["value"] == PAGE and entry["source"] == "argument"
    assert result.as_json()["settings"]["max_num_seqs"]["value"] == 6


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(DeepinferError) as caught:
        LLM(tmp_path / "nothing")
    assert caught.value.code == "model-dir-missing"


def test_the_example_runs(tmp_path):
    """DEEPINFER_HF_MODEL_DIR=DIR python examples/offline_inference.py"""
    root = Path(__file__).parents[2]
    folder = t6.write(tmp_path / "m")
    environment = {
        "DEEPINFER_HF_MODEL_DIR": str(folder), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8", "PATH": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, root / "examples" / "offline_inference.py"],
        env=environment, cwd=tmp_path, capture_output=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stdout.count(b"--- ") == 3 and b"def fibonacci(n):" in done.stdout


def test_overlap_is_taken_where_steps_run_beside_the_host(tmp_path):
    """On a cpu to queue a step is to run it: the plain loop, unless somebody asks."""
    folder = t6.write(tmp_path / "m")
    for asked, taken in (({}, False), ({"overlap": True}, True), ({"overlap": False}, False)):
        with LLM(folder, **SMALL, **asked) as llm:
            assert llm.parts.overlap is taken
