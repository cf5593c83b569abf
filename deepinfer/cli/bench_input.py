"""What `bench` was asked: which rows, on which model, measured how; and what makes two runs alike.

Comes in: the words of the options, or a sweep file. Goes out: `Asked`, or an error that names the
option. Only a configuration is read; no weight and no device is touched.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepinfer
from deepinfer.bench import axes
from deepinfer.bench.job import Job
from deepinfer.cli.options import Chosen
from deepinfer.cli.output import Output
from deepinfer.cli.prompt import read_jsonl
from deepinfer.cli.replay_input import read_config
from deepinfer.device.detect import Found, find, pick, version_of
from deepinfer.errors import CapacityError, DeepinferError, UsageError
from deepinfer.ops import registry as ops
from deepinfer.settings import Settings, for_device, for_model, registry, resolve
from deepinfer.toolchain import built

if TYPE_CHECKING:
    from deepinfer.bench.synthetic import Size
    from deepinfer.model.config import ModelConfig

__all__ = [
    "SHORT", "Asked", "check_ops", "dtype_of", "fingerprint", "jobs", "ops_grid", "ops_settings",
    "read_asked", "unfit",
]  # fmt: skip

# Rows nobody described: short enough for a minute on two cores without compiled kernels ...
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "prompt_len": (512,), "gen_len": (32,), "batch_size": (1,), "cached": (None,),
    "workload": ("code",),
}  # fmt: skip
# ... and for a machine that is too slow for them.
SHORT: dict[str, tuple[Any, ...]] = {"prompt_len": (256,), "gen_len": (16,)}
_HIT = {"agent": "75%"}  # of a prompt is known, by workload, unless somebody said
_METHOD = {"repeats": 5, "warmup": 1, "temperature": 0.0}
_LEAST = {"repeats": 1, "warmup": 0, "temperature": 0.0}
_OPS_AXES = ("batch_size", "prompt_len", "backend", "dtype", "batch_invariant", "accelerator")
_OPS_ROWS, _OPS_CONTEXT = (1, 32, 256), (512,)  # rows of a step, and tokens before them
# Settings that change no number.
_SILENT = ("log_level", "config", "no_progress", "debug", "build_dir", "jit_cache_dir",
           "decode_perf_cache_dir", "decode_perf_cache_ttl_sec")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A checked question. grids: of which rows are made; given: axes that somebody chose; method:
    repeats, warmup, temperature; bars: of a sweep file; folder: of the checkpoint, None with random
    weights of a synthetic size; accepted_length: what simulated acceptance gives; said: warnings so
    far."""

    settings: Settings
    chosen: Chosen
    environ: Mapping[str, str]
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    given: frozenset[str]
    method: Mapping[str, Any]
    bars: tuple[Mapping[str, Any], ...]
    accelerator: str
    folder: Path | None
    synthetic: Size | None
    accepted_length: float | None
    name: str
    config: ModelConfig
    texts: tuple[str, ...] | None
    workload: str | None
    said: tuple[str, ...]


