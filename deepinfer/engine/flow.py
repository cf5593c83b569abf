"""Calls that come and go while others run: the engine driven one step at a time.

Prompts come in whenever the caller likes, deltas and results go out as steps make them. It must
not know protocols, files, or why a call is ended early.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.core.request import Completion, SamplingParams
from deepinfer.core.step import TokenDelta

if TYPE_CHECKING:
    from deepinfer.engine.engine import LLM

__all__ = ["Flow", "Made"]


@dataclass(frozen=True, slots=True)
class Made:
    """What a step made of a call: deltas, if it is followed; its results in order, once all are
    there."""

    key: Hashable
    deltas: tuple[TokenDelta, ...] = ()
    results: tuple[Completion, ...] | None = None


class Flow:
    """Calls on one engine, by keys of the caller's. Use it as a context manager, or `close` it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._calls: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def submit(
        self, key: Hashable, prompts: Any, params: SamplingParams, follow: bool = False
    ) -> None:
        """A call as `LLM.generate` takes it. follow: its tokens are told as they come. Raises
        UsageError."""
        self._calls[key] = self._llm.open_call(prompts, params, follow)

    def step(self) -> Iterator[Made]:
        """Run a step, unless something is there already to be told, and tell it."""
        if self._calls and not any(map(_ready, self._calls.values())):
            self._llm.run_step()
        for key, call in list(self._calls.items()):
            if _ready(call) and key in self._calls:
                deltas = tuple(call.deltas)
                call.deltas.clear()
                if not call.open:
                    del self._calls[key]
                yield Made(key, deltas, None if call.open else _results(call))

    def end(self, key: Hashable) -> tuple[Completion, ...]:
        """End a call now; what it has so far."""
        call = self._calls.pop(key)
        self._llm.end_call(call)
        return _results(call)

    def close(self) -> None:
        for key in list(self._calls):
            self.end(key)

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ready(call: Any) -> bool:
    return bool(call.deltas) or not call.open


def _results(call: Any) -> tuple[Completion, ...]:
    answers: Sequence[Any] = call.answers
    return tuple(answer.result for answer in answers)
