"""A request body into what the engine takes: token ids and sampling parameters.

Bodies of OpenAI's Chat Completions, Responses and Completions and of Anthropic's Messages come in,
`Prepared` goes out. `deepseek_recipe` writes the prompt; what it would drop is applied here, or
refused by name (`fields`). It must not know engines, files or how an answer is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deepinfer.core.request import SEED_LIMIT, SamplingParams, Structured
from deepinfer.errors import CheckpointError, UsageError
from deepinfer.protocol import fields
from deepinfer.protocol.grammar import Choice, Tool, constraint
from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["THINKING", "URLS", "Frontend", "Prepared", "Setup"]

URLS = {
    "/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages",
    "/v1/completions": "completions",
}  # fmt: skip
THINKING = ("off", "on", "max")
# Most new tokens where a request does not say: outside thinking, in it, at the highest effort.
_MOST = {"off": 8192, "on": 65536, "max": 131072}
_TEXT_MOST = 16  # of /v1/completions, as its vendor has it
_UNBOUNDED = (1 << 31) - 1  # the engine knows what fits
_MAX_TOKENS = {
    "chat": ("max_completion_tokens", "max_tokens"), "responses": ("max_output_tokens",),
    "messages": ("max_tokens",), "completions": ("max_tokens",),
}  # fmt: skip
_SAME = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "temperature", "top_p",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What holds for every request of a run.

    thinking: off, on or max, for requests that do not say; forced: for all. sampling: values by
    their name in `SamplingParams` that override a request's, such as flags that a user typed; of
    these stop strings end the text and no thinking, and a constraint begins behind the thinking.
    model: what the model is called in the answer to a request that does not name it.
    """

    thinking: str = "off"
    forced: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str = "deepinfer"


@dataclass(frozen=True)
class Prepared:
    """A request that can run.

    sampled: temperature and top_p with their sources, and what the conversion library had set.
    prompts: of /v1/completions, texts or ids; rendered: the prompt of a chat. stage: where the
    answer begins: thinking, text or calls. calls: it may call tools. stop: strings that end the
    text of a chat. converted, echo: the library's own, for the shape of the answer.
    """

    kind: str
    model: str
    params: SamplingParams
    sampled: Mapping[str, Any]
    prompts: tuple[str | tuple[int, ...], ...] = ()
    rendered: Any = None
    stage: str = "text"
    calls: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    converted: Any = None
    echo: Any = None


