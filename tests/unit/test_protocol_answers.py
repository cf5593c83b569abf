"""Answers in three protocols: hard inputs, any cutting, and the clients' own types."""

import copy
import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.exchanges import CHATS, MARK, body, bytes_of, frontend, ids, joined, neutral
from tests.unit.exchanges import replied as answered

PIECES = (1, 2, 3, 4, 5, 6, 7, None)
LENGTH = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
STOP = {"chat": "stop", "responses": "completed", "messages": "end_turn"}
CALLED = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}


def stable(document):
    """A document without the time it was made at."""
    return {**document, "completed_at": None}


def said(kind, tokens, **asked):
    """The answer, which is the same for every cutting, streamed and whole."""
    first = None
    for piece in PIECES:
        events, document = answered(kind, tokens, piece=piece, **asked)
        if first is None:
            first = stable(document)
        assert stable(document) == first, piece
        streamed, whole = joined(kind, events), neutral(kind, document)
        if kind == "messages":
            # A call that was cut has no end to its JSON in a stream.
            whole_calls, calls = whole.pop("calls"), streamed.pop("calls")
            assert [name for name, _ in calls] == [name for name, _ in whole_calls]
            for (_, text), (_, value) in zip(calls, whole_calls, strict=True):
                if whole["why"] != "max_tokens":
                    assert json.loads(text or "{}") == value
        assert streamed == {key: whole[key] for key in streamed}
    return neutral(kind, first)


def call(name, *arguments):
    inner = "".join(
        f'<{MARK} parameter name="{key}" string="{string}">{value}</{MARK} parameter>\n'
        for key, string, value in arguments
    )
    return f'<{MARK} invoke name="{name}">\n{inner}</{MARK} invoke>\n'


def block(*calls):
    return f"\n\n<{MARK} calls>\n{''.join(calls)}</{MARK} calls>"


def arguments(kind, made):
    """Arguments of every call as objects."""
    return [value if isinstance(value, dict) else json.loads(value) for _, value in made["calls"]]


# DI-39: characters split over tokens


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize(
    "tokens, text",
    [
        (bytes_of("中🚀é".encode()), "中🚀é"),
        (bytes_of("中🚀".encode()[:5]), "中\ufffd"),
        ([*bytes_of(b"\xff"), *ids("ok")], "\ufffdok"),
        ([*bytes_of("中".encode() + b"\xf0"), *ids(" ok")], "中\ufffd ok"),
        ([*bytes_of(b"a\xf0"), *ids("<｜User｜>b")], "a\ufffdb"),
    ],
)
def test_characters_split_over_tokens(kind, tokens, text):
    assert said(kind, tokens)["text"] == text


def test_what_is_no_utf8_does_not_hold_back_what_follows():
    events, _ = answered("chat", [*bytes_of(b"\xff"), *ids("ok")], piece=1)
    deltas = [e.data["choices"][0]["delta"].get("content") for e in events]
    assert [delta for delta in deltas if delta] == ["\ufffd", "ok"]


# DI-42: thinking cut off by the token cap


@pytest.mark.parametrize("kind", CHATS)
def test_thinking_that_was_cut_is_thinking_alone(kind):
    made = said(kind, "I should", reason="length", think=True)
    assert made == {"thinking": "I should", "text": "", "calls": [], "why": LENGTH[kind]}


@pytest.mark.parametrize("kind", CHATS)
def test_thinking_and_text_are_apart(kind):
    made = said(kind, "I should</think>ok", think=True)
    assert made == {"thinking": "I should", "text": "ok", "calls": [], "why": STOP[kind]}


@pytest.mark.parametrize("kind", CHATS)
def test_thinking_that_stopped_by_itself_is_thinking_alone(kind):
    made = said(kind, "I should", think=True)
    assert made == {"thinking": "I should", "text": "", "calls": [], "why": STOP[kind]}


@pytest.mark.parametrize("kind", CHATS)
def test_without_thinking_there_is_text_alone(kind):
    made = said(kind, "ok")
    assert made == {"thinking": "", "text": "ok", "calls": [], "why": STOP[kind]}


@pytest.mark.parametrize("kind", CHATS)
def test_control_tokens_that_the_model_spells_are_text(kind):
    made = said(kind, frontend().tokenizer.encode_plain("a</think>b"), think=True)
    assert (made["thinking"], made["text"]) == ("a</think>b", "")
    spelt = frontend().tokenizer.encode_plain("x" + block(call("other")))
    made = said(kind, spelt, tools=True)
    assert (made["text"], made["calls"]) == ("x" + block(call("other")), [])


# DI-43: any chunking, one result

