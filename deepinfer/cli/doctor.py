"""`deepinfer doctor`: is this machine able to run, and if not, which command helps.

Comes in: parsed options. Goes out: one row per check, settings with their sources, operations with
their back ends, the verdict on batch invariance, or a bundle for an issue. Checks live in
`cli/checks.py` and `cli/doctor_invariance.py`; here they are printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, Quiet, with_settings
from deepinfer.cli.output import Output
from deepinfer.errors import DeepinferError, ExitCode, UsageError
from deepinfer.settings import Settings, registry, resolve

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "doctor"
EXAMPLES = """Examples:

- `deepinfer doctor`
- `deepinfer doctor -m path/to/checkpoint --json`
- `deepinfer doctor --check-invariance`
"""
_FAILURE = {"environment": ExitCode.ENVIRONMENT, "checkpoint": ExitCode.CHECKPOINT}


@with_settings("model_dir", "accelerator", "build_dir", "cpu_level", "log_level", "config")
def command(
    show_settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            metavar=SWITCH,
            rich_help_panel="Output",
            help="Every setting and its source.",
        ),
    ] = False,
    show_ops: Annotated[
        bool,
        typer.Option(
            "--ops",
            metavar=SWITCH,
            rich_help_panel="Output",
            help="Every operation and its back end.",
        ),
    ] = False,
    check_invariance: Annotated[
        bool,
        typer.Option(
            "--check-invariance",
            metavar=SWITCH,
            rich_help_panel="Device",
            help="Run requests in many compositions and compare every bit; a minute or two.",
        ),
    ] = False,
    bundle: Annotated[
        str | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            rich_help_panel="Output",
            help="Write a report for an issue, without paths and secrets.",
        ),
    ] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    chosen: Chosen,
) -> int:
    """Check this machine, the installation and a checkpoint."""
    from deepinfer.cli import checks, doctor_invariance
    from deepinfer.device.detect import find
    from deepinfer.report.records import document

    if json_mode and quiet:
        raise UsageError("bad-usage", "--json cannot be used with -q", hint="leave one out")
    environ = registry.environment()
    output = Output(json_mode=json_mode, quiet=quiet, color=color, environ=environ)
    settings = resolve(chosen, environ, source="flag")
    output.level = settings.log_level
    rows = checks.run_all(settings, environ)
    head = document("deepinfer.doctor/1", sys.argv[1:], settings.as_json(), find())
    report: dict[str, Any] = {**head, "checks": [row.as_json() for row in rows]}
    if show_ops or json_mode or bundle:
        report["ops"] = operations(settings)
    failed = next((row for row in rows if row.verdict == "fail"), None)
    proof = None
    if check_invariance and failed is None:
        proof, report["settings"] = doctor_invariance.check(output, chosen, environ)
        report |= proof.as_json()
    if bundle is not None:
        checks.write_bundle(Path(bundle), report)
        output.say(f"wrote {bundle}; read it before you share it")
    if json_mode:
        output.document(report)
    elif quiet:
        output.data(checks.verdict(rows) if proof is None or proof.invariant else "fail")
    else:
        _print(output, settings, rows, report, show_settings, show_ops, proof is not None)
        if proof is not None:
            doctor_invariance.show(output, proof)
    if failed is not None:
        return int(_FAILURE[failed.area])
    return int(ExitCode.DONE if proof is None or proof.invariant else ExitCode.CHECK_FAILED)


def _print(
    output: Output, settings: Settings, rows: list[Any], report: dict[str, Any],
    show_settings: bool, show_ops: bool, asked_more: bool,
) -> None:  # fmt: skip
    if show_settings:
        output.table(
            ("setting", "value", "source", "from"),
            [
                (key, _shown(entry["value"]), entry["source"], entry["origin"])
                for key, entry in report["settings"].items()
            ],
            "Settings",
        )
        for line in settings.warnings:
            output.warn(line)
    if show_ops:
        output.table(
            ("operation", "back end", "available", "fixed order", "why"),
            [
                (o["op"], o["backend"], ", ".join(o["available"]),
                 "yes" if o["fixed_order"] else "no", o["why"])
                for o in report["ops"]
            ],
            "Operations",
        )  # fmt: skip
    if not (show_settings or show_ops or asked_more):
        output.table(
            ("check", "verdict", "found", "help"),
            [(row.name, row.verdict, row.found, row.hint) for row in rows],
            "Checks",
        )
    else:
        for row in rows:
            if row.verdict == "fail":
                output.warn(f"{row.name}: {row.found}; {row.hint}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == {} else str(value)


def operations(settings: Settings) -> list[dict[str, Any]]:
    """Operation, chosen back end, those available, whether it keeps a row's bits in any company,
    why; empty where torch is missing."""
    try:
        from deepinfer.device.detect import TORCH_DEVICE, pick
        from deepinfer.ops.registry import explain
        from deepinfer.toolchain import built

        device_type = TORCH_DEVICE[pick(settings.accelerator, settings.origin("accelerator"))]
        overrides = [f"{op}={name}" for op, name in settings.backend.items()]
        here = ("cpu",) if built.find(settings.build_dir).path else ()
        choices = explain(device_type, overrides, here)
    except (ImportError, DeepinferError, OSError):
        return []
    return [
        {
            "op": c.op,
            "backend": c.backend,
            "available": list(c.available),
            "fixed_order": c.fixed_order,
            "why": c.why,
        }
        for c in choices
    ]
