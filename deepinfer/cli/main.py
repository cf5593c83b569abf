"""Assemble the `deepinfer` command and turn whatever happens into an exit code.

Comes in: the argument list. Goes out: an exit status as `deepinfer.errors.ExitCode` lists them.
Nothing heavy is imported at the top: help, version, completion and usage errors never load torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import typer

import deepinfer
from deepinfer.cli import bench, build, doctor, replay_inspect, run, spec_trace
from deepinfer.cli.options import EXIT_CODES, SWITCH, Help
from deepinfer.cli.output import Output
from deepinfer.errors import (
    CapacityError,
    DeepinferError,
    EnvironmentProblem,
    ExitCode,
    InternalError,
    UsageError,
)
from deepinfer.settings import registry
from deepinfer.settings.kinds import BadValue, boolean

__all__ = ["app", "main"]

_LIBRARIES = (
    "torch", "numpy", "safetensors", "tokenizers", "rich", "pandas", "matplotlib",
    "deepseek_recipe", "llguidance",
)  # fmt: skip


class _Terminated(BaseException):
    """SIGTERM arrived; unwinds like Ctrl-C."""


class _PipeClosed(Exception):
    """The reader of stdout went away."""


def _guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a closed pipe from being turned into exit 1 before `main` sees it."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise _PipeClosed from None

    return wrapper


app = typer.Typer(
    name="deepinfer",
    help="Run DeepSeek-V4.1 checkpoints offline.",
    # The default mode reads square brackets in help texts as markup.
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
)
for _module in (run, bench, replay_inspect, spec_trace, build, doctor):
    app.command(_module.NAME, epilog=_module.EXAMPLES)(_guarded(_module.command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deepinfer {deepinfer.__version__}")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar=SWITCH, rich_help_panel="Output",
            help="Show the version.",
        ),
    ] = False,
    help_page: Help = False,
) -> None:  # fmt: skip
    """Run DeepSeek-V4.1 checkpoints offline."""


def _assembled() -> Any:
    """The command tree, with defaults for Typer's own completion switches.

    Typer converts an option without a default through a validation library, and importing that
    takes longer than printing a help page.
    """
    command = typer.main.get_command(app)
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            parameter.default = False
            parameter.metavar = SWITCH
            parameter.rich_help_panel = "Output"  # type: ignore[attr-defined]
    return command


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status; never raises.

    Without `argv` it is this process's own: where grammars are still compiled then, the process
    ends here, since Python's clean-up under a worker in native code would end it by SIGSEGV.
    """
    status = _status(sys.argv[1:] if argv is None else list(argv))
    compiler = sys.modules.get("deepinfer.structured.compiler")
    if argv is None and compiler is not None and compiler.at_work():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


def _status(args: list[str]) -> int:
    registry.rest_idle_threads()
    environ = registry.environment()
    output = Output(json_mode="--json" in args, environ=environ)
    signals = _install_signals()
    try:
        status = _assembled()(args or ["--help"], prog_name="deepinfer", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (_PipeClosed, BrokenPipeError):
        return _pipe_closed()
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except _Terminated:
        return int(ExitCode.TERMINATED)
    except SystemExit as leaving:
        # Typer and Rich leave with 1 when the reader of their help text went away.
        return _pipe_closed() if leaving.code == 1 else int(leaving.code or 0)
    except Exception as problem:
        error = _as_error(problem, args)
        if _debugging(environ) or isinstance(error, InternalError):
            traceback.print_exc()
        try:
            output.error(error)
            sys.stdout.flush()
        except BrokenPipeError:
            return _pipe_closed()
        return error.exit_status
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)


def _debugging(environ: dict[str, str]) -> bool:
    """DEEPINFER_DEBUG before settings are resolved; a malformed value is reported by `resolve`."""
    try:
        return bool(boolean.parse(environ.get("DEEPINFER_DEBUG", "").strip() or "0"))
    except BadValue:
        return False


def _as_error(problem: Exception, args: list[str]) -> DeepinferError:
    if isinstance(problem, DeepinferError):
        return problem
    if hasattr(problem, "format_message"):
        command = " ".join(["deepinfer", *args[:1]]) if args and args[0][:1] != "-" else "deepinfer"
        context = getattr(problem, "ctx", None)
        command = getattr(context, "command_path", None) or command
        return UsageError(
            "bad-usage", problem.format_message().rstrip("."), hint=f"{command} --help"
        )
    if isinstance(problem, ModuleNotFoundError) and problem.name in _LIBRARIES:
        return EnvironmentProblem(
            "dependency-missing",
            f"{problem.name} is not installed",
            [f"Python {sys.version.split()[0]}"],
            "./build.sh, or pip install -e . in this checkout",
        )
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return CapacityError(
            "out-of-memory",
            "the device or host is out of memory",
            str(problem).splitlines()[:1],
            "--max-num-seqs 8 --kv-cache-tokens 8192, or smaller",
        )
    return InternalError(
        "internal-error",
        f"{type(problem).__name__}: {problem}",
        ["this is a bug of deepinfer"],
        "deepinfer doctor --bundle report.txt, and open an issue with it",
    )


def _install_signals() -> dict[signal.Signals, Any]:
    """Handlers for Ctrl-C and SIGTERM; the result are those that stood before."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for a step to finish.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    wanted = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    try:
        return {number: signal.signal(number, handler) for number, handler in wanted.items()}
    except ValueError:
        # Not the main thread: whoever embeds the command line keeps its own handlers.
        return {}


def _pipe_closed() -> int:
    # Python flushes stdout once more at exit; give it somewhere to write.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.PIPE_CLOSED)


if __name__ == "__main__":
    sys.exit(main())
