"""`deepinfer build`: what toolchain is here for an accelerator, and what serves it.

Comes in: parsed options. Goes out: a probe table or a JSON document; exit 3 when the accelerator
was asked for by name and its toolchain is incomplete. This version ships no compiled kernel, so
there is nothing to compile and the command says so; it must not know settings of the engine.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, with_settings
from deepinfer.cli.output import Output
from deepinfer.settings import registry, resolve

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "build"
EXAMPLES = """Examples:

- `deepinfer build`
- `deepinfer build --accelerator ascend --dry-run`
- `deepinfer build --accelerator nvidia --json`
"""


@with_settings("accelerator", "log_level", "config")
def command(
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar=SWITCH,
            rich_help_panel="Output",
            help="Print what would be compiled (nothing).",
        ),
    ] = False,
    json_mode: Json = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    chosen: Chosen,
) -> int:
    """Probe the toolchain of an accelerator and show what serves it."""
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
    error = None if requested == "auto" else problem(accelerator, rows)
    head = document("deepinfer.build/1", sys.argv[1:], settings.as_json(), found)
    body: dict[str, Any] = {
        "accelerator": accelerator,
        "probes": [row.as_json() for row in rows],
        "steps": [],
        "artifacts": [],
    }
    if output.mode == "json":
        body["ops"] = {} if error else operations(TORCH_DEVICE[accelerator])
    if output.mode != "json":
        output.table(
            ("probe", "found", "needed", "verdict", "path"),
            [(row.name, row.found, row.needed, row.verdict, row.path) for row in rows],
            f"Toolchain for {accelerator}",
        )
    if error is not None:
        output.error(error, **head, **body)
        return error.exit_status
    if output.mode == "json":
        output.document({**head, **body})
        return 0
    for row in rows:
        if row.verdict != "ok" and row.hint:
            output.warn(f"{row.name}: found {row.found}; {row.hint}")
    output.say(
        f"{accelerator}: no compiled kernels in this version; "
        "the torch back end serves this accelerator"
    )
    return 0


def operations(device_type: str) -> dict[str, list[str]]:
    """Back ends of every operation on a torch device type; empty where torch is missing."""
    try:
        from deepinfer.ops.registry import explain

        choices: list[Any] = explain(device_type)
    except ImportError:
        return {}
    return {choice.op: list(choice.available) for choice in choices}
