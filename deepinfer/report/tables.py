"""The words and tables that `replay-inspect` prints beside its map.

Comes in: a `deepinfer.replay/1` document, as saved. Goes out: lines and rows of text. It must not
know plans, models or the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.report.replay import views

__all__ = ["ascii_only", "drift", "facts", "flops", "title", "unit_of"]

_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
_ASCII = {"−": "-", " · ": " | ", "→": "->", "Δ": "d"}

Table = tuple[tuple[str, ...], list[tuple[str, ...]], str]
"""Column heads, rows, title."""


def unit_of(flops: float) -> tuple[float, str]:
    """The unit in which a number of FLOPs reads well: its size and its name."""
    return next(unit for unit in _UNITS if flops >= unit[0] or unit[0] == 1)


def title(document: Mapping[str, Any], view: Mapping[str, Any]) -> str:
    model = document["model"]["name"]
    source = {"plan": "plan, nothing ran", "measured": "measured"}[document["source"]]
    return f"{model} · prompt {document['prompt_tokens']:,} · {keep(view)} · {source}"


def keep(view: Mapping[str, Any]) -> str:
    """`keep 140`, `keep 140 (mask)` or `keep full`."""
    mode = " (mask)" if view["mode"] == "mask" else ""
    return f"keep {view['keep']}{mode}"


def facts(document: Mapping[str, Any], view: Mapping[str, Any]) -> list[str]:
    """The thresholds, what is new, what is saved."""
    model, limits, totals = document["model"], document["thresholds"], view["totals"]
    least = (
        f"minimum {limits['minimum']:,} (window {model['window']} + rollback {model['rollback']})"
    )
    exact = f"exact from {limits['exact']:,}" if limits["exact"] else limits["why"]
    here = f"here {'exact' if view['exact'] else 'approximate'}"
    new = document["prompt_tokens"] - view["cached_tokens"]
    parts = [f"cached {view['cached_tokens']:,}", f"new {new:,}"]
    if view["replayed_tokens"]:
        parts.append(f"replayed {view['replayed_tokens']:,}")
    parts += [
        f"layer-rows {_minus(totals['rows_saved'])}",
        f"FLOPs {_minus(totals['flops_saved'])}",
    ]  # fmt: skip
    lines = [" · ".join((least, exact, here)), " · ".join(parts)]
    if view["cached_tokens"]:
        rows = 1 - totals["rows"] / totals["rows_uncached"]
        work = 1 - totals["flops"] / totals["flops_uncached"]
        lines.append(
            f"against the whole prompt uncut: layer-rows {_minus(rows)} · FLOPs {_minus(work)}"
        )
    return lines


def flops(document: Mapping[str, Any]) -> Table:
    """FLOPs by component: uncut, and with each keep."""
    cut = [view for view in views(document) if view["mode"] != "off"]
    totals = views(document)[0]["totals"]
    size, unit = unit_of(totals["flops_full"])
    heads = ["component", f"full {unit}"]
    for view in cut:
        heads += [f"{keep(view)} {unit}", "saved"]
    names = {name: (part["flops_full"], [v["totals"]["components"][name]["flops"] for v in cut])
             for name, part in totals["components"].items()}  # fmt: skip
    names["total"] = totals["flops_full"], [v["totals"]["flops"] for v in cut]
    rows = []
    for name, (full, others) in names.items():
        row = [name, _amount(full / size)]
        for other in others:
            row += [_amount(other / size), _percent(1 - other / full)]
        rows.append(tuple(row))
    return tuple(heads), rows, "FLOPs of the new tokens (FP8-equivalent)"


def drift(document: Mapping[str, Any]) -> Table:
    rows = [
        (str(row["keep"]), f"{row['max_abs_dlogit']:.4g}", f"{row['kl']:.4g}",
         _percent(row["top1_agreement"]))
        for row in document["drift"]
    ]  # fmt: skip
    heads = ("keep", "max |Δlogit|", "KL nats", "top-1 agreement")
    return heads, rows, "Drift against the uncut prompt"


def ascii_only(text: str) -> str:
    """The same text for a stream that knows no other characters."""
    for character, plain in _ASCII.items():
        text = text.replace(character, plain)
    return text


def _minus(saved: float) -> str:
    return ("−" if saved >= 0.0005 else "") + _percent(saved)


def _percent(saved: float) -> str:
    return f"{saved * 100:.1f} %"


def _amount(value: float) -> str:
    """Four significant digits, never an exponent."""
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(4 - whole, 0)}f}"
