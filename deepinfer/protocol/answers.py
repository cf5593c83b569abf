"""Tokens of an answer into the shape that the request's protocol has: events, and the whole.

A `Prepared` and the tokens of its answer come in, in pieces of any size; events of a stream and at
the end one document go out, the same for every cutting. `deepseek_recipe` makes the shapes; it is
fed plain text, in which only what really was a control token is one. Must not know engines.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from deepinfer.core.request import FinishReason, TokenLogprob, Usage
from deepinfer.errors import InternalError
from deepinfer.protocol.calls import Call, Markup
from deepinfer.protocol.convert import Frontend, Prepared
from deepinfer.tokenizer.tokenizer import overlap

__all__ = ["Event", "Reply"]

_CONTROL = (
    "bos", "eos", "thinking_start", "thinking_end", "system", "user", "assistant",
    "latest_reminder", "dsml", "image", "ref", "ref_end", "box", "box_end", "point", "point_end",
    "polygon", "polygon_end",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One event of a stream: its name, None in protocols whose events have none, and its data."""

    name: str | None
    data: dict[str, Any]


@dataclass
class _Scored:
    """Entries of log-probabilities of one part of the answer; the first `sent` are in events."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0

    def fresh(self) -> list[dict[str, Any]]:
        new, self.sent = self.entries[self.sent :], len(self.entries)
        return new


class Reply:
    """The answer to one request, as it grows.

    identity: its id, from which those of its calls follow; created: seconds since 1970. usage: of
    the prompt, as far as it is known. follow: make events.

    finished: a stop string came, or the block of calls is complete: what follows is no part of the
    answer, and nothing more is taken.
    """

    def __init__(
        self, frontend: Frontend, prepared: Prepared, identity: str, created: int, usage: Usage,
        follow: bool = True,
    ) -> None:  # fmt: skip
        import deepseek_recipe as recipe

        self._recipe, self._frontend, self._prepared = recipe, frontend, prepared
        self._identity, self._created, self._follow = identity, created, follow
        self._usage = usage
        self._written: int | None = None  # tokens of the answer, where the engine counts more
        self._spelt, self._markup = _spelling()
        options = prepared.converted.parsing_options
        parsing = recipe.ParsingOptions(
            parse_tool_calls=prepared.calls,
            thinking_initial_stage=options.thinking_initial_stage,
            stop_sequences=list(prepared.stop),
            special_tokens=recipe.SpecialTokens(**self._spelt),
        )
        requests, answers = _classes(recipe, prepared.kind)
        generator = requests.chunk_generator(prepared.converted, identity, prepared.model)
        if prepared.echo is not None:
            generator = generator.with_echo(prepared.echo)
        self._processor = recipe.StreamProcessor(generator, parsing)
        self._answers = answers
        self._whole = answers(
            identity, prepared.model, created, usage.prompt_tokens, usage.cached_tokens
        )
        self._stage = prepared.stage
        self._bytes = frontend.tokenizer.stream()
        self._held = ""  # text that may be the beginning of a block of calls
        self._block: list[str] = []
        self._calls: list[Call] = []
        self._last: list[Any] = []  # events that wait for the end
        self._names: dict[str, str] = {}  # ids of calls: the library's to ours
        self._scored = {"thinking": _Scored(), "text": _Scored()}
        self._scoring = prepared.params.logprobs is not None
        self.tokens = self.reasoning_tokens = 0
        self.finished = False
        self._started = False

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        """The next tokens, without end-of-sequence. What follows the end of the answer in them is
        not taken; `tokens` says how many were."""
        events = self._begin()
        for at, token in enumerate(ids):
            if self.finished:
                break
            if self._scoring and at < len(logprobs):
                self._score(logprobs[at])
            events += self._take(token)
        return events

    def finish(self, reason: FinishReason, usage: Usage | None = None) -> list[Event]:
        """The answer is over. usage: of all of it; where the answer ended by itself (`finished`),
        tokens behind its end do not count."""
        recipe, cut = self._recipe, reason is FinishReason.LENGTH
        events = self._begin()
        if usage is not None:
            self._usage = usage
            self._written = None if self.finished else usage.completion_tokens
        events += self._emit(self._last)
        if not self._processor.finished:
            if not self.finished:
                tail = self._bytes.finish()
                events += self._text(tail) if tail else []
                events += self._close_block(cut)
                events += self._emit_text(self._held)
            word = "Length" if cut and not self.finished else "Stop"
            end = recipe.InferenceChunk.finish(getattr(recipe.InferenceFinishReason, word))
            events += self._emit(self._processor.push(end))
            events += self._emit(self._processor.finish())
        self.finished = True
        return events

    @property
    def usage(self) -> Usage:
        """Of the prompt and of what there is of the answer."""
        written = self.tokens if self._written is None else self._written
        return replace(
            self._usage, completion_tokens=written, reasoning_tokens=self.reasoning_tokens
        )

    def document(self) -> dict[str, Any]:
        """The answer as a whole, after `finish`. `deepinfer` holds what the protocol has no place
        for: arguments that should have been JSON and are not."""
        whole = json.loads(self._whole.to_json())
        kind = self._prepared.kind
        self._patch(whole)
        if kind == "chat" and self._scoring:
            choice = whole["choices"][0]
            choice["logprobs"] = {"content": self._scored["text"].entries, "refusal": None}
            if self._scored["thinking"].entries:
                choice["logprobs"]["reasoning_content"] = self._scored["thinking"].entries
        if kind == "messages":
            uses = [block for block in whole["content"] if block["type"] == "tool_use"]
            for block, call in zip(uses, self._calls, strict=True):
                block["input"] = call.values
        unread = [
            {"call": at, "argument": argument.name}
            for at, call in enumerate(self._calls)
            for argument in call.arguments
            if not argument.valid and argument.whole
        ]
        if unread:
            whole["deepinfer"] = {"arguments_not_json": unread}
        return whole

    # tokens to text

    def _begin(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        usage = self._recipe.PromptUsage(
            prompt_tokens=self._usage.prompt_tokens,
            prompt_cache_hit_tokens=self._usage.cached_tokens,
        )
        return self._emit(
            self._processor.push(self._recipe.InferenceChunk.ready(prompt_usage=usage))
        )

    def _take(self, token: int) -> list[Event]:
        front = self._frontend
        self.tokens += 1
        if token == front.think_end and self._stage == "thinking":
            events = self._emit_text(self._bytes.finish() + self._spelt["thinking_end"])
            self._bytes, self._stage = front.tokenizer.stream(), "text"
            return events
        if self._stage == "thinking":
            self.reasoning_tokens += 1
        if token == front.mark:
            events = self._text(self._bytes.finish() + self._spelt["dsml"])
            self._bytes = front.tokenizer.stream()
            return events
        return self._text(self._bytes.push(token))

    def _text(self, piece: str) -> list[Event]:
        """Text of the answer; a block of calls is kept together until it is complete."""
        if not piece:
            return []
        if self._stage == "thinking" or not self._prepared.calls:
            return self._emit_text(self._plain(piece))
        events: list[Event] = []
        if self._stage == "text":
            text, opening = self._held + piece, self._markup.open
            before, found, piece = text.partition(opening)
            keep = 0 if found else overlap(before, opening)
            self._held = before[len(before) - keep :]
            events = self._emit_text(self._plain(before[: len(before) - keep]))
            if not found:
                return events
            self._stage = "calls"
        self._block.append(piece)
        if self._markup.close in "".join(self._block[-_CLOSING:]):
            events += self._close_block(cut=False)
            self.finished = True
        return events

    def _close_block(self, cut: bool) -> list[Event]:
        """The calls of the block; what in it is no call goes in front of them as text."""
        if self._stage != "calls":
            return []
        self._stage = "over"
        self._calls, rest = self._markup.read("".join(self._block), cut)
        opened = "" if self._prepared.stage == "calls" else self._markup.open
        events = self._emit_text(self._plain(opened + rest)) if rest else []
        return events + self._emit_text(self._markup.write(self._calls))

    def _plain(self, text: str) -> str:
        """A control token that is no markup here stands for its name."""
        return text.replace(self._spelt["dsml"], "｜DSML｜")

    def _emit_text(self, text: str) -> list[Event]:
        if not text or self._processor.finished:
            return []
        chunks = self._processor.push(self._recipe.InferenceChunk.text(text, 1))
        if self._processor.finished:
            # A stop string: the last event has the usage, which is known at the end.
            self._last, self.finished = chunks, True
            return []
        return self._emit(chunks)

    # shapes

    def _emit(self, chunks: Iterable[Any]) -> list[Event]:
        events = []
        for chunk in chunks:
            if self._follow:
                name = self._answers.sse_event_name(chunk)
                data = json.loads(chunk.to_json())
                self._patch(data)
                if self._scoring:
                    self._attach(data)
                events.append(Event(name, data))
            self._whole.accumulate(chunk)
        return events

    def _patch(self, data: Any) -> None:
        """Ids of calls that follow from the answer's, numbers of tokens, log-probabilities."""
        if isinstance(data, list):
            for item in data:
                self._patch(item)
        if not isinstance(data, dict):
            return
        kind = data.get("type")
        if kind in ("function", "tool_use") and isinstance(data.get("id"), str):
            data["id"] = self._call_id(data["id"])
        if kind == "function_call" and "call_id" in data:
            data["call_id"] = self._call_id(data["call_id"])
        if data.get("object") in ("response", "chat.completion.chunk"):
            made = "created_at" if data["object"] == "response" else "created"
            data[made] = self._created
        if data.get("object") == "response":
            for name in ("presence_penalty", "frequency_penalty"):
                data[name] = getattr(self._prepared.params, name)
        if kind == "output_text" and self._scoring and data.get("text"):
            data["logprobs"] = self._scored["text"].entries
        if isinstance(data.get("usage"), dict):
            data["usage"] = self._usage_of(data["usage"])
        for name, item in data.items():
            # What the caller wrote and the model said is passed on as it is.
            if name not in ("arguments", "input", "metadata", "tools", "usage", "logprobs"):
                self._patch(item)

    def _call_id(self, theirs: str) -> str:
        known = self._names
        if theirs in known.values():
            return theirs
        if theirs not in known:
            seed = f"{self._identity} {len(known)}".encode()
            known[theirs] = f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"
        return known[theirs]

    def _usage_of(self, shown: dict[str, Any]) -> dict[str, Any]:
        usage = self.usage
        cached, fresh = usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens
        if self._prepared.kind == "messages":
            return {**shown, "input_tokens": fresh, "cache_read_input_tokens": cached,
                    "output_tokens": usage.completion_tokens}  # fmt: skip
        read, written = "prompt_tokens", "completion_tokens"
        details = {"cached_tokens": cached}
        if self._prepared.kind == "responses":
            read, written = "input_tokens", "output_tokens"
            details["cache_write_tokens"] = 0
        else:
            shown = {**shown, "prompt_cache_hit_tokens": cached, "prompt_cache_miss_tokens": fresh}
        return {
            **shown, read: usage.prompt_tokens, written: usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            f"{read}_details": details,
            f"{written}_details": {"reasoning_tokens": usage.reasoning_tokens},
        }  # fmt: skip

    def _score(self, logprob: TokenLogprob) -> None:
        part = self._stage if self._stage == "thinking" else "text"
        if logprob.token_id in (self._frontend.think_end,) or self._stage in ("calls", "over"):
            return
        entry = self._entry(logprob.token_id, logprob.logprob)
        entry["top_logprobs"] = [self._entry(*pair) for pair in logprob.top]
        self._scored[part].entries.append(entry)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._frontend.tokenizer.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _attach(self, data: dict[str, Any]) -> None:
        """Log-probabilities of what no event had before to the event whose text they are of."""
        if self._prepared.kind == "responses":
            if data.get("type") == "response.output_text.delta":
                data["logprobs"] = self._scored["text"].fresh()
            elif data.get("type") == "response.output_text.done":
                data["logprobs"] = self._scored["text"].entries
        elif self._prepared.kind == "chat" and data["choices"]:
            choice = data["choices"][0]
            new = {}
            for part, name in (("text", "content"), ("thinking", "reasoning_content")):
                ends = choice["finish_reason"] is not None
                if (choice["delta"].get(name) or ends) and (fresh := self._scored[part].fresh()):
                    new[name] = fresh
            choice["logprobs"] = {"content": None, "refusal": None, **new} if new else None


@cache
def _spelling() -> tuple[dict[str, str], Markup]:
    """Control tokens as text. What the model spells with ordinary tokens must not be taken for one,
    so these are spelt in a way that it cannot know."""
    secret = secrets.token_hex(8)
    spelt = {name: f"<{secret} {name}>" for name in _CONTROL}
    return spelt, Markup(spelt["dsml"])


# A closing tag spans few pieces; looking at all of a block for each piece would be quadratic.
_CLOSING = 64


def _classes(recipe: Any, kind: str) -> tuple[Any, Any]:
    found = {
        "chat": (recipe.ChatCompletionRequest, recipe.ChatCompletionResponse),
        "responses": (recipe.ResponsesRequest, recipe.ResponsesResponse),
        "messages": (recipe.MessagesRequest, recipe.MessagesResponse),
    }
    if kind not in found:
        raise InternalError("no-shape", f"an answer to {kind} has no shape here")
    return found[kind]
