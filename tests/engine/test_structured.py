"""Constrained answers in the loop, over a scripted pair: the test decides what the model wants."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import structured
from deepinfer.core.request import FinishReason, SamplingParams, Structured
from deepinfer.engine.engine import _Call
from deepinfer.errors import UsageError
from deepinfer.speculative.schedule import DraftRules
from deepinfer.structured import grammar
from deepinfer.structured.compiler import Compiler
from tests.compiling import held
from tests.engine.fakes import EOS, THINK, VOCAB, byte_tokenizer, engine, idle, says

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
COUPLED = DraftRules(length=5, verify="coupled")
RULES = [None, COUPLED, replace(COUPLED, varlen=True), DraftRules(length=5)]
NAMES = ["off", "coupled", "varlen", "rejection"]
ONE = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
HUGE = 2**64 - 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def wants(*wishes, start, high=40.0):
    """Logits of a model that wants these texts (bytes or ids), the first one most: where that one
    cannot stand, the next, in the same place. Behind their ends it wants EOS."""

    def script(prefix):
        row = np.zeros(VOCAB, dtype=np.float32)
        at = len(prefix) - start
        for rank, wish in enumerate(reversed(wishes)):
            row[wish[at] if 0 <= at < len(wish) else EOS] = high * (rank + 1)
        return row

    return script


def drafts(script, count=lambda base: 5, other=10):
    """A drafter that agrees for the first `count(base)` drafts behind position `base`, and then
    wants `other` most."""

    def draft(prefix, i):
        row = np.array(script(prefix), dtype=np.float32)
        right = i < count(len(prefix) - i)
        if not right:
            row[other] = row.max() + 40
        return row, 20.0 if right else -1.0

    return draft


def made(tokenizer, script, draft, rules, prompts, params, **more):
    draft = draft or drafts(script)
    llm = engine(script, tokenizer=tokenizer, draft=draft if rules else None, rules=rules, **more)
    results = llm.generate(prompts, params)
    assert idle(llm)
    return results


def asked(schema, **more) -> SamplingParams:
    after = more.pop("after", ())
    structured = Structured("json_schema", json.dumps(schema), after)
    return SamplingParams(**{"structured": structured, "seq_seed": 3, **more})


@pytest.mark.parametrize("rules", RULES, ids=NAMES)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("thought", ["hm", 'so "location": ', ""])
def test_di_27_reasoning_ends_inside_a_block(tokenizer, rules, temperature, thought):
    """The end of thinking is at every place of a block; what follows it obeys the schema at once,
    and what comes before obeys nothing."""
    wish = [*thought.encode(), THINK, *b'{"locatio']
    fallback = [*thought.encode(), THINK, *b'{"city":"Rome"}']
    for overlap in (False, True):
        [result] = made(
            tokenizer, wants(wish, fallback, start=2), None, rules, [[1, 2]],
            asked(CITY, after=(THINK,), temperature=temperature), overlap=overlap,
        )  # fmt: skip
        free, _, held = result.text.partition("<think>")
        assert free == thought and json.loads(held) == {"city": "Rome"}
        assert (result.finish_reason, result.complete, result.error) == (STOP, True, None)
    if rules and not rules.varlen:
        assert result.speculation["accepted"] > 10, "the block goes on behind the end of thinking"


def test_di_27_without_its_end_nothing_is_constrained(tokenizer):
    for rules in RULES:
        script = wants(b'{"location": 5', start=2)
        [result] = made(tokenizer, script, None, rules, [[1, 2]], asked(CITY, after=(THINK,)))
        assert result.text == '{"location": 5'
        assert (result.finish_reason, result.complete) == (STOP, False)


@pytest.mark.parametrize("rules", RULES, ids=NAMES)
def test_di_28_tokens_behind_the_end_of_the_grammar(tokenizer, rules):
    """200 requests, accepted counts 0 to 5: the drafts go on with a newline, EOS and junk."""
    junk = [*b'{"a":1}', 10, EOS, *b"]]junk"]

    def script(prefix):
        return wants(b'{"a":1}', start=prefix.count(1))(prefix)

    def draft(prefix, i):
        at, agreed = len(prefix) - prefix.count(1), (len(prefix) - i) * 7 % 11 % 6
        row = np.array(script(prefix), dtype=np.float32)
        row[junk[at] if i < agreed and at < len(junk) else 10] = 400.0  # a newline: often legal
        return row, 1.0

    params = [asked(ONE, temperature=at % 2, seq_seed=at) for at in range(200)]
    prompts = [[1] * (1 + at % 7) for at in range(200)]
    sizes = dict(slots=64, pages=2048, max_rows=512)
    results = made(tokenizer, script, draft, rules, prompts, params, **sizes)
    assert {(r.text, r.finish_reason, r.complete, r.error) for r in results} == {
        ('{"a":1}', STOP, True, None)
    }
    if rules:
        steps = {(r.speculation["steps"], r.speculation["accepted"]) for r in results}
        assert len(steps) > 2, "blocks end at different places"


def one_of(depth):
    part = {"type": "integer"}
    for at in range(depth):
        part = {"oneOf": [part, {"type": "string", "maxLength": at + 1}]}
    return json.dumps(part)


BAD = [
    ("gbnf", "root ::= root", "root ::= root"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "#/$defs/a"),
    ("json_schema", json.dumps({"minItems": HUGE, "maxItems": HUGE}), f"minItems {HUGE}"),
    ("regex", "[", "unclosed"),
    ("json_schema", one_of(12), '"oneOf"'),
]


def test_di_29_pathological_grammars(tokenizer):
    """Each ends its own request by name; the plain one beside them is what it is alone."""
    script = wants(b'"1" and so on, as long as one likes', start=2)
    plain = SamplingParams(temperature=0, max_tokens=20)
    [alone] = made(tokenizer, script, None, None, [[1, 2]], plain)
    good = [
        (("regex", r"^[^\n]{1,129}$"), '"1" and so on, as long as one likes', STOP),
        (("regex", "(a+)+$"), "a" * 35, STOP),
        (("regex", "a{1000000}"), "a" * 64, LENGTH),
        (("json_schema", "{}"), '"1"', STOP),
    ]
    params = [plain]
    params += [SamplingParams(temperature=0, structured=Structured(k, s)) for k, s, _ in BAD]
    params += [
        SamplingParams(temperature=0, max_tokens=64, structured=Structured(*source))
        for source, *_ in good
    ]
    for rules in (None, COUPLED):
        results = made(tokenizer, script, None, rules, [[1, 2]] * len(params), params)
        assert results[0].token_ids == alone.token_ids and results[0].complete is None
        for at, (_, _, named) in enumerate(BAD, start=1):
            result = results[at]
            assert (result.finish_reason, result.token_ids, result.complete) == (ERROR, (), False)
            assert isinstance(result.error.raised(), Exception) and result.error.exit_status == 2
            whole = " ".join((result.error.message, *result.error.facts))
            assert named in whole and f"prompt {at}, sample 0" in whole
        for result, (_, text, reason) in zip(results[1 + len(BAD) :], good, strict=True):
            assert result.error is None and result.finish_reason == reason
            assert result.text == text and result.complete == (reason is STOP)


def test_di_29_one_that_never_compiles(tokenizer):
    """It ends after its time; the plain request beside it has gone on long before."""
    never = threading.Event()

    def make(structured, tokens):
        if structured.source == "never":
            never.wait(30)
        return grammar.compiled(structured, tokens)

    llm = engine(says(65, 66, start=2), tokenizer=tokenizer)
    llm._compiler = Compiler(tokenizer, VOCAB, (EOS,), 0.3, make)
    params = [SamplingParams(temperature=0, structured={"regex": "never"}),
              SamplingParams(temperature=0)]  # fmt: skip
    stuck, plain = llm.generate([[1, 2]] * 2, params)
    assert stuck.error.code == "grammar-timeout" and "0.3 s" in stuck.error.message
    assert plain.text == "AB" and plain.timing_ms.total < stuck.timing_ms.total
    assert idle(llm)
    stream = llm.stream([1, 2], SamplingParams(structured={"regex": "never", "after": [5]}))
    never.set()
    assert [delta.result.finish_reason for delta in stream][-1] is ERROR  # from the cache
    llm.close()


def test_di_29_a_request_that_goes_while_its_grammar_is_made(tokenizer):
    hold = threading.Event()
    llm = engine(wants(b"AB", start=2), tokenizer=tokenizer)
    llm._compiler = Compiler(tokenizer, VOCAB, (EOS,), 20.0, held(hold, []))
    params = SamplingParams(temperature=0, structured={"regex": "A+B"})
    stays = llm.stream([1, 2], params)
    plain = llm.stream([1, 2], SamplingParams(temperature=0))
    first = next(plain)
    call = _Call()
    llm._submit(call, llm._read([[1, 2]], params))
    llm._withdraw(call)
    assert call.answers[0].result.finish_reason is FinishReason.ABORT
    threading.Timer(0.2, hold.set).start()
    assert first.token_ids and "".join(delta.text for delta in stays) == "AB"
    assert "".join(delta.text for delta in plain) == "B"
    assert idle(llm)


def test_a_call_that_is_interrupted_takes_its_grammars_along(tokenizer):
    """Ctrl-C with 20 requests parked: what no worker has taken up never is, and close waits."""
    hold, made = threading.Event(), []
    llm = engine(wants(b"AB", start=2), tokenizer=tokenizer)
    llm._compiler = Compiler(tokenizer, VOCAB, (EOS,), 20.0, held(hold, made))
    call = _Call()
    params = [SamplingParams(structured={"regex": f"A{{{at + 1}}}"}) for at in range(20)]
    llm._submit(call, llm._read([[1, 2]] * 20, params))
    llm._step()
    llm._withdraw(call)
    threading.Timer(0.2, hold.set).start()
    llm.close()
    assert len(made) == 2 and not any(worker.is_alive() for worker in llm._compiler._workers)


@pytest.mark.parametrize("rules", RULES, ids=NAMES)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_landing_that_breaks_off_leaves_the_grammar_where_the_answer_is(
    tokenizer, rules, after, twice, monkeypatch
):
    """Grammars follow a step's tokens before these are told: those that get lost are forgotten.
    twice: while the engine starts afresh, once more."""
    text = b"abcdefghijklmnopqrstuvwxyz"
    script = wants(text, start=2)
    draft = drafts(script) if rules else None
    llm = engine(script, tokenizer=tokenizer, draft=draft, rules=rules)
    params = SamplingParams(temperature=0, structured={"regex": text.decode()})
    results, real, left = (), llm._log.write, [after]

    def fails(slots, outcome):
        left[0] -= 1
        if not left[0]:
            if twice:
                monkeypatch.setattr(llm, "_catch_up", interrupts)
            raise KeyboardInterrupt
        return real(slots, outcome)

    def interrupts(answer):
        monkeypatch.setattr(llm, "_catch_up", caught_up)
        raise KeyboardInterrupt

    caught_up = llm._catch_up
    monkeypatch.setattr(llm._log, "write", fails)
    broken = 0
    with llm.flow() as flow:
        flow.submit("one", [[1, 2]], params)
        while len(flow):
            try:
                for made_of in flow.step():
                    results = made_of.results
            except KeyboardInterrupt:
                broken += 1
    assert broken == 1
    assert [(r.text, r.finish_reason, r.complete) for r in results] == [(text.decode(), STOP, True)]


def test_a_step_does_not_wait_for_a_grammar_to_end(tokenizer):
    """Who drives the steps can see between them that somebody wants to stop."""
    hold = threading.Event()
    llm = engine(wants(b"AB", start=2), tokenizer=tokenizer)
    llm._compiler = Compiler(tokenizer, VOCAB, (EOS,), 20.0, held(hold, [], 5))
    params = SamplingParams(temperature=0, structured={"regex": "A+B"})
    call = _Call()
    llm._submit(call, llm._read([[1, 2]], params))
    began = time.monotonic()
    llm._step()
    assert time.monotonic() - began < 2 and call.open == 1
    hold.set()
    while call.open:
        llm._step()
    llm._withdraw(call)
    assert call.answers[0].result.text == "AB" and idle(llm)


@pytest.mark.parametrize("rules", RULES, ids=NAMES)
class TestDI30:
    """Limits of length, blanks, the end of the object, the cap."""

    def one(self, tokenizer, rules, schema, *wishes, script=None, **more):
        script = script or wants(*wishes, start=2)
        [result] = made(tokenizer, script, None, rules, [[1, 2]], asked(schema, **more))
        assert result.error is None
        return result

    def test_a_at_most_four_letters(self, tokenizer, rules):
        schema = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4}
        result = self.one(tokenizer, rules, schema, b'"abcdefgh"', temperature=0)
        assert (result.text, result.finish_reason) == ('"abcd"', STOP)

    def test_b_code_points_count(self, tokenizer, rules):
        schema = {"type": "string", "maxLength": 2}
        wish = '"🚀🚀🚀"'.encode()
        result = self.one(tokenizer, rules, schema, wish, '"🚀🚀"'.encode(), temperature=0)
        assert (result.text, result.finish_reason) == ('"🚀🚀"', STOP)

    @pytest.mark.parametrize("blank", [10, 32, 9], ids=["newline", "space", "tab"])
    def test_c_blanks_wherever_they_are_legal(self, tokenizer, rules, blank):
        schema = {
            "type": "object", "required": ["a"], "additionalProperties": False,
            "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2,
                                 "maxItems": 2}},
        }  # fmt: skip
        compact = b'{"a":[1,2]}'

        def script(prefix):
            said = bytes(token for token in prefix[2:] if token < 256 and chr(token).strip())
            row = np.zeros(VOCAB, dtype=np.float32)
            row[compact[len(said)] if len(said) < len(compact) else EOS] = 40
            row[blank] = 80
            return row

        for temperature in (0, 1):
            result = self.one(
                tokenizer, rules, schema, script=script, max_tokens=500, temperature=temperature
            )
            assert json.loads(result.text) == {"a": [1, 2]} and result.finish_reason is STOP
            assert result.usage.completion_tokens < 40 and chr(blank) in result.text + "\t"

    def test_d_the_brace_is_the_end(self, tokenizer, rules):
        result = self.one(tokenizer, rules, ONE, b'{"a":1}{"a":1} and more')
        assert (result.text, result.finish_reason, result.complete) == ('{"a":1}', STOP, True)

    def test_e_the_cap(self, tokenizer, rules):
        for cap, complete in ((5, False), (6, False), (7, True), (1, False)):
            result = self.one(tokenizer, rules, ONE, b'{"a":1}', max_tokens=cap, temperature=0)
            assert result.text == '{"a":1}'[:cap] and result.finish_reason is LENGTH
            assert result.complete is complete and result.as_json()["complete"] is complete


@pytest.mark.parametrize("rules", RULES, ids=NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_di_33_a_grammar_in_the_making_parks_its_request_alone(tokenizer, rules, overlap):
    """Budget 32: two decode, then a prompt of 2,000 tokens, five short ones, and one whose grammar
    is not there yet. The decoding ones get a token in every step."""
    hold, begun = threading.Event(), threading.Event()

    def make(structured, tokens):
        begun.set()
        assert hold.wait(60)
        return grammar.compiled(structured, tokens)

    script = wants([66] * 200, start=1)
    llm = engine(
        script, tokenizer=tokenizer, draft=drafts(script) if rules else None, rules=rules,
        max_rows=32, chunk=32, max_model_len=2200, pages=1700, slots=16, overlap=overlap,
    )  # fmt: skip
    llm._compiler = Compiler(tokenizer, VOCAB, (EOS,), 60.0, make)
    runner = llm.parts.runner
    two = llm.stream([[1], [2]], SamplingParams(temperature=0, max_tokens=2100, ignore_eos=True))
    assert {next(two).index, next(two).index} == {0, 1}
    before = len(runner.plans)
    rest = [[3] * 2000, *([4 + at] * 8 for at in range(5)), [1, 2]]
    plain = SamplingParams(temperature=0, max_tokens=4)
    params = [*[plain] * 6, SamplingParams(temperature=0, structured={"regex": "A{3}"})]
    others = llm.stream(rest, params)
    ended: list[int] = []
    for delta in others:
        if delta.result is not None:
            ended.append(delta.index)
            assert delta.result.error is None
        if len(ended) == 6:
            assert 6 not in ended and begun.is_set()
            hold.set()
        if 6 in ended:
            assert delta.result.text == "AAA" and delta.result.finish_reason is STOP
    assert sorted(ended) == list(range(7)) and ended[-1] == 6
    plans = [plan for plan in runner.plans[before:] if plan.chunks]
    assert len(plans) > 60
    assert {plan.decoding.slots[:2] for plan in plans} == {plans[0].decoding.slots[:2]}
    two.close()
    assert idle(llm)


@pytest.mark.parametrize("rules", RULES[:3], ids=NAMES[:3])
def test_with_everything_else(tokenizer, rules):
    """Penalties, bias, min_tokens, stop strings, log-probabilities, top-k, n: the ids are those
    without drafts, the text is what the grammar allows."""
    script = wants(b'{"city":"aaaaaaaaaaaaaaa', b'{"city":"bbbbbb"}', start=2, high=6.0)
    more = [
        dict(frequency_penalty=2.0, repetition_penalty=1.5), dict(top_k=2, min_p=0.1),
        dict(logit_bias={97: -math.inf, 34: 3.0}), dict(min_tokens=30), dict(stop=("aaa",)),
        dict(logprobs=2), dict(n=3, seq_seed=(1, 2, 3)), dict(temperature=0.0),
    ]  # fmt: skip
    params = [asked(CITY, **{"max_tokens": 60, **one}) for one in more]
    prompts = [[1, 2]] * len(params)
    plain = made(tokenizer, script, None, None, prompts, params)
    found = made(tokenizer, script, drafts(script, lambda base: base % 6), rules, prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert [r.logprobs for r in found] == [r.logprobs for r in plain]
    for result in found:
        assert result.error is None
        if result.complete:
            assert list(json.loads(result.text)) == ["city"]
        else:
            assert result.finish_reason is LENGTH or result.index == 4
    assert "a" not in found[2].text[9:]


def test_the_end_of_the_grammar_outdoes_min_tokens(tokenizer):
    for rules in RULES:
        script = wants(b'{"a":1}', start=2)
        [result] = made(tokenizer, script, None, rules, [[1, 2]], asked(ONE, min_tokens=40))
        assert (result.finish_reason, result.complete, result.error) == (STOP, True, None)


def test_a_bias_that_leaves_nothing_is_named(tokenizer):
    for rules in RULES:
        script = wants(b'{"a":1}', start=2)
        params = asked(ONE, logit_bias=dict.fromkeys(b": \r\n\t", -math.inf), temperature=0)
        bad, good = made(tokenizer, script, None, rules, [[1, 2]] * 2, [params, asked(ONE)])
        assert bad.finish_reason is ERROR and bad.error.code == "nothing-to-choose"
        assert bad.text == '{"a"' and good.text == '{"a":1}'


def test_too_complex_to_follow_ends_the_request_alone(tokenizer, monkeypatch):
    """A limit of the library that is met on the way."""
    monkeypatch.setitem(grammar._LIMITS, "step_lexer_fuel", 300)
    script = wants("é1é2é3é4é5é6é7".encode(), start=2)
    params = SamplingParams(temperature=0, structured={"regex": r"(\p{L}+|\d+){1,50}é"})
    ids = set()
    for rules in RULES:
        bad, good = made(tokenizer, script, None, rules, [[1, 2]] * 2, [params, asked(ONE)])
        assert bad.finish_reason is ERROR and not bad.complete and good.complete
        assert bad.error.code in ("grammar-too-complex", "regex-unsupported")
        ids.add(bad.token_ids)
    assert len(ids) == 1


@pytest.mark.parametrize("rules", RULES[:3], ids=NAMES[:3])
def test_preemption_keeps_the_place_in_the_grammar(tokenizer, rules):
    script = wants(b'{"city":"' + b"x" * 30 + b'"}', start=3)
    params = [asked(CITY, seq_seed=at, max_tokens=60) for at in range(4)]
    prompts = [[1, 2, at] for at in range(4)]
    wide = made(tokenizer, script, None, rules, prompts, params)
    tight = made(tokenizer, script, None, rules, prompts, params, pages=24)
    assert [r.token_ids for r in tight] == [r.token_ids for r in wide]
    assert sum(r.usage.recomputed_tokens for r in tight) > 0
    assert all(json.loads(r.text)["city"] == "x" * 30 for r in tight)


def test_neighbours_keep_their_bits(tokenizer):
    """What is not constrained is what it is without a constrained request beside it."""
    script = wants(b"free text of some length", start=2, high=3.0)
    free = [SamplingParams(seq_seed=at, max_tokens=25) for at in range(3)]
    for rules in RULES:
        alone = made(tokenizer, script, None, rules, [[1, 2]] * 3, free)
        both = made(
            tokenizer, script, None, rules, [[1, 2]] * 5,
            [*free, asked(ONE), asked(CITY, max_tokens=20)],
        )  # fmt: skip
        if rules is None or rules.verify == "coupled":
            assert [r.token_ids for r in both[:3]] == [r.token_ids for r in alone]
        assert all(r.complete is None for r in both[:3]) and both[3].complete


def test_what_cannot_be_asked_for(tokenizer):
    with pytest.raises(UsageError, match="ignore_eos"):
        SamplingParams(structured={"regex": "a"}, ignore_eos=True)
    params = SamplingParams(structured={"regex": "a", "after": [VOCAB]})
    [result] = engine(says(1, start=1), tokenizer=tokenizer).generate([[1]], params)
    assert result.error.code == "bad-token-id" and "structured.after" in result.error.message
    [result] = engine(says(1, start=1)).generate([[1]], SamplingParams(structured={"regex": "a"}))
    assert result.error.code == "no-tokenizer"


def test_schemas_on_the_embedded_model():
    """The small form of `python -m benchmarks.structured valid`: answers fit, and ids do not depend
    on drafts."""
    modes = {name: structured.MODES[name] for name in ("mtp 0", "mtp 5, varlen")}
    record = structured.valid(4, 48, modes)
    assert all(found["valid"] >= 2 for found in record["modes"].values())
