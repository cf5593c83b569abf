"""The compiled library that tests of the cpu back end open, one level and number of threads at a
time."""

from __future__ import annotations

import os

import pytest

from deepinfer.errors import UsageError
from deepinfer.ops import registry
from deepinfer.ops.cpu.library import LEVELS, Library
from deepinfer.toolchain.plan import Plan
from tests.native import made

SIDES = [(level, threads) for level in LEVELS for threads in (1, 2)]


def plan() -> Plan:
    """What is built. DEEPINFER_TEST_FLAGS: further flags, such as -fsanitize=address."""
    return made(tuple(os.environ.get("DEEPINFER_TEST_FLAGS", "").split()))


def library(level: str | None = None, threads: int = 1) -> Library:
    """Skips where no compiler is, the processor does not have the level (None: its best), or the
    level is not built."""
    built = plan()
    if level not in (None, *built.levels):
        pytest.skip(f"not built: {level}")
    try:
        return Library(built.link.output, level, threads)
    except UsageError as why:
        pytest.skip(str(why))


def levels() -> list[str]:
    """Those that are built and that this processor has."""
    best = LEVELS.index(library().level)
    return [level for level in plan().levels if LEVELS.index(level) <= best]


def ops(level: str, threads: int) -> registry.Ops:
    """The op table that prefers the compiled library."""
    return registry.build("cpu", libraries={"cpu": library(level, threads)})
