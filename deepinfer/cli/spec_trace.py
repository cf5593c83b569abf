"""`deepinfer spec-trace`: which drafts stood, which fell, and what speculation saved.

Comes in: parsed options. Goes out: the text with its drafts marked, one row a step or sums; a JSON
document; a trace file and pictures. A trace file is shown on any machine without torch. It must not
know how a number is made: `speculative` and `report` do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli import sampling
from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, Quiet, with_settings
from deepinfer.cli.output import Output
from deepinfer.errors import ExitCode, UsageError
from deepinfer.settings import registry

if TYPE_CHECKING:
    from deepinfer.speculative.acceptance import Calibration
    from deepinfer.speculative.reschedule import Choice, Curve
    from deepinfer.speculative.trace import Trace

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "spec-trace"
EXAMPLES = """Examples:

- `deepinfer spec-trace -p "def fibonacci(n):" --check`
- `deepinfer spec-trace -f prompts.jsonl -o trace.jsonl --out report`
- `deepinfer spec-trace --from trace.jsonl --view steps`
"""
SETTINGS = (
    "model_dir", "max_model_len", "mtp", "mtp_varlen", "verify", "mtp_threshold", "max_rollback",
    "accelerator", "batch_invariant", "backend", "dtype", "max_num_seqs", "max_num_batched_tokens",
    "kv_cache_tokens", "page_tokens", "log_level", "config", "no_progress",
)  # fmt: skip
# What still means something where nothing runs.
_SHOWING = ("log_level", "config", "no_progress")
_VIEWS = ("inline", "steps", "summary")


def _text(panel: str, *names: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(
        *names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False, **more
    )


def _switch(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(
        name, metavar=SWITCH, help=help, rich_help_panel=panel, show_default=False, **more
    )


Prompt = _text("Input", "-p", "--prompt", metavar="TEXT", help="Text to continue.")
File = _text(
    "Input", "-f", "--file", metavar="FILE",
    help='The text of a file, or of each {"prompt": TEXT} line of a .jsonl.',
)  # fmt: skip
From = _text("Input", "--from", metavar="TRACE", help="Show a saved trace; nothing runs.")
Temperature = _text(
    "Sampling", "-t", "--temperature", metavar="X", min=0.0,
    help="0 = greedy. Default: 0, for --check.",
)  # fmt: skip
Check = _switch("Speculation", "--check", "Run again without drafts; exit 1 if ids differ.")
Calibrate = _switch(
    "Speculation", "--calibrate", "Fit confidence temperatures, put them beside the checkpoint."
)
CalibrateTo = _text(
    "Speculation", "--calibrate-to", metavar="FILE", help="Fit them, put them there."
)
ReplayCurve = _text(
    "Speculation", "--replay-curve", metavar="FILE",
    help="What other step times would choose, as saved or rows to ms.",
)  # fmt: skip
View = _text(
    "Output", "--view", metavar="WORD",
    help="inline, steps, summary. Default: inline; summary of several prompts.",
    autocompletion=lambda: list(_VIEWS),
)  # fmt: skip
TraceFile = _text("Output", "-o", "--output", metavar="TRACE", help="Write the trace.jsonl.")
Out = _text("Output", "--out", metavar="DIR", help="Write trace.jsonl, pictures and their CSV.")
Plot = _switch("Output", "--plot/--no-plot", "Pictures in --out. Default: on.", hidden=True)
DryRun = _switch(
    "Output", "--dry-run", "Check everything, print the plan, run nothing.", hidden=True
)


@with_settings(*SETTINGS)
def command(
    prompt_text: Annotated[str | None, Prompt] = None,
    prompt_file: Annotated[str | None, File] = None,
    from_file: Annotated[str | None, From] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: Annotated[float | None, Temperature] = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    check: Annotated[bool, Check] = False,
    calibrate: Annotated[bool, Calibrate] = False,
    calibrate_to: Annotated[str | None, CalibrateTo] = None,
    replay_curve: Annotated[str | None, ReplayCurve] = None,
    view: Annotated[str | None, View] = None,
    trace_file: Annotated[str | None, TraceFile] = None,
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
    """Show which drafts stood, which fell, and what speculation saved."""
    typed = {
        "-p": prompt_text, "-f": prompt_file, "-n": max_tokens, "-t": temperature,
        "--top-p": top_p, "--top-k": top_k, "--min-p": min_p, "--seed": seed, "--stop": stop,
        "--check": check or None,
    }  # fmt: skip
    _check_words(json_mode, quiet, view, plot, out, calibrate, calibrate_to)
    environ = registry.environment()
    output = Output(json_mode=json_mode, quiet=quiet, color=color, environ=environ)
    curve = _curve(replay_curve)
    for path in (trace_file, calibrate_to):
        _check_folder(path)
    if trace_file is not None:
        _check_target(Path(trace_file))
    calibration = Path(calibrate_to) if calibrate_to else None
    if from_file is not None:
        _check_alone(typed, chosen, calibrate and calibrate_to is None)
        from deepinfer.speculative import tracefile

        trace = tracefile.read(Path(from_file), output.warn)
        if calibration:
            _check_block(trace)
    else:
        params = sampling.sampling(
            stop, seed, max_tokens=max_tokens, temperature=temperature or 0.0, top_p=top_p,
            top_k=top_k, min_p=min_p,
        )  # fmt: skip
        from deepinfer.cli.spec_input import read_asked

        asked = read_asked(
            output, chosen, environ, params, prompt_text=prompt_text, prompt_file=prompt_file,
            check=check, calibrate=calibrate or calibrate_to is not None,
        )  # fmt: skip
        if dry_run:
            from deepinfer.cli.plan import print_plan

            if len(asked.prompts) > 1:
                output.note(f"the plan of the longest of {len(asked.prompts):,} prompts", "dim")
            return print_plan(output, asked.settings, max(asked.prompts, key=len), params)
        from deepinfer.cli.spec_record import traced
        from deepinfer.speculative.temperatures import FILE

        if calibrate:
            calibration = asked.folder / FILE
        _check_places(trace_file, out, calibration)
        try:
            trace = traced(output, asked, check)
        except KeyboardInterrupt:
            output.note("stopped: no trace was kept")
            raise
    return _deliver(
        output, trace, curve, view=view, trace_file=trace_file, folder=out, calibration=calibration,
        plot=plot is not False, coloured=color == "always" or (output.mode == "human"
        and output.color), keep=not dry_run,
    )  # fmt: skip


def _deliver(
    output: Output, trace: Trace, curve: Curve | None, *, view: str | None,
    trace_file: str | None, folder: str | None, calibration: Path | None, plot: bool,
    coloured: bool, keep: bool,
) -> int:  # fmt: skip
    """Write what is to be kept, and print also if that failed; the status of the command."""
    from deepinfer.speculative.acceptance import calibrate, summary
    from deepinfer.speculative.reschedule import reschedule, totals

    sums = summary(trace)
    choices = reschedule(trace.steps, curve) if curve else []
    if curve:
        sums["replay"] = totals(choices, curve)
    fitted = document = failed = None
    try:
        if keep:
            _write(output, trace, sums, trace_file, folder, plot)
        if calibration:
            fitted = calibrate(trace)
            document = _keep(output, fitted, calibration) if keep else None
    except UsageError as problem:
        failed = problem
    if output.mode == "json":
        found = _document(trace, sums, choices, document)
        output.error(failed, **found) if failed else output.document(found)
    else:
        from deepinfer.cli import spec_show

        spec_show.view(output, trace, sums, choices, view, coloured)
        if fitted:
            spec_show.calibration(output, fitted)
        if sums["lossless"] is False:
            spec_show.difference(output, trace)
        if failed:
            output.error(failed)
    if failed:
        return failed.exit_status
    return int(ExitCode.DONE if sums["lossless"] is not False else ExitCode.CHECK_FAILED)


def _write(
    output: Output, trace: Trace, sums: dict[str, Any], trace_file: str | None,
    folder: str | None, plot: bool,
) -> None:  # fmt: skip
    from deepinfer.speculative import tracefile

    flag, place = "-o", trace_file
    try:
        if trace_file is not None:
            tracefile.write(trace, Path(trace_file))
        if folder is None:
            return
        flag, place, target = "--out", folder, Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tracefile.write(trace, target / "trace.jsonl")
        files = [target / "trace.jsonl"]
        if plot:
            from deepinfer.report import trace_plots

            files += trace_plots.write(trace, sums, target)
    except OSError as problem:
        raise _not_written(place or "", problem, flag) from None
    output.say(f"wrote {', '.join(file.name for file in files)} in {folder}", "dim")


def _keep(output: Output, fitted: Calibration, path: Path) -> dict[str, Any]:
    from deepinfer.cli.spec_record import write_calibration

    try:
        document = write_calibration(fitted, path)
    except OSError as problem:
        raise _not_written(str(path), problem, "--calibrate") from None
    output.say(f"wrote {path}", "dim")
    return document


def _document(
    trace: Trace, sums: dict[str, Any], choices: list[Choice], calibration: dict[str, Any] | None
) -> dict[str, Any]:
    """The trace's header, then the sums and the steps."""
    from deepinfer.speculative.tracefile import step_json

    other = {choice.step: choice for choice in choices}
    steps = [step_json(line) for line in trace.lines]
    for step in steps:
        choice = other.get(step["step"])
        if choice:
            share = choice.splits.get(step["seq"], 0)
            step["replayed"] = {"budget": choice.budget, "split": share}
    document = {
        **trace.header, "schema": "deepinfer.spec-trace/1", "summary": sums, "steps": steps,
    }  # fmt: skip
    return document | ({"calibration": calibration} if calibration else {})


