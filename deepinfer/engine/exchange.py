"""Requests of the protocols on an engine: prepared ones in, answers in their shapes out.

It puts `protocol` and `Flow` together: prompts are encoded and submitted, tokens parsed as they
come where the parser may end an answer, at its end elsewhere. It must not know files or flags.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepinfer.core.request import Completion, FinishReason, Problem, Usage
from deepinfer.core.step import TokenDelta
from deepinfer.engine.flow import Made
from deepinfer.protocol import completions
from deepinfer.protocol.answers import Event, Reply
from deepinfer.protocol.convert import Frontend, Prepared

if TYPE_CHECKING:
    from deepinfer.engine.engine import LLM

__all__ = ["Exchange", "News"]


@dataclass(frozen=True, slots=True)
class News:
    """What happened to a request. events: of its stream. document: the whole answer in the shape
    of its protocol, once it is over; completion: the engine's own record of it, of Chat Completions
    with text, thinking and calls apart (the first one, where there are several). problem: why there
    is none. token_ids: new ones of a request that is followed.
    """

    key: Hashable
    events: tuple[Event, ...] = ()
    token_ids: tuple[int, ...] = ()
    document: dict[str, Any] | None = None
    completion: Completion | None = None
    problem: Problem | None = None

    @property
    def over(self) -> bool:
        return self.document is not None or self.problem is not None


@dataclass(slots=True)
class _Open:
    prepared: Prepared
    identity: str
    created: int
    reply: Reply | None = None  # of a request that is followed


class Exchange:
    """Use it as a context manager, or `close` it: what still runs ends then."""

    def __init__(self, llm: LLM, frontend: Frontend) -> None:
        self._llm, self._frontend = llm, frontend
        self._flow = llm.flow()
        self._open: dict[Hashable, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def submit(
        self, key: Hashable, prepared: Prepared, identity: str, follow: bool = False
    ) -> None:
        """identity: of the answer. follow: its events are told as they come. Raises UsageError for
        a prompt that cannot be written, CheckpointError."""
        prompts = self._frontend.encode(prepared)
        one = _Open(prepared, identity, int(time.time()))
        chat = prepared.kind != "completions"
        follow = follow and chat
        if follow or (chat and (prepared.stop or prepared.calls)):
            usage = Usage(prompt_tokens=len(prompts[0]))
            one.reply = Reply(self._frontend, prepared, identity, one.created, usage, follow=follow)
        self._flow.submit(key, prompts, prepared.params, follow=one.reply is not None)
        self._open[key] = one

    def step(self) -> Iterator[News]:
        """Run a step of the engine and tell what came of it."""
        for made in self._flow.step():
            one = self._open[made.key]
            if one.reply is None:
                if made.results is not None:
                    del self._open[made.key]
                    yield self._answered(made.key, one, made.results)
                continue
            news = self._followed(made, one, one.reply)
            if news.over:
                del self._open[made.key]
            yield news

    def _followed(self, made: Made, one: _Open, reply: Reply) -> News:
        events: list[Event] = []
        for delta in made.deltas:
            if not reply.finished:
                events += reply.push(self._words(delta, one.prepared), delta.logprobs or ())
        ids = tuple(token for delta in made.deltas for token in delta.token_ids)
        results = made.results
        if results is None and reply.finished:
            results = self._flow.end(made.key)
        if results is None:
            return News(made.key, tuple(events), ids)
        [result] = results
        # What failed behind the end of the answer is none of it.
        if result.error is not None and not reply.finished:
            return News(made.key, tuple(events), ids, problem=result.error)
        reason = FinishReason.STOP if reply.finished else result.finish_reason
        events += reply.finish(reason, result.usage)
        return replace(self._news(made.key, reply, result, reason), events=tuple(events),
                       token_ids=ids)  # fmt: skip

    def _words(self, delta: TokenDelta, prepared: Prepared) -> Sequence[int]:
        """Tokens of a delta without the one that ended the answer."""
        return self._spoken(delta.token_ids, delta.result, prepared)

    def _spoken(
        self, ids: Sequence[int], result: Completion | None, prepared: Prepared
    ) -> Sequence[int]:
        if not ids or result is None or result.finish_reason is not FinishReason.STOP:
            return ids
        ends = prepared.params.stop_token_ids
        if not prepared.params.ignore_eos:
            ends += self._llm.parts.eos_ids
        return ids[:-1] if ids[-1] in ends else ids

    def _answered(self, key: Hashable, one: _Open, results: Sequence[Completion]) -> News:
        failed = next((result.error for result in results if result.error), None)
        if failed is not None:
            return News(key, problem=failed)
        prepared = one.prepared
        if prepared.kind == "completions":
            tokenizer = self._frontend.tokenizer
            document = completions.document(tokenizer, prepared, results, one.identity, one.created)
            return News(key, document=document, completion=results[0])
        [result] = results
        reply = Reply(
            self._frontend, prepared, one.identity, one.created, result.usage, follow=False
        )
        reply.push(self._spoken(result.token_ids, result, prepared), result.logprobs or ())
        reply.finish(result.finish_reason, result.usage)
        return self._news(key, reply, result, result.finish_reason)

    def _news(self, key: Hashable, reply: Reply, result: Completion, reason: FinishReason) -> News:
        document = reply.document()
        completion = replace(
            result, finish_reason=reason, usage=reply.usage, error=None,
            # A token behind the end of the answer may have been made, and is none of it.
            token_ids=result.token_ids[: reply.usage.completion_tokens],
        )  # fmt: skip
        if "choices" in document:
            message = document["choices"][0]["message"]
            completion = replace(
                completion, text=message["content"] or "",
                thinking=message.get("reasoning_content") or "",
                tool_calls=tuple(message.get("tool_calls") or ()),
            )  # fmt: skip
        return News(key, document=document, completion=completion)

    def close(self) -> None:
        self._flow.close()
        self._open.clear()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
