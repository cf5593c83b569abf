"""Running a sweep for `bench`: the plan, the folder, ceilings before and after, rows as they end.

Comes in: what was asked. Goes out: the document about the run and its rows. The engine is loaded
here and nowhere else in this command; it must not know how rows are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.bench import ceilings
from deepinfer.bench.axes import tokens_cached
from deepinfer.bench.ceilings import Floors
from deepinfer.bench.files import META, Folder
from deepinfer.bench.job import Job, Method, estimate
from deepinfer.bench.workload import Prompts
from deepinfer.cli import bench_input
from deepinfer.cli.bench_input import Asked
from deepinfer.cli.output import Output, counted
from deepinfer.cli.progress import progress as bar
from deepinfer.replay.plan import ReplayRule

if TYPE_CHECKING:
    from deepinfer.engine.assembly import Model, Parts
    from deepinfer.model.config import ModelConfig
    from deepinfer.settings import Settings

__all__ = ["folder_of", "measured", "plan"]

Rows = Sequence[Mapping[str, Any]]
_PATIENCE = 35.0  # seconds that the repeats of rows with default lengths may take
_FEW = 2  # and so many rows may take them
_COPIES = 10  # of the weights that an engine may need: packed, and unpacked for torch


def plan(output: Output, asked: Asked, what: str, keep_going: bool) -> int:
    """`--dry-run`: the rows and about how long they take; needs neither torch nor weights."""
    grid = bench_input.ops_grid(asked) if what != "e2e" else None
    jobs = bench_input.jobs(output, asked, keep_going=keep_going) if what != "ops" else []
    seconds = estimate(asked.config, jobs, _method(asked, keep_going))
    if output.mode == "json":
        from deepinfer.device.detect import find
        from deepinfer.report.records import document

        here = find(query=False)
        body = document("deepinfer.bench-plan/1", sys.argv[1:], asked.settings.as_json(), here)
        if jobs:
            body["estimated_seconds"] = round(seconds)
        body["rows"] = [{"row_id": job.row_id, "axes": dict(job.axes)} for job in jobs]
        if grid:
            body["ops"] = {name: list(values) for name, values in grid.items()}
            if not grid["backend"]:
                body["why"] = {"ops.backend": "every back end that can run when it starts"}
        output.document(body)
        return 0
    if grid:
        backends = ", ".join(grid["backend"]) or "every one that can run"
        output.say(
            f"ops of {_several(grid['rows'])} rows behind {_several(grid['context'])} tokens; "
            f"back ends: {backends}; dtype: {_several(grid['dtype'])}"
        )
    if not jobs:
        return 0
    names = [name for name in jobs[0].axes if len({str(job.axes[name]) for job in jobs}) > 1]
    names = names or ["prompt_len", "gen_len", "batch_size", "swa_keep", "mtp"]
    lines = [[str(job.axes[name]) for name in names] for job in jobs]
    output.table(names, lines, "Plan; nothing was run")
    engines = len({job.engine for job in jobs})
    output.say(
        f"{counted(len(jobs), 'row')} on {counted(engines, 'engine')}, about {_time(seconds)}"
    )
    return 0


def _several(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def folder_of(asked: Asked, out: str | None, table: Callable[[Rows], str]) -> Folder:
    """The folder of the results, not made yet."""
    if out is not None:
        return Folder(Path(out), table)
    return Folder.named(asked.name.replace(":", "-"), table)


def measured(
    output: Output, asked: Asked, folder: Folder, what: str, resume: bool, keep_going: bool
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Run what is missing; the document about the run, and its rows in the grid's order, single
    ops behind them. what: e2e, ops or all."""
    import torch

    from deepinfer.bench.run import Sweep, TooSlow
    from deepinfer.device.detect import TORCH_DEVICE, find
    from deepinfer.engine.assembly import free_bytes
    from deepinfer.report.records import document

    model, config, accelerator = _model(asked), asked.config, asked.accelerator
    device, found = TORCH_DEVICE[accelerator], find()
    if asked.settings.threads is not None:  # those of the rows, not what torch would take
        torch.set_num_threads(asked.settings.threads)
    parts = bench_input.fingerprint(
        asked, found, model.identity().hex()[:16], torch.get_num_threads()
    )
    before = folder.meta() if resume else None
    short = bool(before and before.get("short"))
    if before is not None:
        mismatch = bench_input.unfit(
            before["fingerprint"], parts, "the same command, code and machine; or another --out"
        )
        if mismatch:
            raise mismatch
    jobs = _jobs(output, asked, keep_going, short) if what != "ops" else []
    if before is not None:
        folder.load(output.warn)
    conditions = {"before": ceilings.conditions(accelerator)}
    rates = ceilings.measure(device)
    # Rows that are there already were measured under those of the first run.
    first = ((before or {}).get("ceilings") or {}).get("before") or rates
    output.say(_said(rates))
    floors = Floors(config, rates, device) if rates else None
    if floors and len(jobs) <= _FEW:
        for job in jobs:
            output.say(_best(config, job, floors))
    meta: dict[str, Any] = {
        **document(META, sys.argv[1:], asked.settings.as_json(), found),
        "model": asked.name,
        "fingerprint": parts,
        "grid": [{name: list(values) for name, values in grid.items()} for grid in asked.grids],
        "short": short,
        "rows": len(jobs),
        **{name: value for name, value in _told(asked).items()},
        "ceilings": {"before": first, "after": None, "moved": None} if rates else None,
        "conditions": conditions,
        "runs": [*(before or {}).get("runs", []), datetime.now(UTC).isoformat(timespec="seconds")],
    }
    if rates is None:
        meta["why"] = {"ceilings": "unknown device: no ceiling"}
    folder.write_meta(meta)
    prompts = Prompts(model.tokenizer(), config.bos_token_id, config.vocab_size)
    together = free_bytes(device) // 2 // (_COPIES * model.weight_bytes)
    method = replace(_method(asked, keep_going), together=int(together))
    said = {*asked.said}

    def warn(line: str) -> None:
        if line not in said:
            said.add(line)
            output.warn(line)

    with bar(output, asked.settings.no_progress) as progress:

        def sweep(rows: Sequence[Job], method: Method) -> None:
            Sweep(
                rows, folder, method, make=lambda settings: _parts(asked, settings, warn),
                config=config, prompts=prompts, texts=asked.texts, floors=floors,
                on_progress=progress, warn=warn,
            ).run()  # fmt: skip

        chosen = {"prompt_len", "gen_len"} & asked.given
        begun = folder.rows or folder.samples
        impatient = not (chosen or short or begun) and len(jobs) <= _FEW
        slow = False
        try:
            sweep(jobs, replace(method, patience=_PATIENCE if impatient else None))
        except TooSlow:
            slow = True
        if slow:  # behind the exception, which held on to the engines
            sizes = ", ".join(f"{key} {value[0]}" for key, value in bench_input.SHORT.items())
            output.note(f"this machine is slow: the rows are shorter ({sizes})")
            jobs = _jobs(output, asked, keep_going, True)
            meta["short"] = True
            folder.write_meta(meta)
            sweep(jobs, method)
        if what != "e2e":
            _ops(asked, folder, prompts, floors, method.together, progress, warn)
    conditions["after"] = ceilings.conditions(accelerator)
    if rates:
        after = ceilings.measure(device)
        moved = ceilings.moved(first, after)
        meta["ceilings"] = {"before": first, "after": after, "moved": moved}
    folder.write_meta(meta)
    folder.finish()
    ops = [row for row in folder.rows.values() if row["kind"] == "ops" and what != "e2e"]
    return meta, [*(folder.rows[job.row_id] for job in jobs), *ops]


