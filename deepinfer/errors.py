"""The errors a user can see: what went wrong, the facts, a command that helps, an exit status.

Every room raises these for bad input, a missing device, a broken checkpoint or a size that does
not fit; the command line turns them into text or JSON and an exit status, callers catch them.
This file must not know torch, typer or rich, nor how an error is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

__all__ = [
    "CapacityError",
    "CheckpointError",
    "DeepinferError",
    "EnvironmentProblem",
    "ExitCode",
    "InternalError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit statuses of the `deepinfer` command; scripts may rely on them."""

    DONE = 0
    CHECK_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    CHECKPOINT = 4
    CAPACITY = 5
    INTERNAL = 70
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    TERMINATED = 143


class DeepinferError(Exception):
    """Base of every error that is shown to a user.

    `code` is a slug that scripts may test, `message` one sentence without a full stop, `facts`
    what was got, what was expected and where it came from (a line each), `hint` a command to
    paste or "".
    """

    exit_status: int = int(ExitCode.INTERNAL)

    def __init__(self, code: str, message: str, facts: Iterable[str] = (), hint: str = "") -> None:
        if isinstance(facts, str):
            facts = (facts,)
        self.code = code
        self.message = message
        self.facts = tuple(facts)
        self.hint = hint
        super().__init__(code, message, self.facts, hint)

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.facts))

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints under the key `error`."""
        return {
            "code": self.code,
            "message": self.message,
            "facts": list(self.facts),
            "hint": self.hint,
        }


class UsageError(DeepinferError, ValueError):
    """The request itself is wrong: an option, a variable, an argument (exit 2)."""

    exit_status = int(ExitCode.USAGE)


class EnvironmentProblem(DeepinferError, RuntimeError):
    """The machine cannot do it: device, driver, toolchain or extension missing (exit 3)."""

    exit_status = int(ExitCode.ENVIRONMENT)


class CheckpointError(DeepinferError, ValueError):
    """The model folder is there but unusable (exit 4)."""

    exit_status = int(ExitCode.CHECKPOINT)


class CapacityError(DeepinferError, RuntimeError):
    """It does not fit: memory, cache capacity or context length (exit 5)."""

    exit_status = int(ExitCode.CAPACITY)


class InternalError(DeepinferError, RuntimeError):
    """A bug of this toolkit (exit 70)."""

    exit_status = int(ExitCode.INTERNAL)
