"""The record of `replay-inspect`: what a prompt's plan computes and what that saves, as plain data.

Comes in: a model configuration, the cutting rule, a prompt's length, what is cached of it. Goes
out: the parts of the `deepinfer.replay/1` document, which the strip and the pictures are drawn
from; and the proof that a measured run did what the plan says. It must not know settings or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer.errors import InternalError
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay.plan import LayerRanges, ReplayPlan, ReplayRule

__all__ = ["ROLES", "STATES", "Measured", "check", "components", "inspection", "restricted",
           "shape", "thresholds", "views"]  # fmt: skip

STATES = ("computed", "keys_only", "read", "skipped")
# The plan's words for the halves, and those of the pictures.
ROLES = {"encoder": "producer", "boundary": "boundary", "decoder": "consumer"}


class Measured(Protocol):
    """What a run really did: ranges per layer, FLOPs per component of the whole prompt."""

    @property
    def layers(self) -> Sequence[LayerRanges]: ...
    @property
    def flops(self) -> Mapping[str, int]: ...


def shape(config: ModelConfig, name: str, rollback: int) -> dict[str, Any]:
    """The facts of a model that the pictures need."""
    return {
        "name": name,
        "layers": config.num_hidden_layers,
        "boundary": None if config.cut_obstacles else config.decoder_start,
        "window": config.sliding_window,
        "rollback": rollback,
    }


def thresholds(config: ModelConfig, rule: ReplayRule, rollback: int) -> dict[str, Any]:
    """The two keeps of serving semantics §2: the least allowed, and where the cut becomes exact."""
    limits: dict[str, Any] = {"minimum": rule.minimum(rollback), "exact": rule.exact}
    if config.cut_obstacles:
        limits |= {"exact": None, "why": f"cannot be cut: {config.cut_obstacles[0]}"}
    return limits


def inspection(config: ModelConfig, rule: ReplayRule, plan: ReplayPlan) -> dict[str, Any]:
    """One keep: ranges and FLOPs of every layer, and the totals.

    `rows_full`, `flops_full`: mode off, the same prompt and the same hit; `_uncached`: mode off
    and nothing cached. FLOPs are FP8-equivalent (performance ledger §1.3), with one logits row.
    """
    full = rule.plan(plan.tokens, cached=plan.cached, refill=plan.refill, full=True)
    fresh = rule.plan(plan.tokens, full=True)
    spent, spent_full = cost.plan_flops(config, plan), cost.plan_flops(config, full)
    flops, flops_full = components(config, plan), components(config, full)
    layers = [
        {
            **_ranges(ranges),
            "flops": dict(spent[ranges.index]),
            "flops_full": sum(spent_full[ranges.index].values()),
        }
        for ranges in plan.all_ranges()
    ]
    total, total_full = sum(flops.values()), sum(flops_full.values())
    rows, rows_full = _rows(plan), _rows(full)
    return {
        "keep": rule.keep if rule.cuts else "full",
        "mode": plan.mode,
        "exact": plan.kept == 0 or rule.keep >= rule.exact,
        "cached_tokens": plan.cached,
        "replayed_tokens": plan.refill,
        "layers": layers,
        "totals": {
            "rows_full": rows_full,
            "rows": rows,
            "rows_saved": 1 - rows / rows_full,
            "rows_uncached": _rows(fresh),
            "flops_full": total_full,
            "flops": total,
            "flops_saved": 1 - total / total_full,
            "flops_uncached": sum(components(config, fresh).values()),
            "components": {
                name: {"flops_full": flops_full.get(name, 0), "flops": flops.get(name, 0)}
                for name in cost.COMPONENTS
                if flops_full.get(name) or flops.get(name)
            },
        },
    }


def components(config: ModelConfig, plan: ReplayPlan) -> dict[str, int]:
    """FLOPs of a plan by component, all layers and one logits row."""
    summed: dict[str, int] = {}
    for layer in (*cost.plan_flops(config, plan), {"head": cost.head_flops(config, 1)}):
        for name, flops in layer.items():
            summed[name] = summed.get(name, 0) + flops
    return summed


def restricted(
    part: Mapping[str, Any], layers: tuple[int, int], tokens: tuple[int, int]
) -> dict[str, Any]:
    """An inspection of fewer layers and tokens (half-open ranges); its totals stay the whole's."""
    kept = [
        {**layer, **{state: _clipped(layer[state], *tokens) for state in STATES}}
        for layer in part["layers"]
        if layers[0] <= layer["index"] < layers[1]
    ]
    return {**part, "layers": kept}


def views(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The inspections of a document, one per keep, the chosen one first."""
    return [document, *document.get("others", ())]


def check(config: ModelConfig, plan: ReplayPlan, measured: Measured) -> None:
    """Raises InternalError `replay-plan-differs`, naming the first layer and range that differ."""
    for planned, real in zip(plan.all_ranges(), measured.layers, strict=False):
        for state in STATES:
            wanted, got = getattr(planned, state), tuple(getattr(real, state))
            if wanted != got:
                what = f"layer {planned.index}, {state.replace('_', ' ')}"
                raise _differs(what, _shown(wanted), _shown(got))
    if len(measured.layers) != plan.layers:
        raise _differs("layers", f"{plan.layers}", f"{len(measured.layers)}")
    wanted_flops = components(config, plan)
    for name in sorted({*wanted_flops, *measured.flops}):
        a, b = wanted_flops.get(name, 0), measured.flops.get(name, 0)
        if a != b:
            raise _differs(f"FLOPs of {name}", f"{a:,}", f"{b:,}")


def _differs(what: str, planned: str, measured: str) -> InternalError:
    return InternalError(
        "replay-plan-differs",
        f"the run did not do what the plan says: {what}",
        [f"planned {planned}", f"measured {measured}", "this is a bug of deepinfer"],
        "deepinfer doctor --bundle report.txt, and open an issue with it",
    )


def _shown(ranges: Sequence[Sequence[int]]) -> str:
    return " ".join(f"[{a}, {b})" for a, b in ranges) or "nothing"


def _ranges(ranges: LayerRanges) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": ranges.index, "role": ROLES[ranges.role]}
    return shown | {state: [list(r) for r in getattr(ranges, state)] for state in STATES}


def _rows(plan: ReplayPlan) -> int:
    return sum(plan.tokens - min(plan.rows_from(i), plan.tokens) for i in range(plan.layers))


def _clipped(ranges: Sequence[Sequence[int]], start: int, stop: int) -> list[list[int]]:
    cut = [[max(a, start), min(b, stop)] for a, b in ranges]
    return [[a, b] for a, b in cut if a < b]
