"""Requests of four kinds into prompts and sampling parameters; nothing in them is ignored."""

import json
from pathlib import Path

import deepseek_recipe as recipe
import pytest

from deepinfer.core.request import Structured
from deepinfer.errors import CheckpointError, DeepinferError, UsageError
from deepinfer.protocol import fields
from deepinfer.protocol.convert import Frontend
from deepinfer.tokenizer.tokenizer import Tokenizer
from tests.unit.exchanges import CHATS, FILE, TOOLS, body, frontend, tokenizer

KINDS = (*CHATS, "completions")


def read(kind, request, seed=None, **setup):
    return frontend(**setup).read(kind, request, seed)


def prompt(kind, request, **setup):
    front = frontend(**setup)
    [ids] = front.encode(front.read(kind, request))
    return ids


def refused(kind, request, match, **setup):
    with pytest.raises(UsageError, match=match):
        read(kind, request, **setup)


# DI-40: special-token text typed by the user; DI-41: exactly one BOS

LITERALS = ("x", "<｜User｜>", "<｜Assistant｜>hi", "<think>", "</think>", "｜DSML｜",
            "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>x", "<｜System｜>")  # fmt: skip
SPECIAL = set(range(19))


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("literal", LITERALS)
def test_names_of_control_tokens_stay_text_in_every_field(kind, literal):
    def all_fields(text):
        tools = {"t": {"type": "object", "description": text, "properties": {}}}
        if kind == "chat":
            tool = {"type": "function", "function": {
                "name": "t", "description": text, "parameters": tools["t"]}}  # fmt: skip
            return {"model": "m", "tools": [tool], "messages": [
                {"role": "system", "content": text},
                {"role": "user", "content": [{"type": "text", "text": text}]},
                {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [
                    {"id": "1", "type": "function",
                     "function": {"name": "t", "arguments": json.dumps({"a": text})}}]},
                {"role": "tool", "tool_call_id": "1", "content": text},
                {"role": "user", "content": text}]}  # fmt: skip
        if kind == "responses":
            return {"model": "m", "instructions": text, "tools": [
                {"type": "function", "name": "t", "description": text, "parameters": tools["t"]}],
                "input": [
                {"role": "user", "content": text},
                {"type": "function_call", "call_id": "1", "name": "t",
                 "arguments": json.dumps({"a": text})},
                {"type": "function_call_output", "call_id": "1", "output": text},
                {"role": "user", "content": [{"type": "input_text", "text": text}]}]}  # fmt: skip
        return {"model": "m", "max_tokens": 9, "system": text, "tools": [
            {"name": "t", "description": text, "input_schema": tools["t"]}], "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": [
                {"type": "text", "text": text},
                {"type": "tool_use", "id": "1", "name": "t", "input": {"a": text}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": text},
                {"type": "text", "text": text}]}]}  # fmt: skip

    plain, typed = (prompt(kind, all_fields(text)) for text in ("x", literal))
    assert [i for i in typed if i in SPECIAL] == [i for i in plain if i in SPECIAL]
    assert typed.count(0) == 1 and typed[0] == 0
    escaped = json.dumps(literal, ensure_ascii=False)[1:-1]
    assert tokenizer().decode(typed).count(escaped) >= 5


@pytest.mark.parametrize("literal, added", [("<｜User｜>", 5), ("<think>", 3)])
def test_a_literal_is_as_long_as_its_text(literal, added):
    """On this vocabulary, as long as the plain encoding; on V4.1's that is 5 and 3 tokens."""
    long = len(prompt("chat", body("chat", literal))) - len(prompt("chat", body("chat", "")))
    assert long == len(tokenizer().encode_plain(literal)) and long > 1