def _curve(word: str | None) -> Curve | None:
    if word is None:
        return None
    from deepinfer.speculative.reschedule import load

    return load(Path(word))


def _check_words(
    json_mode: bool, quiet: bool, view: str | None, plot: bool | None, out: str | None,
    calibrate: bool, calibrate_to: str | None,
) -> None:  # fmt: skip
    if json_mode and quiet:
        raise UsageError("bad-usage", "--json cannot be used with -q", hint="leave one out")
    if view is not None and view not in _VIEWS:
        raise UsageError(
            "bad-option", f'--view "{view}" is not a view', [f"accepted: {', '.join(_VIEWS)}"],
            "--view summary",
        )  # fmt: skip
    if plot is not None and out is None:
        flag = "--plot" if plot else "--no-plot"
        raise UsageError("bad-usage", f"{flag} needs --out", hint=f"{flag} --out DIR")
    if calibrate and calibrate_to is not None:
        raise UsageError(
            "bad-usage", "--calibrate cannot be used with --calibrate-to",
            ["they say two places for one file"], "leave one out",
        )  # fmt: skip


def _check_alone(typed: dict[str, Any], chosen: Chosen, calibrate: bool) -> None:
    """With --from nothing runs: options of a run would have no effect."""
    flags = [flag for flag, value in typed.items() if value is not None]
    for name in chosen:
        setting = registry.find(name)
        if name not in _SHOWING and setting is not None:
            flags.append(setting.flag or name)
    if flags:
        raise UsageError(
            "bad-usage", f"--from cannot be used with {flags[0]}",
            ["a saved trace is shown, nothing runs"], "leave one out",
        )  # fmt: skip
    if calibrate:
        raise UsageError(
            "calibration-place", "--calibrate needs a checkpoint to write beside",
            ["--from has none"], "--calibrate-to FILE",
        )  # fmt: skip


