"""The compiled library: one C function per op and level, found by name.

Comes in: the file, and the level wanted (None: the best of this processor). Goes out: calls. Must
not know what any op means, nor where libraries are kept.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.errors import EnvironmentProblem, InternalError, UsageError

LEVELS = ("portable", "avx2", "avx512", "avx512bf16")
TYPES = {torch.bfloat16: 0, torch.float32: 1}

# Argument types: pointer, int, int64, float, double.
PTR, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
FLOAT, DOUBLE = ctypes.c_float, ctypes.c_double
_ERRORS = {1: "out of memory", 2: "an argument is not supported"}

Call = tuple[str, tuple[type, ...], tuple[Any, ...]]
"""Symbol, argument types and arguments."""
Told = Callable[[str, tuple[type, ...], tuple[Any, ...]], None]


class Library:
    """An open library at one level. `op` gives its functions; threads are shared by all."""

    def __init__(self, path: Path, level: str | None = None, threads: int | None = None):
        """Raises `EnvironmentProblem` where the file cannot be loaded, `UsageError` on a level that
        this processor does not have."""
        try:
            self._file = ctypes.CDLL(str(path))
        except OSError as why:
            raise EnvironmentProblem(
                "extension-broken",
                "the compiled library for cpu cannot be loaded",
                [str(why)],
                hint="deepinfer build --accelerator cpu --clean",
            ) from None
        best = self._file.di_level()
        self.level = LEVELS[best] if level is None else level
        if LEVELS.index(self.level) > best:
            raise UsageError(
                "level-unavailable",
                f"this processor does not have {self.level}",
                facts=[f"its levels: {', '.join(LEVELS[: best + 1])}"],
                hint="leave DEEPINFER_CPU_LEVEL out",
            )
        self._file.di_set_threads(torch.get_num_threads() if threads is None else threads)
        self._told: Told | None = None
        self._captured: dict[str, int | None] = {}

    def op(self, name: str, *types: type) -> Callable[..., None]:
        """`di_<name>_<level>` with arguments of these ctypes types; calling it raises
        `InternalError` on an error."""
        symbol = f"di_{name}_{self.level}"
        function = getattr(self._file, symbol)
        function.argtypes, function.restype = types, ctypes.c_int
        captured = getattr(self._file, f"{symbol}_captured")
        self._captured[symbol] = ctypes.cast(captured, PTR).value

        def call(*arguments: object) -> None:
            if status := function(*arguments):
                raise _failed(symbol, status)
            if self._told is not None:
                self._told(symbol, types, arguments)

        return call

    @contextmanager
    def capturing(self, told: Told) -> Iterator[None]:
        """While the block runs, every call is told: symbol, argument types, arguments."""
        self._told = told
        try:
            yield
        finally:
            self._told = None

    def launcher(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Runs the calls, one behind the other, as one call of the library."""
        pairs = [pair for _, types, args in calls for pair in zip(types, args, strict=True)]
        words = np.array([_word(*pair) for pair in pairs], dtype=np.uint64)
        table = np.empty((len(calls), 2), dtype=np.uint64)
        at = words.ctypes.data
        for row, (symbol, types, _) in zip(table, calls, strict=True):
            row[:] = self._captured[symbol], at
            at += words.itemsize * len(types)
        launch, first, count = self._file.di_launch, table.ctypes.data, len(calls)
        launch.argtypes, launch.restype = (PTR, LONG, PTR), ctypes.c_int
        done = ctypes.c_int64()
        where, held = ctypes.addressof(done), (words, table)

        def run() -> None:
            if status := launch(first, count, where):
                assert held, "the words outlive the calls"
                raise _failed(calls[done.value][0], status)

        return run


def _failed(symbol: str, status: int) -> InternalError:
    return InternalError("kernel-failed", f"{symbol}: {_ERRORS.get(status, status)}")


def _word(kind: type, value: Any) -> int:
    """An argument as eight bytes, its value in the low ones."""
    if kind is FLOAT or kind is DOUBLE:
        return int.from_bytes(struct.pack("<f" if kind is FLOAT else "<d", value), "little")
    return (value or 0) & (1 << 64) - 1