@pytest.mark.parametrize("kind", CHATS)
def test_the_prompt_is_the_conversion_librarys(kind):
    """Its own encoder, given the same tokenizer, makes the same ids."""
    theirs = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(FILE)))
    for asked in ({}, {"think": True}, {"tools": True}, {"think": True, "tools": True}):
        prepared = read(kind, body(kind, "Hi <think> 北京", **asked))
        ids = theirs.encode(prepared.converted.conversation)
        assert frontend().encode(prepared) == [ids]


def test_a_begun_bos_is_not_doubled():
    literal = "<｜begin▁of▁sentence｜>"
    for text in (literal + "<｜User｜>Hi", "raw", f"raw {literal} text"):
        assert tokenizer().encode(text).count(0) == 1
    prepared = read("completions", body("completions", [0, 5, 6]))
    assert frontend().encode(prepared) == [[0, 5, 6]]


# DI-45: equivalent inputs, equal prompts


def history(reasoning, **more):
    return {"model": "m", "thinking": {"type": "enabled"}, **more, "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": reasoning},
        {"role": "user", "content": "q2"}]}  # fmt: skip


def test_old_reasoning_counts_with_tools_only():
    long = "word " * 1000
    tools = body("chat", tools=True)["tools"]
    for more in ({}, {"tools": []}):
        assert prompt("chat", history(long, **more)) == prompt("chat", history("", **more))
    grown = len(prompt("chat", history(long, tools=tools)))
    assert grown - len(prompt("chat", history("", tools=tools))) > 1000


def test_old_reasoning_of_messages_and_responses():
    tools = body("messages", tools=True)["tools"]
    thinking = {"type": "enabled", "budget_tokens": 1024}

    def messages(text, **more):
        return {"model": "m", "max_tokens": 9, "thinking": thinking, **more, "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": text, "signature": "s"},
                {"type": "text", "text": "a"}]},
            {"role": "user", "content": "q2"}]}  # fmt: skip

    long = "word " * 500
    assert prompt("messages", messages(long)) == prompt("messages", messages("x"))
    assert len(prompt("messages", messages(long, tools=tools))) > 500


def test_models_of_other_types_are_refused(tmp_path):
    from deepinfer.checkpoint.layout import open_checkpoint

    for kind in ("deepseek_v4", "llama", None):
        config = {"model_type": kind, "architectures": ["X"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path, "-m")


def test_a_tokenizer_without_the_control_tokens_is_refused(tmp_path):
    spec = json.loads(Path(FILE).read_text())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "</think>"]
    place = tmp_path / "tokenizer.json"
    place.write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="no control token </think>"):
        Frontend(Tokenizer(place, 0, 4096)).read("chat", body("chat"))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Frontend(None).read("chat", body("chat"))
    plain = Frontend(None)
    assert plain.encode(plain.read("completions", body("completions", [5, 6]))) == [[5, 6]]


def test_content_as_text_and_as_blocks():
    def messages(system, content):
        return {"model": "m", "max_tokens": 9, "system": system,
                "messages": [{"role": "user", "content": content}]}  # fmt: skip

    block = [{"type": "text", "text": "hi"}]
    first = prompt("messages", messages("S", "hi"))
    assert first == prompt("messages", messages([{"type": "text", "text": "S"}], block))
    cached = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert first == prompt("messages", messages("S", cached))
    chat = [{"role": "user", "content": block}]
    assert prompt("chat", {"model": "m", "messages": chat}) == prompt("chat", body("chat", "hi"))
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert prompt("responses", {"model": "m", "input": items}) == prompt(
        "responses", body("responses", "hi")
    )
    developer = [{"role": "developer", "content": "S"}, *chat]
    system = [{"role": "system", "content": "S"}, *chat]
    assert prompt("chat", {"messages": developer}) == prompt("chat", {"messages": system})


