"""`deepinfer replay-inspect`: what bounded replay computes, reads and skips, and what that saves.

Comes in: parsed options. Goes out: a strip map and tables, one JSON document, or one number per
keep; with --out also files. The plan needs a configuration, neither torch nor a device; --measure
and --compare-full run the model. It must not know how a number is made: `report/replay.py` does.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, Quiet, with_settings
from deepinfer.cli.output import Output
from deepinfer.cli.replay_input import read_asked
from deepinfer.errors import UsageError
from deepinfer.settings import registry

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "replay-inspect"
EXAMPLES = """Examples:

- `deepinfer replay-inspect --config-json v41-flash --prompt-len 64k --cached 56k`
- `deepinfer replay-inspect -m path/to/checkpoint --prompt-len 8k --swa-keep 140,full --json`
- `deepinfer replay-inspect -f prompt.txt --compare-full --swa-keep 140,256 --out report`
"""
SETTINGS = (
    "model_dir", "mtp", "replay_mode", "max_rollback", "accelerator", "backend", "dtype",
    "page_tokens", "encoder_replay", "log_level", "config", "no_progress",
)  # fmt: skip
_KEEP = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"


def _text(panel: str, *names: str, metavar: str, help: str) -> Any:
    return typer.Option(
        *names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False
    )


def _switch(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(
        name, metavar=SWITCH, help=help, rich_help_panel=panel, show_default=False, **more
    )


PromptLen = _text("Input", "--prompt-len", metavar="N", help="Tokens of the prompt: 1000, 64k, 1m.")
File = _text("Input", "-f", "--file", metavar="FILE", help="Count a text's tokens; - is stdin.")
ConfigJson = _text(
    "Model",
    "--config-json",
    metavar="FILE",
    help="Only a config.json; v41-flash is the published one, inside this package.",
)
Cached = _text(
    "Replay",
    "--cached",
    metavar="N",
    help="Tokens at the front that a prefix cache holds. Default: 0.",
)
Keeps = _text(
    "Replay",
    "--swa-keep",
    metavar="LIST",
    help=f"Keeps to show, such as 140,256,full; the first is the chosen one. Default: 140. {_KEEP}",
)
Layers = _text("Output", "--layers", metavar="A-B", help="Show these layers only, both included.")
Tokens = _text("Output", "--tokens", metavar="A-B", help="Show these tokens only, both included.")
Out = _text("Output", "--out", metavar="DIR", help="Write replay.json, pictures and their CSV.")
Measure = _switch("Replay", "--measure", "Run the prompt and check that the plan is what happened.")
Compare = _switch("Replay", "--compare-full", "Run every keep and the uncut prompt: the drift.")
Plot = _switch("Output", "--plot/--no-plot", "Pictures in --out. Default: on.", hidden=True)
DryRun = _switch("Output", "--dry-run", "Check everything, print the plan, run and write nothing.")
# fmt: skip


@with_settings(*SETTINGS)
def command(
    prompt_len: Annotated[str | None, PromptLen] = None,
    prompt_file: Annotated[str | None, File] = None,
    config_json: Annotated[str | None, ConfigJson] = None,
    cached: Annotated[str | None, Cached] = None,
    swa_keep: Annotated[str | None, Keeps] = None,
    layers: Annotated[str | None, Layers] = None,
    tokens: Annotated[str | None, Tokens] = None,
    measure: Annotated[bool, Measure] = False,
    compare_full: Annotated[bool, Compare] = False,
    out: Annotated[str | None, Out] = None,
    plot: Annotated[bool | None, Plot] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    dry_run: Annotated[bool, DryRun] = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    chosen: Chosen,
) -> int:
    """Show what bounded replay computes, reads and skips, and what it saves."""
    if json_mode and quiet:
        raise UsageError("bad-usage", "--json cannot be used with -q", hint="leave one out")
    if plot is not None and out is None:
        flag = "--plot" if plot else "--no-plot"
        raise UsageError("bad-usage", f"{flag} needs --out", hint=f"{flag} --out DIR")
    environ = registry.environment()
    output = Output(json_mode=json_mode, quiet=quiet, color=color, environ=environ)
    asked = read_asked(
        output, chosen, environ, keeps=swa_keep, config_json=config_json, prompt_len=prompt_len,
        prompt_file=prompt_file, cached=cached, layers=layers, tokens=tokens,
        runs=measure or compare_full,
    )  # fmt: skip
    from deepinfer.cli.replay_record import body

    document = body(output, asked, measure and not dry_run, compare_full and not dry_run)
    if json_mode or out is not None:
        # Looking at the machine takes longer than the plan: only for what is kept.
        from deepinfer.device.detect import find
        from deepinfer.report import records

        here = find(query=(measure or compare_full) and not dry_run)
        settings = asked.plans[0][0].as_json()
        document = {
            **records.document("deepinfer.replay/1", sys.argv[1:], settings, here), **document
        }  # fmt: skip
    if out is not None and not dry_run:
        _write(output, document, Path(out), plot is not False)
    if json_mode:
        output.document(document)
    else:
        _print(output, document)
    return 0


def _write(output: Output, document: dict[str, Any], folder: Path, plot: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part, target = folder / "replay.json.part", folder / "replay.json"
        part.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(target)
        files = [target]
        if plot:
            from deepinfer.report import plots

            files += plots.write(document, folder)
    except OSError as problem:
        raise UsageError(
            "out-not-written", f"{folder} cannot be written",
            [problem.strerror or str(problem), "from --out"], "--out report",
        ) from None  # fmt: skip
    output.say(f"wrote {', '.join(file.name for file in files)} in {folder}", "dim")


def _print(output: Output, document: dict[str, Any]) -> None:
    """The strip of each keep, then the tables; -q: the saved fraction of FLOPs of each keep."""
    from deepinfer.report import heatmap, tables
    from deepinfer.report.replay import views

    if output.mode == "quiet":
        for view in views(document):
            output.data(f"{view['totals']['flops_saved']:.4f}")
        return
    plain = not heatmap.drawable(getattr(output.out, "encoding", None) or "utf-8")
    width = max(shutil.get_terminal_size().columns, 80) if output.mode == "human" else 80
    for view in views(document):
        strip = heatmap.strip(document, view, width, plain)
        lines = [tables.title(document, view), strip, *tables.facts(document, view), ""]
        output.data(tables.ascii_only("\n".join(lines)) if plain else "\n".join(lines))
    output.table(*tables.flops(document))
    if document.get("drift"):
        output.data("")
        output.table(*tables.drift(document))