class Frontend:
    """Reads requests for one checkpoint. tokenizer: the checkpoint's, None where it has none."""

    def __init__(self, tokenizer: Tokenizer | None, setup: Setup | None = None) -> None:
        self.tokenizer = tokenizer
        self.setup = setup or Setup()

    @cached_property
    def think_end(self) -> int:
        return self.special("</think>")

    @cached_property
    def mark(self) -> int:
        """The control token of calls."""
        return self.special("｜DSML｜")

    def special(self, text: str) -> int:
        """The id of a control token. Raises CheckpointError for a checkpoint without it."""
        if self.tokenizer is None:
            raise _no_format("this checkpoint has no tokenizer", "no tokenizer.json in its folder")
        token = self.tokenizer.special(text)
        if token is None:
            raise _no_format(f"the tokenizer has no control token {text}", "the format needs it")
        return token

    def read(self, kind: str, body: object, seed: int | None = None) -> Prepared:
        """seed: of the answer, where the request has none. Raises UsageError that says which part
        of the request cannot be honoured, CheckpointError for a chat without the prompt format."""
        fields.check(kind, body)
        given = {k: v for k, v in dict(body).items() if v is not None}  # type: ignore[call-overload]
        given.setdefault("model", self.setup.model)
        if not isinstance(given["model"], str):
            raise _invalid(f"model is a {type(given['model']).__name__}, not a text")
        if seed is not None:
            given.setdefault("seed", seed)
        return self._completion(given) if kind == "completions" else self._chat(kind, given)

    def encode(self, prepared: Prepared) -> list[str | list[int]]:
        """The prompts as the engine takes them. Control tokens stand where the format puts them,
        never where a user typed their names. Raises UsageError, CheckpointError."""
        rendered = prepared.rendered
        if rendered is None or self.tokenizer is None:
            return [p if isinstance(p, str) else list(p) for p in prepared.prompts]
        ids: list[int] = []
        plain, at = self.tokenizer.encode_plain, 0
        for start, end in rendered.special_ranges:
            ids += plain(rendered.prompt[at:start])
            ids.append(self.special(rendered.prompt[start:end]))
            at = end
        return [ids + plain(rendered.prompt[at:])]

    def _completion(self, given: dict[str, Any]) -> Prepared:
        prompts = _prompts(given.get("prompt"))
        values, sampled = self._values("completions", given, _TEXT_MOST, {})
        asked = {"n": given.get("n", 1), "stop": given.get("stop"),
                 "logprobs": given.get("logprobs")}  # fmt: skip
        values = {**asked, **values, **self._constraint(None, ())}
        return Prepared("completions", given["model"], SamplingParams(**values), sampled, prompts)

    def _chat(self, kind: str, given: dict[str, Any]) -> Prepared:
        import deepseek_recipe as recipe

        after, mark = (self.think_end,), self.mark
        body = {k: v for k, v in given.items() if fields.TABLES[kind][k].library}
        _REWRITE[kind](body)
        mode = self._think(kind, given, body)
        choice = _choice(kind, given)
        if choice.must and mode != "off":
            # The library refuses a forced call while thinking; the grammar forces it afterwards.
            body["tool_choice"] = {"type": "auto"} if kind == "messages" else "auto"
        converted, echo = self._convert(kind, body)
        conversation = _completed(recipe, kind, given, converted.conversation)
        stage = converted.parsing_options.thinking_initial_stage
        thinks = stage is not None and stage.starts_in_reasoning()
        opened = bool(converted.parsing_options.starts_in_tool_calls)
        asked = converted.inference_options
        library = {"temperature": asked.temperature, "top_p": asked.top_p}
        values, sampled = self._values(kind, given, _MOST[mode], library)
        stop = values.pop("stop", None) or converted.parsing_options.stop_sequences
        if asked.logprobs or "message.output_text.logprobs" in given.get("include", ()):
            values.setdefault("logprobs", asked.top_logprobs or 0)
        strict = _strict(kind, given)
        tools = [
            Tool(t.name, strict.get(t.name, t.parameters), t.name in strict or bool(t.strict))
            for t in conversation.tools
        ]
        after = after if thinks else ()
        held = constraint(
            self._answer(kind, given, body, converted), tools,
            Choice(choice.must, choice.only, choice.single, opened), mark, after,
        )  # fmt: skip
        values |= self._constraint(held, after)
        return Prepared(
            kind, given["model"], SamplingParams(**values), sampled,
            rendered=recipe.DeepseekV41Encoding().render_conversation(conversation),
            stage="thinking" if thinks else "calls" if opened else "text",
            calls=bool(tools), stop=tuple(stop),
            stream=converted.stream, converted=converted, echo=echo,
        )  # fmt: skip

    def _convert(self, kind: str, body: Mapping[str, Any]) -> tuple[Any, Any]:
        """The library's own conversion, and what a Responses answer repeats of the request."""
        import deepseek_recipe as recipe

        options = recipe.ConversionOptions(
            default_thinking_mode=False,
            responses_web_search=recipe.WebSearchBehavior.Reject,
            thinking_max_tokens_upper_bound=_UNBOUNDED,
            non_thinking_max_tokens_upper_bound=_UNBOUNDED,
        ).with_model_versions_by_name({body["model"]: recipe.ModelVersion.DeepseekV41Flash})
        types = {"chat": recipe.ChatCompletionRequest, "responses": recipe.ResponsesRequest,
                 "messages": recipe.MessagesRequest}  # fmt: skip
        try:
            request = types[kind](dict(body))
            echo = request.echo() if kind == "responses" else None
            return request.convert(options), echo
        except recipe.ConversionError as problem:
            raise _invalid(_message(problem.body)) from None
        except UnicodeError:
            raise _invalid("a text has half of a surrogate pair and is no valid text") from None
        except (ValueError, OverflowError, RecursionError, TypeError) as problem:
            raise _invalid(str(problem).removeprefix("invalid request body: ")) from None

    def _think(self, kind: str, given: Mapping[str, Any], body: dict[str, Any]) -> str:
        """off, on or max, and the same said to the library."""
        effort_of = {"chat": given, "responses": given.get("reasoning"),
                     "messages": given.get("output_config")}[kind]  # fmt: skip
        effort = _get(effort_of, "reasoning_effort" if kind == "chat" else "effort")
        switch = None if kind == "responses" else _get(given.get("thinking"), "type")
        if None not in (switch, effort) and (switch == "disabled") != (effort == "none"):
            raise _invalid(f"thinking is {switch}, but the effort is {effort}")
        if self.setup.forced or (switch is None and effort is None):
            mode, effort = self.setup.thinking, None
        elif switch == "disabled" or effort == "none":
            mode = "off"
        else:
            mode = "max" if effort == "max" else "on"
        level = "none" if mode == "off" else effort or ("max" if mode == "max" else "high")
        if kind == "responses":
            body["reasoning"] = {**(given.get("reasoning") or {}), "effort": level}
            return mode
        if switch in (None, "enabled", "disabled", "adaptive") or self.setup.forced:
            body["thinking"] = {"type": "disabled" if mode == "off" else "enabled"}
        if kind == "messages":
            body["output_config"] = {"effort": level} if mode != "off" else None
        else:
            body["reasoning_effort"] = level if mode != "off" else None
        return mode

    def _values(
        self, kind: str, given: Mapping[str, Any], most: int, library: Mapping[str, float]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values for `SamplingParams`, and where temperature and top_p come from."""
        names = [name for name in _MAX_TOKENS[kind] if name in given]
        if len({given[name] for name in names}) > 1:
            raise _invalid(f"{' and '.join(names)} differ")
        values: dict[str, Any] = {"max_tokens": given[names[0]] if names else most}
        if values["max_tokens"] == 0 and kind != "completions":
            raise _invalid(f"{names[0]} is 0, and an answer has at least one token")
        values.update({name: given[name] for name in _SAME if name in given})
        if "logit_bias" in given:
            values["logit_bias"] = _bias(given["logit_bias"])
        if "seed" in given:
            values["seed"] = _seed(given["seed"])
        typed = self.setup.sampling
        values.update(typed)
        if typed.get("seq_seed") is not None:
            values["seed"] = None
        sampled = {}
        for name in ("temperature", "top_p"):
            source = "flag" if name in typed else "request" if name in given else "protocol"
            value = values.setdefault(name, library.get(name, 1.0))
            sampled[name] = {"value": value, "source": source}
            if name in library:
                sampled[name]["protocol"] = round(library[name], 6)
        return values, sampled

    def _constraint(
        self, held: Structured | None, after: tuple[int, ...]
    ) -> dict[str, Structured | None]:
        """That of the request, or the caller's in its place."""
        own = self.setup.sampling.get("structured")
        if own is None or held is None:
            return {"structured": held if own is None else replace(own, after=own.after or after)}
        raise UsageError(
            "two-constraints", "the answer is constrained twice",
            ["by the request's own format or tools, and by a schema, expression or grammar beside"],
        )  # fmt: skip

    def _answer(
        self, kind: str, given: Mapping[str, Any], body: Mapping[str, Any], converted: Any
    ) -> Structured | None:
        """What a text must look like; calls of tools may stand in its place."""
        if kind == "messages":
            wanted = _get(_get(given.get("output_config"), "format"), "schema")
            return None if wanted is None else Structured("json_schema", json.dumps(wanted))
        if converted.conversation.response_format == "text":
            return None
        if body.get("tools"):
            # Of both the library names the tools only.
            plain = {k: v for k, v in body.items() if k not in ("tools", "tool_choice")}
            converted, _ = self._convert(kind, plain)
        wanted = converted.inference_options.output_constraint
        if wanted.kind == "regex":
            return Structured("regex", wanted.schema)
        told = (_get(given.get("response_format"), "json_schema") if kind == "chat"
                else _get(given.get("text"), "format"))  # fmt: skip
        if _get(told, "strict") and isinstance(_get(told, "schema"), Mapping):
            return Structured("json_schema", json.dumps(_closed(told["schema"])))
        return Structured("json_schema", wanted.schema or '{"type": "object"}')


def _completed(recipe: Any, kind: str, given: Mapping[str, Any], conversation: Any) -> Any:
    """The conversation with what the library leaves out of Messages: a format, and an answer that
    the caller has begun."""
    if kind != "messages":
        return conversation
    schema = _get(_get(given.get("output_config"), "format"), "schema")
    messages = list(conversation.messages)
    last = messages[-1]
    begun = last.role == "assistant" and not last.tool_calls
    if begun and conversation.thinking_mode:
        raise fields.refusal("a last message of the assistant", "an answer with thinking is new")
    if begun:
        messages[-1] = recipe.AssistantMessage(last.content, prefix=True)
    if schema is None and not begun:
        return conversation
    return recipe.Conversation(
        messages, thinking_mode=conversation.thinking_mode, tools=conversation.tools,
        tool_choice=conversation.tool_choice, reasoning_effort=conversation.reasoning_effort,
        response_schema=schema,
    )  # fmt: skip


def _chat_body(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _invalid("messages is not a list")
    body["messages"] = [
        {**message, "role": "system"} if _get(message, "role") == "developer" else message
        for message in messages
    ]
    _check_results(messages)
    wanted = _get(body.get("response_format"), "json_schema")
    if isinstance(wanted, Mapping):
        body["response_format"] = {**body["response_format"], "json_schema": _described(wanted)}


def _responses_body(body: dict[str, Any]) -> None:
    wanted = _get(body.get("text"), "format")
    if isinstance(wanted, Mapping) and "schema" in wanted:
        body["text"] = {"format": _described(wanted)}


def _messages_body(body: dict[str, Any]) -> None:
    wanted = _get(body.get("output_config"), "format")
    if wanted is not None and _get(wanted, "type") != "json_schema":
        raise fields.refusal("output_config.format.type", "accepted: json_schema")
    if wanted is not None and not isinstance(_get(wanted, "schema"), Mapping):
        raise _invalid("output_config.format.schema is not an object")
    tools = body.get("tools")
    if isinstance(tools, list):
        plain = ("type", "eager_input_streaming", "defer_loading", "allowed_callers")
        body["tools"] = [
            {k: v for k, v in tool.items() if k not in plain} if isinstance(tool, Mapping) else tool
            for tool in tools
        ]
    if isinstance(body.get("messages"), list):
        body["messages"] = [_with_errors(message) for message in body["messages"]]


_REWRITE = {"chat": _chat_body, "responses": _responses_body, "messages": _messages_body}


def _with_errors(message: Any) -> Any:
    """Results of tools that failed say so in their text: the format has no other place."""
    blocks = _get(message, "content")
    if not isinstance(blocks, list) or not any(_get(block, "is_error") for block in blocks):
        return message
    marked = []
    for block in blocks:
        if _get(block, "is_error"):
            content = block.get("content") or ""
            told = f"Error: {content}" if isinstance(content, str) else [
                {"type": "text", "text": "Error:"}, *content]  # fmt: skip
            block = {**block, "content": told}
        marked.append(block)
    return {**message, "content": marked}


def _described(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A description of a schema stands in the schema, which the prompt shows."""
    schema, told = wanted.get("schema"), wanted.get("description")
    if told is None or not isinstance(schema, Mapping):
        return dict(wanted)
    return {**wanted, "schema": {"description": told, **schema}}


def _check_results(messages: Sequence[Any]) -> None:
    """Every call has its result. Raises UsageError naming the call: the library does not."""
    open_calls: dict[str, int] = {}
    for at, message in enumerate([*messages, {"role": "end"}]):
        if _get(message, "role") == "tool":
            open_calls.pop(str(_get(message, "tool_call_id")), None)
            continue
        if open_calls:
            [*names] = open_calls
            raise _invalid(
                f"the call {names[0]!r} of messages[{open_calls[names[0]]}] has no result: a "
                "message of the role tool with its tool_call_id is missing"
            )
        calls = _get(message, "tool_calls")
        open_calls = {str(_get(c, "id")): at for c in calls} if isinstance(calls, list) else {}


def _choice(kind: str, given: Mapping[str, Any]) -> Choice:
    choice = given.get("tool_choice")
    word = choice if isinstance(choice, str) else _get(choice, "type")
    only = None
    if kind == "messages":
        must, single = word in ("any", "tool"), bool(_get(choice, "disable_parallel_tool_use"))
        only = _get(choice, "name")
    else:
        must, single = word in ("required", "function"), given.get("parallel_tool_calls") is False
        if isinstance(choice, Mapping):
            only = _get(choice.get("function") if kind == "chat" else choice, "name")
    if must and not given.get("tools"):
        raise _invalid("tool_choice asks for a call, but there are no tools")
    names = [_get(_get(tool, "function") if kind == "chat" else tool, "name")
             for tool in given.get("tools") or () if isinstance(tool, Mapping)]  # fmt: skip
    if only is not None and only not in names:
        raise _invalid(f"tool_choice names {only!r}, which is not in tools")
    return Choice(must, only, single)


def _strict(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of strict tools from what the caller wrote: the library drops limits of them,
    and of Messages the word itself."""
    tools = [_get(tool, "function") if kind == "chat" else tool for tool in given.get("tools", ())]
    key = "input_schema" if kind == "messages" else "parameters"
    for tool in tools:
        strict = _get(tool, "strict")
        if strict is not None and not isinstance(strict, bool):
            got = type(strict).__name__
            raise _invalid(f"strict of the tool {tool['name']!r} is a {got}, not true or false")
    return {tool["name"]: _closed(tool.get(key)) for tool in tools if _get(tool, "strict")}


def _closed(schema: Any) -> Any:
    """What strict means: every object has the properties that it names, and no other."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            closed[key] = {name: _closed(part) for name, part in schema[key].items()}
    if isinstance(schema.get("anyOf"), list):
        closed["anyOf"] = [_closed(part) for part in schema["anyOf"]]
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if schema.get("type") == "object":
        closed["additionalProperties"] = False
        closed.setdefault("required", list(schema.get("properties") or ()))
    return closed


def _prompts(got: object) -> tuple[str | tuple[int, ...], ...]:
    """The prompts of a text completion: a text, ids, or a list of either."""
    many = got if isinstance(got, list) and got and not isinstance(got[0], int) else [got]
    prompts: list[str | tuple[int, ...]] = []
    for one in many:
        ids = isinstance(one, list) and one and all(type(token) is int for token in one)
        if not isinstance(one, str) and not ids:
            raise _invalid("prompt is no text, no list of token ids and no list of either")
        prompts.append(one if isinstance(one, str) else tuple(one))
    return tuple(prompts)


def _bias(got: object) -> dict[int, float]:
    if not isinstance(got, Mapping):
        raise _invalid("logit_bias is not an object of token ids and numbers")
    try:
        return {int(token): value for token, value in got.items()}
    except ValueError:
        raise _invalid("logit_bias has a key that is no token id") from None


def _seed(got: object) -> int:
    if type(got) is not int or not -(1 << 63) <= got < SEED_LIMIT:
        raise _invalid("seed is not a whole number of 64 bits")
    return got % SEED_LIMIT


def _get(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _message(body: str) -> str:
    """What a refusal of the library says, without its envelope."""
    try:
        told = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = body
    return str(told).rstrip(".")


def _invalid(why: str) -> UsageError:
    return UsageError("request-invalid", why)


def _no_format(what: str, fact: str) -> CheckpointError:
    return CheckpointError("chat-unsupported", what, [fact], "-p TEXT needs no format of a chat")
