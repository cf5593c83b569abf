"""Rules across settings: values that follow from others, and combinations that are refused.

Comes in: parsed settings, later the checkpoint's shape and the device. Goes out: completed
settings, warnings, or a `UsageError` that names both sides. It must not know devices' interfaces or
checkpoints; `ModelShape` lists the few facts it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from deepinfer.errors import UsageError
from deepinfer.settings import registry
from deepinfer.settings.values import SOURCES, Settings, Value

__all__ = ["ModelShape", "check", "derive", "for_device", "for_model"]

DEFAULT_KEEP = 140


class ModelShape(Protocol):
    """What rules need to know of a checkpoint."""

    @property
    def sliding_window(self) -> int: ...
    @property
    def compress_ratios(self) -> tuple[int, ...]: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_nextn_predict_layers(self) -> int: ...
    @property
    def dspark_block_size(self) -> int: ...
    @property
    def cut_obstacles(self) -> tuple[str, ...]: ...


def derive(values: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Fill in values that follow from others; the second result are warnings."""
    out, warnings = dict(values), []
    keep, mode = out["swa_keep"], out["replay_mode"]
    if keep.value == "full":
        if mode.chosen and mode.value != "off" and mode.source == keep.source:
            raise _conflict("replay-keep-conflict", keep, "swa_keep", mode, "replay_mode")
        if _stronger(keep, mode):
            out["replay_mode"] = replace(keep, value="off")
    elif mode.value == "off" and keep.chosen:
        warnings.append(
            f"{keep.origin} {keep.value} is not used: truncation is off ({mode.origin})"
        )
    out["max_rollback"], rollback_warnings = _rollback(out)
    warnings += rollback_warnings
    if not out["verify"].chosen and out["batch_invariant"].value:
        out["verify"] = replace(out["batch_invariant"], value="coupled", source="default")
    if out["max_num_batched_tokens"].value is None:
        rows = max(4096, out["max_num_seqs"].value * (1 + out["mtp"].value))
        out["max_num_batched_tokens"] = Value(rows)
    if out["prefill_chunk"].value is None:
        out["prefill_chunk"] = Value(out["max_num_batched_tokens"].value)
    if out["mtp"].value == 0:
        warnings += _unused(out, "mtp_varlen", False, f"drafting is off ({out['mtp'].origin})")
    elif out["mtp_varlen"].value:
        why = f"the schedule decides ({out['mtp_varlen'].origin})"
        warnings += _unused(out, "mtp_threshold", None, why)
    if not out["prefix_cache"].value:
        why = f"the prefix cache is off ({out['prefix_cache'].origin})"
        warnings += _unused(out, "prefix_cache_dir", None, why)
        warnings += _unused(out, "encoder_replay", False, why)
    return out, warnings


def check(values: Mapping[str, Value]) -> None:
    """Refuse combinations that contradict each other whatever the checkpoint and device."""
    invariant, verify = values["batch_invariant"], values["verify"]
    if invariant.value and verify.value == "rejection":
        raise UsageError(
            "invariant-verify-conflict",
            "--batch-invariant cannot be used with --verify rejection",
            [
                f"from {invariant.origin} and {verify.origin}",
                "rejection sampling makes the text depend on the draft; "
                "coupled verification does not",
            ],
            "--verify coupled",
        )
    if invariant.value and values["encoder_replay"].value:
        raise UsageError(
            "invariant-replay-conflict",
            "--batch-invariant cannot be used with --encoder-replay",
            [
                f"from {invariant.origin} and {values['encoder_replay'].origin}",
                "encoder replay is approximate",
            ],
            "--no-encoder-replay",
        )
    temperatures, mtp = values["mtp_temperature"], values["mtp"]
    if len(temperatures.value) not in (1, mtp.value) and mtp.source not in ("default", "model"):
        raise _temperatures(temperatures, mtp)
    if values["dtype"].value == "fp32":
        accelerator = values["accelerator"]
        if accelerator.value in ("nvidia", "ascend"):
            raise _fp32(values["dtype"], accelerator.value, accelerator)
        for op, name in values["backend"].value.items():
            if name != "torch":
                raise _fp32(values["dtype"], f"{op}={name}", values["backend"])


def for_model(settings: Settings, model: ModelShape) -> Settings:
    """Apply the checkpoint's defaults and check what depends on its shape.

    Raises UsageError: a draft longer than trained, a tail too short for window and rollback, a page
    that is no multiple of a compression ratio, a length the model does not have.
    """
    trained = model.dspark_block_size if model.num_nextn_predict_layers else 0
    values = dict(settings.values)
    mtp = values["mtp"]
    if not mtp.chosen:
        values["mtp"] = mtp = Value(trained, "model", "the checkpoint")
        for attribute in ("max_rollback", "max_num_batched_tokens", "prefill_chunk"):
            if not values[attribute].chosen:
                values[attribute] = Value(None)
        # Warnings about chosen values were given when the settings were resolved.
        values, _ = derive(values)
    elif mtp.value > 0 and not trained:
        raise UsageError(
            "mtp-too-long",
            "this checkpoint has no draft head",
            [f"draft length {mtp.value} from {mtp.origin}"],
            "--mtp 0",
        )
    elif trained and mtp.value > trained:
        raise UsageError(
            "mtp-too-long",
            f"--mtp {mtp.value} exceeds this checkpoint's draft head",
            [f"trained for blocks of {trained}", *_from(mtp, "--mtp")],
            f"--mtp {trained}",
        )
    if trained and len(values["mtp_temperature"].value) not in (1, values["mtp"].value):
        raise _temperatures(values["mtp_temperature"], values["mtp"])
    _check_keep(values, model)
    _check_sizes(values, model)
    return settings.changed(values)


