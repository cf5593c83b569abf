"""The V4.1 chat format as weighted segments, for training text.

Messages come in, a list of (content, weight code) segments goes out; content is plain text, or a
tuple of ids for special tokens and ready-made code. Control tokens are always ids, so no text can
inject one. It knows nothing of tokenization or of the exercises.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from examples.train_tiny.tokenizer import ASSISTANT, BOS, DSML, EOS, SYSTEM, THINK, THINK_END, USER

# Weight codes: index into WEIGHTS. Prompts are random and carry little signal.
UNUSED, PROMPT, ANSWER = 0, 1, 2
WEIGHTS = (0.0, 0.1, 1.0)

Content = str | tuple[int, ...]
Segment = tuple[Content, int]

_EFFORT = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)


@dataclass(frozen=True)
class Call:
    """One tool call: name and (parameter, value) pairs in order."""

    name: str
    arguments: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class User:
    """A user turn; content is text or a mix of text and ids."""

    content: Sequence[Content]


@dataclass(frozen=True)
class Result:
    """A tool result, rendered as a user turn."""

    content: str


@dataclass(frozen=True)
class Assistant:
    """An assistant turn: optional thinking, answer text, tool calls."""

    answer: str
    think: str | None = None
    calls: tuple[Call, ...] = ()


Message = User | Result | Assistant


def _tools_text(schemas: Sequence[dict]) -> list[Content]:
    d: Content = (DSML,)
    listing = "\n".join(json.dumps(s, ensure_ascii=False) for s in schemas)
    return [
        "\n\n## Tools\n\nYou have access to a set of tools to help answer the user's question. "
        'You can invoke tools by writing a "<', d, ' calls>" block like the following:\n\n<', d,
        " calls>\n<", d, ' invoke name="$TOOL_NAME">\n<', d,
        ' parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</', d,
        " parameter>\n...\n</", d, " invoke>\n<", d, ' invoke name="$TOOL_NAME2">\n...\n</', d,
        " invoke>\n</", d,
        " calls>\n\nString parameters should be specified as is and set `string=\"true\"`. For all "
        "other types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
        '`string="false"`.\n\nIf thinking_mode is enabled (triggered by ', (THINK,),
        "), you MUST output your complete reasoning inside ", (THINK,), "...", (THINK_END,),
        " BEFORE any tool calls or final response.\n\nOtherwise, output directly after ",
        (THINK_END,), " with tool calls or final response.\n\n### Available Tool Schemas\n\n"
        + listing
        + "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to "
        "invoke tool calls.\n",
    ]  # fmt: skip


def _calls_text(calls: Sequence[Call]) -> list[Content]:
    d: Content = (DSML,)
    out: list[Content] = ["\n\n<", d, " calls>"]
    for call in calls:
        out += ["\n<", d, f' invoke name="{call.name}">']
        for name, value in call.arguments:
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            flag = "true" if is_text else "false"
            out += ["\n<", d, f' parameter name="{name}" string="{flag}">{shown}</', d]
            out.append(" parameter>")
        out += ["\n</", d, " invoke>"]
    return [*out, "\n</", d, " calls>"]


def render(
    messages: Sequence[Message],
    *,
    system: str = "",
    effort: int | None = None,
    tools: Sequence[dict] = (),
) -> list[Segment]:
    """Segments of a whole conversation.

    `effort` is the number of the reasoning-effort line; an assistant message with `think` set
    (possibly empty) answers in thinking mode. Thinking of earlier turns is dropped unless there
    are tools, as the official rendering does; such an answer cannot be derived from what is left
    of its turn and is weighted as prompt. If the last message is not the assistant's, the result
    ends with the assistant header, thinking opened iff `effort` is given.
    """
    out: list[Segment] = [((BOS,), PROMPT)]
    preamble: list[Content] = []
    if effort is not None:
        preamble.append(_EFFORT.format(effort))
    if system:
        preamble.append(system)
    if tools:
        preamble += _tools_text(tools)
    if preamble:
        out.append(((SYSTEM,), PROMPT))
        out += [(c, PROMPT) for c in preamble]
    last_user = max((i for i, m in enumerate(messages) if isinstance(m, User)), default=-1)
    for i, message in enumerate(messages):
        if isinstance(message, User):
            out.append(((USER,), PROMPT))
            out += [(c, PROMPT) for c in message.content]
        elif isinstance(message, Result):
            out.append(((USER,), PROMPT))
            out.append((f"<tool_result>{message.content}</tool_result>", PROMPT))
        else:
            out.append(((ASSISTANT,), PROMPT))
            dropped = message.think is not None and not tools and i < last_user
            code = PROMPT if dropped else ANSWER
            if message.think is None or dropped:
                out.append(((THINK_END,), PROMPT))
            else:
                out += [((THINK,), PROMPT), (message.think, code), ((THINK_END,), code)]
            out.append((message.answer, code))
            if message.calls:
                out += [(c, code) for c in _calls_text(message.calls)]
            out.append(((EOS,), code))
    if messages and not isinstance(messages[-1], Assistant):
        mark = THINK_END if effort is None else THINK
        out += [((ASSISTANT,), PROMPT), ((mark,), PROMPT)]
    return out
