"""Speculation in the loop, over a scripted pair: the test decides every logit and every draft."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.core.request import Request, SamplingParams
from deepinfer.core.sequence import Sequence
from deepinfer.errors import UsageError
from deepinfer.sampling.logits import Row, Rows
from deepinfer.speculative.planner import Planner
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from deepinfer.speculative.verify import propose, verify
from tests.engine.fakes import (
    EOS,
    PAD,
    VOCAB,
    byte_tokenizer,
    engine,
    hashed,
    idle,
    one_hot,
    says,
)
from tests.verdicts import verdicts

SURE = 20.0  # a raw confidence logit
COUPLED = DraftRules(length=5, verify="coupled")
VARLEN = DraftRules(length=5, verify="coupled", varlen=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class FixedTimes(StepTimes):
    """A time curve that learns nothing: seconds by rows."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def __call__(self, rows, requests):
        return self.seconds(rows)

    def observe(self, rows, requests, target, rest):
        pass


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0, **more)


def agrees(script, count=lambda base: 5, sharp=False):
    """A drafter that says what `script` does for the first `count(base)` drafts of a block, base
    being the position of its first; then something else. sharp: no other token has a chance."""

    def draft(prefix, i):
        row = np.array(script(prefix), dtype=np.float32)
        right = i < count(len(prefix) - i)
        if not right:
            row = np.roll(row, 1)
        if sharp:
            row = one_hot(int(row.argmax()), len(row), 1e4)
        return row, SURE if right else -SURE

    return draft


def mixed(base: int) -> int:
    """0 to 5 drafts that agree, by position."""
    return base * 7 % 11 % 6


def seen(result):
    """Every field that speculation may not change."""
    usage = result.usage
    return (
        result.text,
        result.token_ids,
        result.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
        result.logprobs,
        result.prompt_logprobs,
        result.error and result.error.code,
    )


def both(script, draft, params, prompt=(1, 2), rules=None, **parts):
    """The same call with speculation off and on, equal in every field; the second result."""
    off, on = engine(script, **parts), engine(script, draft=draft, rules=rules, **parts)
    [plain] = off.generate([list(prompt)], params)
    [result] = on.generate([list(prompt)], params)
    assert seen(result) == seen(plain)
    deltas = list(on.stream([list(prompt)], params))
    assert "".join(delta.text for delta in deltas) == plain.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == plain.token_ids
    assert idle(on) and idle(off)
    return result


# DI-18: the target's distribution


