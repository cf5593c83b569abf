"""A figure to draw on, and its two files: PNG (150 dpi) and the CSV behind it.

Comes in: sizes, then a figure and the rows it was drawn from. Goes out: files. It must not know
what is drawn; matplotlib is imported when a figure is made.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["GREY", "new_figure", "save_figure"]

GREY = "#555555"
_DPI = 150


def new_figure(size: tuple[float, float], **grid: Any) -> tuple[Any, Any]:
    """A figure and its axes, without a window system, so that drawing works anywhere.

    size: inches. grid: arguments of `subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**grid)
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(
    figure: Any, base: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[Path]:
    """Write both files, named `base` and its endings."""
    picture, table = base.with_suffix(".png"), base.with_suffix(".csv")
    figure.savefig(picture, dpi=_DPI)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return [picture, table]
