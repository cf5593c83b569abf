"""The loop over a scripted model: stops, counters, shapes of calls, seeds, broken numbers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.core.request import SamplingParams
from deepinfer.engine.engine import LLM
from deepinfer.errors import UsageError
from deepinfer.sampling import sampler
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests.engine.fakes import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    byte_tokenizer,
    engine,
    hashed,
    idle,
    one_hot,
    says,
    tokenizer_json,
)

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0, **params)


def run(script, prompt=(1, 2), params=GREEDY, **parts):
    llm = engine(script, **parts)
    [result] = llm.generate([list(prompt)], params)
    assert idle(llm)
    deltas = list(llm.stream([list(prompt)], params))
    assert idle(llm)
    joined = "".join(delta.text for delta in deltas)
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    assert (joined, ids) == (result.text, result.token_ids), "a stream says what a result says"
    assert deltas[-1].result.finish_reason == result.finish_reason
    assert all(delta.result is None for delta in deltas[:-1])
    return result


# DI-20: stop strings and the token cap


@pytest.mark.parametrize(
    ("answer", "limit", "reason", "count"),
    [
        (b"ab##cde", 100, "stop", 4),  # (a), and (c): '#' + '#' in two tokens and steps
        (b"ab##cde", 4, "stop", 4),  # (b): the stop string is complete at the cap
        (b"ab##cde", 2, "length", 2),  # (d)
        (b"ab##cde", 3, "length", 3),  # the half stop string is text after all
    ],
)
def test_stop_string_and_cap(tokenizer, answer, limit, reason, count):
    result = run(
        says(*answer, start=2), params=greedy(stop="##", max_tokens=limit), tokenizer=tokenizer
    )
    assert result.text == ("ab#" if limit == 3 else "ab")
    assert result.finish_reason == reason
    assert result.usage.completion_tokens == len(result.token_ids) == count


def test_stop_string_inside_one_token(tmp_path):
    """The stop string and what follows come in one token: nothing after it leaks."""
    document = tokenizer_json()
    document["model"]["vocab"]["##c"] = VOCAB
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    result = run(
        says(*b"ab", VOCAB, *b"d", start=2, vocab=VOCAB + 1),
        params=greedy(stop=["##"]),
        tokenizer=Tokenizer(path, BOS),
        vocab=VOCAB + 1,
    )
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert result.token_ids == (*b"ab", VOCAB)


# DI-21: end of sequence and the counters


def test_end_of_sequence(tokenizer):
    script = says(*b"xy", EOS, *b"zw", start=2)
    result = run(script, tokenizer=tokenizer)
    assert result.token_ids == (*b"xy", EOS) and result.text == "xy"
    assert result.finish_reason == "stop" and result.usage.completion_tokens == 3
    result = run(script, params=greedy(ignore_eos=True, max_tokens=4), tokenizer=tokenizer)
    assert result.token_ids == (*b"xy", EOS, *b"z") and result.finish_reason == "length"
    assert result.text == "xyz" and result.usage.reasoning_tokens == 0


def test_stop_ids_end_with_their_id_and_without_their_text(tokenizer):
    script = says(*b"xyz", start=2)
    for params in (greedy(stop_token_ids=[ord("y")]), greedy(stop_token_ids=[ord("y")],
                                                             ignore_eos=True)):  # fmt: skip
        result = run(script, params=params, tokenizer=tokenizer)
        assert (result.text, result.token_ids) == ("x", tuple(b"xy"))
        assert result.finish_reason == "stop"


# DI-22: min_tokens


@pytest.mark.parametrize("extra", [(), (PAD,)])
def test_min_tokens_suppresses_every_end(extra):
    def script(prefix):
        row = one_hot(EOS)
        row[ord("x")] = 5.0
        row[PAD] = 7.0 if extra else 0.0
        return row

    result = run(script, params=greedy(min_tokens=3, stop_token_ids=extra, max_tokens=9))
    assert result.token_ids == (*b"xxx", EOS) and result.finish_reason == "stop"


def test_min_tokens_delays_stop_strings(tokenizer):
    result = run(
        says(*b"#a#b#c", start=2), params=greedy(stop="#", min_tokens=3), tokenizer=tokenizer
    )
    assert result.text == "#a" and result.token_ids == tuple(b"#a#")


def test_max_tokens_zero():
    llm = engine(says(start=2))
    [result] = llm.generate([[1, 2]], SamplingParams(max_tokens=0))
    assert (result.token_ids, result.text, result.finish_reason) == ((), "", "length")
    assert result.error is None and not llm.parts.runner.plans
    [result] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(result.prompt_logprobs) == 3 and result.token_ids == ()
    assert result.usage.computed_tokens == 3 and result.finish_reason == "length"


def test_text_cut_inside_a_character(tokenizer):
    rocket = "中🚀".encode()
    result = run(says(*rocket, start=2), params=greedy(max_tokens=5), tokenizer=tokenizer)
    assert result.text == "中\ufffd"
    assert run(says(*rocket, start=2), tokenizer=tokenizer).text == "中🚀"


# DI-23: log-probabilities


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logprobs_and_the_context_limit(temperature):
    prompt = list(range(10))
    for limit, expected in ((32, 20), (22, 12)):
        llm = engine(hashed, max_model_len=limit)
        params = SamplingParams(
            temperature=temperature, seed=5, logprobs=5, max_tokens=20, ignore_eos=True
        )
        [result] = llm.generate([prompt], params)
        assert result.finish_reason == "length"
        assert len(result.token_ids) == len(result.logprobs) == expected
        for at, entry in enumerate(result.logprobs):
            prefix = tuple(prompt) + result.token_ids[:at]
            norm = math.log(sum(math.exp(x) for x in hashed(prefix).astype(float)))
            assert entry.token_id == result.token_ids[at] and len(entry.top) == 5
            value = float(hashed(prefix)[entry.token_id]) - norm
            assert entry.logprob == pytest.approx(value, abs=1e-6) and entry.logprob < 0
            assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))
        streamed = [e for d in llm.stream([prompt], params) for e in d.logprobs]
        assert tuple(streamed) == result.logprobs


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompt_logprobs(chunk):
    prompt = [5, 9, 9, 200, 31, 7, 0]
    llm = engine(hashed, chunk=chunk)
    asks = SamplingParams(prompt_logprobs=2, max_tokens=3, seed=1)
    first, second = llm.generate([prompt, prompt], [asks, SamplingParams(max_tokens=3, seed=1)])
    assert first.token_ids == second.token_ids and second.prompt_logprobs is None
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 7
    for at in range(1, 7):
        entry = first.prompt_logprobs[at]
        raw = hashed(tuple(prompt[:at])).astype(float)
        value = raw[prompt[at]] - math.log(sum(math.exp(x) for x in raw))
        assert entry.token_id == prompt[at]
        assert entry.logprob == pytest.approx(value, abs=1e-6)
        assert entry.top[0][0] == int(raw.argmax()) and len(entry.top) == 2


# DI-19, DI-37: seeds


def test_a_seeded_request_does_not_see_its_neighbours():
    llm = engine(hashed, max_rows=16)
    mine, prompt = SamplingParams(seed=7, max_tokens=50, ignore_eos=True), [3, 1, 4]
    others = [[2, 7], [1], [8, 2, 8, 1, 8]]
    free = SamplingParams(max_tokens=60, ignore_eos=True)
    [alone] = llm.generate([prompt], mine)
    first = llm.generate([prompt, *others], [mine, free, free, free])[0]
    last = llm.generate([*others, prompt], [free, free, free, mine])[-1]
    assert alone.token_ids == first.token_ids == last.token_ids
    assert len(llm.parts.runner.plans) > 50
    [again] = llm.generate([prompt], mine)
    assert again.token_ids == alone.token_ids and again.seed == 7
    [other] = llm.generate([prompt], SamplingParams(seed=8, max_tokens=50, ignore_eos=True))
    assert other.token_ids != alone.token_ids
    one, two = llm.generate([prompt, prompt], free)
    assert one.token_ids[:50] != two.token_ids[:50] and one.seed != two.seed
    [repeat] = llm.generate(
        [prompt], SamplingParams(seq_seed=two.seed, max_tokens=60, ignore_eos=True)
    )
    assert repeat.token_ids == two.token_ids, "the recorded seed gives the answer again"


COIN = dict(vocab=3, eos=2)


def coin(prefix):
    return [0.0, 0.0, -1e9]


def test_samples_of_one_seed_differ_and_repeat():
    llm = engine(coin, **COIN)
    params = SamplingParams(n=8, seed=1, max_tokens=64)
    results = llm.generate([[0]], params)
    assert [(r.index, r.sample) for r in results] == [(0, k) for k in range(8)]
    assert len({r.token_ids for r in results}) == 8
    assert [r.token_ids for r in engine(coin, slots=3, **COIN).generate([[0]], params)] == [
        r.token_ids for r in results
    ]
    for result in results:  # in any order: each alone, by its recorded seed
        [alone] = llm.generate([[0]], SamplingParams(seq_seed=result.seed, max_tokens=64))
        assert alone.token_ids == result.token_ids


def test_a_broadcast_seed_does_not_correlate_prompts():
    llm = engine(coin, **COIN)
    agree = 0
    for seed in range(2000):
        one, two = llm.generate([[0], [1]], SamplingParams(seed=seed, max_tokens=1))
        agree += one.token_ids == two.token_ids
    assert abs(agree / 2000 - 0.5) < 0.04


def test_explicit_seeds_are_used_as_given():
    llm = engine(hashed)
    given = SamplingParams(seq_seed=99, max_tokens=20)
    one, two = llm.generate([[4, 2], [4, 2]], given)
    assert one.token_ids == two.token_ids and one.seed == two.seed == 99
    one, two = llm.generate([[4, 2]], SamplingParams(n=2, seq_seed=[99, 5], max_tokens=20))
    assert one.token_ids != two.token_ids and (one.seed, two.seed) == (99, 5)


def test_prompts_come_first_then_samples():
    results = engine(coin, **COIN).generate([[0], [1], []], SamplingParams(n=2, max_tokens=2))
    assert [(r.index, r.sample) for r in results] == [(i, k) for i in range(3) for k in range(2)]
    assert [bool(r.error) for r in results] == [False] * 4 + [True] * 2


# DI-35: the shape of a call


def test_bad_members_do_not_harm_the_others(tokenizer):
    llm = engine(hashed, tokenizer=tokenizer, max_model_len=40)
    params = SamplingParams(max_tokens=8, seq_seed=3, ignore_eos=True)
    results = llm.generate(["ok then", "", "x" * 60, "fine", "   "], params)
    codes = [r.error.code if r.error else None for r in results]
    assert codes == [None, "prompt-empty", "prompt-too-long", None, None]
    assert [r.index for r in results] == [0, 1, 2, 3, 4]
    assert [r.finish_reason for r in results] == ["length", "error", "error", "length", "length"]
    assert "61 tokens" in results[2].error.message and "takes 40" in results[2].error.message
    for result, prompt in ((results[0], "ok then"), (results[3], "fine"), (results[4], "   ")):
        [alone] = llm.generate(prompt, params)
        assert alone.token_ids == result.token_ids and len(alone.token_ids) == 8
    assert idle(llm)


def test_wrong_number_of_parameters_is_refused_before_any_work(tokenizer):
    llm = engine(says(start=2), tokenizer=tokenizer)
    with pytest.raises(UsageError, match="3 sampling parameter sets for 5 prompts"):
        llm.generate(["a"] * 5, [GREEDY] * 3)
    for wrong in (None, 5, [None], [["a"]], [[1.5]], {"a": 1}, b"ab"):
        with pytest.raises(UsageError):
            llm.generate(wrong)
    for wrong in ("greedy", [GREEDY, "x"], 5):
        with pytest.raises(UsageError):
            llm.generate(["a", "b"], wrong)
    assert not llm.parts.runner.plans and llm.generate([]) == []


def test_page_aligned_resend_and_the_last_free_token():
    llm = engine(hashed, max_model_len=16, pages=4, page_tokens=4)
    params = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    one, two = [llm.generate([[9] * 8], params)[0] for _ in range(2)]
    assert one.token_ids == two.token_ids and len(one.token_ids) == 5
    [last] = llm.generate([[9] * 15], params)
    assert len(last.token_ids) == 1 and last.finish_reason == "length" and last.error is None
    [full] = llm.generate([[9] * 16], params)
    assert full.error.code == "prompt-too-long"
    [full] = llm.generate([[9] * 16], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert full.error is None and len(full.prompt_logprobs) == 16


def test_foreign_ids_are_errors_of_their_prompt():
    llm = engine(hashed)
    for prompt, params in (
        ([1, VOCAB], GREEDY),
        ([-1], GREEDY),
        ([1], greedy(stop_token_ids=[VOCAB])),
        ([1], greedy(logit_bias={VOCAB: 1.0})),
    ):
        good, bad = llm.generate([[1], prompt], [greedy(max_tokens=1), params])
        assert good.error is None and bad.error.code == "bad-token-id"
        assert bad.finish_reason == "error"


def test_without_a_tokenizer():
    llm = engine(hashed)
    [text] = llm.generate("hello", GREEDY)
    assert text.error.code == "no-tokenizer"
    [stop] = llm.generate([[1]], greedy(stop="x"))
    assert stop.error.code == "no-tokenizer"
    [ids] = llm.generate([1, 2], greedy(max_tokens=2))
    assert ids.text == "" and len(ids.token_ids) == 2


def test_ids_are_used_as_given_and_text_gets_one_bos(tokenizer):
    """DI-41."""
    seen = []

    def script(prefix):
        seen.append(prefix)
        return one_hot(EOS)

    llm = engine(script, tokenizer=tokenizer)
    llm.generate(["ab", "<|bos|>c", [BOS, 7], [7]], greedy(max_tokens=1))
    assert sorted(seen) == sorted([(BOS, *b"ab"), (BOS, *b"<|bos|>c"), (BOS, 7), (7,)])


# DI-31: requests that cannot fit


def test_what_can_never_fit_ends_at_once_and_the_rest_completes():
    llm = engine(hashed, pages=16, page_tokens=4, max_model_len=4096)
    sizes = [(200, 10), (60, 10), (20, 5), (40, 5), (40, 5)]
    results = llm.generate(
        [[1] * prompt for prompt, _ in sizes],
        [SamplingParams(max_tokens=new, seed=1, ignore_eos=True) for _, new in sizes],
    )
    for result, need in zip(results[:2], (209, 69), strict=True):
        assert result.error.code == "kv-too-small" and result.error.exit_status == 5
        assert f"needs {need} tokens" in result.error.message
        assert "capacity 64" in result.error.message
    assert [len(r.token_ids) for r in results[2:]] == [5, 5, 5]
    assert sum(r.usage.computed_tokens + r.usage.recomputed_tokens for r in results) <= 200
    assert idle(llm)


def test_preempted_requests_say_so_and_answer_the_same():
    prompts = [[at] * 20 for at in range(6)]
    params = [
        SamplingParams(max_tokens=30, seed=at, ignore_eos=True, min_tokens=20, logprobs=1,
                       prompt_logprobs=0, presence_penalty=0.5, repetition_penalty=1.2)
        for at in range(6)
    ]  # fmt: skip
    small = engine(hashed, pages=20, page_tokens=4, chunk=7)
    large = engine(hashed)
    tight, roomy = small.generate(prompts, params), large.generate(prompts, params)
    assert sum(r.usage.recomputed_tokens for r in tight) > 0
    assert sum(r.usage.recomputed_tokens for r in roomy) == 0
    for one, two in zip(tight, roomy, strict=True):
        assert one.token_ids == two.token_ids and one.logprobs == two.logprobs
        assert one.prompt_logprobs == two.prompt_logprobs
        assert one.usage.computed_tokens == 20 and one.usage.completion_tokens == 30
    assert idle(small)


# DI-38: broken numbers


def test_a_broken_row_ends_its_request_alone():
    prompts, params = [[at, 1] for at in range(4)], SamplingParams(max_tokens=6, seed=4)
    clean = engine(hashed).generate(prompts, params)
    for bad in (math.nan, math.inf, -math.inf):
        llm = engine(hashed)

        def hook(step, logits, bad=bad):
            if step == 3:
                logits[2, 17] = bad

        llm.parts.runner.hook = hook
        results = llm.generate(prompts, params)
        broken = results[2]
        assert broken.finish_reason == "error" and broken.error.code == "numeric-error"
        assert broken.token_ids == clean[2].token_ids[:2]
        for at in (0, 1, 3):
            assert results[at].token_ids == clean[at].token_ids and results[at].error is None
        assert idle(llm)


def test_a_broken_prompt_row_ends_its_request_alone():
    llm = engine(lambda prefix: [math.nan] * VOCAB if prefix == (5, 6) else hashed(prefix))
    asks = SamplingParams(max_tokens=2, prompt_logprobs=1)
    broken, fine = llm.generate([[5, 6, 7], [8, 9]], asks)
    assert broken.error.code == "numeric-error" and fine.error is None and idle(llm)


# steps and memory


@pytest.mark.parametrize(
    "sizes", [dict(), dict(max_rows=8, chunk=8), dict(chunk=1), dict(slots=1), dict(pages=14)]
)
def test_answers_do_not_depend_on_the_schedule(sizes):
    prompts = [[at] * (3 + 5 * at) for at in range(5)]
    params = SamplingParams(max_tokens=12, seed=6, logprobs=2)
    expected = engine(hashed).generate(prompts, params)
    llm = engine(hashed, **sizes)
    for _ in range(2):
        results = llm.generate(prompts, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        assert [r.logprobs for r in results] == [r.logprobs for r in expected]
        assert idle(llm)


def test_memory_of_a_long_answer():
    """DI-05 with speculation off: what stays constant does, and everything comes back."""
    llm = engine(hashed, pages=100, page_tokens=4)
    slots, pages = set(), []
    for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=300, ignore_eos=True)):
        slots.add(llm._policy.slots_in_use)
        pages.append(llm._policy.blocks.total - llm._policy.blocks.free)
    assert slots == {1} and idle(llm)
    assert max(pages) == 76 and len(pages) == 300
    used_slots = {chunk.slot for plan in llm.parts.runner.plans for chunk in plan.chunks}
    assert len(used_slots) == 1 and idle(llm)


def test_logits_of_every_row():
    llm = engine(hashed, chunk=5, max_rows=5)
    ids = [7, 7, 1, 30, 2, 9, 9, 100]
    rows = llm.logits(ids)
    assert rows.shape == (8, VOCAB) and str(rows.dtype) == "torch.float32"
    for at in range(8):
        assert (rows[at].numpy() == hashed(tuple(ids[: at + 1]))).all()
    for bad in ([], [VOCAB], [1] * 600):
        with pytest.raises(Exception) as caught:
            llm.logits(bad)
        assert caught.value.exit_status in (2, 5)
    assert idle(llm)


PROMPTS_AS_ARRAYS = [
    (lambda a: [a([20]), a([30])], [(20,), (30,)]),
    (lambda a: [a([1, 2]), a([3, 4])], [(1, 2), (3, 4)]),
    (lambda a: a([1, 2]), [(1, 2)]),
    (lambda a: a([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
    (lambda a: [*a([1, 2])], [(1, 2)]),  # a list of single numbers is one prompt
    (lambda a: [[*a([1, 2])], "a"], [(1, 2), None]),
]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
@pytest.mark.parametrize(("make", "expected"), PROMPTS_AS_ARRAYS)
def test_arrays_of_ids_are_prompts(array, make, expected):
    llm = engine(hashed)
    results = llm.generate(make(array), greedy(max_tokens=3))
    assert len(results) == len(expected)
    for result, ids in zip(results, expected, strict=True):
        if ids is not None:
            assert result.token_ids == llm.generate([ids], greedy(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_that_are_no_prompt_are_named(array):
    llm = engine(hashed)
    for wrong in (array(5), array([1.5, 2.5]), [array([[1, 2]])], array([[[1]]]), [[array([1])]]):
        with pytest.raises(UsageError, match="not a prompt"):
            llm.generate(wrong)
    assert llm.generate([array([])])[0].error.code == "prompt-empty"
    assert idle(llm)


def test_a_bias_that_forbids_every_id_is_refused():
    llm = engine(hashed)
    everything = dict.fromkeys(range(VOCAB), -math.inf)
    all_but_eos = {token: value for token, value in everything.items() if token != EOS}
    for params in (
        greedy(logit_bias=everything),
        greedy(logit_bias=all_but_eos, min_tokens=1),
        greedy(logit_bias=all_but_eos, min_tokens=1, ignore_eos=True, stop_token_ids=[EOS]),
    ):
        [result] = llm.generate([[1]], params)
        assert result.error.code == "nothing-to-choose" and result.error.exit_status == 2
    for params in (
        greedy(logit_bias=all_but_eos),
        greedy(logit_bias=all_but_eos, min_tokens=1, max_tokens=1, ignore_eos=True),
    ):
        [result] = llm.generate([[1]], params)
        assert result.error is None and result.token_ids == (EOS,)
    assert llm.generate([[1]], greedy(logit_bias=everything, max_tokens=0))[0].error is None


# closing, aborting, interrupting


def test_closing_a_stream_returns_its_memory():
    llm = engine(hashed)
    deltas = llm.stream([[1], [2]], SamplingParams(max_tokens=50, ignore_eos=True))
    assert idle(llm), "nothing runs before the first delta is asked for"
    for _ in range(5):
        next(deltas)
    assert not idle(llm)
    deltas.close()
    assert idle(llm)


def test_two_calls_at_once():
    llm = engine(hashed, pages=20)
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    [expected] = llm.generate([[1, 2]], params)
    deltas = llm.stream([[1, 2]], params)
    head = [next(deltas) for _ in range(3)]
    [other] = llm.generate([[5, 5]], params)
    rest = list(deltas)
    assert tuple(t for d in head + rest for t in d.token_ids) == expected.token_ids
    assert other.token_ids == llm.generate([[5, 5]], params)[0].token_ids and idle(llm)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_nothing_behind(problem):
    llm = engine(hashed)
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    [expected] = llm.generate([[1, 2]], params)
    deltas = llm.stream([[1, 2]], params)
    head = [next(deltas) for _ in range(2)]
    steps = itertools.count()

    def hook(step, logits):
        if next(steps) == 2:
            raise problem

    llm.parts.runner.hook = hook
    with pytest.raises(problem):
        llm.generate([[3, 4], [5, 6]], params)
    llm.parts.runner.hook = None
    tokens = [t for d in (*head, *deltas) for t in d.token_ids]
    assert tuple(tokens) == expected.token_ids, "the bystander is computed again and goes on"
    assert idle(llm)


def test_close():
    llm = engine(hashed)
    with llm:
        deltas = llm.stream([[1]], SamplingParams(max_tokens=50, ignore_eos=True))
        next(deltas)
        never_begun = llm.stream([[1]])
    with pytest.raises(UsageError, match="closed"):
        next(never_begun)
    assert list(deltas)[-1].result.finish_reason == "abort"
    for call in (lambda: llm.generate([[1]]), lambda: llm.stream([[1]]), lambda: llm.logits([1])):
        with pytest.raises(UsageError, match="closed"):
            call()
    llm.close()


def test_times_count_from_submission():
    ticks = itertools.count(0, 1)
    llm = engine(says(65, 66, start=1), clock=lambda: float(next(ticks)), slots=1)
    first, second = llm.generate([[1], [2]], GREEDY)
    for result in (first, second):
        times = result.timing_ms
        assert 0 < times.queue < times.ttft < times.total
    assert second.timing_ms.queue > first.timing_ms.total - 2000


def test_warnings_reach_the_caller():
    parts = replace(engine(coin, **COIN).parts, warnings=("something odd",))
    lines = []
    LLM.from_parts(parts, on_warning=lines.append)
    assert lines == ["something odd"]
    with pytest.warns(UserWarning, match="something odd"):
        LLM.from_parts(parts)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_landing_that_breaks_off_loses_no_end(overlap, monkeypatch):
    """An error while one answer is told; the one behind it got its last token in that very step."""
    ends = {1: 7, 3: 6}  # the first prompt is a step ahead
    llm = engine(
        lambda prefix: one_hot(EOS if len(prefix) == ends[prefix[0]] else 7), overlap=overlap
    )
    first = llm.stream([[1, 2]], SamplingParams(temperature=0, max_tokens=9, logprobs=0))
    second = llm.stream([[3, 4]], SamplingParams(temperature=0, max_tokens=9))
    next(first)
    got = [*next(second).token_ids]
    real = sampler.logprobs

    def fails(held, first, targets, top):
        if EOS in targets:
            raise RuntimeError("told halfway")
        return real(held, first, targets, top)

    monkeypatch.setattr(sampler, "logprobs", fails)
    with pytest.raises(RuntimeError, match="halfway"):
        list(first)
    got += [token for delta in second for token in delta.token_ids]
    assert tuple(got) == (7, 7, 7, 7, EOS) and idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [3, 4])  # in the middle; at the last token
def test_a_landing_that_breaks_off_loses_nothing_of_a_stream(overlap, at, tokenizer, monkeypatch):
    """An error behind the tokens of a step, before they are told: the next delta has them."""
    script = says(*b"abcd", start=2)
    llm = engine(script, tokenizer=tokenizer, overlap=overlap)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0)
    first, second = llm.stream([[1, 2]], params), llm.stream([[3, 4]], params)
    got = [next(first)]
    next(second)
    real = llm._go_on

    def fails(answer, landed):
        if answer.sequence.order == 0 and answer.sequence.generated == at + 1:
            monkeypatch.undo()
            raise KeyboardInterrupt
        real(answer, landed)

    monkeypatch.setattr(llm, "_go_on", fails)
    with pytest.raises(KeyboardInterrupt):
        list(second)
    got += first
    result = got[-1].result
    assert result.token_ids == sum((delta.token_ids for delta in got), ()) == (*b"abcd", EOS)
    assert result.text == "".join(delta.text for delta in got) == "abcd"
    assert result.logprobs == sum((delta.logprobs for delta in got), ())
    assert len(result.logprobs) == 5 and idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", ["remove", "settle", "next_step"])
def test_a_stream_that_is_closed_inside_another_calls_step(overlap, at):
    """As the collector may do it, while the scheduler is at work."""
    llm = engine(lambda prefix: one_hot(7), overlap=overlap)
    params = SamplingParams(temperature=0, max_tokens=60)
    other, gone = llm.stream([[5]], params), llm.stream([[1, 2, 3]], params)
    head = [next(other)]
    next(gone)
    real, calls = getattr(llm._policy, at), itertools.count()

    def closes(*given):
        found = real(*given)
        if next(calls) == 2:
            gone.close()
        return found

    setattr(llm._policy, at, closes)
    for _ in range(4):  # short ones, which end
        llm.generate([[9, 9]], SamplingParams(temperature=0, max_tokens=3))
    assert next(calls) > 3 and len(llm._running) == 1
    head += other
    assert sum((delta.token_ids for delta in head), ()) == (7,) * 60 and idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_interrupted_twice(overlap, monkeypatch):
    """The second time while the engine starts afresh: who goes on is computed again anyhow."""
    llm = engine(lambda prefix: one_hot(len(prefix)), overlap=overlap)
    stream = llm.stream([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60))
    head = [next(stream) for _ in range(3)]

    def interrupts(sequence):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._policy, "remove", interrupts)
    with pytest.raises(KeyboardInterrupt):
        for _ in "12":  # its memory is taken back in the second one, or before
            llm.generate([[4, 5]], SamplingParams(temperature=0, max_tokens=2))
    monkeypatch.undo()
    assert not llm._policy.running
    head += stream
    assert sum((delta.token_ids for delta in head), ()) == tuple(range(3, 63)) and idle(llm)