P, Q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
LAWS = [
    (dict(), [0.5, 0.3, 0.2]),
    (dict(temperature=0.5), [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
    (dict(top_k=2), [0.625, 0.375, 0.0]),
]


def close(counts, law, n, sigmas=4.5):
    """Each frequency within 4.5 standard deviations of a binomial, 7e-6 each way; never looser
    than that."""
    return all(
        abs(count / n - p) <= sigmas * math.sqrt(p * (1 - p) / n)
        for count, p in zip(counts, law, strict=True)
    )


@pytest.mark.parametrize("more,law", LAWS)
def test_di_18_sampling_keeps_the_target_distribution(more, law):
    """First and second token by rejection within 0.01: 100,000 seeded requests at T = 1, 30,000
    elsewhere, where 0.01 is still 3.4 binomial standard deviations. `verify` without the loop."""
    n, params = 30_000 if more else 100_000, SamplingParams(**more)
    first = Rows.of([Row(params, seed, 1) for seed in range(n)], "cpu")
    # The row behind an accepted draft is of the token after it.
    both = [Row(params, seed, position) for seed in range(n) for position in (2, 3)]
    second = Rows.of(both[::2], "cpu")
    p, q = (torch.tensor(x, dtype=torch.float32).expand(2 * n, 3) for x in (P, Q))
    at, none = torch.arange(n), torch.zeros((n, 0), dtype=torch.int64)
    zero, one_each = torch.zeros_like(at), torch.ones_like(at)
    plain = verify(p[:n], first, at, none, zero, None, "rejection", 1)
    one = plain.tokens[:, 0].numpy()
    ids, scores = propose(q[:n], second, 0, "rejection")
    drafts, rows = ids.unsqueeze(1), Rows.of(both, "cpu")
    judged = verify(p, rows, 2 * at, drafts, one_each, scores.unsqueeze(1), "rejection", 2)
    found = verdicts(judged)
    two = [verdict.tokens[0] for verdict in found]
    for tokens in (one, two):
        assert np.abs(np.bincount(tokens, minlength=3) / n - law).max() < 0.01
    joint = np.bincount(one * 3 + two, minlength=9) / n
    assert np.abs(joint - np.outer(law, law).flatten()).max() < 0.01
    accepted = sum(verdict.accepted for verdict in found) / n
    assert abs(accepted - np.minimum(np.bincount(ids.numpy(), minlength=3) / n, law).sum()) < 0.01
    if not more:
        assert abs(accepted - 0.7) < 0.01


@pytest.mark.parametrize("more,law", LAWS)
def test_di_18_in_the_engine(more, law):
    """1,000 requests through the loop. At so few a frequency may be off by 4.5 binomial standard
    deviations, 0.071 at most. The coupled ids are those without speculation."""
    n = 1000
    params = [SamplingParams(max_tokens=3, seq_seed=seed, **more) for seed in range(n)]
    sizes = dict(vocab=3, eos=9, slots=512, pages=1024, max_rows=4096)
    choices = [DraftRules(5)] if more else [DraftRules(5), DraftRules(5, varlen=True), COUPLED]
    for rules in choices:
        llm = engine(lambda prefix: P, draft=lambda prefix, i: (Q, 0.0), rules=rules, **sizes)
        results = llm.generate([[0]] * n, params)
        ids = np.array([result.token_ids for result in results])
        for tokens in ids.T:
            assert close(np.bincount(tokens, minlength=3), law, n)
        assert idle(llm)
        # Two tokens are left after the first: one draft in the first step, none in another.
        counts = [result.speculation for result in results]
        assert all(c["drafted"] == 1 and c["steps"] + c["accepted"] == 2 for c in counts)
        accepted = sum(c["accepted"] for c in counts)
        if rules == DraftRules(5) and not more:
            assert close([accepted], [0.7], n)
        if rules == COUPLED:
            plain = engine(lambda prefix: P, **sizes).generate([[0]] * n, params)
            assert [r.token_ids for r in results] == [r.token_ids for r in plain]
            variation = np.abs(np.exp(P) - np.exp(Q)).sum() / 2
            least = (1 - variation) / (1 + variation)
            assert accepted / n > least - 4.5 * math.sqrt(least * (1 - least) / n)


# DI-19: seeds


@pytest.mark.parametrize("rules", [DraftRules(5), COUPLED])
def test_di_19_a_seed_is_all_that_counts(rules):
    """Alone, with neighbours, last of a queue, after 50 steps; other seeds, and none, differ."""
    mine = SamplingParams(max_tokens=50, ignore_eos=True, seed=7)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    ids, others = [1, 2, 3], [[4], [5, 6, 7, 8], [1, 2, 3]]
    llm = engine(narrow, draft=jumbled, rules=rules, slots=2)
    [alone] = llm.generate([ids], mine)
    beside = engine(narrow, draft=jumbled, rules=rules)
    first = beside.generate([ids, *others], [mine, free, free, free])[0]
    last = llm.generate([*others, ids], [free, free, free, mine])[-1]
    llm.generate([ids], greedy(max_tokens=120, ignore_eos=True))
    assert llm._policy.planned > 50
    [late] = llm.generate([ids], mine)
    assert alone.token_ids == first.token_ids == last.token_ids == late.token_ids
    [other] = llm.generate([ids], replace(mine, seed=8))
    one, two = llm.generate([ids, ids], replace(free, max_tokens=50))
    assert other.token_ids != alone.token_ids and one.token_ids != two.token_ids
    [again] = llm.generate([ids], replace(mine, seed=None, seq_seed=one.seed))
    assert again.token_ids == one.token_ids, "the recorded seed gives the answer again"


# DI-20: stop strings and the token cap


@pytest.mark.parametrize("rules", [None, VARLEN])
@pytest.mark.parametrize(
    "count", [lambda base: 5, lambda base: 0, mixed, lambda base: 1, lambda base: 2]
)
@pytest.mark.parametrize(
    "limit,text,reason,ids",
    [(100, "ab", "stop", 4), (5, "ab", "stop", 4), (4, "ab", "stop", 4), (3, "ab#", "length", 3),
     (2, "ab", "length", 2)],
)  # fmt: skip
def test_di_20_stop_string_inside_a_block(tokenizer, rules, count, limit, text, reason, ids):
    """(a) to (d); the stop string in one step, and split over two, wherever the blocks end."""
    script = says(*b"ab##cde", start=2)
    params = greedy(stop="##", max_tokens=limit, logprobs=1)
    result = both(script, agrees(script, count), params, rules=rules, tokenizer=tokenizer)
    assert (result.text, result.finish_reason, len(result.token_ids)) == (text, reason, ids)
    assert len(result.logprobs) == ids


# DI-21: end of sequence and the counters


@pytest.mark.parametrize("count", [lambda base: 5, lambda base: 1, lambda base: 2, mixed])
def test_di_21_end_of_sequence_inside_a_block(tokenizer, count):
    script = says(*b"xy", EOS, *b"zwv", start=2)
    draft = agrees(script, count)
    result = both(script, draft, greedy(), tokenizer=tokenizer)
    assert result.token_ids == (*b"xy", EOS) and result.text == "xy"
    assert result.finish_reason == "stop" and result.usage.completion_tokens == 3
    counts = result.speculation
    # The first token comes with the prompt; what was drafted is more than what was delivered.
    assert counts["accepted"] <= 2 and counts["steps"] <= 2 <= counts["drafted"]
    result = both(script, draft, greedy(ignore_eos=True, max_tokens=4), tokenizer=tokenizer)
    assert result.token_ids == (*b"xy", EOS, *b"z") and result.finish_reason == "length"
    for limit in range(1, 9):
        result = both(script, draft, greedy(ignore_eos=True, max_tokens=limit), tokenizer=tokenizer)
        assert result.usage.completion_tokens == len(result.token_ids) == limit
        assert result.usage.reasoning_tokens <= limit


def test_di_21_a_drafted_end_that_is_rejected():
    """(d): generation goes on; what was drafted behind it is not looked at."""
    script = says(*b"abcdefgh", start=2)

    def draft(prefix, i):
        return (one_hot(EOS) if i == 1 else script(prefix)), SURE

    result = both(script, draft, greedy())
    assert result.token_ids == (*b"abcdefgh", EOS)
    llm = engine(script, draft=draft)
    _, steps = llm.trace([[1, 2]], greedy())
    assert steps[0].draft_ids[:2] == (ord("b"), EOS) and steps[0].useful == 2
    assert steps[0].verified == 2 and steps[0].accepted == 1 and steps[0].committed == 2


def test_di_21_what_lies_behind_the_end_is_counted_apart():
    """Drafts behind an end are listed as discarded and never accepted; behind a drafted EOS they
    are not even verified."""
    script = says(*b"abc", EOS, start=2)
    llm = engine(script, draft=lambda prefix, i: (script(prefix), SURE))
    [result], [step] = llm.trace([[1, 2]], greedy())
    # a; then b, c, EOS of five drafts
    assert result.token_ids == (*b"abc", EOS)
    assert (len(step.draft_ids), step.useful, step.verified) == (5, 3, 3)
    assert (step.accepted, step.discarded, step.committed, step.target_id) == (3, 2, 3, None)
    assert result.speculation["drafted"] == 5 and llm._planner.watch is None
    script = says(*b"abcdefgh", start=2)
    llm = engine(script, draft=lambda prefix, i: (script(prefix), SURE))
    [result], [step] = llm.trace([[1, 2]], greedy(stop_token_ids=[ord("c")]))
    assert step.useful == step.verified == step.accepted == 2
    llm = engine(script, draft=lambda prefix, i: (script(prefix), SURE), rules=COUPLED)
    [result], [step] = llm.trace([[1, 2]], greedy(max_tokens=4))
    assert len(step.draft_ids) == 2, "the third could never be delivered as a draft"
    assert (step.accepted, step.committed, step.target_id) == (2, 3, ord("d"))


def test_di_21_drafts_behind_a_stop_string(tokenizer):
    script = says(*b"ab##cdefgh", start=2)
    llm = engine(script, draft=agrees(script), tokenizer=tokenizer)
    [result], [step] = llm.trace([[1, 2]], greedy(stop="##"))
    assert result.text == "ab" and result.token_ids == (*b"ab##",)
    assert (step.verified, step.accepted, step.discarded, step.committed) == (5, 3, 2, 3)
    assert step.target_id is None
    assert result.speculation == {
        "steps": 1, "drafted": 5, "verified": 5, "accepted": 3, "accepted_length": 3.0,
    }  # fmt: skip


# DI-22: min_tokens


@pytest.mark.parametrize("extra", [(), (PAD,)])
@pytest.mark.parametrize("blind", [True, False])
@pytest.mark.parametrize("rules", [None, VARLEN])
def test_di_22_min_tokens(extra, blind, rules):
    """The drafter proposes the end five times (blind to what is forbidden, or not)."""

    def script(prefix):
        row = one_hot(EOS)
        row[PAD], row[ord("x")] = 9.0 if extra else 0.0, 5.0
        return row

    def draft(prefix, i):
        row = list(script(prefix))
        if blind:
            row[PAD] = row[EOS] = 1e30
        return row, SURE

    for least in range(7):
        params = greedy(min_tokens=least, stop_token_ids=extra)
        result = both(script, draft, params, rules=rules)
        assert result.token_ids == (ord("x"),) * least + (EOS,), least
        assert result.finish_reason == "stop"


def test_min_tokens_and_a_stop_string_inside_a_block(tokenizer):
    """The string counts once it is complete after that many tokens, wherever the block ends."""
    script = says(*b"a##b##c##", start=2)
    for least, count in itertools.product(range(8), (lambda base: 5, mixed)):
        params = greedy(stop="##", min_tokens=least, max_tokens=9)
        result = both(script, agrees(script, count), params, tokenizer=tokenizer)
        assert len(result.token_ids) == next(end for end in (3, 6, 9) if end >= least)


# DI-24: confidence decides


def logit(chance: float) -> float:
    return math.log(chance / (1 - chance))


def test_di_24_survivals_are_products_and_the_budget_is_global():
    """(b): of A .9 .8 .7 and B .95 .3 .99, with four extra rows, three of A and one of B."""
    confidences = {1: (0.9, 0.8, 0.7), 2: (0.95, 0.3, 0.99)}
    script = says(*range(40), start=2)

    def draft(prefix, i):
        return script(prefix), logit(confidences[prefix[0]][i])

    # Six rows of two requests cost nothing more than two, a seventh is dear.
    times = FixedTimes(lambda rows: 1.0 if rows <= 6 else 1e6)
    rules = DraftRules(length=3, varlen=True)
    llm = engine(script, draft=draft, rules=rules, times=times)
    results, steps = llm.trace([[1, 0], [2, 0]], greedy(max_tokens=30))
    a, b = ([step for step in steps if step.seq == seq] for seq in (0, 1))
    assert a[0].survival == pytest.approx((0.9, 0.72, 0.504))
    assert b[0].survival == pytest.approx((0.95, 0.285, 0.28215))
    assert (a[0].budget, b[0].budget) == (4, 4)
    assert (a[0].verified, b[0].verified) == (3, 1)
    assert (a[0].committed, b[0].committed) == (4, 2)
    for step in steps:
        assert step.verified <= step.split <= step.useful <= len(step.draft_ids) <= 3
        assert step.committed == step.verified + 1, "all drafts are right"
    for plan in llm.parts.runner.plans:
        assert len(plan.chunks) < 2 or plan.rows <= 6
    assert [len(result.token_ids) for result in results] == [30, 30]


@pytest.mark.parametrize("raw", [-math.inf, -1e30, math.nan, math.inf])
@pytest.mark.parametrize("steep", [True, False])
def test_di_24_confidences_of_nothing(raw, steep):
    """(c), (d): one token a step where a row costs time; NaN is 0 with one warning."""
    script, lines = says(*range(20), start=2), []
    times = FixedTimes(lambda rows: float(rows) if steep else 1.0)
    llm = engine(
        script,
        draft=lambda prefix, i: (script(prefix), raw),
        rules=replace(VARLEN, verify="rejection"),
        times=times,
        on_warning=lines.append,
    )
    [result], steps = llm.trace([[1, 2]], greedy(max_tokens=12))
    assert result.token_ids == tuple(range(12))
    nan = math.isnan(raw)
    assert lines == ["the confidence of draft 1 is not a number; it counts as 0"] * nan
    if nan or (steep and raw < 0):
        # before anything is known of a request its drafts count as sure, so the first step is free
        assert all(step.committed == 1 for step in steps[0 if nan else 2 :])
    assert all(0 <= s <= 1 for step in steps for s in step.survival)
    if nan:
        assert all(step.verified == 0 for step in steps)


def test_a_budget_does_not_know_the_newest_confidences():
    """It rests on blocks drafted two steps ago: the first sure block after many hopeless ones is
    not verified for its own sake, and the one after it is."""
    script = says(*range(60), start=2)

    def draft(prefix, i):
        return script(prefix), SURE if len(prefix) - i >= 30 else -SURE

    times = FixedTimes(lambda rows: 1 + rows / 100)
    llm = engine(script, draft=draft, rules=replace(VARLEN, verify="rejection"), times=times)
    _, steps = llm.trace([[1, 2]], greedy(max_tokens=50))
    hopeless = [step for step in steps if step.survival[:1] < (0.5,) and step.draft_ids][2:]
    first, *others = [step for step in steps if step.survival[:1] > (0.5,)]
    assert {step.budget for step in hopeless} == {0} and len(hopeless) > 8
    assert first.pos == 30 and first.budget == first.verified == 0
    assert [step.budget for step in others[:3]] == [5, 5, 5]
    assert [step.committed for step in others[:3]] == [6, 6, 6]


def test_a_draft_never_decides_whether_it_is_looked_at():
    """Serving semantics 4.1: other tokens from the third draft on, the same rows are verified."""
    found = []
    for wrong in (None, 7, EOS):
        script = says(*range(60, 90), start=2)

        def draft(prefix, i, wrong=wrong, script=script):
            row = script(prefix) if i < 2 or wrong is None else one_hot(wrong)
            return row, (2.0, 1.0, 1.5, 0.5, 1.0)[i]

        times = FixedTimes(lambda rows: 1.0 if rows < 8 else 9.0)
        llm = engine(script, draft=draft, rules=DraftRules(5, varlen=True), times=times)
        _, steps = llm.trace([[1, 2], [3, 4]], greedy(max_tokens=20))
        found.append([(step.split, step.budget) for step in steps[:2]])
    assert found[0] == found[1] == [(3, 5), (2, 5)]
    # Nothing behind a drafted end is worth a row; it itself is.
    assert found[2] == found[0]


def test_rows_behind_a_drafted_end_go_to_others():
    script = says(*range(60, 90), start=2)

    def draft(prefix, i):
        ends = prefix[0] == 1 and i == 0
        return (one_hot(EOS) if ends else script(prefix)), SURE if prefix[0] == 1 else 0.0

    times = FixedTimes(lambda rows: 1.0 if rows <= 7 else 1e6)
    llm = engine(script, draft=draft, rules=DraftRules(5, varlen=True), times=times)
    _, steps = llm.trace([[1, 2], [3, 4]], greedy(max_tokens=20))
    assert [step.verified for step in steps[:2]] == [1, 4]
    assert steps[0].survival[1:] == (0.0,) * 4


def test_a_fixed_threshold():
    script = says(*range(40), start=2)
    for threshold, verified in ((0.0, 5), (0.5, 3), (0.72, 2), (0.95, 0), (1.0, 0)):
        rules = DraftRules(length=5, threshold=threshold)
        llm = engine(
            script, draft=lambda prefix, i: (script(prefix), logit((0.9, 0.81, 0.8, 0.5, 0.9)[i])),
            rules=rules,
        )  # fmt: skip
        [result], steps = llm.trace([[1, 2]], greedy(max_tokens=30))
        assert result.token_ids == tuple(range(30))
        assert {step.verified for step in steps[:-2]} == {verified}, threshold
        assert all(step.budget is None for step in steps)


def test_temperatures_by_position():
    script = says(*range(40), start=2)
    rules = DraftRules(length=3, temperatures=(1.0, 2.0, 0.5, 1.0, 1.0))
    llm = engine(script, draft=lambda prefix, i: (script(prefix), 2.0), rules=rules)
    _, steps = llm.trace([[1, 2]], greedy(max_tokens=20))
    want = [1 / (1 + math.exp(-2.0 / t)) for t in (1.0, 2.0, 0.5)]
    assert steps[0].confidence == pytest.approx(want)
    assert steps[0].logits == (2.0, 2.0, 2.0)
    assert steps[0].survival == pytest.approx(np.cumprod(want))


# equality with plain decoding, whatever the parameters


PARAMS = [
    {},
    dict(presence_penalty=1.5, frequency_penalty=0.5),
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6, presence_penalty=-1.0),
    dict(logit_bias={5: 4.0, 6: -math.inf, EOS: 6.0}),
    dict(min_tokens=9, logit_bias={EOS: 30.0}),
    dict(min_tokens=4, stop_token_ids=[3, 4], logit_bias={3: 7.0, 4: 7.0}),
    dict(logprobs=3),
    dict(logprobs=0, prompt_logprobs=1, frequency_penalty=2.0),
    dict(stop=("\x03", "\x05\x01")),
    dict(ignore_eos=True, logit_bias={EOS: 9.0}),
]
SAMPLED = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=4),
    dict(temperature=1.3, top_p=0.6, presence_penalty=1.0),
    dict(temperature=1.0, min_p=0.2, logprobs=2, repetition_penalty=1.3),
    dict(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, frequency_penalty=1.0),
]