TWO_CALLS = (
    "Let me see</think>I look."
    + block(
        call("get_weather", ("city", "true", "a 2>&1"), ("n", "false", "42")), call("other")
    )
)  # fmt: skip


@pytest.mark.parametrize("kind", CHATS)
def test_thinking_text_and_two_calls(kind):
    made = said(kind, TWO_CALLS, think=True, tools=True)
    assert (made["thinking"], made["text"]) == ("Let me see", "I look.")
    assert [name for name, _ in made["calls"]] == ["get_weather", "other"]
    assert arguments(kind, made) == [{"city": "a 2>&1", "n": 42}, {}]
    assert made["why"] == CALLED[kind]


@pytest.mark.parametrize("kind", CHATS)
def test_pieces_of_characters(kind):
    """The same answer as tokens of 1 to 7 characters: another way to the same text."""
    whole = said(kind, TWO_CALLS, think=True, tools=True)
    for size in range(1, 8):
        tokens, control = [], {"</think>", MARK}
        rest = TWO_CALLS
        while rest:
            mark = next((m for m in control if rest.startswith(m)), None)
            ends = [at for m in control if (at := rest.find(m)) > 0]
            part = mark or rest[: min([size, *ends])]
            tokens += ids(part)
            rest = rest[len(part) :]
        assert neutral(kind, answered(kind, tokens, think=True, tools=True)[1]) == whole


@pytest.mark.parametrize("kind", CHATS)
def test_a_cut_anywhere_in_the_calls_loses_no_text_and_hides_nothing(kind):
    tokens = ids(TWO_CALLS)
    asked = {"reason": "length", "think": True, "tools": True}
    for end in range(tokens.index(frontend().mark), len(tokens)):
        if end % 7 == 0:
            made = said(kind, tokens[:end], **asked)
        else:
            made = neutral(kind, answered(kind, tokens[:end], **asked)[1])
        assert made["why"] == LENGTH[kind]
        assert made["thinking"] == "Let me see"
        assert made["text"].rstrip("\n<") == "I look."
        for _, value in made["calls"]:
            shown = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
            assert MARK not in shown and "</" not in shown and "parameter" not in shown
    inside = len(ids(TWO_CALLS.split("2>")[0] + "2>"))
    made = neutral(kind, answered(kind, tokens[:inside], **asked)[1])
    value = made["calls"][0][1]
    assert value == {"city": "a 2>"} if kind == "messages" else value.startswith('{"city": "a 2>')


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("inside", ["blah", "<b>", f"<{MARK} invoke>x", f"</{MARK} parameter>"])
def test_a_block_that_is_none_stays_text(kind, inside):
    text = f"see\n\n<{MARK} calls>\n{inside}\n</{MARK} calls>"
    made = said(kind, text, tools=True)
    assert inside in made["text"] and made["text"].startswith("see") and made["calls"] == []
    assert made["why"] == STOP[kind]


@pytest.mark.parametrize("kind", CHATS)
def test_what_is_no_call_in_a_block_is_text_in_front_of_the_calls(kind):
    made = said(kind, "x" + block(call("other"), "and more "), tools=True)
    assert [name for name, _ in made["calls"]] == ["other"]
    assert made["text"].startswith("x") and "and more" in made["text"]


@pytest.mark.parametrize("kind", CHATS)
def test_a_half_call_that_stopped_by_itself_is_no_call(kind):
    half = block(call("other"), call("get_weather", ("city", "true", "Paris"))).split("Paris")[0]
    made = said(kind, half + "Par", tools=True)
    assert [name for name, _ in made["calls"]] == ["other"]
    assert "Par" in made["text"]


@pytest.mark.parametrize("kind", CHATS)
def test_the_end_of_the_block_is_the_end_of_the_answer(kind):
    plain = said(kind, block(call("other")), tools=True)
    assert said(kind, block(call("other")) + " and on it goes", tools=True) == plain
    for piece in (1, 3, None):
        _, document = answered(kind, block(call("other")) + " and on", piece=piece, tools=True)
        usage = document["usage"]
        count = usage.get("completion_tokens", usage.get("output_tokens"))
        assert count == len(ids(block(call("other"))))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_text_and_any_pieces(data):
    """Answers put together at random, in pieces of random sizes."""
    kind = data.draw(st.sampled_from(CHATS))
    parts = ["a", " b", "<", "</", "\n\n", "北京", MARK, " calls>", "\n", ">", call("other"),
             call("get_weather", ("city", "true", "x</y>")), block(call("other")), "</think>",
             f"<{MARK} calls>", f"</{MARK} calls>", "{", '"']  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    asked = {"think": data.draw(st.booleans()), "tools": True}
    tokens = ids(text)
    _, whole = answered(kind, tokens, reason, **asked)
    for piece in range(1, 8):
        events, document = answered(kind, tokens, reason, piece=piece, **asked)
        assert stable(document) == stable(whole)
        streamed = joined(kind, events)
        made = neutral(kind, whole)
        assert (streamed["thinking"], streamed["text"]) == (made["thinking"], made["text"])