def read_asked(
    output: Output, chosen: Chosen, environ: Mapping[str, str], words: Mapping[str, str | None], *,
    sweep: str | None, prompts: str | None, synthetic: str | None, accepted_length: float | None,
    method: Mapping[str, Any], runs: bool,
) -> Asked:  # fmt: skip
    """Check every word. runs: not only a plan, so torch is asked what it can use.

    Raises UsageError, CheckpointError and EnvironmentProblem.
    """
    grids: list[dict[str, tuple[Any, ...]]] = [{}]
    beside: dict[str, Any] = {}
    bars: tuple[Mapping[str, Any], ...] = ()
    if sweep is not None:
        grids, beside = axes.read_sweep(Path(sweep))
        bars = axes.read_bars(Path(sweep), beside.pop("bar", []))
        chosen = {**axes.table_of(Path(sweep), beside, "settings"), **chosen}
    settings = resolve(chosen, environ, source="flag")
    output.level = settings.log_level
    for line in settings.warnings:
        output.warn(line)
    given = {name: axes.parse(name, text) for name, text in words.items() if text is not None}
    if sweep is not None:
        of_file = {name: beside.pop(name, None) for name in ("synthetic", "accepted_length")}
        synthetic = synthetic or of_file["synthetic"]
        accepted_length = accepted_length or of_file["accepted_length"]
        unknown = next((key for key in beside if key not in _METHOD), None)
        if unknown:
            raise UsageError(
                "sweep-unreadable", f"{Path(sweep).name}: {unknown} is not an entry",
                [f"entries: synthetic, accepted_length, {', '.join(_METHOD)}",
                 "tables: axes, settings, bar"],
                "deepinfer bench --help",
            )  # fmt: skip
        for name, value in beside.items():
            least = _LEAST[name]
            number = isinstance(value, int | type(least)) and not isinstance(value, bool)
            if not number or not value >= least:
                raise UsageError(
                    "sweep-unreadable", f"{Path(sweep).name}: {name} = {value!r} is not accepted",
                    [f"accepted: numbers from {least}"], f"{name} = {_METHOD[name]}",
                )  # fmt: skip
    texts = workload = None
    if prompts is not None:
        if "workload" in given:
            raise UsageError(
                "bad-usage", "--prompts cannot be used with --workload",
                ["both say what is asked"], "leave one out",
            )  # fmt: skip
        texts = read_jsonl(prompts, "--prompts")
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]
        workload = f"{Path(prompts).name}#{digest}"
    whole = [{**_defaults(texts), **grid, **given} for grid in grids]
    count = sum(math.prod(map(len, grid.values())) for grid in whole)
    if count > axes.MOST:
        raise UsageError(
            "bad-axis", f"a sweep of {count:,} rows is too long", [f"at most {axes.MOST:,}"],
            "shorter lists, or a sweep for each part",
        )  # fmt: skip
    accelerator = _accelerator(settings, whole, runs)
    folder, size, name, config = _model(output, settings, synthetic, accelerator)
    if accepted_length is not None:
        from deepinfer.bench.synthetic import chance_of

        chance_of(accepted_length, config.dspark_block_size)  # it refuses what cannot be
    return Asked(
        settings=settings,
        chosen=chosen,
        environ=environ,
        grids=tuple(whole),
        given=frozenset(name for grid in grids for name in {**grid, **given}),
        bars=bars,
        method={**_METHOD, **beside, **{k: v for k, v in method.items() if v is not None}},
        accelerator=accelerator,
        folder=folder,
        synthetic=size,
        accepted_length=accepted_length,
        name=name,
        config=config,
        texts=texts,
        workload=workload,
        said=settings.warnings,
    )  # fmt: skip


def _accelerator(
    settings: Settings, grids: Iterable[Mapping[str, tuple[Any, ...]]], runs: bool
) -> str:
    """The one that all rows run on; for a plan, the one whose device node is there."""
    named = {word for grid in grids for word in grid.get("accelerator", ())}
    if len(named) > 1:
        raise UsageError(
            "bad-axis", f"--accelerator {','.join(sorted(named))}: one sweep runs on one device",
            ["ceilings and the fingerprint are of one"], "a sweep for each, and bench compare",
        )  # fmt: skip
    word = str(next(iter(named), settings.accelerator))
    if runs:
        return pick(word)
    return find(query=False).accelerators[0] if word == "auto" else word


def _model(
    output: Output, settings: Settings, synthetic: str | None, accelerator: str
) -> tuple[Path | None, Size | None, str, ModelConfig]:
    """Folder or synthetic size, what the model is called, and its configuration."""
    if synthetic is not None:
        from deepinfer.bench.synthetic import model_of, read_size

        if settings.source("model_dir") == "flag":
            raise UsageError(
                "bad-usage", "--synthetic cannot be used with -m", ["both say which model"],
                "leave one out",
            )  # fmt: skip
        size = read_size(synthetic, accelerator)
        return None, size, str(size), model_of(size, True).config
    from deepinfer.engine.assembly import embedded_model

    if settings.model_dir is None:
        output.note("using the embedded model; -m DIR measures another", "dim")
    folder = Path(settings.model_dir or embedded_model())
    if not (folder / "config.json").is_file():
        from deepinfer.checkpoint.layout import open_checkpoint

        # It raises, and says what is wrong with the folder.
        open_checkpoint(folder, settings.origin("model_dir"))
    name = folder.resolve().name if settings.model_dir else "embedded"
    return folder, None, name, read_config(folder / "config.json")


def _defaults(texts: Sequence[str] | None) -> dict[str, tuple[Any, ...]]:
    """What nobody said. A user's texts are as long as they are."""
    return _DEFAULTS | ({"prompt_len": (None,)} if texts is not None else {})


