"""The pictures of spec-trace and the table behind each: PNG (150 dpi) and CSV in a folder.

Comes in: a `Trace`, as saved, its summary, and a folder. Goes out: files. It must not know models
or the command line; matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.report.figures import GREY, new_figure, save_figure
from deepinfer.report.trace_views import FORMULA, shown
from deepinfer.speculative.acceptance import outcomes, reliability
from deepinfer.speculative.trace import Line, Trace

__all__ = ["write"]

# From dark to light in grey, too: accepted, verified in vain, only drafted.
BLUE, ORANGE, LIGHT = "#0B4F8A", "#E69F00", "#D9D9D9"
PALE = "#B8B8B8"
FEW = 30  # outcomes below which a rate is drawn in grey
_PANELS = 8  # answers in the timeline
_MEAN = 9  # steps of its running mean


def write(trace: Trace, summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every picture there is data for, and its CSV; returns the files. Raises OSError."""
    if not summary["steps"]:
        return []
    files = _histogram(trace, summary, folder / "accepted-length")
    if summary["drafted"]:
        files += _positions(trace, summary, folder / "acceptance-by-position")
    if summary["outcomes"]:
        files += _calibration(trace, summary, folder / "calibration")
    return files + _timeline(trace, folder / "timeline")


def _histogram(trace: Trace, summary: Mapping[str, Any], base: Path) -> list[Path]:
    counts, steps = summary["histogram"], summary["steps"]
    figure, axes = new_figure((8, 4.2))
    axes.bar(range(len(counts)), counts, 0.8, color=BLUE)
    for tokens, count in enumerate(counts):
        axes.text(tokens, count, f"{count / steps:.1%}" if count else "", ha="center", va="bottom")
    axes.axvline(summary["accepted_length"], color=ORANGE, linestyle="--", linewidth=1.5)
    first = 0 if counts[0] else 1
    axes.set_xticks(range(first, len(counts)))
    axes.set_xlim(first - 0.6, len(counts) - 0.4)
    axes.set_xlabel("tokens committed by a step")
    axes.set_ylabel("steps")
    axes.margins(y=0.12)
    figure.suptitle(
        f"{_name(trace)}: accepted length {summary['accepted_length']:.2f}\n"
        f"= {FORMULA} ({summary['tokens']:,} / {steps:,})"
    )
    rows = ((tokens, count, count / steps) for tokens, count in enumerate(counts))
    return save_figure(figure, base, ("tokens_committed", "steps", "share"), rows)


def _positions(trace: Trace, summary: Mapping[str, Any], base: Path) -> list[Path]:
    rows = summary["by_position"]
    figure, axes = new_figure((8, 4.2))
    behind = axes.twinx()
    behind.spines["top"].set_visible(False)
    _behind(axes, behind)
    x = [row["position"] for row in rows]
    behind.bar(x, [row["drafted"] for row in rows], 0.8, color=LIGHT, label="drafted")
    behind.set_ylabel("drafts", color=GREY)
    axes.plot(x, [row["acceptance"] for row in rows], color=BLUE, linewidth=1.5)
    for row in rows:
        few = row["drafted"] < FEW
        axes.plot(
            row["position"], row["acceptance"], "o", color=PALE if few else BLUE, markersize=8
        )
        axes.annotate(
            f"{row['acceptance']:.1%}", (row["position"], row["acceptance"]), (6, 6),
            textcoords="offset points", color=GREY if few else "black",
        )  # fmt: skip
    axes.set_ylim(0, 1.1)
    axes.set_xticks(x)
    axes.set_xlabel("position of the draft in its block")
    axes.set_ylabel("accepted / drafted")
    rate = f"{_name(trace)}: acceptance by position, {summary['acceptance_rate']:.1%} in all"
    figure.suptitle(f"{rate}\nbars: drafts; grey points: fewer than {FEW}")
    head = ("position", "drafted", "verified", "accepted", "acceptance")
    return save_figure(figure, base, head, ([row[name] for name in head] for row in rows))


def _calibration(trace: Trace, summary: Mapping[str, Any], base: Path) -> list[Path]:
    found = [pairs for pairs in outcomes(trace.steps) if pairs]
    panels: list[tuple[str, Sequence[tuple[float, bool]], Mapping[str, Any]]] = [
        ("all drafts", [pair for pairs in found for pair in pairs], summary)
    ]
    if len(found) > 1:
        measured = [row for row in summary["by_position"] if row["verified"]]
        panels += [
            (f"draft {row['position']}", pairs, row)
            for row, pairs in zip(measured, found, strict=True)
        ]
    columns = min(len(panels), 3)
    tall = -(-len(panels) // columns)
    figure, grid = new_figure(
        (3.6 * columns + 0.6, 3.5 * tall + 0.7), nrows=tall, ncols=columns, squeeze=False
    )
    table = []
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, pairs, quality) in zip(grid.flat, panels, strict=False):
        bins = reliability(pairs)
        _reliability(axes, bins)
        axes.set_title(f"{title}\n{_measures(quality)}", fontsize=9)
        table += [[title, *row.values()] for row in bins]
    for axes in grid[:, 0]:
        axes.set_ylabel("observed survival")
    for axes in grid[-1]:
        axes.set_xlabel("predicted survival")
    figure.suptitle(
        f"{_name(trace)}: confidence of {len(panels[0][1]):,} verified drafts\n"
        f"bars: drafts, right axis; grey points: fewer than {FEW}"
    )
    head = ("drafts", "from", "to", "count", "predicted", "observed")
    return save_figure(figure, base, head, table)


