"""Requests of the protocols on the embedded model: chats, streams, many at once (DI-34, DI-35)."""

from __future__ import annotations

import json

import pytest

import deepinfer
from deepinfer import SamplingParams
from deepinfer.core.request import FinishReason, Structured
from deepinfer.engine.exchange import Exchange
from deepinfer.errors import DeepinferError, UsageError
from deepinfer.protocol.convert import Frontend, Setup
from tests.unit.exchanges import body, joined, neutral

GREEDY = SamplingParams(temperature=0, max_tokens=120)
YES_NO = Structured("regex", "yes|no")
SUM = [{"role": "user", "content": "What is 123 + 456?"}]
WEATHER = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                   "required": ["city"]}}}]  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with deepinfer.LLM(max_model_len=2048, max_num_seqs=4, threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def thought(llm):
    return llm.chat(SUM, GREEDY, thinking="on")


def test_an_answer_after_thinking(llm, thought):
    made = thought
    assert made.text == "579" and made.thinking.endswith("579")
    assert made.finish_reason is FinishReason.STOP
    assert 0 < made.usage.reasoning_tokens < made.usage.completion_tokens == len(made.token_ids)
    plain = llm.chat(SUM, GREEDY)
    assert plain.thinking == "" and plain.usage.reasoning_tokens == 0


def test_thinking_that_was_cut(llm):
    made = llm.chat(SUM, SamplingParams(temperature=0, max_tokens=5), thinking="on")
    assert made.text == "" and made.thinking and made.finish_reason is FinishReason.LENGTH


def test_a_call_and_its_result(llm):
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    made = llm.chat(ask, GREEDY, tools=WEATHER)
    [call] = made.tool_calls
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"
    said = {"role": "assistant", "content": made.text, "tool_calls": list(made.tool_calls)}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temp": 12}'}
    short = SamplingParams(temperature=0, max_tokens=4)
    assert llm.chat([*ask, said, result], short, tools=WEATHER).text


def test_a_forced_call_is_one_by_the_schema(llm):
    for thinking in ("off", "on"):
        made = llm.chat(SUM, SamplingParams(temperature=1, seed=3, max_tokens=60),
                        tools=WEATHER, tool_choice="required", thinking=thinking)  # fmt: skip
        if made.finish_reason is FinishReason.STOP:
            for call in made.tool_calls:
                assert set(json.loads(call["function"]["arguments"])) == {"city"}
            assert made.tool_calls


def test_a_format(llm):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    params = SamplingParams(temperature=1, seed=1, max_tokens=30)
    made = llm.chat(SUM, params, response_format=wanted)
    assert made.complete is False or isinstance(json.loads(made.text)["n"], int)
    own = SamplingParams(
        temperature=1, seed=1, max_tokens=60, structured=Structured("regex", "yes|no")
    )
    made = llm.chat(SUM, own, thinking="on")
    assert made.finish_reason is FinishReason.LENGTH or made.text in ("yes", "no")
    with pytest.raises(UsageError, match="twice"):
        llm.chat(SUM, own, response_format=wanted)


def test_stop_strings_end_the_text(llm, thought):
    whole = thought
    stop = whole.text[1]
    assert stop in whole.thinking
    params = SamplingParams(temperature=0, max_tokens=120, stop=stop)
    made = llm.chat(SUM, params, thinking="on")
    assert (made.thinking, made.text) == (whole.thinking, whole.text[0])
    assert made.token_ids == whole.token_ids[: len(made.token_ids)]


def test_seeds(llm):
    params = SamplingParams(temperature=1, max_tokens=8, seq_seed=5)
    first = llm.chat(SUM, params)
    assert first.seed == 5 and llm.chat(SUM, params).text == first.text


@pytest.mark.parametrize("more", [
    {"thinking": "loud"}, {"response_format": {"type": "xml"}}, {"tools": [{"type": "custom"}]},
    {"tool_choice": "required"}, {"sampling_params": SamplingParams(n=2)},
])  # fmt: skip
def test_what_a_chat_refuses(llm, more):
    with pytest.raises(UsageError):
        llm.chat(SUM, **more)


def test_a_prompt_that_is_too_long_raises(llm):
    with pytest.raises(DeepinferError, match="takes 2,048"):
        llm.chat([{"role": "user", "content": "x " * 4000}])


# many at once


def front(llm):
    return Frontend(llm.parts.tokenizer, Setup())


def asked(number, kind="chat", **more):
    tokens = {"responses": "max_output_tokens"}.get(kind, "max_tokens")
    return body(kind, f"What is {number} + {number}?", **{tokens: 6 + number, **more})


def run(llm, requests, window=99, follow=False):
    """Documents by key, and events where `follow`."""
    reader, documents, events, waiting = front(llm), {}, {}, list(requests.items())
    with Exchange(llm, reader) as exchange:
        while waiting or len(exchange):
            while waiting and len(exchange) < window:
                key, (kind, request) = waiting.pop(0)
                exchange.submit(key, reader.read(kind, request, seed=7), f"id-{key}", follow)
            for news in exchange.step():
                events.setdefault(news.key, []).extend(news.events)
                if news.over:
                    documents[news.key] = news.document or news.problem
    return documents, events


def stable(document):
    if not isinstance(document, dict):
        return document
    times = ("created", "created_at", "completed_at", "usage")
    return {name: value for name, value in document.items() if name not in times}


REQUESTS = {
    f"{kind}{n}": (kind, asked(n, kind, **({"think": True} if kind != "completions" else {})))
    for n, kind in enumerate(("chat", "responses", "messages", "completions"))
}


@pytest.fixture(scope="module")
def whole(llm):
    return run(llm, REQUESTS)[0]


def test_an_answer_does_not_depend_on_the_others(llm, whole):
    assert len(whole) == len(REQUESTS)
    backwards, _ = run(llm, dict(reversed(REQUESTS.items())), window=2)
    for key in REQUESTS:
        assert stable(backwards[key]) == stable(whole[key]), key


def test_a_stream_is_the_whole_in_pieces(llm, whole):
    streamed, events = run(llm, REQUESTS, follow=True)
    for key, (kind, _) in REQUESTS.items():
        assert stable(streamed[key]) == stable(whole[key])
        if kind != "completions":
            made = neutral(kind, whole[key])
            assert joined(kind, events[key]) == {**made, "calls": []}


def test_ending_one_leaves_the_others_and_its_key_free(llm):
    """DI-34: one is ended in flight and asked again under its name at once, another before it ran,
    a third twice."""
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [[0, 3, 60 + n, 4, 7] for n in range(6)]
    alone = [result.token_ids for result in llm.generate(prompts, params)]
    flow = llm.flow()
    for key in range(6):
        flow.submit(key, [prompts[key]], params)
    made = {}
    for _ in range(2):
        made |= {m.key: m.results[0].token_ids for m in flow.step() if m.results}
    [ended] = flow.end(1)
    assert ended.finish_reason is FinishReason.ABORT
    assert ended.token_ids == alone[1][: len(ended.token_ids)]
    flow.submit(1, [prompts[1]], params)
    [unborn] = flow.end(5)
    assert unborn.token_ids == () or unborn.token_ids == alone[5][: len(unborn.token_ids)]
    with pytest.raises(KeyError):
        flow.end(5)
    while len(flow):
        made |= {m.key: m.results[0].token_ids for m in flow.step() if m.results}
    assert [made[key] for key in range(5)] == alone[:5]
    assert not llm._running and not llm._policy.waiting


def test_bad_members_do_not_harm_their_neighbours(llm):
    """DI-35: an empty prompt, one that is too long, blanks only, room for one token."""
    room = 2048 - len(front(llm).encode(front(llm).read("chat", body("chat", "")))[0])
    bad = {
        "ok": ("chat", asked(1)), "empty": ("completions", body("completions", "")),
        "long": ("messages", body("messages", "x " * 4000)), "blank": ("chat", body("chat", "  ")),
        "one": ("chat", body("chat", "!" + " a" * (room - 2))), "again": ("chat", asked(1)),
    }  # fmt: skip
    made, _ = run(llm, bad)
    assert list(sorted(made)) == sorted(bad)
    assert made["empty"].code == "prompt-empty" and made["long"].code == "prompt-too-long"
    assert made["one"]["usage"]["completion_tokens"] == 1
    assert neutral("chat", made["ok"]) == neutral("chat", made["again"])
    alone, _ = run(llm, {"ok": bad["ok"], "blank": bad["blank"]})
    assert stable(alone["ok"]) == stable(made["ok"])
    assert neutral("chat", alone["blank"]) == neutral("chat", made["blank"])