def jobs(
    output: Output, asked: Asked, *, keep_going: bool,
    instead: Mapping[str, tuple[Any, ...]] | None = None,
) -> list[Job]:  # fmt: skip
    """The rows of the grids, each once. instead: other values of some axes.

    A combination that is refused is raised, or kept as a job's problem with `keep_going`.
    """
    found: dict[str, Job] = {}
    said = set(asked.said)
    for grid in asked.grids:
        for values in axes.combinations({**grid, **(instead or {})}):
            try:
                settings = _settings(asked, values)
                effective = for_device(settings, asked.accelerator)
                _fits(asked.config, values)
                problem = None
            except (UsageError, CapacityError) as refused:
                if not keep_going:
                    raise
                settings = effective = asked.settings
                problem = refused
            for line in settings.warnings:
                if line not in said:
                    said.add(line)
                    output.warn(line)
            row = _axes(asked, values, effective)
            if problem is not None:
                row |= {name: values[name] for name in axes.settings_axes() if name in values}
            job = Job(row, settings, problem)
            found.setdefault(job.row_id, job)
    return list(found.values())


def _fits(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """Raises CapacityError for more tokens than the model has places, one of them spare."""
    tokens = (values.get("prompt_len") or 0) + values["gen_len"]
    most = config.max_position_embeddings
    if tokens >= most:
        raise CapacityError(
            "prompt-too-long",
            f"prompt and answer have {tokens:,} tokens, the model takes {most - 1:,}",
            hint="--prompt-len or --gen-len shorter",
        )


def _settings(asked: Asked, values: Mapping[str, Any]) -> Settings:
    """Of one combination, with the checkpoint's defaults. Raises UsageError."""
    typed = {name: values[name] for name in axes.settings_axes() if name in values}
    # In a grid these meet by multiplication, and nobody asked for both.
    if typed.get("swa_keep") == "full":
        typed.pop("replay_mode", None)
    if typed.get("replay_mode") == "off":
        typed.pop("swa_keep", None)
    if typed.get("mtp") == 0:
        typed.pop("mtp_varlen", None)
    if "backend" in typed:
        words = typed["backend"].split("+") if typed["backend"] != "auto" else []
        typed["backend"] = [word if "=" in word else f"all={word}" for word in words]
    settings = resolve({**asked.chosen, **typed}, asked.environ, source="flag")
    ops.parse_overrides(f"{op}={name}" for op, name in settings.backend.items())
    return for_model(settings, asked.config)


def _axes(asked: Asked, values: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """What tells the row from others, with the values that hold: one spelling for what is alike."""
    length, drafts = values.get("prompt_len"), settings.mtp > 0
    cached = values["cached"]
    if cached is None:
        cached = _HIT.get(values["workload"], 0) if asked.texts is None else 0
    backend = "+".join(
        name if op == "all" else f"{op}={name}" for op, name in sorted(settings.backend.items())
    )
    return {
        "prompt_len": length,
        "gen_len": values["gen_len"],
        "batch_size": values["batch_size"],
        # Of a user's texts a share is one of each.
        "cached": axes.tokens_cached(cached, length) if length and not asked.texts else cached,
        "swa_keep": "full" if settings.replay_mode == "off" else settings.swa_keep,
        "replay_mode": settings.replay_mode,
        "mtp": settings.mtp,
        "mtp_varlen": settings.mtp_varlen and drafts,
        "verify": settings.verify if drafts else None,
        "batch_invariant": settings.batch_invariant,
        "overlap": settings.overlap,
        "backend": backend or "auto",
        "dtype": dtype_of(asked, settings),
        "accelerator": asked.accelerator,
        "temperature": asked.method["temperature"],
        "workload": asked.workload or values["workload"],
        "model": asked.name,
        "synthetic": str(asked.synthetic) if asked.synthetic else None,
        "accepted_length": asked.accepted_length if drafts else None,
    }


def dtype_of(asked: Asked, settings: Settings) -> str:
    """Of activations: the one asked for, or the checkpoint's."""
    own = asked.config.dtype
    return settings.dtype or {"bfloat16": "bf16", "float32": "fp32"}.get(own, own)


def check_ops(asked: Asked) -> None:
    """Raises UsageError for a question about requests, where only single ops are measured."""
    said = [axes.AXES[name].flag for name in axes.AXES if name in asked.given - {*_OPS_AXES}]
    said += ["--prompts"] if asked.texts is not None else []
    said += ["--accepted-length"] if asked.accepted_length is not None else []
    said += ["--temperature"] if asked.method["temperature"] else []
    if said:
        raise UsageError(
            "bad-usage", f"bench ops cannot be used with {said[0]}",
            ["an op runs a chunk of --batch-size rows behind --prompt-len tokens, every layer",
             f"its axes: {', '.join(axes.AXES[name].flag for name in _OPS_AXES)}"],
            "leave it out, or deepinfer bench all",
        )  # fmt: skip


def ops_grid(asked: Asked) -> dict[str, tuple[Any, ...]]:
    """What single ops are measured over. backend: () for every one that can run."""
    settings = asked.settings
    grid = {
        "rows": _values_of(asked, "batch_size", _OPS_ROWS),
        "context": _values_of(asked, "prompt_len", _OPS_CONTEXT),
        "backend": _values_of(asked, "backend", ()),
        "dtype": _values_of(asked, "dtype", (dtype_of(asked, settings),)),
        "batch_invariant": _values_of(asked, "batch_invariant", (settings.batch_invariant,)),
    }
    longest = max(grid["context"]) + max(grid["rows"])
    if longest >= asked.config.max_position_embeddings:
        raise CapacityError(
            "prompt-too-long",
            f"context and rows have {longest:,} tokens, the model takes "
            f"{asked.config.max_position_embeddings - 1:,}",
            hint="--prompt-len or --batch-size smaller",
        )
    return grid


def ops_settings(asked: Asked, values: Mapping[str, Any]) -> Settings:
    """Of an engine whose chunks run every layer on every row; values: of some axes."""
    fixed = {"swa_keep": "full", "mtp": 0, "accelerator": asked.accelerator}
    return _settings(asked, {**values, **fixed})


def _values_of(asked: Asked, name: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every value of an axis that somebody chose, else `otherwise`."""
    if name not in asked.given:
        return otherwise
    return tuple(dict.fromkeys(value for grid in asked.grids for value in grid.get(name, ())))


def fingerprint(asked: Asked, found: Found, identity: str, threads: int) -> dict[str, Any]:
    """What must be equal for rows of two runs to stand in one folder: code, machine, model and what
    no axis says. identity: of the model; threads: that the host computes with."""
    accelerator = asked.accelerator
    devices = [] if accelerator == "cpu" else found.devices
    library = built.find(asked.settings.build_dir).path if accelerator == "cpu" else None
    fixed = {
        # As a file gives it back.
        name: list(entry.value) if isinstance(entry.value, tuple) else entry.value
        for name, entry in asked.settings.values.items()
        if name not in _SILENT and name not in axes.settings_axes()
        and name not in ("model_dir", "threads")
    }  # fmt: skip
    return {
        "code": _code(),
        "python": sys.version.split()[0],
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "device": [one.name or one.accelerator for one in devices]
        or [found.cpu.name, found.cpu.cores],
        "driver": [one.driver for one in devices],
        "threads": threads,
        "compiled kernels": library.name if library else None,
        "model": identity,
        "repeats": asked.method["repeats"],
        "warmup": asked.method["warmup"],
        **{str(_flag(name)): value for name, value in fixed.items()},
    }


def _flag(name: str) -> str:
    setting = registry.find(name)
    return (setting.flag or setting.key) if setting else name


def _code() -> str:
    """The version, and a digest of the sources that run."""
    root = Path(deepinfer.__file__).parent
    seen = hashlib.sha256()
    for path in _sources(root):
        seen.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{deepinfer.__version__} {seen.hexdigest()[:12]}"


def _sources(root: Path) -> Iterable[Path]:
    return sorted(root.rglob("*.py"))


def unfit(before: Mapping[str, Any], now: Mapping[str, Any], hint: str) -> DeepinferError | None:
    """Why a folder cannot be gone on with, if it cannot."""
    differs = [name for name in now if before.get(name) != now[name]]
    if not differs:
        return None
    name = differs[0]
    return UsageError(
        "resume-mismatch",
        f"cannot resume: {name.removeprefix('--')} was {before.get(name)}, now {now[name]}",
        [f"{other} was {before.get(other)}, now {now[other]}" for other in differs[1:6]],
        hint,
    )
