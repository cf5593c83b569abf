"""The model of a run, made ready, and what reads requests for it before it is.

Comes in: settings. Goes out: `deepinfer.LLM`, or a `Frontend` that needs no weights. It must not
know prompts or answers.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.settings import Settings

if TYPE_CHECKING:
    from deepinfer.protocol.convert import Frontend, Prepared, Setup

__all__ = ["load", "open_frontend", "prepare"]


def load(output: Output, settings: Settings) -> Any:
    """The engine; warnings that were said already are not said again."""
    import deepinfer

    def warn(line: str) -> None:
        if line not in settings.warnings:
            output.warn(line)

    started = time.perf_counter()
    # torch makes a million objects that stay: looking through them again and again is 0.4 s.
    gc.disable()
    try:
        llm = deepinfer.LLM.from_settings(settings, on_warning=warn)  # type: ignore[attr-defined]
    finally:
        gc.freeze()
        gc.enable()
    output.info(f"the model was ready after {time.perf_counter() - started:.1f} s")
    return llm


def open_frontend(settings: Settings, setup: Setup) -> tuple[Frontend, bytes]:
    """What reads requests for the checkpoint, and the checkpoint's identity. Raises
    CheckpointError for one without a chat format."""
    from deepinfer.checkpoint.layout import open_checkpoint
    from deepinfer.engine.assembly import Folder, embedded_model
    from deepinfer.protocol.convert import Frontend

    folder = settings.model_dir or embedded_model()
    model = Folder(open_checkpoint(folder, settings.origin("model_dir")))
    return Frontend(model.tokenizer(), setup), model.identity()


def prepare(frontend: Frontend, kind: str, body: object) -> Prepared:
    """The request, and whether its constraint can be one. Raises UsageError, CheckpointError."""
    from deepinfer.core.request import Structured

    prepared = frontend.read(kind, body)
    if isinstance(prepared.params.structured, Structured):
        from deepinfer.structured.grammar import check

        check(prepared.params.structured)
    return prepared