# DI-44: argument types and odd characters


@pytest.mark.parametrize("kind", CHATS)
def test_types_of_arguments(kind):
    given = [
        ("s1", "true", "42", "42"), ("s2", "true", "\\u4f60", "\\u4f60"),
        ("n", "false", "42", 42), ("b", "false", "true", True), ("z", "false", "null", None),
        ("l", "false", "[1,2]", [1, 2]), ("o", "false", '{"a":1}', {"a": 1}),
        ("u", "false", '"\\u4f60"', "你"), ("bad", "false", "not json", "not json"),
        ("nan", "false", "NaN", "NaN"), ("inf", "false", "[1e999]", "[1e999]"),
        ("city", "true", "北京", "北京"), ("r", "true", "🚀", "🚀"),
        ("q", "true", "\"a\" 'b' \\", "\"a\" 'b' \\"), ("lines", "true", "a\nb\r\n", "a\nb\r\n"),
        ("blank", "true", "  x", "  x"), ("empty", "true", "", ""),
        ("arguments", "true", "x", "x"), ("tag", "true", "<b></b> a<c", "<b></b> a<c"),
        ("big", "false", "123456789012345678901234567890", 123456789012345678901234567890),
    ]  # fmt: skip
    written = block(call("free", *[(name, string, text) for name, string, text, _ in given]))
    made = said(kind, written, tools=True)
    [value] = arguments(kind, made)
    assert value == {name: wanted for name, _, _, wanted in given}
    assert list(value) == [name for name, *_ in given]
    assert {type(v) for k, v in value.items() if k in ("b", "n")} == {bool, int}
    _, document = answered(kind, written, tools=True)
    unread = document["deepinfer"]["arguments_not_json"]
    assert unread == [{"call": 0, "argument": name} for name in ("bad", "nan", "inf")]
    json.dumps(document, allow_nan=False)


# stop strings


@pytest.mark.parametrize("kind, field", [("chat", "stop"), ("messages", "stop_sequences")])
def test_stop_strings_end_the_text_and_not_the_thinking(kind, field):
    made = said(kind, "a STOP b</think>c STOP d", think=True, **{field: ["STOP"]})
    assert (made["thinking"], made["text"]) == ("a STOP b", "c ")
    assert made["why"] == {"chat": "stop", "messages": "stop_sequence"}[kind]
    _, document = answered(kind, "c STOP d", **{field: ["STOP"]})
    assert document.get("stop_sequence", "STOP") == "STOP"
    usage = document["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == len(ids("c STOP"))
    events, _ = answered(kind, "c STOP d", piece=1, **{field: ["STOP"]})
    last = [event.data["usage"] for event in events if event.data.get("usage")][-1]
    assert last == usage


# counts and log-probabilities


@pytest.mark.parametrize("kind", CHATS)
def test_usage(kind):
    events, document = answered(kind, "a b</think>c", piece=1, think=True)
    usage = document["usage"]
    if kind == "messages":
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 4)
        assert usage["output_tokens"] == 5
        assert events[-2].data["usage"]["output_tokens"] == 5
        return
    read, written = ("prompt", "completion") if kind == "chat" else ("input", "output")
    assert (usage[f"{read}_tokens"], usage[f"{written}_tokens"]) == (9, 5)
    assert usage["total_tokens"] == 14
    assert usage[f"{read}_tokens_details"]["cached_tokens"] == 4
    assert usage[f"{written}_tokens_details"]["reasoning_tokens"] == 2
    last = events[-1].data
    assert (last["usage"] if kind == "chat" else last["response"]["usage"]) == usage


