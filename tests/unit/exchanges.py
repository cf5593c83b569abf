"""The embedded tokenizer behind a `Frontend`, and answers made of texts, for tests of protocols.

A reply is fed token ids in pieces of a given size; a text's control tokens are those of the format.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from deepinfer.core.request import FinishReason, TokenLogprob, Usage
from deepinfer.protocol.answers import Reply
from deepinfer.protocol.convert import Frontend, Setup
from deepinfer.tokenizer.tokenizer import Tokenizer

FILE = Path(__file__).parents[2] / "deepinfer" / "embedded" / "tokenizer.json"
CHATS = ("chat", "responses", "messages")
MARK = "｜DSML｜"
_CONTROL = re.compile("</think>|｜DSML｜|<｜User｜>|<｜end▁of▁sentence｜>")
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["city"],
    },
    "other": {"type": "object", "properties": {}},
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(FILE, 0, 4096)


def frontend(**setup) -> Frontend:
    return Frontend(tokenizer(), Setup(**setup))


def ids(text: str) -> list[int]:
    """Ids of an answer, names of control tokens being these tokens."""
    out, at = [], 0
    for found in _CONTROL.finditer(text):
        out += [*tokenizer().encode_plain(text[at : found.start()]), tokenizer().special(found[0])]
        at = found.end()
    return out + tokenizer().encode_plain(text[at:])


def bytes_of(data: bytes) -> list[int]:
    """One token a byte."""
    table = {tokenizer().token_bytes(token): token for token in range(19, 276)}
    return [table[bytes([byte])] for byte in data]


def body(kind: str, text: str = "Hi", think: bool = False, tools: bool = False, **more) -> dict:
    """A request with one user message."""
    made: dict = {"model": "any-model"}
    functions = TOOLS.items() if tools else ()
    if kind == "chat":
        made["messages"] = [{"role": "user", "content": text}]
        made["thinking"] = {"type": "enabled" if think else "disabled"}
        shaped = [
            {"type": "function", "function": {"name": n, "parameters": p}} for n, p in functions
        ]
    elif kind == "responses":
        made |= {"input": text, "reasoning": {"effort": "high" if think else "none"}}
        shaped = [{"type": "function", "name": n, "parameters": p} for n, p in functions]
    elif kind == "messages":
        made |= {"messages": [{"role": "user", "content": text}], "max_tokens": 100}
        on = {"type": "enabled", "budget_tokens": 1024}
        made["thinking"] = on if think else {"type": "disabled"}
        shaped = [{"name": n, "input_schema": p} for n, p in functions]
    else:
        made["prompt"], shaped = text, []
    return {**made, **({"tools": shaped} if shaped else {}), **more}


def replied(
    kind: str,
    tokens: str | list[int],
    reason: str = "stop",
    piece: int | None = None,
    scored: bool = False,
    **asked,
):
    """Events and document of an answer that came in pieces of `piece` tokens (None: at once)."""
    front = frontend()
    prepared = front.read(kind, body(kind, **asked))
    tokens = ids(tokens) if isinstance(tokens, str) else tokens
    usage = Usage(9, 4, 0, 5, len(tokens) + 1)
    reply = Reply(front, prepared, "id-1", 5, Usage(9))
    events = []
    for at in range(0, len(tokens), piece or max(len(tokens), 1)):
        part = tokens[at : at + (piece or len(tokens))]
        scores = [TokenLogprob(token, -0.5, ((token, -0.5), (20, -1.5))) for token in part]
        events += reply.push(part, scores if scored else ())
    events += reply.finish(FinishReason(reason), usage)
    return events, reply.document()


def neutral(kind: str, document: dict) -> dict:
    """thinking, text, calls (name, arguments as text or object) and why it ended."""
    if kind == "chat":
        choice = document["choices"][0]
        message = choice["message"]
        calls = [
            (c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or ()
        ]
        return {
            "thinking": message.get("reasoning_content") or "",
            "text": message["content"] or "",
            "calls": calls,
            "why": choice["finish_reason"],
        }
    if kind == "responses":
        of = {
            name: [item for item in document["output"] if item["type"] == name]
            for name in ("reasoning", "message", "function_call")
        }
        return {
            "thinking": "".join(p["text"] for i in of["reasoning"] for p in i["content"]),
            "text": "".join(p["text"] for i in of["message"] for p in i["content"]),
            "calls": [(i["name"], i["arguments"]) for i in of["function_call"]],
            "why": document["status"],
        }
    blocks = document["content"]
    return {
        "thinking": "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        "text": "".join(b["text"] for b in blocks if b["type"] == "text"),
        "calls": [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"],
        "why": document["stop_reason"],
    }


def joined(kind: str, events) -> dict:
    """The same out of the events of a stream; arguments of Messages are the text of their JSON."""
    thinking, text, calls, why = "", "", [], None
    for event in events:
        data = event.data
        if kind == "chat":
            choice = data["choices"][0]
            delta = choice["delta"]
            thinking += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments") or ""
            why = choice["finish_reason"] or why
        elif kind == "responses":
            what = data["type"]
            if what == "response.reasoning_text.delta":
                thinking += data["delta"]
            elif what == "response.output_text.delta":
                text += data["delta"]
            elif what == "response.output_item.added" and data["item"]["type"] == "function_call":
                calls.append([data["item"]["name"], ""])
            elif what == "response.function_call_arguments.delta":
                calls[-1][1] += data["delta"]
            elif "response" in data:
                why = data["response"]["status"]
        else:
            what = data["type"]
            if what == "content_block_start" and data["content_block"]["type"] == "tool_use":
                calls.append([data["content_block"]["name"], ""])
            elif what == "content_block_delta":
                delta = data["delta"]
                thinking += delta.get("thinking", "")
                text += delta.get("text", "")
                if delta["type"] == "input_json_delta":
                    calls[-1][1] += delta["partial_json"]
            elif what == "message_delta":
                why = data["delta"]["stop_reason"]
    return {"thinking": thinking, "text": text, "calls": [tuple(c) for c in calls], "why": why}
