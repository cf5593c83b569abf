"""`deepinfer run --batch`: a file of requests in, a file of answers out.

Comes in: parsed options. Goes out: one line per request, appended as it is finished, whatever
happens to this process. All lines are checked before the model is loaded; of the file no more than
a window is in memory. It must not know prompt formats or how tokens are made.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli.loading import load, open_frontend, prepare
from deepinfer.cli.options import SWITCH
from deepinfer.cli.output import Output
from deepinfer.cli.progress import progress
from deepinfer.errors import DeepinferError, ExitCode, InternalError, UsageError
from deepinfer.settings import Settings

if TYPE_CHECKING:
    from deepinfer.protocol.batchfile import Input, Line, Results, Scan
    from deepinfer.protocol.convert import Frontend, Prepared, Setup

__all__ = ["Batch", "FailFast", "Files", "Out", "Overwrite", "Resume", "SkipInvalid", "run"]

SCHEMA = "deepinfer.batch/1"
# Settings that change no answer.
_SILENT = (
    "log_level", "config", "no_progress", "debug", "build_dir", "jit_cache_dir", "threads",
    "decode_perf_cache_dir", "decode_perf_cache_ttl_sec", "overlap", "model_dir",
    "prefix_cache_dir",
)  # fmt: skip
_AHEAD = 2  # requests that wait for each that can run: a slot is never empty for want of one


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Input", **more)


def _switch(name: str, help: str) -> Any:
    return typer.Option(name, metavar=SWITCH, help=help, rich_help_panel="Output", hidden=True)


Batch = Annotated[
    str | None,
    _option("--batch", metavar="FILE", help="Answer a file of requests; -o names the answers."),
]
Out = Annotated[
    str | None,
    typer.Option("-o", "--out", metavar="FILE", rich_help_panel="Output", hidden=True,
                 help="Where answers of --batch go; - is stdout."),
]  # fmt: skip
Resume = Annotated[bool, _switch("--resume", "Go on with -o: answer what has no answer there.")]
Overwrite = Annotated[bool, _switch("--overwrite", "Begin -o anew.")]
SkipInvalid = Annotated[bool, _switch("--skip-invalid", "Leave bad lines of --batch out.")]
FailFast = Annotated[bool, _switch("--fail-fast", "Stop --batch at the first failure.")]


@dataclass(frozen=True)
class Files:
    """What was typed about a batch."""

    source: str
    out: str | None
    resume: bool = False
    overwrite: bool = False
    skip_invalid: bool = False
    fail_fast: bool = False


@dataclass
class _Work:
    """A batch on its way. stopped: the signal that asked to stop."""

    output: Output
    frontend: Frontend
    source: Input
    scan: Scan
    results: Results
    seed: int | None
    fail_fast: bool
    before: int = 0
    stopped: int = 0
    open_lines: dict[int, tuple[Line, Prepared]] = field(default_factory=dict)


def run(
    output: Output, settings: Settings, setup: Setup, files: Files, seed: int | None, dry_run: bool
) -> int:
    """The exit status: 0, 1 with failures among the lines, 130 or 143 where it was stopped."""
    from deepinfer.protocol.batchfile import Input, Results

    if files.out is None:
        raise UsageError(
            "bad-usage", "--batch needs -o", ["the file that gets the answers"],
            f"deepinfer run --batch {files.source} -o answers.jsonl",
        )  # fmt: skip
    if files.out == "-" and output.mode == "json":
        raise UsageError("bad-usage", "--json cannot be used with -o -", hint="leave one out")
    if files.resume and files.overwrite:
        raise UsageError(
            "bad-usage", "--resume cannot be used with --overwrite", hint="leave one out"
        )
    frontend, identity = open_frontend(settings, setup)
    source, results = Input(Path(files.source)), Results(files.out)
    try:
        if results.writes(source.path):
            raise UsageError(
                "output-exists", f"-o {files.out} would write over the requests",
                [f"{files.source} is that file, or one that is kept beside it"],
                "-o another file",
            )  # fmt: skip
        scan = source.scan(lambda line: prepare(frontend, line.kind, line.body))
        _judge(output, scan, files)
        if dry_run:
            results.check()
            _print_plan(output, scan, files)
            return int(ExitCode.DONE)
        work = _Work(output, frontend, source, scan, results, seed, files.fail_fast)
        _open(work, settings, files, identity)
        return _answer(work, settings, files)
    finally:
        results.close()
        source.close()


def _judge(output: Output, scan: Scan, files: Files) -> None:
    if scan.bad_count and not files.skip_invalid:
        raise scan.refusal(files.source)
    if not len(scan.numbers):
        raise UsageError(
            "batch-invalid", f"{files.source} has no requests", [*scan.bad],
            '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}',
        )  # fmt: skip
    for line in scan.bad:
        output.warn(f"{line}: skipped")
    if scan.bad_count > len(scan.bad):
        output.warn(f"and {scan.bad_count - len(scan.bad):,} more were skipped")


def _print_plan(output: Output, scan: Scan, files: Files) -> None:
    plan = {"requests": len(scan.numbers), "bad_lines": scan.bad_count}
    if output.mode == "json":
        output.document({"schema": "deepinfer.batch-plan/1", "plan": plan})
    else:
        rows = [(name.replace("_", " "), f"{count:,}") for name, count in plan.items()]
        output.table(("plan", "value"), rows, "Plan; nothing was run")


def _open(work: _Work, settings: Settings, files: Files, identity: bytes) -> None:
    """Make the file of answers ready, and refuse to mix two runs in it."""
    results, mine = work.results, _shared(work, settings, identity)
    there, before = results.open(), results.meta()
    if not (results.empty or files.resume or files.overwrite):
        left = max(len(work.scan.numbers) - there, 0) if before is not None else 0
        again = "--overwrite to start again"
        raise UsageError(
            "output-exists",
            f"{files.out} already has {there:,} results" if there else f"{files.out} is not empty",
            hint=f"--resume to add the missing {left:,}, {again}" if left else again,
        )  # fmt: skip
    if results.empty or files.overwrite:
        results.begin({**_head(settings), **mine})
        return
    if before is None:
        raise UsageError(
            "resume-mismatch", f"cannot resume: {files.out}.meta.json is missing or damaged",
            ["it says with which settings the answers were made"], "--overwrite to start again",
        )  # fmt: skip
    different = sorted(
        # What somebody chose explains what follows from it.
        _differences(before, mine),
        key=lambda one: not _chosen(settings, one[0]),
    )
    if different:
        first, *more = (f"{name} was {was}, now {now}" for name, was, now in different)
        raise UsageError(
            "resume-mismatch", f"cannot resume: {first}", [*more, f"from {files.out}.meta.json"],
            "the settings of that run, or --overwrite",
        )  # fmt: skip
    if before.get("input") != mine["input"]:
        work.output.warn(f"{files.source} is not what it was; answers that are there are kept")
    results.go_on(work.output.warn)
    work.before = len(results.done)


def _shared(work: _Work, settings: Settings, identity: bytes) -> dict[str, Any]:
    """What two runs must share to write into one file."""
    setup = work.frontend.setup
    return {
        "model": identity.hex(),
        "input": work.source.digest,
        "values": {
            name.replace("_", "-"): entry.value
            for name, entry in settings.values.items()
            if name not in _SILENT
        },
        "flags": {
            **{name.replace("_", "-"): value for name, value in setup.sampling.items()},
            "thinking": setup.thinking, "thinking-forced": setup.forced, "seed": work.seed,
        },
    }  # fmt: skip


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    import json

    now = json.loads(json.dumps(now, default=str))
    if was.get("model") != now["model"]:
        yield "the model", "another one", now["model"][:12]
    for part in ("values", "flags"):
        old = was.get(part)
        old = old if isinstance(old, dict) else {}
        for name in dict.fromkeys([*old, *now[part]]):
            if old.get(name) != now[part].get(name):
                yield name, _word(old.get(name)), _word(now[part].get(name))


def _chosen(settings: Settings, name: str) -> bool:
    entry = settings.values.get(name.replace("-", "_"))
    return entry is None or entry.chosen


def _word(value: Any) -> str:
    return "unset" if value is None else str(value)


def _head(settings: Settings) -> dict[str, Any]:
    from deepinfer.device.detect import find
    from deepinfer.report.records import document

    return document(SCHEMA, sys.argv[1:], settings.as_json(), find())


def _answer(work: _Work, settings: Settings, files: Files) -> int:
    output, count = work.output, len(work.scan.numbers)
    if work.before < count:
        llm = load(output, settings)
        try:
            with _stopping(work), progress(output, settings.no_progress) as show:
                _loop(work, llm, lambda: show(len(work.results.done), count, "answers"))
        finally:
            llm.close()
    made = len(work.results.done) - work.before
    if work.stopped:
        where = f"--batch {files.source} -o {files.out} --resume goes on"
        output.note(f"stopped after {len(work.results.done):,} of {count:,} results; {where}")
        interrupted = work.stopped == signal.SIGINT
        return int(ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED)
    said = f"{made:,} results in {files.out}"
    if work.before:
        said += f", {work.before:,} were there"
    if work.results.errors:
        said += f"; {work.results.errors:,} are errors"
    if output.mode == "json":
        output.document({
            **_head(settings), "results": made, "before": work.before,
            "errors": work.results.errors, "skipped": work.scan.bad_count,
        })  # fmt: skip
    else:
        output.say(said, "dim")
    return int(ExitCode.CHECK_FAILED if work.results.errors else ExitCode.DONE)


def _loop(work: _Work, llm: Any, show: Any) -> None:
    from deepinfer.engine.exchange import Exchange

    lines = work.source.wanted(work.scan, work.results.done)
    window, more = llm.parts.sizes.slots * _AHEAD, True
    with Exchange(llm, work.frontend) as exchange:
        while more or len(exchange):
            while more and not work.stopped and len(exchange) < window:
                line = next(lines, None)
                more = line is not None and _submit(work, exchange, line)
            if work.stopped:
                return
            for news in exchange.step():
                if news.over and not _finish(work, news):
                    return
            show()


def _submit(work: _Work, exchange: Any, line: Line) -> bool:
    """False: nothing more is to be submitted."""
    from deepinfer.protocol import batchfile

    try:
        seed = batchfile.seed(line.custom_id, work.seed)
        prepared = work.frontend.read(line.kind, line.body, seed)
        exchange.submit(line.number, prepared, batchfile.identity(line))
    except DeepinferError as problem:
        work.results.append(batchfile.failed(line, problem))
        return not work.fail_fast
    work.open_lines[line.number] = line, prepared
    return True


def _finish(work: _Work, news: Any) -> bool:
    """False: nothing more is to be answered."""
    from deepinfer.protocol import batchfile

    line, prepared = work.open_lines.pop(news.key)
    problem = news.problem
    if problem is None:
        record = {"seed": news.completion.seed, **prepared.sampled}
        document = {**news.document, "deepinfer": {**news.document.get("deepinfer", {}), **record}}
        try:
            work.results.append(batchfile.succeeded(line, document))
            return True
        except DeepinferError:
            raise  # the file, and no answer, is at fault
        except (ValueError, RecursionError) as bad:
            problem = InternalError("answer-not-json", "the answer is no JSON", [str(bad)])
    work.results.append(batchfile.failed(line, problem))
    return not work.fail_fast


@contextmanager
def _stopping(work: _Work) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets a step finish and its answers reach the file; a second one
    ends the process at once, which costs no line that is written."""

    def stop(number: int, frame: object) -> None:
        work.stopped = number
        signal.signal(number, signal.SIG_DFL)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    except ValueError:
        pass  # not the main thread: whoever embeds the command line keeps its own handlers
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
