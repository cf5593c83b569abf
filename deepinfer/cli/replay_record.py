"""The `deepinfer.replay/1` document of a question: planned, or measured by running the model.

Comes in: what was asked. Goes out: the document without its head. The engine is loaded here and
nowhere else in this command, and only where something has to run; it must not know how a document
is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.cli.replay_input import Asked
from deepinfer.errors import CapacityError
from deepinfer.model import cost
from deepinfer.report import replay
from deepinfer.settings import Settings

if TYPE_CHECKING:
    from deepinfer.replay.plan import ReplayPlan

__all__ = ["body"]

DRIFT_TOKENS = 64


def body(output: Output, asked: Asked, measure: bool, compare_full: bool) -> dict[str, Any]:
    """Plans of all keeps; measure: run each too and raise InternalError where it differs;
    compare_full: the drift of each keep as well."""
    parts = []
    for settings, rule, plan in asked.plans:
        if measure:
            replay.check(asked.config, plan, _measured(output, settings, asked, plan))
        view = replay.inspection(asked.config, rule, plan)
        parts.append(replay.restricted(view, asked.layers, asked.tokens))
    settings, rule, _ = asked.plans[0]
    document: dict[str, Any] = {
        "source": "measured" if measure else "plan",
        "model": replay.shape(asked.config, asked.name, settings.max_rollback),
        "prompt_tokens": asked.prompt_tokens,
        "requested_cached_tokens": asked.cached,
        "state_bytes": cost.held_bytes(
            asked.config, asked.prompt_tokens, settings.max_rollback, settings.mtp > 0
        ),
        "thresholds": replay.thresholds(asked.config, rule, settings.max_rollback),
        "shown": {"layers": list(asked.layers), "tokens": list(asked.tokens)},
        **parts[0],
    }
    if parts[1:]:
        document["others"] = parts[1:]
    if compare_full:
        document["drift"] = _drift(output, settings, asked)
    return document


def _measured(output: Output, settings: Settings, asked: Asked, plan: ReplayPlan) -> Any:
    """What the engine's prefill of the prompt really did."""
    import deepinfer

    output.say(f"running {plan.tokens - plan.first:,} tokens, keep {settings.swa_keep}")
    warn = _unsaid(output, asked)
    llm = deepinfer.LLM.from_settings(settings, on_warning=warn)  # type: ignore[attr-defined]
    try:
        return llm.measure(asked.prompt_ids(), cached=plan.cached)
    finally:
        llm.close()


def _drift(output: Output, settings: Settings, asked: Asked) -> list[dict[str, Any]]:
    """One row per keep; the uncut prompt is what the others are compared with."""
    from deepinfer.engine.assembly import assemble
    from deepinfer.replay.drift import drift

    keeps = [rule.keep if rule.cuts else "full" for _, rule, _ in asked.plans]
    cut = [keep for keep in keeps if isinstance(keep, int)]
    found: dict[int, Any] = {}
    if cut:
        warn = _unsaid(output, asked)
        parts, ids = assemble(settings, warn), asked.prompt_ids()
        for line in parts.warnings:
            warn(line)
        most = parts.sizes.max_model_len
        if len(ids) >= most:
            raise CapacityError(
                "prompt-too-long",
                f"the prompt has {len(ids):,} tokens, the model takes {most:,} including those "
                "compared",
                hint=f"--prompt-len {most - DRIFT_TOKENS}",
            )
        output.say(f"comparing {len(cut)} keeps with the uncut prompt")
        tokens = min(DRIFT_TOKENS, most - len(ids))
        found = drift(parts.runner, parts.sizes, [ids], cut, tokens)
    return [_row(keep, found[keep] if isinstance(keep, int) else None) for keep in keeps]


def _unsaid(output: Output, asked: Asked) -> Callable[[str], None]:
    """Warnings of the engine, without those that were given when the question was read."""

    def warn(line: str) -> None:
        if line not in asked.said:
            output.warn(line)

    return warn


def _row(keep: int | str, drift: Any) -> dict[str, Any]:
    """None: the uncut prompt itself, with which the others are compared."""
    row = {"keep": keep, "max_abs_dlogit": 0.0, "kl": 0.0, "top1_agreement": 1.0}
    return row if drift is None else {key: getattr(drift, key, keep) for key in row}