def for_device(
    settings: Settings, accelerator: str, order_dependent: Sequence[str] = ()
) -> Settings:
    """Check what depends on the device that was found (`nvidia`, `ascend` or `cpu`).

    order_dependent: ops whose chosen back end has no fixed-order version on it.
    """
    if settings.batch_invariant and order_dependent:
        raise _order_dependent(settings, accelerator, order_dependent)
    if settings.dtype == "fp32" and accelerator != "cpu":
        raise _fp32(settings.values["dtype"], accelerator, settings.values["accelerator"])
    changed = {"accelerator": replace(settings.values["accelerator"], value=accelerator)}
    if accelerator == "cpu" and not settings.values["overlap"].chosen:
        # To launch a step on a cpu is to run it: looking ahead gains nothing.
        changed["overlap"] = Value(False, "device", "the cpu")
    return settings.changed(changed)


def _check_keep(values: dict[str, Value], model: ModelShape) -> None:
    keep, rollback = values["swa_keep"], values["max_rollback"]
    least = model.sliding_window + rollback.value
    if values["replay_mode"].value == "off" or keep.value == "full":
        return
    if model.cut_obstacles:  # the engine says so once; here only the value follows
        values["replay_mode"] = Value("off", "model", "the checkpoint")
        return
    if not keep.chosen:
        values["swa_keep"] = Value(max(DEFAULT_KEEP, least), "model", "the checkpoint")
    elif keep.value < least:
        why = f"draft length {values['mtp'].value} from {values['mtp'].origin}"
        if rollback.chosen:
            why = f"from {rollback.origin}"
        raise UsageError(
            "swa-keep-too-short",
            f"--swa-keep {keep.value} is too short for this model",
            [
                f"window {model.sliding_window} + longest rollback {rollback.value} = {least} "
                f"({why})",
                *_from(keep, "--swa-keep"),
            ],
            f"--swa-keep {max(DEFAULT_KEEP, least)}, or --swa-keep full",
        )


def _check_sizes(values: Mapping[str, Value], model: ModelShape) -> None:
    page = values["page_tokens"]
    for ratio in sorted({r for r in model.compress_ratios if r > 1}):
        if page.value % ratio:
            raise UsageError(
                "page-tokens-odd",
                f"--page-tokens {page.value} is not a multiple of compression ratio {ratio}",
                _from(page, "--page-tokens"),
                f"--page-tokens {-(-page.value // ratio) * ratio}",
            )
    length = values["max_model_len"]
    if length.value is not None and length.value > model.max_position_embeddings:
        raise UsageError(
            "max-model-len-too-long",
            f"--max-model-len {length.value} exceeds this model",
            [
                f"it has {model.max_position_embeddings} positions",
                *_from(length, "--max-model-len"),
            ],
            f"--max-model-len {model.max_position_embeddings}",
        )


def _rollback(values: Mapping[str, Value]) -> tuple[Value, list[str]]:
    rollback, mtp = values["max_rollback"], values["mtp"]
    least = mtp.value + 1
    if rollback.value is None:
        return Value(least), []
    if rollback.value < least:
        line = (
            f"{rollback.origin} {rollback.value} is less than draft length {mtp.value} + 1; "
            f"{least} is used"
        )
        return replace(rollback, value=least), [line]
    return rollback, []


def _unused(values: Mapping[str, Value], attribute: str, off: object, why: str) -> list[str]:
    entry = values[attribute]
    return [f"{entry.origin} is not used: {why}"] if entry.chosen and entry.value != off else []


def _stronger(one: Value, other: Value) -> bool:
    return SOURCES.index(one.source) >= SOURCES.index(other.source)


def _from(entry: Value, flag: str) -> list[str]:
    return [] if entry.origin == flag else [f"from {entry.origin}"]


def _conflict(code: str, one: Value, a: str, other: Value, b: str) -> UsageError:
    flags = {s.attribute: s.flag for s in registry.SETTINGS}
    return UsageError(
        code,
        f"{flags[a]} {one.value} cannot be used with {flags[b]} {other.value}",
        [f"from {one.origin} and {other.origin}"],
        f"leave one of them out: {flags[a]} or {flags[b]}",
    )


def _temperatures(entry: Value, mtp: Value) -> UsageError:
    return UsageError(
        "mtp-temperature-count",
        f"{entry.origin} has {len(entry.value)} numbers for draft length {mtp.value}",
        [f"one number, or exactly one per draft; draft length from {mtp.origin}"],
        f"unset {entry.origin}",
    )


def _order_dependent(settings: Settings, accelerator: str, ops: Sequence[str]) -> UsageError:
    chosen = settings.values["backend"].value
    mine = [op for op in ops if op in chosen or "all" in chosen]
    hint = "--accelerator cpu for a slow exact run"
    if mine:
        hint = "leave --backend out, or --backend all=torch"
    elif accelerator == "cpu":
        hint = "--backend all=torch"
    return UsageError(
        "invariant-unsupported",
        f"batch-invariant mode is not available on {accelerator}",
        [
            f"ops without a fixed-order version: {', '.join(ops)}",
            f"from {settings.origin('batch_invariant')}"
            + (f" and {settings.origin('backend')}" if mine else ""),
        ],
        hint,
    )


def _fp32(dtype: Value, other: str, entry: Value) -> UsageError:
    return UsageError(
        "dtype-unsupported",
        f"--dtype fp32 cannot be used with {other}",
        [f"from {dtype.origin} and {entry.origin}", "fp32 needs the torch back end on cpu"],
        "--accelerator cpu --backend all=torch",
    )
