"""Compiling grammars at the pace of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deepinfer.structured import grammar


def held(hold: threading.Event, made: list[str], seconds: float = 30) -> Callable:
    """What a `Compiler` compiles with: it notes each source in `made` and waits for `hold`."""

    def make(structured, tokens):
        made.append(structured.source)
        hold.wait(seconds)
        return grammar.compiled(structured, tokens)

    return make