def _reliability(axes: Any, bins: Sequence[Mapping[str, float]]) -> None:
    """Predicted against observed survival, the counts as bars behind."""
    behind = axes.twinx()
    _behind(axes, behind)
    behind.spines[["top", "right"]].set_visible(False)
    wide = bins[0]["high"] - bins[0]["low"]
    behind.bar(
        [row["low"] + wide / 2 for row in bins], [row["count"] for row in bins], wide * 0.9,
        color=LIGHT,
    )  # fmt: skip
    behind.tick_params(colors=GREY, labelsize=7)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    many = [row for row in bins if row["count"] >= FEW]
    axes.plot(
        [row["predicted"] for row in many], [row["observed"] for row in many], "o-", color=BLUE,
        markersize=5, linewidth=1.2,
    )  # fmt: skip
    few = [row for row in bins if row["count"] < FEW]
    axes.plot(
        [row["predicted"] for row in few], [row["observed"] for row in few], "o", color=PALE,
        markersize=5, markeredgecolor=GREY, markeredgewidth=0.5,
    )  # fmt: skip
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.04, 1.04)


def _timeline(trace: Trace, base: Path) -> list[Path]:
    answers = [(seq, lines) for seq, lines in enumerate(trace.by_sequence()) if lines]
    drawn = answers[:_PANELS]
    figure, grid = new_figure((11, 1.2 + 1.7 * len(drawn)), nrows=len(drawn), squeeze=False)
    most = max(len(line.step.draft_ids) for _, lines in drawn for line in lines)
    for axes, (seq, lines) in zip(grid[:, 0], drawn, strict=True):
        _steps(axes, lines)
        axes.set_ylim(0, most + 0.6)
        if len(trace.sequences) > 1:
            axes.set_title(f"prompt {seq + 1}", fontsize=8, loc="left")
    grid[-1, 0].set_xlabel("decoding step of the answer")
    grid[0, 0].set_ylabel("drafts")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    which = "" if len(drawn) == len(answers) else f", the first {len(drawn)} of {len(answers)}"
    figure.suptitle(f"{_name(trace)}: drafted and accepted by step{which}")
    head = ("prompt", "step", "position", "drafted", "verified", "accepted", "committed")
    rows = [
        (seq + 1, step.step, step.pos, len(step.draft_ids), step.verified, step.accepted,
         step.committed)
        for seq, lines in answers for step in (line.step for line in lines)
    ]  # fmt: skip
    return save_figure(figure, base, head, rows)


def _steps(axes: Any, lines: Sequence[Line]) -> None:
    """Three bars one before the other per step, and how it goes on average."""
    x = range(1, len(lines) + 1)
    drafted = [len(line.step.draft_ids) for line in lines]
    verified = [line.step.verified for line in lines]
    accepted = [line.step.accepted for line in lines]
    axes.bar(x, drafted, 1.0, color=LIGHT, label="drafted")
    axes.bar(x, verified, 1.0, color=ORANGE, label="verified in vain")
    axes.bar(x, accepted, 1.0, color=BLUE, label="accepted")
    near = [accepted[max(0, i - _MEAN // 2) : i + _MEAN // 2 + 1] for i in range(len(lines))]
    axes.plot(
        x, [sum(some) / len(some) for some in near], color="black", linewidth=1.2,
        label=f"accepted, mean of {_MEAN} steps",
    )  # fmt: skip
    axes.set_xlim(0.5, len(lines) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _behind(axes: Any, behind: Any) -> None:
    """Draw the second axes below the first ones, which have to be see-through for that."""
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_axisbelow(True)


def _measures(quality: Mapping[str, Any]) -> str:
    auroc = "-" if quality["auroc"] is None else f"{quality['auroc']:.3f}"
    return f"ECE {quality['ece']:.1%}, Brier {quality['brier']:.3f}, AUROC {auroc}"


def _name(trace: Trace) -> str:
    rule = trace.header["speculation"]
    how = "varlen" if rule["varlen"] else f"mtp {rule['mtp']}"
    # A font has few alphabets, and a dollar would begin a formula.
    name = shown(trace.header["model"]["name"]).encode("ascii", "backslashreplace").decode()
    return f"{name} ({how})".replace("$", r"\$")
