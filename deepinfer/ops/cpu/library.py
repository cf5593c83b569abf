"""The compiled library: one C function per op and level, found by name.

Comes in: the file, and the level wanted (None: the best of this processor). Goes out: calls. Must
not know what any op means, nor where libraries are kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from deepinfer.errors import EnvironmentProblem, InternalError, UsageError

LEVELS = ("portable", "avx2", "avx512", "avx512bf16")
TYPES = {torch.bfloat16: 0, torch.float32: 1}

# Argument types: pointer, int, int64, float, double.
PTR, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
FLOAT, DOUBLE = ctypes.c_float, ctypes.c_double
_ERRORS = {1: "out of memory", 2: "an argument is not supported"}


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

    def op(self, name: str, *arguments: type) -> Callable[..., None]:
        """`di_<name>_<level>` with these ctypes arguments; calling it raises `InternalError` on
        an error."""
        function = getattr(self._file, f"di_{name}_{self.level}")
        function.argtypes, function.restype = arguments, ctypes.c_int
        function.errcheck = _check
        return function


def _check(status: int, function: object, arguments: object) -> None:
    if status:
        name = getattr(function, "__name__", "?")
        raise InternalError("kernel-failed", f"{name}: {_ERRORS.get(status, status)}")
