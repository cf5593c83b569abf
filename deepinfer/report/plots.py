"""The pictures of replay-inspect and the table behind each: PNG (150 dpi) and CSV in a folder.

Comes in: a `deepinfer.replay/1` document, as saved, and a folder. Goes out: files. It must not know
plans, models or the command line; matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.report import heatmap
from deepinfer.report.figures import GREY, new_figure, save_figure
from deepinfer.report.replay import STATES, views
from deepinfer.report.tables import bars, unit_of

__all__ = ["write"]

# Flat colours that stay apart for colour-blind readers and in grey: dark, middle, light, white.
COLOURS = {"computed": "#0B4F8A", "keys_only": "#E69F00", "read": "#9FD0EC", "skipped": "#F1F1F1"}
# Okabe and Ito's palette, in the order of the components.
PALETTE = ("#0072B2", "#56B4E9", "#F0E442", "#009E73", "#D55E00", "#CC79A7", "#999999", "#000000")
RED = "#B3261E"
_BINS = 48


def write(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every picture the document has data for, and its CSV; returns the files."""
    files = []
    for view in views(document):
        files += _heat_map(document, view, folder / f"heatmap-{view['keep']}")
    files += _flops(document, folder / "flops")
    if document.get("drift"):
        files += _drift(document, folder / "drift")
    return files


def _heat_map(document: Mapping[str, Any], view: Mapping[str, Any], base: Path) -> list[Path]:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    layers, tokens = view["layers"], document["prompt_tokens"]
    found = heatmap.edges(document, view, _BINS)
    bins = list(zip(found[1:], found, strict=False))[::-1]
    cells = [
        [STATES.index(heatmap.state_of(layer, tokens - far)) for far, _ in bins] for layer in layers
    ]
    figure, (map_axes, work) = new_figure(
        (11, 1.9 + max(0.13 * len(layers), 1.6)), ncols=2, sharey=True,
        gridspec_kw={"width_ratios": [3.2, 1]},
    )  # fmt: skip
    rows = [layer["index"] - 0.5 for layer in layers] + [layers[-1]["index"] + 0.5]
    map_axes.pcolormesh(
        range(len(bins) + 1), rows, cells, cmap=ListedColormap([COLOURS[s] for s in STATES]),
        vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=0.4,
    )  # fmt: skip
    placed = heatmap.ticks(document, view, found, 0.6)
    map_axes.set_xticks(list(placed), list(placed.values()))
    map_axes.set_xlabel("tokens before the end of the prompt (growing bins)")
    _marks(map_axes, document, view, found)
    _bands(map_axes, layers)
    size, unit = unit_of(max(layer["flops_full"] for layer in layers), 1)
    y = [layer["index"] for layer in layers]
    if view["mode"] != "off":
        full = [layer["flops_full"] / size for layer in layers]
        work.barh(y, full, 0.8, color="#D9D9D9", label="full")
    spent = [sum(layer["flops"].values()) / size for layer in layers]
    work.barh(y, spent, 0.8, color=COLOURS["computed"],
              label="full" if view["mode"] == "off" else view["mode"])  # fmt: skip
    work.set_xlabel(f"{unit} per layer (FP8-equivalent)")
    work.tick_params(left=False, labelleft=False)
    work.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
    states = [s for s in STATES if any(layer[s] for layer in layers)]
    figure.legend(
        handles=[Patch(facecolor=COLOURS[s], edgecolor="#999999", label=heatmap.WORDS[s])
                 for s in states],
        loc="outside lower center", ncols=len(states), frameon=False,
    )  # fmt: skip
    figure.suptitle(_title(document, f"what each layer does, keep {view['keep']}"))
    table = (
        (layer["index"], layer["role"], tokens - far, tokens - near,
         heatmap.state_of(layer, tokens - far), layer["flops_full"], sum(layer["flops"].values()))
        for layer in layers for far, near in bins
    )  # fmt: skip
    head = ("layer", "role", "token_from", "token_to", "state", "layer_flops_full", "layer_flops")
    return save_figure(figure, base, head, table)


def _marks(
    axes: Any, document: Mapping[str, Any], view: Mapping[str, Any], found: Sequence[int]
) -> None:
    """Lines at the keep and the cache hit, their names above the cells, one below the other
    where they would touch."""
    columns, before = len(found) - 1, None
    for name, distance in heatmap.marks(document, view).items():
        at = columns - found.index(distance)
        near = before is not None and abs(at - before) < columns / 3
        text = f"keep {distance:,}" if name == "keep" else \
            f"cache hit at {document['prompt_tokens'] - distance:,}"  # fmt: skip
        side = "left" if at < columns / 8 else "right" if at > columns * 7 / 8 else "center"
        axes.axvline(at, color=RED, linewidth=1.3, linestyle="-" if name == "keep" else "--")
        axes.annotate(text, (at, 1), (0, 18 if near else 4), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha=side, va="bottom", color=RED)  # fmt: skip
        before = at