def _ops(
    asked: Asked, folder: Folder, prompts: Prompts, floors: Floors | None, together: int,
    progress: Callable[[int, int, str], None], warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Single ops of every back end that can run here, or of those that were asked for."""
    from deepinfer.bench import axes, ops
    from deepinfer.bench.run import sized
    from deepinfer.device.detect import TORCH_DEVICE
    from deepinfer.engine.compiled import open_compiled
    from deepinfer.ops import registry

    device = TORCH_DEVICE[asked.accelerator]
    libraries = open_compiled(asked.settings, device).libraries
    here = tuple(
        name for name, devices in registry.BACKENDS.items()
        if device in devices and (name in libraries or name not in registry.COMPILED)
    )  # fmt: skip
    grid = bench_input.ops_grid(asked)
    longest = max(grid["context"]) + max(grid["rows"])
    rates = floors.rates if floors else None

    def side(values: Mapping[str, Any]) -> ops.Side:
        settings = sized(bench_input.ops_settings(asked, values), [(1, longest + 1)])
        shared = {
            "backend": values["backend"], "dtype": bench_input.dtype_of(asked, settings),
            "batch_invariant": settings.batch_invariant, "accelerator": asked.accelerator,
            "model": asked.name, "synthetic": str(asked.synthetic) if asked.synthetic else None,
        }  # fmt: skip
        return ops.Side(_parts(asked, settings, warn), shared, rates, warn)

    several = axes.combinations({**grid, "backend": grid["backend"] or here})
    ops.measure(
        [partial(side, values) for values in several], max(together, 1), grid["rows"],
        grid["context"], prompts, asked.method["repeats"], folder, floors, progress,
    )  # fmt: skip


def _model(asked: Asked) -> Model:
    """What the engines are made for; of a folder everything but the weights is checked."""
    if asked.synthetic:
        from deepinfer.bench.synthetic import model_of

        return model_of(asked.synthetic, True)
    from deepinfer.checkpoint.layout import open_checkpoint
    from deepinfer.engine.assembly import Folder as Checkpoint

    return Checkpoint(open_checkpoint(str(asked.folder), asked.settings.origin("model_dir")))


def _parts(asked: Asked, settings: Settings, warn: Callable[[str], object]) -> Parts:
    """Of one engine."""
    from deepinfer.bench import synthetic
    from deepinfer.engine.assembly import assemble

    if asked.synthetic:
        parts = synthetic.parts(settings, asked.synthetic, warn)
    else:
        parts = assemble(settings, warn)
    if asked.accepted_length is None:
        return parts
    return synthetic.simulated(parts, asked.accepted_length, asked.config.dspark_block_size)


def _jobs(output: Output, asked: Asked, keep_going: bool, short: bool) -> list[Job]:
    instead = bench_input.SHORT if short else None
    return bench_input.jobs(output, asked, keep_going=keep_going, instead=instead)


def _told(asked: Asked) -> dict[str, Any]:
    return {name: asked.method[name] for name in ("repeats", "warmup", "temperature")}


def _method(asked: Asked, keep_going: bool) -> Method:
    return Method(**_told(asked), keep_going=keep_going)


def _best(config: ModelConfig, job: Job, floors: Floors) -> str:
    """What the ceilings allow a row at best, drafts all verified."""
    axes = job.axes
    length, batch = axes["prompt_len"], axes["batch_size"]
    if length is None:
        return "at best: not known for prompts of any length"
    rule = ReplayRule.of(config, axes["replay_mode"], axes["swa_keep"])
    page, replay = job.settings.page_tokens, job.settings.encoder_replay
    plan = rule.plan_with_hit(length, tokens_cached(axes["cached"], length), page, replay)
    prefill = floors.prefill(plan, batch) * 1e3
    step = floors.decode(length + axes["gen_len"] / 2, batch, 1 + axes["mtp"]) * 1e3
    return f"at best, by bytes and FLOPs: prefill {prefill:,.4g} ms, a decoding step {step:,.3g} ms"


def _said(rates: Mapping[str, float] | None) -> str:
    if rates is None:
        return "unknown device: no ceiling"
    words = [
        f"{name.split('_')[0]} {value:,.4g} {'GB/s' if 'gb' in name else 'GFLOP/s'}"
        for name, value in rates.items()
    ]
    return f"ceilings, measured now: {', '.join(words)}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds / 5) * 5, 5)} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