def results(kind, order, calls=("c1", "c2")):
    """Two calls, and results of those in `order`."""
    names = {"c1": "get_weather", "c2": "other"}
    request = body(kind, tools=True)
    if kind == "chat":
        made = [{"id": c, "type": "function", "function": {"name": names[c], "arguments": "{}"}}
                for c in calls]  # fmt: skip
        request["messages"] += [{"role": "assistant", "content": "", "tool_calls": made}]
        request["messages"] += [
            {"role": "tool", "tool_call_id": c, "content": f"of {c}"} for c in order
        ]
    elif kind == "responses":
        request["input"] = [{"role": "user", "content": "Hi"}]
        request["input"] += [
            {"type": "function_call", "call_id": c, "name": names[c], "arguments": "{}"}
            for c in calls
        ]
        request["input"] += [
            {"type": "function_call_output", "call_id": c, "output": f"of {c}"} for c in order
        ]
    else:
        uses = [{"type": "tool_use", "id": c, "name": names[c], "input": {}} for c in calls]
        blocks = [{"type": "tool_result", "tool_use_id": c, "content": f"of {c}"} for c in order]
        request["messages"] += [{"role": "assistant", "content": uses},
                                {"role": "user", "content": blocks}]  # fmt: skip
    return request


@pytest.mark.parametrize("kind", CHATS)
def test_results_are_matched_to_calls_by_id(kind):
    ids = prompt(kind, results(kind, ["c2", "c1"]))
    assert ids == prompt(kind, results(kind, ["c1", "c2"]))
    text = tokenizer().decode(ids)
    assert text.index("of c1") < text.index("of c2")


@pytest.mark.parametrize("kind", CHATS)
def test_a_call_without_a_result_is_named(kind):
    refused(kind, results(kind, ["c2"]), "c1")
    if kind == "chat":
        cut = results(kind, ["c2"])
        cut["messages"].append({"role": "user", "content": "and?"})
        refused(kind, cut, "'c1' of messages")


# thinking


def test_thinking_is_off_unless_asked_for():
    end = tokenizer().special("</think>")
    for kind in CHATS:
        request = body(kind)
        request.pop("thinking", None), request.pop("reasoning", None)
        assert prompt(kind, request)[-1] == end
        assert prompt(kind, request, thinking="on")[-1] == tokenizer().special("<think>")
        assert prompt(kind, body(kind, think=False), thinking="on")[-1] == end
        forced = read(kind, body(kind, think=True), thinking="off", forced=True)
        assert forced.stage == "text"


@pytest.mark.parametrize("kind", CHATS)
def test_effort(kind):
    def asked(level):
        at = {"chat": {"reasoning_effort": level}, "responses": {"reasoning": {"effort": level}},
              "messages": {"output_config": {"effort": level}}}[kind]  # fmt: skip
        request = {**body(kind), **at}
        request.pop("thinking", None)
        return request

    texts = {level: tokenizer().decode(prompt(kind, asked(level)))
             for level in ("low", "high", "max")}  # fmt: skip
    for level, number in (("low", 50), ("high", 75), ("max", 100)):
        assert f"Reasoning Effort: {number}" in texts[level]
    request = body(kind)
    request.pop("thinking", None), request.pop("reasoning", None)
    assert prompt(kind, request, thinking="max") == prompt(kind, asked("max"))
    request.pop("max_tokens", None)
    most = {t: read(kind, request, thinking=t).params.max_tokens for t in ("off", "on", "max")}
    assert most == {"off": 8192, "on": 65536, "max": 131072}


def test_thinking_that_contradicts_itself():
    refused("chat", {**body("chat"), "reasoning_effort": "high"}, "thinking is disabled")
    refused("chat", {**body("chat", think=True), "reasoning_effort": "none"}, "effort is none")
    refused("messages", {**body("messages"), "output_config": {"effort": "max"}}, "disabled")


# sampling parameters

APPLIED = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "min_tokens": 2, "ignore_eos": True, "temperature": 0.3,
    "top_p": 0.4,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", APPLIED)