def _bands(axes: Any, layers: Sequence[Mapping[str, Any]]) -> None:
    """Names of the halves left of the cells, lines between them."""
    for role in dict.fromkeys(layer["role"] for layer in layers):
        inside = [layer["index"] for layer in layers if layer["role"] == role]
        axes.text(
            -0.05, (inside[0] + inside[-1]) / 2, role, transform=axes.get_yaxis_transform(),
            ha="right", va="center", color=GREY,
        )  # fmt: skip
        if inside[0] > layers[0]["index"]:
            axes.axhline(inside[0] - 0.5, color="black", linewidth=0.9)
    axes.text(-0.01, 1.01, "layer", transform=axes.transAxes, ha="right", va="bottom", color=GREY)


def _flops(document: Mapping[str, Any], base: Path) -> list[Path]:
    shown = bars(document)
    names = list(shown[0][1])
    longest = max(sum(parts.values()) for _, parts, _ in shown)
    size, unit = unit_of(longest)
    figure, axes = new_figure((10, 1.9 + 0.55 * len(shown)))
    for row, (_, parts, saved) in enumerate(shown):
        left = 0.0
        for colour, name in zip(PALETTE, names, strict=False):
            value = parts.get(name, 0) / size
            axes.barh(row, value, 0.62, left=left, color=colour, edgecolor="white", linewidth=0.5,
                      label=name if row == 0 else None)  # fmt: skip
            left += value
        text = f" {left:,.4g} {unit}" + (
            f", {saved * 100:.1f} % saved" if saved is not None else ""
        )
        axes.text(left, row, text, va="center")
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, longest / size * 1.28)
    axes.set_xlabel(f"{unit} of the prompt's new tokens (FP8-equivalent)")
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False,
                  handlelength=1.2, columnspacing=1.2)  # fmt: skip
    figure.suptitle(_title(document, "FLOPs by component"))
    table = ((bar, name, parts.get(name, 0)) for bar, parts, _ in shown for name in names)
    return save_figure(figure, base, ("bar", "component", "flops"), table)


def _drift(document: Mapping[str, Any], base: Path) -> list[Path]:
    rows = document["drift"]
    figure, panels = new_figure((8, 5), nrows=2, sharex=True)
    keeps = [str(row["keep"]) for row in rows]
    chosen = keeps.index(str(document["keep"])) if str(document["keep"]) in keeps else None
    for axes, key, name, colour in zip(
        panels, ("max_abs_dlogit", "kl"), ("max |Δlogit|", "KL (nats)"), PALETTE[:5:4], strict=True
    ):
        values = [row[key] for row in rows]
        positive = [v for v in values if v]
        # Zero has no place on a logarithmic axis: such points lie on its lower edge and say so.
        floor = min(positive, default=1e-6) / 10
        axes.plot(
            [at for at, v in enumerate(values) if v], positive, color=colour, zorder=2,
        )  # fmt: skip
        for at, value in enumerate(values):
            axes.plot(at, value or floor, "o", color=colour, markersize=7,
                      markerfacecolor=colour if value else "white", zorder=3)  # fmt: skip
            axes.annotate(f"{value:.2g}" if value else "0", (at, value or floor), (0, 9),
                          textcoords="offset points", ha="center", zorder=4,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(floor / 2, max(positive, default=1e-5) * 6)
        axes.set_ylabel(name)
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        if chosen is not None:
            axes.axvline(chosen, color=RED, linestyle="--", linewidth=1.2, zorder=1)
    if chosen is not None:
        panels[0].text(chosen, 1.02, "chosen", transform=panels[0].get_xaxis_transform(),
                       ha="center", va="bottom", color=RED)  # fmt: skip
    panels[-1].set_xticks(range(len(rows)), keeps)
    panels[-1].set_xlabel("keep (tokens at the end that run through every layer)")
    figure.suptitle(_title({**document, "source": "measured"}, "drift against the uncut prompt"))
    head = ("keep", "max_abs_dlogit", "kl", "top1_agreement")
    return save_figure(figure, base, head, (tuple(row[key] for key in head) for row in rows))


def _title(document: Mapping[str, Any], what: str) -> str:
    """The first line of every picture: whose numbers, and whether anything ran."""
    name, tokens = document["model"]["name"], document["prompt_tokens"]
    return f"{name}, {tokens:,}-token prompt: {what} ({document['source']})"