@functools.cache
def _narrow(last):
    row = np.full(VOCAB, -9.0, dtype=np.float32)
    row[:8] = hashed(last, 8)
    row[EOS] = -3.0
    return row


def narrow(prefix):
    """Logits over a few tokens that depend on the last three, so that tokens come again."""
    return _narrow(prefix[-3:])


@functools.cache
def _jumbled(last, i):
    row = np.array(_narrow(last))
    row[:8] += hashed((*last[-2:], i), 8) / 3
    return row, float(hashed((*last[-2:], i), 1)[0])


def jumbled(prefix, i):
    """Drafts that often agree, of a network that is nothing like the target's."""
    return _jumbled(prefix[-3:], i)


@pytest.mark.parametrize("length,varlen", [(1, False), (2, True), (3, False), (4, True), (5, False),
                                           (5, True)])  # fmt: skip
def test_every_parameter_is_that_of_its_token(tokenizer, length, varlen):
    """Greedy and coupled: every field as without speculation, all in one mixed batch."""
    rules = DraftRules(length, "coupled", varlen)
    asked = [
        SamplingParams(**{"max_tokens": 25, **more})
        for more in [{**one, "temperature": 0} for one in PARAMS]
        + [{**one, "seed": 3, **SAMPLED[at % 5]} for at, one in enumerate(PARAMS)]
        + [{**one, "seed": 5} for one in SAMPLED]
    ]
    prompts = [[1 + at % 7, at % 5, 3] * (1 + at % 4) for at in range(len(asked))]
    sizes = dict(tokenizer=tokenizer, slots=32, max_rows=96, chunk=5)
    plain = engine(narrow, **sizes).generate(prompts, asked)
    llm = engine(narrow, draft=jumbled, rules=rules, **sizes)
    results = llm.generate(prompts, asked)
    for params, one, two in zip(asked, plain, results, strict=True):
        assert seen(one) == seen(two), params
    assert idle(llm)
    assert not any(result.usage.recomputed_tokens for result in results), "no row runs twice"
    accepted = sum(result.speculation["accepted"] for result in results)
    drafted = sum(result.speculation["drafted"] for result in results)
    assert 0.2 * drafted < accepted < 0.9 * drafted, "both fates are there"


