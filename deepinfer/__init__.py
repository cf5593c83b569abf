"""deepinfer: run DeepSeek-V4.1 checkpoints, offline, from Python or the command line.

The public names live here and are imported when first used, so that `import deepinfer` and
`deepinfer --help` cost milliseconds. Importing this package must not import torch.
"""

from __future__ import annotations

from importlib import import_module

from deepinfer.errors import DeepinferError

__version__ = "0.1.0"
__all__ = ["LLM", "DeepinferError", "SamplingParams", "Structured", "__version__", "errors"]

_LAZY = {
    "LLM": "deepinfer.engine.engine",
    "SamplingParams": "deepinfer.core.request",
    "Structured": "deepinfer.core.request",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