def _check_block(trace: Trace) -> None:
    length, block = trace.header["speculation"]["mtp"], trace.header["model"].get("block")
    if block and length < block:
        raise UsageError(
            "calibration-needs-block", f"--calibrate-to needs drafts of {block}, not {length}",
            ["draft length of the trace"], f"trace again with --mtp {block}",
        )  # fmt: skip


def _check_folder(file: str | None) -> None:
    if file is not None and not Path(file).parent.is_dir():
        raise UsageError(
            "out-not-written", f"{file} cannot be written", ["its folder does not exist"],
            f"mkdir -p {Path(file).parent}",
        )  # fmt: skip


def _check_places(trace_file: str | None, folder: str | None, calibration: Path | None) -> None:
    """Can be written what a long run is to leave? Makes the folder."""
    folder_file = Path(folder, "trace.jsonl") if folder is not None else None
    for flag, place in (("-o", trace_file), ("--out", folder_file), ("--calibrate", calibration)):
        if place is None:
            continue
        part = Path(f"{place}.part")
        try:
            if flag == "--out":
                part.parent.mkdir(parents=True, exist_ok=True)
            part.open("wb").close()
            part.unlink()
        except OSError as problem:
            raise _not_written(str(place), problem, flag) from None


def _check_target(path: Path) -> None:
    """Only a trace is written over."""
    from deepinfer.speculative.tracefile import is_trace

    if path.is_dir() or (path.exists() and path.stat().st_size and not is_trace(path)):
        raise UsageError(
            "output-exists", f"{path} is there and is not a trace", ["from -o"],
            "-o trace.jsonl",
        )  # fmt: skip


def _not_written(place: str, problem: OSError, flag: str) -> UsageError:
    return UsageError(
        "out-not-written", f"{place} cannot be written",
        [problem.strerror or str(problem), f"from {flag}"], f"{flag} another place",
    )  # fmt: skip
