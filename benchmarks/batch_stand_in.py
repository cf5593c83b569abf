"""A stand-in for the engine that says one token at once, to measure what a batch itself costs.

Prompts come in, one-token answers go out; it has the few members that `run --batch` uses of
`deepinfer.LLM`. It must not know files.
"""

from __future__ import annotations

import resource
from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

from deepinfer.core.request import Completion, FinishReason, Timing, Usage
from deepinfer.core.step import TokenDelta
from deepinfer.engine.assembly import embedded_model
from deepinfer.engine.flow import Flow
from deepinfer.tokenizer.tokenizer import Tokenizer

_WORD = 300  # an id of the embedded vocabulary


class StandIn:
    ready_bytes: ClassVar[int] = 0

    def __init__(self, settings: Any) -> None:
        tokenizer = Tokenizer(embedded_model() / "tokenizer.json", 0, 4096)
        sizes = SimpleNamespace(slots=256)
        self.parts = SimpleNamespace(tokenizer=tokenizer, eos_ids=(1,), sizes=sizes)
        self._settings = settings.as_json()
        self._calls: list[Any] = []

    @classmethod
    def from_settings(cls, settings: Any, on_warning: Any = None) -> StandIn:
        cls.ready_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return cls(settings)

    def flow(self) -> Flow:
        return Flow(self)  # type: ignore[arg-type]

    def open_call(self, prompts: Any, params: Any, follow: bool) -> Any:
        result = Completion(
            0, 0, "word", (_WORD,), FinishReason.LENGTH, Usage(len(prompts[0]), 0, 0, 0, 1),
            Timing(), params.seed, False, self._settings,
        )  # fmt: skip
        deltas = deque([TokenDelta(0, 0, (_WORD,), "word", result=result)] if follow else [])
        call = SimpleNamespace(open=1, deltas=deque(), late=deltas, answers=[
            SimpleNamespace(result=result)])  # fmt: skip
        self._calls.append(call)
        return call

    def run_step(self) -> None:
        for call in self._calls:
            call.open, call.deltas = 0, call.late
        self._calls.clear()

    def end_call(self, call: Any) -> None:
        call.open = 0

    def close(self) -> None:
        self._calls.clear()
