"""Which fields a request may have, field by field: applied, without effect on an answer, refused.

A request body comes in; nothing goes out, or the `UsageError` that names the first field that
would otherwise be ignored. The tables say what happens to every field of the clients' own types,
and README shows them. It must not know prompts, tokens or what a value means to the sampler.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import UsageError

__all__ = ["TABLES", "Field", "check", "markdown", "refusal"]

IMAGES = "this engine answers text; images are not read yet"
_TEXT_ONLY = "this engine reads and writes text only"
_NO_SERVER = "it needs a server that keeps state between calls"
_NO_TOOLS = "only functions that the caller runs are supported"
_NO_PLACE = "the prompt format of the model has no place for it"


@dataclass(frozen=True)
class Field:
    """What becomes of a field. status: applied, none (no effect on an answer) or refused. note:
    why. shape: what may stand inside. only: other values are refused. model: the conversion library
    reads it."""

    status: str
    note: str = ""
    shape: Any = None
    only: tuple[Any, ...] | None = None
    library: bool = False


@dataclass(frozen=True)
class Each:
    """Every item of a list has this shape."""

    shape: Any


@dataclass(frozen=True)
class Tagged:
    """An object whose `key` says which fields it has; refused: values with a reason of their own.
    default: the value where the key is missing."""

    key: str
    kinds: Mapping[str, Mapping[str, Field]]
    refused: Mapping[str, str] | None = None
    default: str | None = None


def _lib(shape: Any = None, note: str = "", only: tuple[Any, ...] | None = None) -> Field:
    return Field("applied", note, shape, only, library=True)


def _own(note: str = "", only: tuple[Any, ...] | None = None) -> Field:
    return Field("applied", note, None, only)


def _none(note: str) -> Field:
    return Field("none", note)


def _no(note: str) -> Field:
    return Field("refused", note)


def _fields(*names: str) -> dict[str, Field]:
    return {name: _lib() for name in names}


_CACHE = _none("prefixes are reused without being asked")
_LABEL = _none("a label for whoever counts requests")
_SERVICE = _none("there is one service")
_STORE = _none("nothing is kept")
_EXTRA = {
    name: _own("not in the vendor's type; as in `SamplingParams`")
    for name in (
        "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "seed",
    )
}  # fmt: skip
_ECHO = {name: _none("what an answer carries, sent back") for name in ("annotations", "logprobs")}

_CHAT_TEXT = {**_fields("type", "text"), "cache_control": _CACHE, "prompt_cache_breakpoint": _CACHE}
_CHAT_PARTS = Each(
    Tagged(
        "type",
        {"text": _CHAT_TEXT},
        {"image_url": IMAGES, "input_audio": _TEXT_ONLY, "file": _TEXT_ONLY, "refusal": _NO_PLACE},
    )
)
_CONTENT = _lib(_CHAT_PARTS)
_NAME = _no(f"{_NO_PLACE}; write the name into the content")
_CHAT_CALL = {
    "id": _lib(),
    "type": _lib(only=("function",)),
    "function": _lib(_fields("name", "arguments")),
    "index": _none("what an answer carries, sent back"),
}
_CHAT_MESSAGE = Tagged(
    "role",
    {
        "system": {"role": _lib(), "content": _CONTENT, "name": _NAME},
        "developer": {"role": _lib(), "content": _CONTENT, "name": _NAME},
        "user": {"role": _lib(), "content": _CONTENT, "name": _NAME},
        "latest_reminder": {"role": _lib(), "content": _CONTENT},
        "assistant": {
            "role": _lib(),
            "content": _CONTENT,
            "reasoning_content": _lib(),
            "tool_calls": _lib(Each(_CHAT_CALL)),
            "prefix": _lib(),
            "name": _NAME,
            "refusal": _no(_NO_PLACE),
            "audio": _no(_TEXT_ONLY),
            "function_call": _no("write tool_calls"),
            **_ECHO,
        },
        "tool": {
            "role": _lib(),
            "content": _CONTENT,
            "tool_call_id": _lib(),
            "name": _none("the call names the tool"),
        },
    },
)
_FUNCTION = {**_fields("name", "description", "parameters", "strict")}
_SCHEMA = {**_fields("name", "schema", "strict"), "description": _own("into the schema")}
CHAT = {
    "model": _lib(note="any name; the answer echoes it"),
    "messages": _lib(Each(_CHAT_MESSAGE)),
    "thinking": _lib({"type": _lib(), "budget_tokens": _no("thinking cannot be cut")}),
    "reasoning_effort": _lib(note="none to max; thinking on unless none"),
    "tools": _lib(Each(Tagged("type", {"function": {"type": _lib(), "function": _lib(_FUNCTION)}},
                              {"custom": _NO_TOOLS}))),
    "tool_choice": _lib(Tagged("type", {"function": {"type": _lib(),
                                                     "function": _lib(_fields("name"))}})),
    "parallel_tool_calls": _own("false: at most one call"),
    "response_format": _lib(Tagged("type", {
        "text": _fields("type"), "json_object": _fields("type"),
        "regex": _fields("type", "regex"),
        "json_schema": {"type": _lib(), "json_schema": _lib(_SCHEMA)}})),
    "max_tokens": _lib(),
    "max_completion_tokens": _own("the newer name of max_tokens"),
    "temperature": _lib(),
    "top_p": _lib(),
    "stop": _lib(note="in the answer, not in the thinking"),
    "logprobs": _lib(),
    "top_logprobs": _lib(),
    **_EXTRA,
    "seed": _own(),
    "presence_penalty": _own(),
    "frequency_penalty": _own(),
    "logit_bias": _own(),
    "n": _lib(only=(1,), note="write the request several times"),
    "stream": _lib(note="not in a batch"),
    "stream_options": _none("the last event has the usage, asked for or not"),
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "metadata": _LABEL,
    "store": _STORE,
    "service_tier": _SERVICE,
    "prediction": _none("it could only make an answer faster"),
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "modalities": _own(only=(["text"],), note=_TEXT_ONLY),
    "verbosity": _own(only=("medium",), note="write it into the prompt"),
    "audio": _no(_TEXT_ONLY),
    "functions": _no("write tools"),
    "function_call": _no("write tool_choice"),
    "moderation": _no("nothing is moderated here"),
    "web_search_options": _no("there is no network"),
}  # fmt: skip

_RESPONSES_TEXT = {**_fields("type", "text"), **_ECHO, "prompt_cache_breakpoint": _CACHE}
_RESPONSES_PARTS = Each(
    Tagged(
        "type",
        {"input_text": _RESPONSES_TEXT, "output_text": _RESPONSES_TEXT},
        {"input_image": IMAGES, "input_file": _TEXT_ONLY, "input_audio": _TEXT_ONLY,
         "refusal": _NO_PLACE},
    )
)  # fmt: skip
_STATE = _none("what an answer carries, sent back")
_RESPONSES_ITEM = Tagged(
    "type",
    {
        "message": {"type": _lib(), "role": _lib(), "content": _lib(_RESPONSES_PARTS),
                    "id": _STATE, "status": _STATE, "phase": _lib()},
        "function_call": {**_fields("type", "call_id", "name", "arguments"), "id": _STATE,
                          "status": _STATE},
        "function_call_output": {"type": _lib(), "call_id": _lib(),
                                 "output": _lib(_RESPONSES_PARTS), "id": _STATE,
                                 "status": _STATE},
        "reasoning": {"type": _lib(), "content": _lib(), "summary": _lib(), "id": _lib(),
                      "status": _STATE, "encrypted_content": _lib()},
    },
    {"item_reference": _NO_SERVER},
    default="message",
)  # fmt: skip
RESPONSES = {
    "model": _lib(note="any name; the answer echoes it"),
    "input": _lib(Each(_RESPONSES_ITEM)),
    "instructions": _lib(),
    "reasoning": _lib({
        "effort": _lib(note="none to max"), "summary": _none("the reasoning comes back whole"),
        "generate_summary": _none("the reasoning comes back whole"),
        "context": _own(only=("auto",)), "mode": _own(only=("standard",))}),
    "tools": _lib(Each(Tagged("type", {"function": {"type": _lib(), **_FUNCTION}},
                              dict.fromkeys(
        ("web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "mcp",
         "code_interpreter", "image_generation", "local_shell", "shell", "custom", "namespace",
         "computer_use_preview", "apply_patch", "tool_search"), _NO_TOOLS)))),
    "tool_choice": _lib(Tagged("type", {"function": _fields("type", "name")})),
    "parallel_tool_calls": _own("false: at most one call"),
    "text": _lib({
        "format": _lib(Tagged("type", {
            "text": _fields("type"), "json_object": _fields("type"),
            "json_schema": {"type": _lib(), **_SCHEMA}})),
        "verbosity": _own(only=("medium",), note="write it into the prompt")}),
    "max_output_tokens": _lib(),
    "temperature": _lib(),
    "top_p": _lib(),
    "top_logprobs": _lib(),
    **_EXTRA,
    "include": _lib(note="log-probabilities; of what else it names an answer has nothing"),
    "stream": _lib(note="not in a batch"),
    "stream_options": _none("nothing in an event depends on it"),
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "metadata": _LABEL,
    "store": _STORE,
    "service_tier": _SERVICE,
    "access_programs": _LABEL,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "max_tool_calls": _none("it counts calls of built-in tools, and there are none"),
    "truncation": _own(only=("disabled",), note="a prompt is never cut"),
    "background": _own(only=(False,), note=_NO_SERVER),
    "background_options": _no(_NO_SERVER),
    "context_management": _no("a prompt is never cut"),
    "conversation": _no(_NO_SERVER),
    "previous_response_id": _no(f"{_NO_SERVER}; write the earlier items into input"),
    "prompt": _no(_NO_SERVER),
    "image": _no(IMAGES),
    "moderation": _no("nothing is moderated here"),
}  # fmt: skip

_MESSAGES_TEXT = {
    **_fields("type", "text"), "cache_control": _CACHE, "citations": _none("sent back"),
}  # fmt: skip
_MESSAGES_BLOCKS = Each(
    Tagged(
        "type",
        {
            "text": _MESSAGES_TEXT,
            "thinking": _fields("type", "thinking", "signature"),
            "tool_use": {**_fields("type", "id", "name", "input"), "cache_control": _CACHE,
                         "caller": _STATE},
            "tool_result": {
                "type": _lib(), "tool_use_id": _lib(), "cache_control": _CACHE,
                "is_error": _own("the content then begins with Error:"),
                "content": _lib(Each(Tagged("type", {"text": _MESSAGES_TEXT},
                                            {"image": IMAGES, "document": _TEXT_ONLY}))),
            },
        },
        {"image": IMAGES, "document": _TEXT_ONLY, "redacted_thinking": "it cannot be read",
         "search_result": _NO_PLACE, "server_tool_use": _NO_TOOLS},
    )
)  # fmt: skip
_MESSAGES_TOOL = {
    **_fields("name", "description", "input_schema", "strict"),
    "type": _own(only=("custom",), note=_NO_TOOLS),
    "cache_control": _CACHE,
    "eager_input_streaming": _none("a call is sent whole"),
    "defer_loading": _own(only=(False,), note=_NO_PLACE),
    "allowed_callers": _own(only=(["direct"],), note=_NO_TOOLS),
    "input_examples": _no(f"{_NO_PLACE}; write them into the description"),
}
_PARALLEL = _own("true: at most one call")
MESSAGES = {
    "model": _lib(note="any name; the answer echoes it"),
    "messages": _lib(Each({"role": _lib(only=("user", "assistant", "system")),
                           "content": _lib(_MESSAGES_BLOCKS)})),
    "system": _lib(Each(Tagged("type", {"text": _MESSAGES_TEXT}))),
    "thinking": _lib({
        "type": _lib(),
        "budget_tokens": _none("a target, by its definition; thinking ends where the model ends "
                               "it, or at max_tokens"),
        "display": _own(only=("summarized",), note="the thinking comes back whole")}),
    "output_config": _lib({
        "effort": _lib(note="with thinking on"),
        "format": _own("as response_format")}),
    "tools": _lib(Each(_MESSAGES_TOOL)),
    "tool_choice": _lib(Tagged("type", {
        "auto": {"type": _lib(), "disable_parallel_tool_use": _PARALLEL},
        "any": {"type": _lib(), "disable_parallel_tool_use": _PARALLEL},
        "tool": {"type": _lib(), "name": _lib(), "disable_parallel_tool_use": _PARALLEL},
        "none": _fields("type")})),
    "max_tokens": _lib(),
    "temperature": _lib(),
    "top_p": _lib(),
    **_EXTRA,
    "top_k": _own(),
    "stop_sequences": _lib(note="in the answer, not in the thinking"),
    "stream": _lib(note="not in a batch"),
    "metadata": _LABEL,
    "service_tier": _SERVICE,
    "speed": _SERVICE,
    "inference_geo": _SERVICE,
    "user_profile_id": _LABEL,
    "workspace_id": _LABEL,
    "cache_control": _CACHE,
    "diagnostics": _none("there is no earlier call to compare with"),
    "container": _no(_NO_SERVER),
}  # fmt: skip

COMPLETIONS = {
    "model": _own("any name; the answer echoes it"),
    "prompt": _own("a text, token ids, or a list of either"),
    "max_tokens": _own("16 where it is missing"),
    "temperature": _own(),
    "top_p": _own(),
    "n": _own(),
    "stop": _own(),
    "logprobs": _own(),
    **_EXTRA,
    "seed": _own(),
    "presence_penalty": _own(),
    "frequency_penalty": _own(),
    "logit_bias": _own(),
    "best_of": _own(only=(1,), note="ask for n and choose"),
    "echo": _own(only=(False,), note="the prompt is known"),
    "suffix": _no("the model was not trained to fill gaps"),
    "stream": _own(only=(False,), note="the answer comes whole"),
    "stream_options": _none("nothing is streamed"),
    "user": _LABEL,
}

TABLES: dict[str, dict[str, Field]] = {
    "chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "completions": COMPLETIONS,
}  # fmt: skip


def refusal(where: str, why: str) -> UsageError:
    """The error for a part of a request that cannot be honoured."""
    return UsageError("request-unsupported", f"{where} is not supported", [why], "leave it out")


def check(kind: str, body: object) -> None:
    """Raises UsageError for the first field of `body` that would be ignored."""
    if not isinstance(body, Mapping):
        raise UsageError(
            "request-invalid", f"the request is a {type(body).__name__}, not an object",
        )  # fmt: skip
    _object(body, TABLES[kind], "")


def _inside(value: object, shape: Any, path: str) -> None:
    """Values of another type than the shape's are left to the conversion, which checks types."""
    if isinstance(shape, Each):
        for at, item in enumerate(value if isinstance(value, list) else ()):
            _inside(item, shape.shape, f"{path}[{at}]")
    elif isinstance(value, Mapping):
        if isinstance(shape, Tagged):
            shape = _kind(value, shape, path)
        if shape is not None:
            _object(value, shape, f"{path}.")