def test_what_the_library_drops_is_applied(kind, name):
    prepared = read(kind, body(kind, **{name: APPLIED[name]}))
    assert getattr(prepared.params, name) == APPLIED[name]


@pytest.mark.parametrize("kind", KINDS)
def test_more_that_is_applied(kind):
    params = read(kind, body(kind, logit_bias={"7": -100, "8": 2.5}, seed=-1)).params
    assert params.logit_bias == {7: -100.0, 8: 2.5}
    assert params.seed == 2**64 - 1
    assert read(kind, body(kind, stop_token_ids=[5])).params.stop_token_ids == (5,)
    for bad in ({"logit_bias": {"a": 1}}, {"logit_bias": 3}, {"seed": 1.5}, {"seed": 2**64}):
        refused(kind, body(kind, **bad), "|".join(bad))


@pytest.mark.parametrize("kind", KINDS)
def test_most_tokens(kind):
    names = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
    request = body(kind)
    request.pop("max_tokens", None)
    name = names.get(kind, "max_tokens")
    assert read(kind, {**request, name: 7}).params.max_tokens == 7
    assert read(kind, {**request, name: 10**6}).params.max_tokens == 10**6
    if kind == "chat":
        assert read(kind, {**request, "max_tokens": 7}).params.max_tokens == 7
        refused(kind, {**request, "max_tokens": 7, name: 8}, "differ")
    if kind != "completions":
        refused(kind, {**request, name: 0}, "max_")


@pytest.mark.parametrize("kind", CHATS)
def test_seeds_and_flags(kind):
    assert read(kind, body(kind), seed=9).params.seed == 9
    assert read(kind, body(kind, seed=3), seed=9).params.seed == 3
    params = read(kind, body(kind, seed=3), sampling={"seq_seed": 5}).params
    assert (params.seed, params.seq_seed) == (None, 5)


@pytest.mark.parametrize("kind", CHATS)
def test_flags_win_and_both_values_are_recorded(kind):
    request = body(kind, think=True, top_p=0.9)
    prepared = read(kind, request, sampling={"temperature": 0.2})
    assert (prepared.params.temperature, prepared.params.top_p) == (0.2, 0.9)
    assert prepared.sampled["temperature"] == {"value": 0.2, "source": "flag", "protocol": 1.0}
    assert prepared.sampled["top_p"]["source"] == "request"
    assert prepared.sampled["top_p"]["protocol"] >= 0.95
    assert read(kind, body(kind)).sampled["temperature"]["source"] == "protocol"


def test_log_probabilities():
    assert read("chat", body("chat", logprobs=True)).params.logprobs == 0
    assert read("chat", body("chat", logprobs=True, top_logprobs=3)).params.logprobs == 3
    assert read("chat", body("chat")).params.logprobs is None
    asked = body("responses", include=["message.output_text.logprobs"])
    assert read("responses", asked).params.logprobs == 0
    assert read("completions", body("completions", logprobs=2)).params.logprobs == 2


# what an answer must look like

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def formatted(kind, schema=SCHEMA, **more):
    wanted = {"type": "json_schema", "schema": schema}
    if kind == "chat":
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return body(kind, response_format=wanted, **more)
    if kind == "responses":
        return {**body(kind, **more), "text": {"format": {**wanted, "name": "n"}}}
    return body(kind, output_config={"format": wanted}, **more)


@pytest.mark.parametrize("kind", CHATS)
def test_a_schema_constrains_and_is_in_the_prompt(kind):
    prepared = read(kind, formatted(kind))
    held = prepared.params.structured
    assert (held.kind, held.after) == ("json_schema", ())
    assert json.loads(held.source)["required"] == ["a"]
    assert '"required": ["a"]' in tokenizer().decode(frontend().encode(prepared)[0])
    after = (tokenizer().special("</think>"),)
    assert read(kind, formatted(kind, think=True)).params.structured.after == after


