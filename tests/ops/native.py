"""The compiled library that tests of the cpu back end open, one level and number of threads at a
time."""

from __future__ import annotations

import os

import pytest

from deepinfer.errors import UsageError
from deepinfer.ops import registry
from deepinfer.ops.cpu.library import LEVELS, Library
from tests.native import library_path

SIDES = [(level, threads) for level in LEVELS for threads in (1, 2)]


def library(level: str | None = None, threads: int = 1) -> Library:
    """Skips where no compiler is, or the processor does not have the level (None: its best).

    DEEPINFER_TEST_FLAGS: further flags of the compiler, such as -fsanitize=address.
    """
    path = library_path(tuple(os.environ.get("DEEPINFER_TEST_FLAGS", "").split()))
    try:
        return Library(path, level, threads)
    except UsageError as why:
        pytest.skip(str(why))


def ops(level: str, threads: int) -> registry.Ops:
    """The op table that prefers the compiled library."""
    return registry.build("cpu", libraries={"cpu": library(level, threads)})
