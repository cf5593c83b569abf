"""One conversation on an engine: `LLM.chat`.

Messages and sampling parameters come in, one completion goes out. It must not know flags or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deepinfer.core.request import Completion, SamplingParams
from deepinfer.engine.exchange import Exchange
from deepinfer.errors import InternalError, UsageError
from deepinfer.protocol.convert import THINKING, Frontend, Setup

if TYPE_CHECKING:
    from deepinfer.engine.engine import LLM

__all__ = ["answer"]


def answer(llm: LLM, body: Mapping[str, Any], params: SamplingParams, thinking: str) -> Completion:
    """Raises UsageError, CheckpointError, and what the answer failed with."""
    if thinking not in THINKING:
        raise UsageError(
            "bad-thinking", f"thinking={thinking!r} is not accepted",
            [f"accepted: {', '.join(THINKING)}"],
        )  # fmt: skip
    if params.n != 1:
        raise UsageError("bad-sampling-parameter", f"n={params.n}: a chat has one answer")
    own = {field.name: getattr(params, field.name) for field in fields(params)}
    frontend = Frontend(llm.parts.tokenizer, Setup(thinking, sampling=own))
    prepared = frontend.read("chat", body)
    with Exchange(llm, frontend) as exchange:
        exchange.submit(0, prepared, "chat")
        while len(exchange):
            for news in exchange.step():
                if news.problem is not None:
                    raise news.problem.raised()
                if news.completion is not None:
                    return news.completion
    raise InternalError("chat-without-result", "the engine ended without a result")