def test_one_greedy_request_by_rejection_beside_sampled_ones():
    asked = [greedy(max_tokens=20), SamplingParams(max_tokens=20, seed=1), greedy(max_tokens=9)]
    prompts = [[1, 2], [3, 4], [5, 6]]
    plain = engine(narrow).generate(prompts, asked)
    results = engine(narrow, draft=jumbled).generate(prompts, asked)
    assert [seen(plain[at]) for at in (0, 2)] == [seen(results[at]) for at in (0, 2)]
    again = engine(narrow, draft=jumbled).generate(prompts, asked)
    assert seen(results[1]) == seen(again[1])


# the shape of a step


@pytest.mark.parametrize("rows", [3, 4, 7, 11])
@pytest.mark.parametrize("varlen", [False, True])
def test_few_rows(rows, varlen):
    """Drafts take what is left of the row budget, and the text stays the same."""
    prompts = [[1, at] * (1 + at) for at in range(6)]
    plain = engine(narrow).generate(prompts, greedy(max_tokens=20))
    rules = replace(VARLEN, varlen=varlen)
    llm = engine(narrow, draft=agrees(narrow), rules=rules, max_rows=rows)
    results, steps = llm.trace(prompts, greedy(max_tokens=20))
    assert [seen(r) for r in results] == [seen(r) for r in plain]
    assert max(plan.rows for plan in llm.parts.runner.plans) <= rows
    assert any(step.verified for step in steps)
    for step in steps:
        assert step.limit < rows and step.verified <= min(step.split, step.limit)
        if varlen:  # what the confidences chose is what runs
            assert step.verified == step.split and (step.budget or 0) <= step.limit
    assert idle(llm)