def _kind(value: Mapping[str, Any], shape: Tagged, path: str) -> Mapping[str, Field]:
    tag = value.get(shape.key, shape.default)
    if isinstance(tag, str) and tag in shape.kinds:
        return shape.kinds[tag]
    known = f"accepted: {', '.join(shape.kinds)}"
    if tag is None:
        raise UsageError("request-invalid", f"{path}.{shape.key} is missing", [known])
    why = (shape.refused or {}).get(tag, known) if isinstance(tag, str) else known
    raise refusal(f"{path}.{shape.key} {str(tag)[:60]!r}", why)


def _object(value: Mapping[str, Any], shape: Mapping[str, Field], path: str) -> None:
    for name, item in value.items():
        if item is None:
            continue  # the clients write null for what is not set
        field = shape.get(name)
        where = f"{path}{name}"
        if field is None:
            near = difflib.get_close_matches(str(name), shape, n=1)
            why = f"did you mean {near[0]}?" if near else "no field of this name is known here"
            raise refusal(where, why)
        if field.status == "refused":
            raise refusal(where, field.note)
        if field.only is not None and item not in field.only:
            accepted = f"accepted: {', '.join(map(repr, field.only))}"
            raise refusal(f"{where}={str(item)[:60]!r}", f"{accepted}; {field.note}".strip("; "))
        _inside(item, field.shape, where)


def markdown() -> str:
    """The table of README: every field of every kind of request."""
    shown = {"applied": "applied", "none": "accepted, changes no answer", "refused": "refused"}
    paths = {"chat": "/v1/chat/completions", "responses": "/v1/responses",
             "messages": "/v1/messages", "completions": "/v1/completions"}  # fmt: skip
    lines = ["| request | what happens | fields |", "|---|---|---|"]
    for kind, table in TABLES.items():
        for status, words in shown.items():
            names = sorted(name for name, field in table.items() if field.status == status)
            if names:
                cells = ", ".join(f"`{name}`{_limits(table[name])}" for name in names)
                lines.append(f"| `{paths[kind]}` | {words} | {cells} |")
    return "\n".join(lines)


def _limits(field: Field) -> str:
    if not field.only:
        return ""
    return f" (only {' or '.join(str(value).lower() for value in field.only)})"
