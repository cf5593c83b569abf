"""`deepinfer bench`: sweeps over settings and workloads, and two of them beside each other.

Comes in: parsed options. Goes out: a table, a document or lines on stdout; a folder of results. It
must not know how a row is measured or shown: `bench` and `report` do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, Quiet, with_settings
from deepinfer.cli.output import Output, counted
from deepinfer.errors import ExitCode, UsageError
from deepinfer.settings import registry, resolve

if TYPE_CHECKING:
    from deepinfer.bench.files import Folder
    from deepinfer.cli.bench_input import Asked
    from deepinfer.report.bench_rows import Saved

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "bench"
EXAMPLES = """Examples:

- `deepinfer bench --swa-keep 140 --mtp 5`
- `deepinfer bench --swa-keep 140,256,full --mtp 0,1,3,5 --batch-size 1,8 --out sweep`
- `deepinfer bench --out sweep --swa-keep 140,256,full --mtp 0,1,3,5 --batch-size 1,8 --resume`
- `deepinfer bench compare sweep-a sweep-b`
"""
SETTINGS = (
    "model_dir", "max_rollback", "mtp_threshold", "max_num_batched_tokens", "prefill_chunk",
    "page_tokens", "encoder_replay", "build_dir", "cpu_level", "threads", "log_level", "config",
    "no_progress",
)  # fmt: skip
_KINDS = ("e2e", "ops", "all")
_OF_COMPARE = ("what", "json_mode", "quiet", "color", "log_level", "no_progress", "verbose",
               "config", "set_pairs")  # fmt: skip
_FORMATS = ("table", "md", "csv", "json", "jsonl")


def _text(panel: str, *names: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(
        *names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False, **more
    )


def _switch(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(
        name, metavar=SWITCH, help=help, rich_help_panel=panel, show_default=False, **more
    )


def _axis(panel: str, name: str, help: str, hidden: bool = False) -> Any:
    flag = "--" + name.replace("_", "-")
    return typer.Option(
        flag, metavar="LIST", help=help, rich_help_panel=panel, show_default=False, hidden=hidden
    )


What = typer.Argument(
    metavar="WHAT", rich_help_panel="Input", show_default=False,
    help="e2e (requests), ops, all; or compare A B, two folders of results. Default: e2e.",
)  # fmt: skip
PromptLen = _axis("Input", "prompt_len", "Tokens of each prompt: 512, 1k-64k*2. Default: 512.")
GenLen = _axis("Input", "gen_len", "Tokens of each answer. Default: 32.")
BatchSize = _axis("Input", "batch_size", "Requests at once: 1,8. Default: 1.")
Cached = _axis(
    "Input", "cached", "Prompt tokens known already: 0,75%. Default: 0; 75% of a session."
)
Workload = _axis("Input", "workload", "code, arithmetic, retrieval, chat, agent. Default: code.")
Prompts = _text(
    "Input", "--prompts", metavar="FILE", hidden=True,
    help='Prompts of your own, a {"prompt": TEXT} a line.',
)  # fmt: skip
SweepFile = _text("Input", "--sweep", metavar="FILE", help="Axes of a TOML file; options win.")
Synthetic = _text(
    "Model", "--synthetic", metavar="SIZE",
    help="Random weights: flash-slice, flash-slice:E+D (real widths), tiny.",
)  # fmt: skip
AcceptedLength = _text(
    "Speculation", "--accepted-length", metavar="X", min=1.0, hidden=True,
    help="Tokens a step by a seeded draw, whatever is drafted; every row says it.",
)  # fmt: skip
Temperature = _text(
    "Sampling", "-t", "--temperature", metavar="X", min=0.0, help="Default: 0, greedy.", hidden=True
)
Mtp = _axis("Speculation", "mtp", "Longest drafts: 0,1,3,5. Default: the checkpoint's.")
MtpVarlen = _axis("Speculation", "mtp_varlen", "on,off. Default: off.", True)
Verify = _axis("Speculation", "verify", "rejection,coupled.", True)
SwaKeep = _axis("Replay", "swa_keep", "Last prompt tokens kept: 140,256,full. Default: 140.")
ReplayMode = _axis("Replay", "replay_mode", "compact,mask,off. Default: compact.", True)
Accelerator = _axis("Device", "accelerator", "auto,nvidia,ascend,cpu. Default: auto.")
BatchInvariant = _axis("Device", "batch_invariant", "on,off. Default: off.", True)
Overlap = _axis("Device", "overlap", "on,off. Default: on; off on a cpu.", True)
Backend = _axis("Device", "backend", "auto,torch, or OP=NAME+OP=NAME. Default: auto.", True)
Dtype = _axis("Device", "dtype", "bf16,fp32. Default: the checkpoint's.", True)
Repeats = _text("Output", "-r", "--repeats", metavar="N", min=1, help="Of each row. Default: 5.")
Warmup = _text(
    "Output", "--warmup", metavar="N", min=0, help="Runs before them. Default: 1.", hidden=True
)
Format = _text(
    "Output", "--format", metavar="WORD", help="table, md, csv, json, jsonl. Default: table.",
    autocompletion=lambda: list(_FORMATS),
)  # fmt: skip
Out = _text("Output", "--out", metavar="DIR", help="Folder of results. Default: bench-DATE-NAME.")
Resume = _switch("Output", "--resume", "Go on with the sweep that --out holds.")
KeepGoing = _switch("Output", "--keep-going", "A row that fails is a row with its error.")
Report = _switch("Output", "--report", "Write report.md with the pictures.")
Plot = _switch(
    "Output", "--plot/--no-plot", "Pictures. Default: on if there are several rows.", hidden=True
)
Check = _switch(
    "Output", "--check", "Exit 1 unless every bar of the sweep file is met.", hidden=True
)
Baseline = _text(
    "Output", "--baseline", metavar="PLACE", hidden=True,
    help="Results to hold the rows against; exit 1 if they lost more.",
)  # fmt: skip
MaxRegression = _text(
    "Output", "--max-regression", metavar="PERCENT", hidden=True, help="Default: 10%."
)
DryRun = _switch("Output", "--dry-run", "Print the rows and about how long they take.")


@with_settings(*SETTINGS)
def command(
    what: Annotated[list[str] | None, What] = None,
    prompt_len: Annotated[str | None, PromptLen] = None,
    gen_len: Annotated[str | None, GenLen] = None,
    batch_size: Annotated[str | None, BatchSize] = None,
    cached: Annotated[str | None, Cached] = None,
    workload: Annotated[str | None, Workload] = None,
    prompts: Annotated[str | None, Prompts] = None,
    sweep: Annotated[str | None, SweepFile] = None,
    synthetic: Annotated[str | None, Synthetic] = None,
    accepted_length: Annotated[float | None, AcceptedLength] = None,
    temperature: Annotated[float | None, Temperature] = None,
    mtp: Annotated[str | None, Mtp] = None,
    mtp_varlen: Annotated[str | None, MtpVarlen] = None,
    verify: Annotated[str | None, Verify] = None,
    swa_keep: Annotated[str | None, SwaKeep] = None,
    replay_mode: Annotated[str | None, ReplayMode] = None,
    accelerator: Annotated[str | None, Accelerator] = None,
    batch_invariant: Annotated[str | None, BatchInvariant] = None,
    overlap: Annotated[str | None, Overlap] = None,
    backend: Annotated[str | None, Backend] = None,
    dtype: Annotated[str | None, Dtype] = None,
    repeats: Annotated[int | None, Repeats] = None,
    warmup: Annotated[int | None, Warmup] = None,
    output_format: Annotated[str | None, Format] = None,
    out: Annotated[str | None, Out] = None,
    resume: Annotated[bool, Resume] = False,
    keep_going: Annotated[bool, KeepGoing] = False,
    report: Annotated[bool, Report] = False,
    plot: Annotated[bool | None, Plot] = None,
    check: Annotated[bool, Check] = False,
    baseline: Annotated[str | None, Baseline] = None,
    max_regression: Annotated[str | None, MaxRegression] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    dry_run: Annotated[bool, DryRun] = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    context: typer.Context,
    chosen: Chosen,
) -> int:
    """Measure sweeps of settings and workloads, with spread, against measured ceilings."""
    if json_mode and quiet:
        raise UsageError("bad-usage", "--json cannot be used with -q", hint="leave one out")
    environ = registry.environment()
    output = Output(json_mode=json_mode, quiet=quiet, color=color, environ=environ)
    words = list(what or ["e2e"])
    if words[0] == "compare":
        from deepinfer.cli import bench_compare

        _check_compare(context)
        return bench_compare.run(
            output, words[1:], resolve(chosen, environ, source="flag").as_json()
        )
    _check_words(words, output_format, json_mode, quiet, resume, out, dry_run)
    limit = _limit(max_regression, baseline)
    from deepinfer.cli import bench_input, bench_record

    asked = bench_input.read_asked(
        output, chosen, environ,
        {
            "prompt_len": prompt_len, "gen_len": gen_len, "batch_size": batch_size,
            "cached": cached, "workload": workload, "mtp": mtp, "mtp_varlen": mtp_varlen,
            "verify": verify, "swa_keep": swa_keep, "replay_mode": replay_mode,
            "accelerator": accelerator, "batch_invariant": batch_invariant, "overlap": overlap,
            "backend": backend, "dtype": dtype,
        },
        sweep=sweep, prompts=prompts, synthetic=synthetic,
        accepted_length=accepted_length, runs=not dry_run,
        method={"repeats": repeats, "warmup": warmup, "temperature": temperature},
    )  # fmt: skip
    if words[0] == "ops":
        bench_input.check_ops(asked)
    from deepinfer.report import bench as shown

    old = _baseline(output, baseline)
    folder = bench_record.folder_of(asked, out, shown.csv)
    if dry_run:
        folder.refuse(resume)
        return bench_record.plan(output, asked, words[0], keep_going)
    with folder.held(resume):
        try:
            meta, rows = bench_record.measured(output, asked, folder, words[0], resume, keep_going)
        except BaseException as leaving:
            if not isinstance(leaving, Exception):
                hint = f"--out {folder.path} --resume goes on"
                kept = sum(map(len, folder.samples.values()))
                more = f" and {counted(kept, 'repeat')} of others" if kept else ""
                output.note(f"stopped after {counted(len(folder.rows), 'row')}{more}; {hint}")
            raise
        bars = _bars(asked, folder, meta, rows)
        regressions = _judged(meta, rows, old, limit)
        if json_mode:
            output.document(_document(meta, rows, regressions, bars))
        elif quiet:
            for row in rows:
                number = row.get("output_tok_s") or row.get("time_us")
                output.data(f"{number['median']:.6g}" if number else "nan")
        else:
            _print(output, meta, rows, regressions, bars, output_format)
        # What was measured is told by now, whatever becomes of the pictures.
        _draw(output, folder, meta, rows, bars, plot, report)
    bad = any(row["status"] != "ok" for row in rows)
    lost = regressions is not None and regressions["regressions"]
    missed = check and any(one["verdict"] != "met" for one in bars)
    return int(ExitCode.CHECK_FAILED if bad or lost or missed else ExitCode.DONE)


def _bars(
    asked: Asked, folder: Folder, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Records of the sweep file's bars, in the folder too."""
    from deepinfer.report import bench_bars

    records = bench_bars.judge(asked.bars, meta, rows)
    if records:
        lines = (json.dumps(one, ensure_ascii=False, allow_nan=False) for one in records)
        folder.write_text("bars.jsonl", "".join(line + "\n" for line in lines))
    return records


