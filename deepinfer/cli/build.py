"""`deepinfer build`: what toolchain is here for an accelerator; compile what there is for it.

Comes in: parsed options. Goes out: a probe table, a line for each step and the back ends of every
operation, or a JSON document; exit 3 when the accelerator was asked for by name and its toolchain
is incomplete, or when a file does not compile. The cpu alone has sources in this version. How to
compile is `toolchain`'s business.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, with_settings
from deepinfer.cli.output import Output
from deepinfer.errors import DeepinferError
from deepinfer.settings import registry, resolve

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "build"
EXAMPLES = """Examples:

- `deepinfer build`
- `deepinfer build --accelerator cpu --only rmsnorm --arch avx2`
- `deepinfer build --accelerator ascend --dry-run`
"""


def _input(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Input", show_default=False, **more)


@with_settings("accelerator", "build_dir", "log_level", "config", "no_progress")
def command(
    only: Annotated[
        list[str] | None,
        _input("--only", metavar="OP", help="Compile this one and link nothing; repeatable."),
    ] = None,
    arch: Annotated[
        str | None,
        _input("--arch", metavar="LIST", help="Levels to compile, with commas. Default: all."),
    ] = None,
    jobs: Annotated[
        int | None,
        _input("-j", "--jobs", metavar="N", min=1, help="Compilers at a time. Default: a core."),
    ] = None,
    clean: Annotated[
        bool, _input("--clean", metavar=SWITCH, help="Forget what was built before.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar=SWITCH,
            rich_help_panel="Output",
            help="Print the commands, run none.",
        ),
    ] = False,
    json_mode: Json = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    chosen: Chosen,
) -> int:
    """Compile the kernels of an accelerator, and show what serves it."""
    from deepinfer.cli.compiling import Compiling, operations
    from deepinfer.device.detect import TORCH_DEVICE, find
    from deepinfer.report.records import document
    from deepinfer.toolchain.probe import probe, problem

    environ = registry.environment()
    output = Output(json_mode=json_mode, color=color, environ=environ)
    settings = resolve(chosen, environ, source="flag")
    output.level = settings.log_level
    for line in settings.warnings:
        output.warn(line)
    found = find()
    requested = settings.accelerator
    accelerator = found.accelerators[0] if requested == "auto" else requested
    rows = probe(accelerator, environ, found)
    # Nobody asked for this accelerator by name: what is missing is a warning in the table.
    error: DeepinferError | None = None if requested == "auto" else problem(accelerator, rows)
    if output.mode != "json":
        output.table(
            ("probe", "found", "needed", "verdict", "path"),
            [(row.name, row.found, row.needed, row.verdict, row.path) for row in rows],
            f"Toolchain for {accelerator}",
        )
    compiling = Compiling(output, settings)
    able = any(row.name == "C++ compiler" and row.verdict == "ok" for row in rows)
    if error is None and able and (accelerator == "cpu" or requested == "auto"):
        try:
            compiling.prepare(rows, found, only or [], arch)
            if dry_run:
                compiling.show()
            else:
                compiling.run(environ, jobs or found.cpu.cores, clean)
        except DeepinferError as raised:
            error = raised
    ops: dict[str, list[str]] = {}
    if error is None:
        ops = operations(TORCH_DEVICE[accelerator], compiling.built())
    if output.mode == "json":
        body: dict[str, Any] = {
            **document("deepinfer.build/1", sys.argv[1:], settings.as_json(), found),
            "accelerator": accelerator,
            "probes": [row.as_json() for row in rows],
            "steps": compiling.steps,
            "artifacts": compiling.artifacts(),
            "ops": ops,
        }
        if error is None:
            output.document(body)
        else:
            output.error(error, **body)
    elif error is not None:
        output.error(error)
    else:
        for row in rows:
            if row.verdict != "ok" and row.hint:
                output.warn(f"{row.name}: found {row.found}; {row.hint}")
        if not dry_run:
            names = [(op, ", ".join(backends)) for op, backends in ops.items()]
            output.table(("operation", "back ends"), names, "Operations")
        compiling.summary()
        if accelerator != "cpu":
            output.say(
                f"{accelerator}: no compiled kernels in this version; "
                "the torch back end serves this accelerator"
            )
    return 0 if error is None else error.exit_status
