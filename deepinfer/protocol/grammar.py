"""What an answer must look like, as a grammar: a schema, an expression, calls of tools.

Tools, a choice and a format come in; a `Structured` goes out. The grammar of calls is that of the
markup the model was taught: one block, in it calls with their arguments in the order of the schema.
It must not know requests, nor how a grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.core.request import Structured
from deepinfer.errors import UsageError

__all__ = ["Choice", "Tool", "constraint"]

_TEXT = r"/(.|\n)*/"
# Keywords that only a JSON string can be held to; without them text is written as it is.
_AS_JSON = ("pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "$ref")

_COUNTABLE = (1 << 31) - 1
# What a name in the markup cannot have: a quote ends it.
_UNREADABLE = re.compile(r'["\x00-\x1f\x7f-\x9f]')


@dataclass(frozen=True)
class Tool:
    """parameters: a JSON schema, {} or None for anything. strict: held to it word by word."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True)
class Choice:
    """must: the answer is a call. only: of this tool. single: one call at most. opened: the prompt
    has begun the block already."""

    must: bool = False
    only: str | None = None
    single: bool = False
    opened: bool = False


def constraint(
    answer: Structured | None, tools: Sequence[Tool], choice: Choice, mark: int | None,
    after: tuple[int, ...],
) -> Structured | None:  # fmt: skip
    """answer: what a text must be (`after` of it does not count). mark: id of the control token of
    calls. after: ids that start the constraint. None: anything goes. Raises UsageError for a name
    that a call cannot be written with."""
    held = choice.must or choice.single or any(tool.strict for tool in tools)
    if not tools or mark is None or not (held or answer):
        return None if answer is None else Structured(answer.kind, answer.source, after)
    if choice.only is not None:
        tools = [tool for tool in tools if tool.name == choice.only]
    return Structured("lark", _Grammar(mark).text(answer, tools, choice), after)


class _Grammar:
    def __init__(self, mark: int) -> None:
        self._mark = f"<[{mark}]>"
        self._rules: list[str] = []

    def text(self, answer: Structured | None, tools: Sequence[Tool], choice: Choice) -> str:
        calls = "call" if choice.single else "call+"
        block = f'" calls>\\n" {calls} "</" {self._mark} " calls>"'
        if choice.opened:
            start = block.removeprefix('" calls>\\n" ')
        elif choice.must:
            start = f'"\\n\\n<" {self._mark} {block}'
        elif answer is None:
            # One lexeme up to the block: the longest text wins, and that is without a block.
            start = f"{_TEXT} | /(.|\\n)*</ {self._mark} {block}"
        else:
            start = f'{self._answer(answer)} | "\\n\\n<" {self._mark} {block}'
        names = [self._call(at, tool) for at, tool in enumerate(tools)]
        rules = [f"start: {start}", f"call: {' | '.join(names)}", *self._rules]
        return "\n".join(rules) + "\n"

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def _answer(self, answer: Structured) -> str:
        if answer.kind == "regex":
            return self._rule("answer", f"/{answer.source.replace('/', chr(92) + '/')}/")
        return self._rule("answer", f"%json {answer.source}")

    def _call(self, at: int, tool: Tool) -> str:
        name = f"call{at}"
        _check_name("tool", tool.name)
        head = _quoted(f' invoke name="{tool.name}">\n')
        body = f'"<" {self._mark} {head} {self._parameters(name, tool)}'
        return self._rule(name, f'{body} "</" {self._mark} " invoke>\\n"')

    def _parameters(self, name: str, tool: Tool) -> str:
        schema = tool.parameters or {}
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            closed = schema.get("additionalProperties") is False or tool.strict
            return "" if closed else f"{self._anything(name)}*"
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for at, (key, value) in enumerate(properties.items()):
            _check_name(f"property of the tool {tool.name}", key)
            rule = self._parameter(f"{name}p{at}", f"tools[{tool.name}]", key, value, shared,
                                   tool.strict)  # fmt: skip
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _anything(self, name: str) -> str:
        typed = self._rule(f"{name}j", "%json {}")
        body = (
            f'"<" {self._mark} /[ ]parameter name="[^"<>\\n]+" string="/ '
            f'("true\\">" /(.|\\n)*<\\// | "false\\">" {typed} "</") {self._mark} " parameter>\\n"'
        )
        return self._rule(f"{name}p", body)

    def _parameter(
        self, name: str, tool: str, key: str, schema: object, shared: Mapping[str, Any],
        strict: bool,
    ) -> str:  # fmt: skip
        forms = []
        text = _text(schema, shared)
        if text is not None:
            forms.append(f"{_quoted(_head(key, 'true'))} {text}")
        if text is None or not _only_text(schema, shared):
            whole = schema if isinstance(schema, bool) else {**shared, **_mapping(schema)}
            if not strict and isinstance(whole, dict):
                # Of a schema that nobody promised to keep, what cannot be expressed is left out.
                whole = {**whole, "x-guidance": {"lenient": True}}
            # The comment is what an error calls the place of the schema.
            self._rules.append(f"// at {tool}.{key}")
            typed = self._rule(f"{name}j", f"%json {json.dumps(whole)}")
            forms.append(f'{_quoted(_head(key, "false"))} {typed} "</"')
        choice = " | ".join(forms)
        return self._rule(name, f'"<" {self._mark} ({choice}) {self._mark} " parameter>\\n"')