def test_drafts_never_preempt():
    """With as many pages as plain decoding needs nobody is preempted because of drafts."""
    prompts = [[at, 1, 2, 3] for at in range(4)]
    pages = 4 * (23 // 4 + 1)
    llm = engine(narrow, draft=agrees(narrow, mixed), pages=pages)
    results = llm.generate(prompts, greedy(max_tokens=20, ignore_eos=True))
    assert all(r.usage.recomputed_tokens == 0 for r in results)
    plain = engine(narrow).generate(prompts, greedy(max_tokens=20, ignore_eos=True))
    assert [seen(r) for r in results] == [seen(r) for r in plain] and idle(llm)


@pytest.mark.parametrize("pages", [8, 9, 11, 14])
def test_preemption_under_speculation(pages):
    """DI-32's kind: a pool that is too small for all; texts, seeds and penalties go on."""
    prompts = [[at, 1, 2, 3, 4] for at in range(5)]
    asked = [
        SamplingParams(max_tokens=22, ignore_eos=True, **more)
        for more in (dict(temperature=0), dict(seed=1), dict(temperature=0, presence_penalty=1.0),
                     dict(seed=2, min_tokens=20), dict(temperature=0, logprobs=1))
    ]  # fmt: skip
    plain = engine(narrow).generate(prompts, asked)
    llm = engine(narrow, draft=agrees(narrow, mixed), rules=VARLEN, pages=pages, chunk=7)
    results = llm.generate(prompts, asked)
    assert [seen(r) for r in results] == [seen(r) for r in plain]
    assert sum(r.usage.recomputed_tokens for r in results) > 0
    assert idle(llm)


def test_a_last_chunk_of_one_token():
    """The rest of a prompt looks like a decoding row, but its step is no decoding step."""
    script = says(*range(30), start=9)
    prompt = list(range(100, 109))
    for chunk in (8, 4, 2, 1, 9):
        llm = engine(script, draft=agrees(script), chunk=chunk)
        [result], steps = llm.trace([prompt], greedy(max_tokens=16))
        assert result.token_ids == tuple(range(16))
        counts = result.speculation
        assert counts["steps"] + counts["accepted"] == 15, "the first comes with the prompt"
        assert steps[0].pos == len(prompt) + 1 and sum(s.committed for s in steps) == 15


# counting


def test_counts_and_trace_say_the_same(tokenizer):
    """Serving semantics §8, on a batch with every kind of end."""
    prompts = [[1, at] for at in range(8)]
    asked = [greedy(max_tokens=n, logit_bias={EOS: n / 4}) for n in range(5, 29, 3)]
    for rules in (DraftRules(5), DraftRules(3, "coupled", True), DraftRules(5, threshold=0.4)):
        llm = engine(narrow, draft=jumbled, rules=rules)
        results, steps = llm.trace(prompts, asked)
        assert {step.seq for step in steps} <= set(range(8))
        for seq, result in enumerate(results):
            own = [step for step in steps if step.seq == seq]
            assert result.speculation == {
                "steps": len(own),
                "drafted": sum(len(step.draft_ids) for step in own),
                "verified": sum(step.verified for step in own),
                "accepted": sum(step.accepted for step in own),
                "accepted_length": (
                    sum(step.committed for step in own) / len(own) if own else None
                ),
            }
            at = 3  # prompt and first token
            text = (1, seq, *result.token_ids)
            for step in own:
                assert step.pos == at
                assert step.committed == step.accepted + (step.target_id is not None)
                assert text[at : at + step.accepted] == step.draft_ids[: step.accepted]
                at += step.committed
                if step.target_id is not None:
                    assert text[at - 1] == step.target_id
                behind = len(step.draft_ids) - step.committed if step.target_id is None else 0
                assert step.discarded == behind
                assert step.accepted <= step.verified <= step.split <= step.useful
                assert step.useful <= len(step.draft_ids) <= rules.length
                assert len(step.survival) == len(step.confidence) == len(step.logits)
                assert len(step.draft_ids) == len(step.logits)
            assert at == len(text)
        assert all(a.step <= b.step for a, b in itertools.pairwise(steps))
        for _, group in itertools.groupby(steps, key=lambda step: step.step):
            group = list(group)
            assert {step.requests for step in group} == {len(group)}
            assert group[0].rows >= len(group) + sum(step.verified for step in group)
            if rules.varlen:
                assert sum(step.split for step in group) <= group[0].budget
                most = sum(len(step.draft_ids) for step in group)
                assert [len(step.time_ms) for step in group] == [most + 1] + [0] * (len(group) - 1)
        assert llm._planner.watch is None


def test_trace_needs_drafts_and_an_idle_engine():
    with pytest.raises(UsageError, match="drafts nothing"):
        engine(narrow).trace([[1, 2]], greedy())
    llm = engine(narrow, draft=jumbled)
    stream = llm.stream([[1, 2]], greedy(max_tokens=9))
    next(stream)
    with pytest.raises(UsageError, match="running"):
        llm.trace([[1, 2]], greedy())
    stream.close()
    results, steps = llm.trace([[1, 2], [], [3, 4]], greedy(max_tokens=9))
    assert results[1].error and {step.seq for step in steps} == {0, 2}
    # A second trace counts from 0 again.
    assert {step.seq for step in llm.trace([[5]], greedy(max_tokens=9))[1]} == {0}


def test_samples_are_traced_in_the_order_of_results():
    llm = engine(narrow, draft=jumbled)
    params = SamplingParams(max_tokens=12, n=3, seed=1, ignore_eos=True)
    results, steps = llm.trace([[1, 2], [3, 4, 5]], params)
    assert {step.seq for step in steps} == set(range(6))
    for step in steps:
        answer, start = results[step.seq].token_ids, (3 if step.seq < 3 else 4)
        if step.target_id is not None:
            assert answer[step.pos - start + 1 + step.accepted] == step.target_id


def test_no_speculation_in_the_result_where_nothing_drafts():
    [result] = engine(narrow).generate([[1]], greedy(max_tokens=3))
    assert result.speculation is None
    llm = engine(narrow, draft=jumbled)
    assert result.as_json()["speculation"] is None
    for limit, steps in ((0, 0), (1, 0), (2, 1)):
        [result] = llm.generate([[1, 2]], greedy(max_tokens=limit, ignore_eos=True))
        assert result.speculation == {
            "steps": steps, "drafted": 0, "verified": 0, "accepted": 0,
            "accepted_length": 1.0 if steps else None,
        }  # fmt: skip
        assert result.as_json()["speculation"] == result.speculation


# broken numbers


@pytest.mark.parametrize("params", [greedy(max_tokens=20), SamplingParams(max_tokens=20, seed=4),
    greedy(max_tokens=20, presence_penalty=1.0, repetition_penalty=1.2)])  # fmt: skip
@pytest.mark.parametrize("rules", [DraftRules(5), COUPLED, VARLEN])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_drafter_of_broken_logits(params, rules, broken):
    """Draft -1 is never run, and the drafts before it count as ever."""

    def draft(prefix, i):
        row = np.array(narrow(prefix))
        if (len(prefix) + i) % 4 == 0:
            row[:] = broken
        return row, SURE

    prompts = [[1, 2], [3], [4, 5, 6]]
    llm = engine(narrow, draft=draft, rules=rules)
    results, steps = llm.trace(prompts, params)
    assert all(r.error is None for r in results) and idle(llm)
    if params.temperature == 0 or rules.verify == "coupled":
        plain = engine(narrow).generate(prompts, params)
        assert [seen(r) for r in results] == [seen(r) for r in plain]
    assert any(-1 in step.draft_ids for step in steps)
    assert sum(step.accepted for step in steps) > 0
    for step in steps:
        if -1 in step.draft_ids:
            assert step.verified <= step.useful <= step.draft_ids.index(-1)


@pytest.mark.parametrize("rules", [DraftRules(5), COUPLED])
@pytest.mark.parametrize("params", [greedy(max_tokens=12), SamplingParams(max_tokens=12, seed=4)])
def test_nan_behind_a_rejected_draft_concerns_nobody(rules, params):
    """DI-38's kind: rows that plain decoding would never have run."""
    truth = engine(narrow).generate([[1, 2], [3, 4]], params)
    texts = [(1, 2, *truth[0].token_ids), (3, 4, *truth[1].token_ids)]

    def script(prefix):
        if any(prefix == text[: len(prefix)] for text in texts):
            return narrow(prefix)
        return np.full(VOCAB, np.nan, dtype=np.float32)

    def draft(prefix, i):
        row = np.array(narrow(prefix))
        return (row if i < 2 else one_hot(200, high=1e3)), SURE

    if rules.verify == "rejection" and params.temperature:
        # whatever is drawn: rows behind the first wrong draft are broken

        def script(prefix):  # noqa: F811
            return np.full(VOCAB, np.nan, dtype=np.float32) if 200 in prefix else narrow(prefix)

    llm = engine(script, draft=draft, rules=rules)
    results, steps = llm.trace([[1, 2], [3, 4]], params)
    assert all(r.error is None and r.finish_reason in ("stop", "length") for r in results)
    assert any(step.verified - step.accepted > 1 for step in steps), "some of them ran"
    if params.temperature == 0 or rules.verify == "coupled":
        assert [r.token_ids for r in results] == [r.token_ids for r in truth]


@pytest.mark.parametrize("rules", [DraftRules(5), COUPLED])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_nan_at_the_deciding_row_fails_that_request_alone(rules, temperature, at):
    """The tokens before it are kept, those accepted in the same step included."""
    params = SamplingParams(
        max_tokens=12, temperature=temperature, seed=4, ignore_eos=True, logprobs=1
    )
    prompts = [[1, 2], [3, 4], [5, 6]]
    clean = engine(narrow, draft=agrees(narrow, sharp=True), rules=rules).generate(prompts, params)

    def script(prefix):
        row = np.array(narrow(prefix))
        if prefix[0] == 3 and len(prefix) == 3 + at:
            row[7] = np.nan
        return row

    llm = engine(script, draft=agrees(narrow, sharp=True), rules=rules)
    deltas = list(llm.stream(prompts, params))
    results = sorted((d.result for d in deltas if d.result), key=lambda r: r.index)
    assert results[1].error.code == "numeric-error" and results[1].finish_reason == "error"
    streamed = tuple(t for d in deltas if d.index == 1 for t in d.token_ids)
    assert streamed == results[1].token_ids
    assert len(results[1].logprobs) == len(streamed)
    if temperature == 0 or rules.verify == "coupled":
        # token 0 comes with the prompt, tokens 1 .. at were chosen before the broken row
        assert results[1].token_ids == clean[1].token_ids[: at + 1]
    for other in (0, 2):
        assert seen(results[other]) == seen(clean[other])
    assert idle(llm)


def test_a_request_that_fails_in_a_block_is_counted_up_to_there():
    script = says(*range(20), start=2)
    broken = lambda p: [math.nan] * VOCAB if len(p) == 5 else script(p)  # noqa: E731
    llm = engine(broken, draft=lambda p, i: (script(p), SURE))
    [result], [step] = llm.trace([[1, 2]], greedy(max_tokens=20))
    assert result.error.code == "numeric-error" and result.token_ids == (0, 1, 2)
    assert (step.verified, step.accepted, step.committed, step.target_id) == (5, 2, 2, None)
    assert result.speculation["accepted"] == 2 and result.speculation["accepted_length"] == 2.0


def test_nan_behind_the_end_does_not_fail_the_answer():
    """The row behind an accepted EOS is broken, as behind the end of a grammar."""
    script = says(*b"abc", start=2)

    def broken(prefix):
        return [math.nan] * VOCAB if EOS in prefix else script(prefix)

    for rules in (DraftRules(5), COUPLED):
        llm = engine(broken, draft=lambda p, i: (script(p), SURE), rules=rules)
        for temperature in (0, 1e-3):
            [result] = llm.generate([[1, 2]], SamplingParams(temperature=temperature, seed=1))
            assert result.token_ids == (*b"abc", EOS) and result.finish_reason == "stop"
            assert result.error is None and idle(llm)


def test_an_exception_in_the_draft_pass_leaves_an_engine_that_works():
    """Interrupted anywhere, the streams go on afterwards as if nothing had been."""
    prompts, params = [[1, 2], [3, 4, 5]], SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    plain = engine(narrow).generate(prompts, params)
    for where in ("draft", "slot", "forward"):
        llm = engine(narrow, draft=agrees(narrow, mixed), rules=COUPLED)
        runner = llm.parts.runner
        calls = itertools.count()
        draft_block, forward, draft = runner.draft_block, runner.forward, runner.draft

        def once(function, n, calls=calls):
            def wrapped(*args):
                if next(calls) == n:
                    raise KeyboardInterrupt
                return function(*args)

            return wrapped

        if where == "draft":
            runner.draft_block = once(draft_block, 2)
        elif where == "slot":
            runner.draft = once(draft, 13)
        else:
            runner.forward = once(forward, 3)
        other, stream = llm.stream(prompts[:1], params), llm.stream(prompts, params)
        rest = [*next(other).token_ids]
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        for delta in other:
            rest += delta.token_ids
        assert tuple(rest) == plain[0].token_ids
        counts = delta.result.speculation
        assert counts["steps"] + counts["accepted"] == 19
        assert counts["drafted"] <= 5 * (counts["steps"] - 1), "what was lost is not counted"
        assert idle(llm)
        again = llm.generate(prompts, params)
        assert [seen(r) for r in again] == [seen(r) for r in plain]
        assert llm._planner.watch is None


def test_an_interrupted_trace_stops_watching():
    llm = engine(narrow, draft=jumbled)
    forward, calls = llm.parts.runner.forward, itertools.count()

    def fails(*step):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward(*step)

    llm.parts.runner.forward = fails
    with pytest.raises(KeyboardInterrupt):
        llm.trace([[1, 2]], greedy(max_tokens=20, ignore_eos=True))
    assert llm._planner.watch is None and idle(llm)
    results, steps = llm.trace([[1, 2]], greedy(max_tokens=20, ignore_eos=True))
    assert sum(step.committed for step in steps) == 19


# everything comes back


def random_params(rng: random.Random) -> SamplingParams:
    more = dict(rng.choice([{**one, "temperature": 0} for one in PARAMS] + SAMPLED))
    least = more.get("min_tokens", 0)
    return SamplingParams(max_tokens=rng.randint(least, 24), seq_seed=rng.randrange(99), **more)


def sometimes_broken(prefix):
    number = hash(prefix[-4:])
    if len(prefix) < 5 or number % 97:
        return narrow(prefix)
    row = np.array(narrow(prefix))
    row[number % VOCAB] = np.nan
    return row


def sometimes_broken_drafts(prefix, i):
    row, raw = jumbled(prefix, i)
    number = hash((prefix[-3:], i)) % 61
    if number == 0:
        row = np.full(VOCAB, np.inf, dtype=np.float32)
    return row, (math.nan if number == 1 else raw)


@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_and_aborts(tokenizer, seed):
    """Streams come, are read for a while and closed, some numbers are broken; every answer is that
    of plain decoding up to there, and in the end nothing is held."""
    rng = random.Random(seed)
    rules = DraftRules(rng.randint(1, 5), "coupled", rng.random() < 0.5)
    sizes = dict(
        slots=rng.choice([2, 4, 8]), pages=rng.choice([12, 20, 64]), chunk=rng.choice([1, 3, 16]),
        max_rows=rng.choice([9, 16, 64]), tokenizer=tokenizer,
    )  # fmt: skip
    llm = engine(
        sometimes_broken, draft=sometimes_broken_drafts, rules=rules, on_warning=str, **sizes
    )
    plain = engine(sometimes_broken, tokenizer=tokenizer)
    open_streams = []
    asked = 0
    while asked < 30 or open_streams:
        if asked < 30 and rng.random() < 0.3:
            count = rng.randint(1, 3)
            prompts = [[rng.randrange(8) for _ in range(rng.randint(1, 13))] for _ in range(count)]
            params = [random_params(rng) for _ in range(count)]
            want = plain.generate(prompts, params)
            open_streams.append((llm.stream(prompts, params), want, [[] for _ in want]))
            asked += count
        if not open_streams:
            continue
        stream, want, got = one = rng.choice(open_streams)
        for delta in itertools.islice(stream, rng.randint(1, 6)):
            got[delta.index] += delta.token_ids
            if delta.result:
                other = want[delta.index]
                if other.error:  # how much of a broken prompt was seen depends on its chunks
                    other = replace(other, prompt_logprobs=delta.result.prompt_logprobs)
                assert seen(delta.result) == seen(other)
        gone = rng.random()
        if gone < 0.08:
            stream.close()
            open_streams.remove(one)
        elif all(tuple(g) == w.token_ids for g, w in zip(got, want, strict=True)):
            assert all(delta.result for delta in stream)
            open_streams.remove(one)
        for g, w in zip(got, want, strict=True):
            assert tuple(g) == w.token_ids[: len(g)]
    assert idle(llm)


def test_an_aborted_answer_keeps_what_was_delivered():
    script = says(*range(60), start=2)
    llm = engine(script, draft=agrees(script))
    stream = llm.stream([[1, 2], [3, 4]], greedy(max_tokens=50))
    got = [[], []]
    for delta in itertools.islice(stream, 5):
        got[delta.index] += delta.token_ids
    assert max(map(len, got)) > 7, "several tokens a delta"
    stream.close()
    assert idle(llm)
    [result] = llm.generate([[1, 2]], greedy(max_tokens=9))
    assert result.token_ids == tuple(range(9))


def test_closing_the_engine_keeps_the_step_times():
    kept = []
    llm = engine(narrow, draft=jumbled)
    llm.parts = replace(llm.parts, keep_times=lambda: kept.append(llm._planner.times))
    llm.generate([[1, 2]], greedy(max_tokens=20, ignore_eos=True))
    llm.close()
    llm.close()
    assert len(kept) == 1 and kept[0].target.samples and kept[0].rest.samples
    with pytest.raises(UsageError):
        llm.trace([[1]], greedy())


@pytest.mark.parametrize("overlap", [False, True])
def test_what_did_not_run_took_no_time(overlap):
    """Answers end while a step with their drafts is planned: it is never run, nothing is drafted
    behind their last tokens, and neither is learned."""
    llm = engine(
        says(5, 6, 7, start=2), draft=lambda prefix, i: (one_hot(9), 3.0),
        rules=DraftRules(3, "coupled"), overlap=overlap,
    )  # fmt: skip
    for _ in range(3):
        llm.generate([[1, 2]], SamplingParams(max_tokens=20, temperature=0))
    times = llm.parts.times
    samples = [value for some in times.target.samples.values() for value in some]
    assert samples and all(samples)
    assert all(value for some in times.rest.samples.values() for value in some)


@pytest.mark.parametrize("verify,temperature,whole", [
    ("coupled", 1.0, 0), ("rejection", 0.0, 0), ("rejection", 1.0, 3),
])  # fmt: skip
def test_one_seed_matters_where_drafts_are_judged_by_chance(verify, temperature, whole):
    """Elsewhere such requests have their drafts scheduled like any others."""
    planner = Planner(DraftRules(3, verify, varlen=True), StepTimes(), print)
    sequences = tuple(
        Sequence(Request(0, 0, (1,), SamplingParams(temperature=t), seed=seed, max_new=9), order)
        for order, (seed, t) in enumerate([(0, temperature)] * 3 + [(0, 0.0), (1, 1.0)])
    )
    assert planner.choose(0, sequences, 3, 12).whole == sequences[:whole]
    assert set(planner._chosen) == {0}