def _print(
    output: Output, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
    regressions: Mapping[str, Any] | None, bars: Sequence[dict[str, Any]],
    output_format: str | None,
) -> None:  # fmt: skip
    from deepinfer.report import bench as shown
    from deepinfer.report import bench_bars

    if output_format in (None, "table"):
        for number, table in enumerate(shown.tables(rows)):
            if number:
                output.data("")
            output.table(*table)
        if bars:
            for one in bars:
                output.data(json.dumps(one, ensure_ascii=False, allow_nan=False))
            output.table(*bench_bars.table(bars))
    else:
        output.text(shown.table(rows, str(output_format)))
    for line in shown.notes(meta, rows):
        output.note(line)
    if regressions is None:
        return
    limit = f"{regressions['limit']:.0%}"
    for line in regressions["remarks"]:
        output.note(line)
    for name in regressions["unmatched"]:
        output.note(f"{name}: not in the baseline")
    if not regressions["regressions"]:
        output.note(f"{regressions['judged']} rows lost no more than {limit} of the baseline")
        return
    offenders = [
        (one["row"], one["measure"], str(one["a"]), str(one["b"]),
         f"{one['ratio']:.3f}" if "ratio" in one else "-")
        for one in regressions["regressions"]
    ]  # fmt: skip
    output.table(
        ("row", "measure", "baseline", "now", "speed now / then"), offenders,
        f"Not there any more, or lost more than {limit} of the baseline",
    )  # fmt: skip