def test_formats_of_chat():
    wanted = {"type": "json_object"}
    held = read("chat", body("chat", "as json", response_format=wanted)).params.structured
    assert json.loads(held.source) == {"type": "object"}
    refused("chat", body("chat", "text", response_format=wanted), "word 'json'")
    held = read("chat", body("chat", response_format={"type": "regex", "regex": "a+"}))
    assert held.params.structured == Structured("regex", "a+")
    assert read("chat", body("chat", response_format={"type": "text"})).params.structured is None
    told = {"name": "n", "description": "WHY", "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": told}
    assert "WHY" in tokenizer().decode(prompt("chat", body("chat", response_format=wanted)))
    strict = {"name": "n", "strict": True, "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": strict}
    held = read("chat", body("chat", response_format=wanted)).params.structured
    assert json.loads(held.source)["additionalProperties"] is False


def choosing(kind, choice):
    """A request whose tool_choice is auto, required, or the name of a tool."""
    named = choice not in ("auto", "required", "none")
    if kind == "messages":
        word = {"auto": "auto", "required": "any", "none": "none"}.get(choice, "tool")
        return {"type": word, **({"name": choice} if named else {})}
    if not named:
        return choice
    chat = {"type": "function", "function": {"name": choice}}
    return chat if kind == "chat" else {"type": "function", "name": choice}


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("think", [False, True])
def test_a_forced_call_is_constrained(kind, think):
    asked = body(kind, think=think, tools=True)
    prepared = read(kind, {**asked, "tool_choice": choosing(kind, "required")})
    held = prepared.params.structured
    assert held.kind == "lark" and 'name=\\"get_weather\\"' in held.source
    assert held.after == ((tokenizer().special("</think>"),) if think else ())
    named = read(kind, body(kind, think=think, tools=True, tool_choice=choosing(kind, "other")))
    source = named.params.structured.source
    assert 'name=\\"other\\"' in source and "get_weather" not in source
    plain = read(kind, body(kind, think=think, tools=True, tool_choice=choosing(kind, "auto")))
    assert plain.params.structured is None and plain.calls
    none = read(kind, body(kind, think=think, tools=True, tool_choice=choosing(kind, "none")))
    assert not none.calls


@pytest.mark.parametrize("kind", CHATS)
def test_choices_that_cannot_be(kind):
    refused(kind, body(kind, tool_choice=choosing(kind, "required")), "no tools")
    refused(kind, body(kind, tools=True, tool_choice=choosing(kind, "nope")), "nope")


def test_strict_tools_and_single_calls_are_constrained():
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    function = {"name": "t", "strict": True, "parameters": closed}
    strict = {**body("chat"), "tools": [{"type": "function", "function": function}]}
    assert read("chat", strict).params.structured.kind == "lark"
    assert "call+" in read("chat", strict).params.structured.source
    single = read("chat", body("chat", tools=True, parallel_tool_calls=False))
    assert "call+" not in single.params.structured.source
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    single = read("messages", body("messages", tools=True, tool_choice=choice))
    assert "call+" not in single.params.structured.source


BOUNDED = {
    "type": "object", "required": ["a", "b", "f"], "$defs": {"d": {
        "type": "object", "properties": {"e": {"type": "string", "maxLength": 2}}}},
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 4},
        "b": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
            "anyOf": [{"type": "object", "properties": {"c": {"type": "string", "minLength": 3}}},
                      {"type": "null"}]}},
        "f": {"$ref": "#/$defs/d"}},
}  # fmt: skip
COUNTS = {"minLength": 3, "maxLength": 2, "minItems": 1, "maxItems": 2}


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_strict_format_keeps_the_limits_of_its_schema(kind):
    told = {"name": "n", "strict": True, "schema": BOUNDED}
    chat = {"response_format": {"type": "json_schema", "json_schema": told}}
    responses = {"text": {"format": {"type": "json_schema", **told}}}
    for tools in (False, True):
        asked = {**body(kind, tools=tools), **(chat if kind == "chat" else responses)}
        if tools:
            asked["tool_choice"] = "none"
        held = json.loads(read(kind, asked).params.structured.source)
        closed = {"additionalProperties": False}
        short = {"e": {"type": "string", "maxLength": 2}}
        assert held["$defs"]["d"] == {
            "type": "object", "properties": short, "required": ["e"], **closed}  # fmt: skip
        assert held["properties"]["a"] == BOUNDED["properties"]["a"]
        assert held["additionalProperties"] is False and held["required"] == ["a", "b", "f"]
        many = held["properties"]["b"]
        assert (many["minItems"], many["maxItems"]) == (1, 2)
        assert many["items"]["anyOf"][0] == {
            "type": "object", "properties": {"c": {"type": "string", "minLength": 3}},
            "required": ["c"], **closed}  # fmt: skip