@pytest.mark.parametrize("piece", PIECES)
def test_log_probabilities_reach_stream_and_whole(piece):
    asked = {"think": True, "logprobs": True, "top_logprobs": 2, "scored": True}
    events, document = answered("chat", "a b</think>c d", piece=piece, **asked)
    whole = document["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["c", " d"]
    assert [entry["token"] for entry in whole["reasoning_content"]] == ["a", " b"]
    assert whole["content"][0]["top_logprobs"][1]["logprob"] == -1.5
    for part in ("content", "reasoning_content"):
        parts = [e.data["choices"][0]["logprobs"] or {} for e in events]
        assert list(itertools.chain(*(p.get(part) or [] for p in parts))) == whole[part]
    events, document = answered(
        "responses", "a b</think>c d", piece=piece, think=True, scored=True, top_logprobs=2
    )
    [text] = [i for i in document["output"] if i["type"] == "message"][0]["content"]
    assert [entry["token"] for entry in text["logprobs"]] == ["c", " d"]
    deltas = [e.data["logprobs"] for e in events if e.name == "response.output_text.delta"]
    assert list(itertools.chain(*deltas)) == text["logprobs"]


# the clients' own types

SHOWN = [
    ("I should</think>ok", {"think": True}),
    ("I should", {"think": True, "reason": "length"}),
    ("ok", {}),
    (TWO_CALLS, {"think": True, "tools": True}),
    (TWO_CALLS[:150], {"think": True, "tools": True, "reason": "length"}),
]


@pytest.mark.parametrize("tokens, asked", SHOWN)
def test_chat_completions_parse_into_the_clients_types(tokens, asked):
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types import chat

    scored = {"logprobs": True, "top_logprobs": 2, "scored": True}
    for more in ({}, scored):
        events, document = answered("chat", tokens, piece=2, **asked, **more)
        parsed = chat.ChatCompletion.model_validate(document)
        state = ChatCompletionStreamState()
        for event in events:
            assert event.name is None
            state.handle_chunk(chat.ChatCompletionChunk.model_validate(event.data))
        final = state.current_completion_snapshot
        theirs, ours = final.choices[0], parsed.choices[0]
        assert (theirs.message.content or "") == (ours.message.content or "")
        assert theirs.finish_reason == ours.finish_reason
        for a, b in zip(
            theirs.message.tool_calls or (), ours.message.tool_calls or (), strict=True
        ):
            assert (a.id, a.function.name) == (b.id, b.function.name)
            assert a.function.arguments == b.function.arguments
        assert final.usage == parsed.usage


@pytest.mark.parametrize("tokens, asked", SHOWN)
def test_responses_parse_into_the_clients_types(tokens, asked):
    from openai.types import responses as types
    from pydantic import TypeAdapter

    adapter = TypeAdapter(types.ResponseStreamEvent)
    for more in ({}, {"top_logprobs": 2, "scored": True}):
        events, document = answered("responses", tokens, piece=2, **asked, **more)
        parsed = types.Response.model_validate(document)
        assert parsed.model == "any-model"
        seen = [adapter.validate_python(event.data) for event in events]
        assert [event.type for event in seen] == [event.name for event in events]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert stable(events[-1].data["response"]) == stable(
            {k: v for k, v in document.items() if k != "deepinfer"}
        )


@pytest.mark.parametrize("tokens, asked", SHOWN)
def test_messages_parse_into_the_clients_types(tokens, asked):
    from anthropic import types
    from pydantic import TypeAdapter

    adapter = TypeAdapter(types.RawMessageStreamEvent)
    events, document = answered("messages", tokens, piece=2, **asked)
    parsed = types.Message.model_validate(document)
    assert parsed.model_dump(exclude_unset=True) == document
    seen = [adapter.validate_python(e.data) for e in events if e.name != "ping"]
    assert [event.type for event in seen] == [e.name for e in events if e.name != "ping"]
    blocks = [event.content_block for event in seen if event.type == "content_block_start"]
    assert [block.type for block in blocks] == [block.type for block in parsed.content]
    ends = [event for event in seen if event.type == "message_delta"]
    assert [end.delta.stop_reason for end in ends] == [parsed.stop_reason]


@pytest.mark.parametrize("kind", CHATS)
def test_ids_follow_from_the_answers_id(kind):
    first, again = (answered(kind, TWO_CALLS, think=True, tools=True)[1] for _ in range(2))
    events, _ = answered(kind, TWO_CALLS, think=True, tools=True)
    datas = [first, *(event.data for event in events)]
    datas += [data["response"] for data in datas if "response" in data]
    made = [data[name] for data in datas for name in ("created", "created_at") if name in data]
    assert set(made) <= {5} and (made or kind == "messages")
    assert stable(first) == stable(again)
    text = json.dumps(first)
    assert text.count("call_") >= 2 and "call_00" not in text


def test_a_call_id_in_the_text_is_left_alone():
    _, document = answered("chat", "call_00_abcdefghijklmnopqrstuvwx")
    assert neutral("chat", document)["text"] == "call_00_abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize("kind", CHATS)
def test_the_model_is_called_what_the_request_calls_it(kind):
    _, document = answered(kind, "ok", model="gpt-4o 北京")
    assert document["model"] == "gpt-4o 北京"


def test_requests_are_not_changed():
    for kind in CHATS:
        request = body(kind, tools=True, think=True)
        before = copy.deepcopy(request)
        frontend().read(kind, request)
        assert request == before
