"""A back end that a test plants in the registry: one op, any behaviour, any promise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from deepinfer.ops import registry

NAME = "planted"


def plant(
    patch: pytest.MonkeyPatch, op: str, function: Callable, promised: bool = True
) -> dict[str, str]:
    """The back end `planted` holds `op`, and promises it a fixed order or not; the `backend`
    setting that asks for it goes out."""
    package = ModuleType(f"deepinfer.ops.{NAME}")
    package.FIXED_ORDER = {"cpu": frozenset({op} if promised else ())}
    patch.setitem(sys.modules, package.__name__, package)
    for family in {spec.family for spec in registry.SPECS.values()}:
        module = ModuleType(f"{package.__name__}.{family}")
        if family == registry.SPECS[op].family:
            setattr(module, op, function)
        patch.setitem(sys.modules, module.__name__, module)
    patch.setitem(registry.BACKENDS, NAME, ("cpu",))
    return {op: NAME}


def by_rows(x, weight):
    """x W^T of a float weight, summed over K in as many blocks as there are rows, up to 8."""
    w, blocks = weight.source.float(), max(1, min(8, x.shape[0]))
    pieces = zip(x.float().chunk(blocks, -1), w.chunk(blocks, -1), strict=True)
    return sum(a @ b.T for a, b in pieces).to(x.dtype)