def _document(
    meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
    regressions: Mapping[str, Any] | None, bars: Sequence[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The head, what is known about the run under `meta`, ceilings, rows."""
    head = ("schema", "deepinfer_version", "created", "command", "settings", "environment")
    document = {name: meta[name] for name in head}
    document["meta"] = {k: v for k, v in meta.items() if k not in (*head, "ceilings")}
    document |= {"ceilings": meta["ceilings"], "rows": list(rows)}
    document |= {"bars": list(bars)} if bars else {}
    return document | ({"regressions": regressions} if regressions is not None else {})


def _draw(
    output: Output, folder: Folder, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
    bars: Sequence[dict[str, Any]], plot: bool | None, report: bool,
) -> None:  # fmt: skip
    """Pictures and the page, from what is saved."""
    figures: list[Path] = []
    if plot or (plot is None and (report or len(rows) > 1)):
        from deepinfer.report import bench_plots

        figures = bench_plots.write(meta, rows, folder.path / "figures")
    if report:
        from deepinfer.report import bench as shown
        from deepinfer.report import bench_bars

        pictures = [file.relative_to(folder.path) for file in figures]
        more = [bench_bars.table(bars)] if bars else []
        folder.write_text("report.md", shown.markdown(meta, rows, pictures, more))
    drawn = sum(file.suffix == ".png" for file in figures)
    beside = f", {counted(drawn, 'picture')}" if drawn else ""
    output.say(f"wrote {counted(len(rows), 'row')}{beside} in {folder.path}", "dim")


def _judged(
    meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], old: Saved | None, limit: float
) -> dict[str, Any] | None:
    if old is None:
        return None
    from deepinfer.report import bench_compare

    return bench_compare.regressions(meta, rows, old, limit)


def _baseline(output: Output, place: str | None) -> Saved | None:
    if place is None:
        return None
    from deepinfer.report import bench_rows

    saved = bench_rows.read(Path(place))
    for line in saved.warnings:
        output.warn(line)
    return saved


def _limit(word: str | None, baseline: str | None) -> float:
    if word is None:
        return 0.1
    number = word.strip().removesuffix("%")
    try:
        value = float(number) / (100 if word.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(
            "bad-option", f'--max-regression "{word}" is no share', ["accepted: 10%, or 0.1"],
            "--max-regression 10%",
        )  # fmt: skip
    if baseline is None:
        raise UsageError(
            "bad-usage", "--max-regression needs --baseline", hint="--baseline DIR of an older run"
        )
    return value


def _check_compare(context: typer.Context) -> None:
    """Raises UsageError for an option that says how to measure, where nothing is measured."""
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name not in _OF_COMPARE and source and source.name == "COMMANDLINE":
            raise UsageError(
                "bad-usage", f"bench compare cannot be used with {option.opts[-1]}",
                ["it prints a table, --json a document, -q ratios alone"], "leave it out",
            )  # fmt: skip


def _check_words(
    words: Sequence[str], output_format: str | None, json_mode: bool, quiet: bool, resume: bool,
    out: str | None, dry_run: bool,
) -> None:  # fmt: skip
    if len(words) > 1 or words[0] not in _KINDS:
        raise UsageError(
            "bad-usage", f"bench {' '.join(words)} is not there",
            [f"accepted: {', '.join(_KINDS)}, or compare A B"], "deepinfer bench",
        )  # fmt: skip
    if output_format is not None and output_format not in _FORMATS:
        raise UsageError(
            "bad-option", f'--format "{output_format}" is not a format',
            [f"accepted: {', '.join(_FORMATS)}"], "--format md",
        )  # fmt: skip
    if output_format is not None and (json_mode or quiet):
        other = "--json" if json_mode else "-q"
        raise UsageError(
            "bad-usage", f"--format cannot be used with {other}",
            ["--format json is the list of rows, --json the document"], "leave one out",
        )  # fmt: skip
    if output_format is not None and dry_run:
        raise UsageError(
            "bad-usage", "--format cannot be used with --dry-run", ["a plan is a table, or --json"],
            "leave one out",
        )  # fmt: skip
    if out == "":
        raise UsageError(
            "bad-option", '--out "" names no folder', hint="--out DIR, or leave it out"
        )
    if resume and out is None:
        raise UsageError(
            "bad-usage", "--resume needs --out", ["the folder to go on with"], "--out DIR --resume"
        )
