"""The words and tables that `replay-inspect` prints beside its map.

Comes in: a `deepinfer.replay/1` document, as saved. Goes out: lines and rows of text. It must not
know plans, models or the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.report.replay import views

__all__ = [
    "Table", "amount", "ascii_only", "bars", "drift", "facts", "flops", "percent", "title",
    "unit_of",
]  # fmt: skip

_UNITS = (
    (1e15, "PFLOP"),
    (1e12, "TFLOP"),
    (1e9, "GFLOP"),
    (1e6, "MFLOP"),
    (1e3, "kFLOP"),
    (1.0, "FLOP"),
)
_ASCII = {"−": "-", " · ": " | ", "→": "->"}

Table = tuple[tuple[str, ...], list[tuple[str, ...]], str]
"""Column heads, rows, title."""


def unit_of(flops: float, least: int = 10) -> tuple[float, str]:
    """The largest unit of which a number of FLOPs has at least so many: its size and its name."""
    return next(unit for unit in _UNITS if flops >= least * unit[0] or unit[0] == 1)


def title(document: Mapping[str, Any], view: Mapping[str, Any]) -> str:
    """Whose numbers these are, and what is shown if that is not all."""
    model, shown = document["model"]["name"], document["shown"]
    source = {"plan": "plan, nothing ran", "measured": "measured"}[document["source"]]
    line = f"{model} · prompt {document['prompt_tokens']:,} · {keep(view)} · {source}"
    (low, high), (first, last) = shown["layers"], shown["tokens"]
    if high - low < document["model"]["layers"] or last - first < document["prompt_tokens"]:
        line += f"\nonly layers {low}-{high - 1}, tokens {first:,}-{last - 1:,}; totals are of all"
    return line


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
    parts.append(f"state {document['state_bytes'] / 2**20:,.1f} MiB")
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


def bars(document: Mapping[str, Any]) -> list[tuple[str, dict[str, int], float | None]]:
    """Name, FLOPs by component and saved fraction of each keep, behind the uncut prompt (None)
    with the same hit: keeps may resume at different tokens, and then there are several."""
    found, tokens = views(document), document["prompt_tokens"]
    hits: list[int] = []
    several = len({view["cached_tokens"] for view in found}) > 1
    shown: list[tuple[str, dict[str, int], float | None]] = []
    for view in found:
        parts, hit = view["totals"]["components"], view["cached_tokens"]
        if hit not in hits:
            hits.append(hit)
            name = f"full, {tokens - hit:,} new" if several else "full"
            shown.append((name, {n: part["flops_full"] for n, part in parts.items()}, None))
        if view["mode"] != "off":
            spent = {n: part["flops"] for n, part in parts.items()}
            shown.append((keep(view), spent, view["totals"]["flops_saved"]))
    return shown


def flops(document: Mapping[str, Any]) -> Table:
    """FLOPs by component: uncut, and with each keep."""
    shown = bars(document)
    size, unit = unit_of(max(sum(parts.values()) for _, parts, _ in shown))
    heads, columns = ["component"], []
    full: list[int] = []
    names = list(shown[0][1])
    for name, parts, saved in shown:
        numbers = [parts.get(n, 0) for n in names] + [sum(parts.values())]
        heads.append(f"{name} {unit}")
        columns.append([amount(number / size) for number in numbers])
        if saved is None:
            full = numbers
        else:
            heads.append("saved")
            columns.append([percent(1 - a / b) for a, b in zip(numbers, full, strict=True)])
    rows = list(zip([*names, "total"], *columns, strict=True))
    return tuple(heads), rows, "FLOPs of the new tokens (FP8-equivalent)"


def drift(document: Mapping[str, Any]) -> Table:
    rows = [
        (str(row["keep"]), f"{row['max_abs_dlogit']:.4g}", f"{row['kl']:.4g}",
         percent(row["top1_agreement"]))
        for row in document["drift"]
    ]  # fmt: skip
    heads = ("keep", "max |dlogit|", "KL nats", "top-1 agreement")
    return heads, rows, "Drift against the uncut prompt"


def ascii_only(text: str) -> str:
    """The same text for a stream that knows no other characters."""
    for character, plain in _ASCII.items():
        text = text.replace(character, plain)
    return text


def _minus(saved: float) -> str:
    return ("−" if saved >= 0.0005 else "") + percent(saved)


def percent(saved: float) -> str:
    """A fraction of 1 in words."""
    return f"{saved * 100:.1f} %"


def amount(value: float) -> str:
    """Four significant digits, never an exponent."""
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(4 - whole, 0)}f}"
