"""`deepinfer run` with a conversation: what was asked, and its answer as it comes.

Comes in: messages, tools and words of the options. Goes out: one prepared request, and pieces of
its answer. It must not know how a prompt is written or a token made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli.options import SWITCH
from deepinfer.errors import UsageError

if TYPE_CHECKING:
    from deepinfer.core.request import Completion
    from deepinfer.protocol.convert import Frontend, Prepared

__all__ = [
    "Chat", "HideThinking", "Messages", "Piece", "System", "Thinking", "Tools", "body_of",
    "check_thinking", "pieces",
]  # fmt: skip


def _option(*names: str, help: str, panel: str = "Input", **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Messages = Annotated[
    str | None,
    _option("--messages", metavar="FILE", help="Answer a chat of a client, as JSON; - is stdin."),
]
Chat = Annotated[
    bool,
    _option("--chat", metavar=SWITCH, hidden=True,
            help="The prompt is a message of a chat, not a text to continue."),
]  # fmt: skip
System = Annotated[
    str | None,
    _option("--system", metavar="TEXT", hidden=True, help="Instructions in front of the chat."),
]
Thinking = Annotated[
    str | None,
    _option("--thinking", metavar="WORD", hidden=True,
            help="Think before the answer: off, on, max. Default: off."),
]  # fmt: skip
Tools = Annotated[
    str | None,
    _option("--tools", metavar="FILE", hidden=True,
            help="JSON list of functions that the answer may call."),
]  # fmt: skip
HideThinking = Annotated[
    bool,
    _option("--hide-thinking", metavar=SWITCH, hidden=True, panel="Output",
            help="Do not show the thinking on stderr."),
]  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """What is new of an answer; result: at its end."""

    text: str = ""
    thinking: str = ""
    token_ids: tuple[int, ...] = ()
    result: Completion | None = None


def check_thinking(word: str | None) -> None:
    """Raises UsageError for a word that --thinking does not have."""
    from deepinfer.protocol.convert import THINKING

    if word is not None and word not in THINKING:
        raise UsageError(
            "bad-option", f'--thinking "{word}" is not accepted',
            [f"accepted: {', '.join(THINKING)}"], "--thinking on",
        )  # fmt: skip


def body_of(text: str, messages: bool, system: str | None, tools: str | None) -> dict[str, Any]:
    """The request of a conversation.

    text: of a file of messages (a list, or a whole request body) or, `messages` False, the user's
    words. Raises UsageError for what cannot be read.
    """
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if messages:
        found = _json(text, "--messages")
        body = {"messages": found} if isinstance(found, list) else found
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise UsageError(
                "messages-invalid", "--messages is no conversation",
                ["accepted: a JSON list of messages, or an object with them under messages"],
                '[{"role": "user", "content": "Hello"}]',
            )  # fmt: skip
        body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    if system is not None:
        first = body["messages"][0] if body["messages"] else None
        if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
            raise UsageError(
                "system-twice", "the instructions were given twice (--system and --messages)",
                hint="leave one out",
            )  # fmt: skip
        body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
    if tools is not None:
        if body.get("tools"):
            raise UsageError(
                "tools-twice", "the tools were given twice (--tools and --messages)",
                hint="leave one out",
            )  # fmt: skip
        body["tools"] = _tools(tools)
    return body


def _tools(name: str) -> list[Any]:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or str(problem)
        raise UsageError(
            "tools-file", f"{name} cannot be read", [why, "from --tools"], "--tools FILE"
        ) from None
    found = _json(text, "--tools")
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise UsageError("tools-invalid", "--tools is no JSON list of functions")
    # A function on its own is taken for what it is.
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "function" not in tool and "name" in tool
        else tool
        for tool in found
    ]


def _json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as bad:
        raise UsageError(
            f"{option[2:]}-invalid", f"{option} is not JSON",
            [f"line {bad.lineno}, column {bad.colno}: {bad.msg}"],
        ) from None  # fmt: skip
    except (ValueError, RecursionError) as bad:
        raise UsageError(f"{option[2:]}-invalid", f"{option} is not JSON", [str(bad)]) from None


def pieces(llm: Any, frontend: Frontend, prepared: Prepared) -> Iterator[Piece]:
    """The answer as it comes. Raises what it failed with."""
    from deepinfer.engine.exchange import Exchange

    with Exchange(llm, frontend) as exchange:
        exchange.submit(0, prepared, "chat", follow=True)
        while len(exchange):
            for news in exchange.step():
                deltas = [c["delta"] for e in news.events for c in e.data["choices"]]
                yield Piece(
                    "".join(delta.get("content") or "" for delta in deltas),
                    "".join(delta.get("reasoning_content") or "" for delta in deltas),
                    news.token_ids, news.completion,
                )  # fmt: skip
                if news.problem is not None:
                    raise news.problem.raised()