def _check_name(what: str, name: str) -> None:
    if _UNREADABLE.search(name):
        raise UsageError(
            "request-invalid", f"no call can be written with the {what} {json.dumps(name)}",
            ["a name in a call has no quotes, line breaks or control characters"],
        )  # fmt: skip


def _head(key: str, string: str) -> str:
    return f' parameter name="{key}" string="{string}">'


def _quoted(text: str) -> str:
    return json.dumps(text)


def _mapping(schema: object) -> dict[str, Any]:
    return dict(schema) if isinstance(schema, Mapping) else {}


def _types(schema: object, shared: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Which types a value may have, {} for any."""
    one = _mapping(schema)
    if "const" in one or "enum" in one:
        values = [one["const"]] if "const" in one else one["enum"]
        values = values if isinstance(values, list) else []
        return {"string" if isinstance(value, str) else "other" for value in values}
    kind = one.get("type")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(map(str, kind))
    target = one.get("$ref")
    if isinstance(target, str) and depth < 8:
        for root in ("$defs", "definitions"):
            name = target.removeprefix(f"#/{root}/")
            if name in _mapping(shared.get(root)):
                return _types(shared[root][name], shared, depth + 1)
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for branch in one.get(key) or ():
            types = _types(branch, shared, depth + 1) if depth < 8 else set()
            if not types:
                return set()
            found |= types
    return found


def _only_text(schema: object, shared: Mapping[str, Any]) -> bool:
    return _types(schema, shared) == {"string"}


def _text(schema: object, shared: Mapping[str, Any]) -> str | None:
    """The value as plain text up to its closing tag; None: it is written as JSON."""
    types = _types(schema, shared)
    one = _mapping(schema)
    if (types and "string" not in types) or schema is False:
        return None
    if any(key in one for key in _AS_JSON):
        return None  # a text with limits of its own further down, or such as JSON alone can have
    if "const" in one or "enum" in one:
        values = [one["const"]] if "const" in one else one["enum"]
        return "(" + " | ".join(_quoted(v + "</") for v in values if isinstance(v, str)) + ")"
    low, high = one.get("minLength"), one.get("maxLength")
    if low is None and high is None:
        return r"/(.|\n)*<\//"
    least, most = 0 if low is None else low, _COUNTABLE if high is None else high
    numbers = all(isinstance(n, (int, float)) and 0 <= n <= _COUNTABLE for n in (least, most))
    if not numbers or least > most:
        return None  # no expression says it; as a schema it is refused by name
    limit = "" if high is None else int(high)
    return rf"/(.|\n){{{int(least)},{limit}}}<\//"