@pytest.mark.parametrize("kind", CHATS)
def test_a_strict_tool_keeps_the_limits_of_its_schema(kind):
    schema = "input_schema" if kind == "messages" else "parameters"
    tool = {"name": "t", "strict": True, schema: BOUNDED}
    if kind != "messages":
        tool = {"type": "function", **({"function": tool} if kind == "chat" else tool)}
    source = read(kind, {**body(kind), "tools": [tool]}).params.structured.source
    assert "{1,4}" in source
    for name, count in COUNTS.items():
        assert f'"{name}": {count}' in source
    assert source.count('"additionalProperties": false') >= 3


def test_strict_of_messages_is_true_or_false():
    def asked(strict):
        tool = {"name": "t", "strict": strict, "input_schema": TOOLS["other"]}
        return {**body("messages"), "tools": [tool]}

    refused("messages", asked("false"), "strict of the tool 't' is a str, not true or false")
    assert read("messages", asked(False)).params.structured is None


def test_a_constraint_beside_the_requests_own():
    own = {"structured": Structured("regex", "a")}
    think = (tokenizer().special("</think>"),)
    assert read("chat", body("chat"), sampling=own).params.structured.after == ()
    assert read("chat", body("chat", think=True), sampling=own).params.structured.after == think
    refused("chat", formatted("chat"), "twice", sampling=own)


# nothing is ignored

CLIENTS = {
    "chat": ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
    "completions": ("openai.types.completion_create_params", "CompletionCreateParamsBase"),
    "responses": ("openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    "messages": ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_clients_types_is_decided(kind):
    import importlib

    module, name = CLIENTS[kind]
    theirs = getattr(importlib.import_module(module), name).__annotations__
    assert not {*theirs, "stream"} - set(fields.TABLES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_nobody_knows_is_named(kind):
    refused(kind, body(kind, temprature=0.5), "temprature is not supported")
    refused(kind, body(kind, chat_template_kwargs={}), "chat_template_kwargs")


REFUSED = [
    ("chat", {"n": 2}), ("chat", {"audio": {"voice": "x"}}), ("chat", {"functions": [{}]}),
    ("chat", {"function_call": "auto"}), ("chat", {"web_search_options": {}}),
    ("chat", {"modalities": ["text", "audio"]}), ("chat", {"verbosity": "low"}),
    ("chat", {"stop": ["a"] * 17}), ("chat", {"top_logprobs": 2}),
    ("responses", {"previous_response_id": "r"}), ("responses", {"conversation": "c"}),
    ("responses", {"prompt": {"id": "p"}}), ("responses", {"background": True}),
    ("responses", {"truncation": "auto"}), ("responses", {"stop": ["a"]}),
    ("responses", {"text": {"verbosity": "high"}}),
    ("responses", {"context_management": []}),
    *(("responses", {"tools": [{"type": kind}]}) for kind in (
        "web_search", "file_search", "mcp", "code_interpreter", "image_generation", "custom")),
    ("messages", {"container": "c"}), ("messages", {"n": 1}), ("messages", {"stop": ["x"]}),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("completions", {"suffix": "x"}), ("completions", {"echo": True}),
    ("completions", {"best_of": 3}), ("completions", {"stream": True}),
]  # fmt: skip


@pytest.mark.parametrize("kind, more", REFUSED, ids=lambda v: str(v)[:40])
def test_refused_by_name(kind, more):
    [name] = more
    singular = {"stop": "[Ss]top", "tools": "tools"}.get(name, name)
    refused(kind, {**body(kind), **more}, singular)


PARTS = [
    ("chat", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "images"),
    ("chat", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "text only"),
    ("chat", {"type": "file", "file": {"file_id": "x"}}, "text only"),
    ("responses", {"type": "input_image", "image_url": "http://x"}, "images"),
    ("responses", {"type": "input_file", "file_id": "x"}, "text only"),
    ("messages", {"type": "image", "source": {"type": "url", "url": "http://x"}}, "images"),
    ("messages", {"type": "document", "source": {"type": "text", "data": "x"}}, "text only"),
    ("messages", {"type": "redacted_thinking", "data": "x"}, "cannot be read"),
]


@pytest.mark.parametrize("kind, part, why", PARTS, ids=lambda v: str(v)[:30])
def test_images_and_what_else_is_no_text_are_refused(kind, part, why):
    request = body(kind)
    if kind == "responses":
        request["input"] = [{"role": "user", "content": [part]}]
    else:
        request["messages"] = [{"role": "user", "content": [part]}]
    with pytest.raises(UsageError, match=r"content\[0\]") as caught:
        read(kind, request)
    assert why in caught.value.facts[0]


def test_an_image_in_the_result_of_a_tool_is_refused():
    request = results("messages", ["c1", "c2"])
    request["messages"][-1]["content"][0]["content"] = [{"type": "image", "source": {}}]
    refused("messages", request, r"content\[0\]")


ODD = [
    ("chat", "text"), ("chat", None), ("chat", []), ("chat", {"messages": "x"}), ("chat", {}),
    ("chat", {"messages": [5]}), ("chat", {"messages": [{"content": "x"}]}),
    ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("chat", {"messages": [{"role": "user", "content": "x", "name": "bob"}]}),
    ("chat", {"model": 5, "messages": [{"role": "user", "content": "x"}]}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "top_k": 1.5}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "tools": "x"}),
    ("chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
    ("responses", {"input": 5}), ("responses", {}), ("responses", {"input": []}),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("messages", {"messages": []}), ("messages", {"messages": [{"role": "x", "content": "y"}]}),
    ("messages", {"messages": 3}),
    ("completions", {}), ("completions", {"prompt": 5}), ("completions", {"prompt": [["x"]]}),
    ("completions", {"prompt": [1, "x"]}), ("completions", {"prompt": []}),
    ("completions", {"prompt": "x", "n": 0}), ("completions", {"prompt": "x", "stop": 5}),
]  # fmt: skip


@pytest.mark.parametrize("kind, request_body", ODD, ids=lambda v: str(v)[:50])
def test_odd_requests_end_in_a_clear_error(kind, request_body):
    with pytest.raises(DeepinferError) as caught:
        read(kind, request_body)
    assert caught.value.exit_status == 2 and caught.value.message


def test_tool_results_that_failed_say_so():
    request = results("messages", ["c1", "c2"])
    request["messages"][-1]["content"][0]["is_error"] = True
    text = tokenizer().decode(prompt("messages", request))
    assert "Error: of c1" in text and "Error: of c2" not in text


def test_an_answer_that_the_caller_has_begun():
    begun = body("messages")
    begun["messages"].append({"role": "assistant", "content": "The answer is"})
    assert tokenizer().decode(prompt("messages", begun)).endswith("The answer is")
    thinking = {**begun, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    refused("messages", thinking, "last message of the assistant")
    chat = body("chat")
    chat["messages"].append({"role": "assistant", "content": "The answer is", "prefix": True})
    assert tokenizer().decode(prompt("chat", chat)).endswith("The answer is")


def test_prompts_of_completions():
    for given, wanted in [
        ("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ]:  # fmt: skip
        prepared = read("completions", body("completions", given, n=2))
        assert prepared.prompts == wanted and prepared.params.n == 2
    assert read("completions", body("completions")).params.max_tokens == 16


# requests made with the clients' own types


def test_requests_of_the_openai_client():
    from openai.types.chat import CompletionCreateParams
    from openai.types.responses import ResponseCreateParams
    from pydantic import TypeAdapter

    chat = {
        "model": "gpt-4o", "user": "u", "metadata": {"a": "b"}, "store": True, "temperature": 0.5,
        "messages": [{"role": "developer", "content": "S"},
                     {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": body("chat", tools=True)["tools"], "tool_choice": "auto",
        "parallel_tool_calls": True, "max_completion_tokens": 20, "seed": 4, "n": 1,
        "stream_options": None, "service_tier": "auto",
    }  # fmt: skip
    TypeAdapter(CompletionCreateParams).validate_python(chat)
    assert read("chat", chat).params.temperature == 0.5
    responses = {
        "model": "gpt-4o", "input": [{"role": "user", "content": "Hi"}], "instructions": "S",
        "tools": body("responses", tools=True)["tools"], "max_output_tokens": 20,
        "reasoning": {"effort": "low", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "truncation": "disabled",
    }  # fmt: skip
    TypeAdapter(ResponseCreateParams).validate_python(
        {**responses, "tools": [{**tool, "strict": None} for tool in responses["tools"]]}
    )
    assert read("responses", responses).stage == "thinking"


def test_requests_of_the_anthropic_client():
    from anthropic.types import MessageCreateParams
    from pydantic import TypeAdapter

    request = {
        "model": "claude", "max_tokens": 20, "system": [{"type": "text", "text": "S"}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
        "tools": [{"type": "custom", "name": "t", "input_schema": TOOLS["other"]}],
        "tool_choice": {"type": "auto"}, "top_k": 3, "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
    }  # fmt: skip
    TypeAdapter(MessageCreateParams).validate_python(request)
    prepared = read("messages", request)
    assert (prepared.params.top_k, prepared.stop, prepared.stage) == (3, ("x",), "thinking")


@pytest.mark.parametrize("kind", CHATS)
def test_an_answer_goes_back_into_the_next_request(kind):
    """What a client keeps of an answer, put into its next request, is accepted."""
    from tests.unit.exchanges import MARK, replied

    written = (
        f"see</think>look\n\n<{MARK} calls>\n"
        f'<{MARK} invoke name="other">\n</{MARK} invoke>\n</{MARK} calls>'
    )
    _, document = replied(kind, written, think=True, tools=True)
    request = body(kind, think=True, tools=True)
    if kind == "chat":
        from openai.types.chat import ChatCompletion

        said = ChatCompletion.model_validate(document).choices[0].message.model_dump()
        request["messages"] += [said, {"role": "tool", "content": "done",
                                       "tool_call_id": said["tool_calls"][0]["id"]}]  # fmt: skip
    elif kind == "responses":
        from openai.types.responses import Response

        items = [item.model_dump() for item in Response.model_validate(document).output]
        request["input"] = [
            {"role": "user", "content": "Hi"},
            *items,
            {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "done"},
        ]
    else:
        from anthropic.types import Message

        blocks = [block.model_dump() for block in Message.model_validate(document).content]
        request["messages"] += [
            {"role": "assistant", "content": blocks},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "content": "done", "tool_use_id": blocks[-1]["id"]}
                ],
            },
        ]
    text = tokenizer().decode(prompt(kind, request))
    assert "see" in text and "look" in text and "done" in text
