"""The pictures of bench and the table behind each: PNG (150 dpi) and CSV in a folder.

Comes in: saved rows, the run's `meta`, and a folder. Goes out: files, one for each picture there is
data for. It must not know how rows are measured; matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.report.bench import ceilings
from deepinfer.report.bench_rows import Row, good, label, median, spread, varying, word
from deepinfer.report.figures import GREY, new_figure, save_figure

__all__ = ["write"]

# Okabe and Ito's palette without yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v")
STROKES = ("-", "--", ":", "-.")
CURVES = 20  # more are told apart by nobody
PANELS = 6
UNITS = {"_tflop_per_s": 1e12, "_gflop_per_s": 1e9, "_flop_per_s": 1.0}


@dataclass(frozen=True)
class Curve:
    """Rows that differ along one axis only. colour, mark: which value of the others it has."""

    name: str
    colour: int
    mark: int
    rows: list[Row]


def write(meta: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every picture the measured rows allow, and its CSV; returns the files. Raises OSError.

    A folder that is missing is made where there is anything to draw.
    """
    runs = [row for row in rows if good(row) and row.get("kind", "e2e") == "e2e"]
    ops = [row for row in rows if good(row) and row.get("kind") == "ops"]
    if runs or ops:
        folder.mkdir(parents=True, exist_ok=True)
    files = _prefill(runs, folder / "prefill-pareto") + _decode(runs, folder / "decode-pareto")
    files += _depth(runs, folder / "context-depth") + _speedups(runs, folder)
    return files + _roofline(meta, ops, folder / "ops-roofline")


# Curves over load and over depth ----------------------------------------------------------------


def _prefill(rows: Sequence[Row], base: Path) -> list[Path]:
    """Computed prompt tokens a second against the time to the first token."""
    shown = [row for row in rows if median(row.get("prompt_tok_s")) and median(row.get("ttft_ms"))]
    if not shown:
        return []
    return _pareto(
        shown, base, "Prefill: computed prompt tokens against first token",
        ("time to first token, ms", "ttft_ms"), ("prompt tokens/s, cached ones left out",
        "prompt_tok_s"), lambda row: row["ttft_ms"], lambda row: row["prompt_tok_s"], "prefill",
        # A run at the ceiling is faster by one factor on both axes.
        lambda row, share: (_at(row, "ttft_ms") * share, _at(row, "prompt_tok_s") / share),
    )  # fmt: skip


def _decode(rows: Sequence[Row], base: Path) -> list[Path]:
    """Tokens a second of the machine against those of one request, while all decode."""
    shown = [row for row in rows if median(row.get("decode_tok_s"))]
    if len({row["axes"]["batch_size"] for row in shown}) < 2:
        return []  # both axes would show the same number
    return _pareto(
        shown, base, "Decode: output of a card against speed of a user, while all decode",
        ("tokens/s of one user", "user_tok_s"),
        ("tokens/s of a card", "decode_tok_s_per_card"), _user, _card, "decode",
        lambda row, share: (_user(row)["median"] / share, _card(row)["median"] / share),
    )  # fmt: skip


def _pareto(
    rows: Sequence[Row],
    base: Path,
    title: str,
    across: tuple[str, str],
    upward: tuple[str, str],
    x_of: Callable[[Row], Mapping[str, float]],
    y_of: Callable[[Row], Mapping[str, float]],
    part: str,
    best: Callable[[Row, float], tuple[float, float]],
) -> list[Path]:
    """Points of both measures with their spread, a curve for each setting, the ceiling dashed."""
    load = "batch_size" if "batch_size" in varying(rows) else "prompt_len"
    curves, hidden = _curves(rows, load)
    figure, axes = new_figure((9, 5.6))
    table: list[list[Any]] = []
    ceiling: list[tuple[float, float]] = []
    places: list[tuple[float, float, str]] = []
    for curve in curves:
        x, y = [x_of(row) for row in curve.rows], [y_of(row) for row in curve.rows]
        # Decoding, both have one spread: that of the card's tokens.
        own = x if part == "prefill" else [{"median": one["median"]} for one in x]
        _line(axes, own, y, curve)
        for row, here, there in zip(curve.rows, x, y, strict=True):
            share = _share(row, part)
            found = best(row, share) if share else None
            ceiling += [found] if found else []
            places.append((here["median"], there["median"], word(row["axes"].get(load))))
            table.append([curve.name, row["axes"].get(load), *_three(here), *_three(there),
                          *(found or (None, None))])  # fmt: skip
    if ceiling:
        axes.plot(*zip(*ceiling, strict=True), ".", color=GREY, markersize=3,
                  label="ceiling of each point")  # fmt: skip
    _logarithmic(axes)
    if ceiling:
        _frontier(axes, ceiling, part == "prefill")
    _numbers(figure, axes, places)
    axes.set_xlabel(across[0])
    axes.set_ylabel(upward[0])
    how = f"points: {_spelled(load)}; bars: 5th to 95th percentile"
    _finish(figure, axes, rows, f"{title}\n{how}", hidden)
    head = ("curve", load, *_heads(across[1]), *_heads(upward[1]), "ceiling_x", "ceiling_y")
    return save_figure(figure, base, head, table)


def _frontier(axes: Any, points: Sequence[tuple[float, float]], early: bool) -> None:
    """The ceilings that no other one exceeds on both axes, and the axes' ends of both. early: a
    small x is the better one."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda at: at if early else (-at[0], at[1])):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    whole = [(kept[0][0], bottom), *kept, (right if early else left, kept[-1][1])]
    axes.plot(*zip(*whole, strict=True), color=GREY, linestyle="--", linewidth=1.2,
              label="best of these ceilings")  # fmt: skip
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _numbers(figure: Any, axes: Any, places: Sequence[tuple[float, float, str]]) -> None:
    """Writes beside each point what it stands for, once where several points lie close."""
    figure.draw_without_rendering()
    written: list[tuple[float, float, str]] = []
    for x, y, text in places:
        at, up = axes.transData.transform((x, y))
        if any(text == t and abs(at - a) < 60 and abs(up - u) < 40 for a, u, t in written):
            continue
        written.append((at, up, text))
        axes.annotate(text, (x, y), (6, 5), textcoords="offset points", fontsize=7, color=GREY)


def _depth(rows: Sequence[Row], base: Path) -> list[Path]:
    """How speed falls with the length of the context, prefill and decode."""
    rows = [row for row in rows if row["axes"].get("prompt_len")]
    lengths = {row["axes"]["prompt_len"] for row in rows}
    if len(lengths) < 2:
        return []
    curves, hidden = _curves(rows, "prompt_len")
    parts = [
        (what, unit, values)
        for what, unit, values in (
            ("prefill", "computed prompt tokens/s", lambda row: row.get("prompt_tok_s")),
            ("decode", "tokens/s of one user, all decoding", _user),
        )
        if any(median(values(row)) is not None for row in rows)
    ]
    if not parts:
        return []
    height = 1 + 3 * len(parts)
    figure, panels = new_figure((9, height), nrows=len(parts), sharex=True, squeeze=False)
    panels, table = panels[:, 0], []
    for axes, (what, unit, values) in zip(panels, parts, strict=True):
        for curve in curves:
            some = [(row, values(row)) for row in curve.rows if median(values(row)) is not None]
            x = [{"median": row["axes"]["prompt_len"]} for row, _ in some]
            _line(axes, x, [value for _, value in some], curve)
            table += [[what, curve.name, row["axes"]["prompt_len"], *_three(v)] for row, v in some]
        axes.set_ylabel(unit)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.4g}" if axes.get_ylim()[1] < 1000 else "{x:,.0f}")
        axes.grid(color="#EEEEEE")
    ticks = sorted(lengths)
    panels[-1].set_xticks(ticks, [f"{length:,}" for length in ticks])
    panels[-1].minorticks_off()
    panels[-1].set_xlabel("prompt tokens")
    _finish(figure, panels[0], rows, "Speed against context\nbars: 5th to 95th percentile", hidden)
    return save_figure(figure, base, ("part", "curve", "prompt_len", *_heads("tok_s")), table)


# Keep by draft length ----------------------------------------------------------------------------


def _speedups(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A matrix of output tokens a second for each value of the other axes."""
    found = [row for row in rows if median(row.get("output_tok_s"))]
    others = [name for name in varying(found) if name not in ("swa_keep", "mtp")]
    groups: dict[str, list[Row]] = {}
    for row in found:
        groups.setdefault(label(row, others), []).append(row)
    matrices = [
        (name, some) for name, some in groups.items()
        if {"swa_keep", "mtp"} <= set(varying(some))
    ]  # fmt: skip
    if not matrices:
        return []
    drawn = matrices[:PANELS]
    columns = min(len(drawn), 2)
    tall = -(-len(drawn) // columns)
    keeps = sorted({row["axes"]["swa_keep"] for row in found}, key=_keep_order)
    drafts = sorted({row["axes"]["mtp"] for row in found})
    figure, grid = new_figure(
        (1.6 + columns * max(1.1 * len(drafts), 3), 1.4 + tall * (0.8 + 0.62 * len(keeps))),
        nrows=tall, ncols=columns, squeeze=False,
    )  # fmt: skip
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    table: list[list[Any]] = []
    values = {name: _matrix(some, keeps, drafts) for name, some in matrices}
    every = [v for cells, _ in values.values() for line in cells for v in line if v is not None]
    for name, (cells, _) in values.items():
        table += [
            [name, keep, mtp, cells[i][j]]
            for i, keep in enumerate(keeps) for j, mtp in enumerate(drafts)
        ]  # fmt: skip
    for axes, (name, _) in zip(grid.flat, drawn, strict=False):
        _cells(axes, *values[name], keeps, drafts, (min(every), max(every)))
        axes.set_title(name if others else "", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("keep")
    for axes in grid.flat[max(len(drawn) - columns, 0) : len(drawn)]:
        axes.set_xlabel("draft length (mtp)")
    which = "" if len(drawn) == len(matrices) else f", the first {len(drawn)} of {len(matrices)}"
    base = folder / "speedup-keep-mtp"
    _title(figure, found, f"Output tokens/s over the framed cell{which}")
    return save_figure(figure, base, ("panel", "swa_keep", "mtp", "speedup"), table)


def _matrix(
    rows: Sequence[Row], keeps: Sequence[Any], drafts: Sequence[Any]
) -> tuple[list[list[float | None]], tuple[int, int]]:
    """Speed over that of the cell with the longest keep and the fewest drafts, and its place."""
    speeds = {(row["axes"]["swa_keep"], row["axes"]["mtp"]): _at(row, "output_tok_s")
              for row in rows}  # fmt: skip
    keep, mtp = max(speeds, key=lambda at: (-drafts.index(at[1]), keeps.index(at[0])))
    base = keeps.index(keep), drafts.index(mtp)
    of = speeds[keep, mtp]
    cells = [
        [speeds[keep, mtp] / of if (keep, mtp) in speeds else None for mtp in drafts]
        for keep in keeps
    ]
    return cells, base


def _cells(
    axes: Any,
    cells: Sequence[Sequence[float | None]],
    base: tuple[int, int],
    keeps: Sequence[Any],
    drafts: Sequence[Any],
    limits: tuple[float, float],
) -> None:
    from matplotlib.patches import Rectangle

    low, high = limits
    filled = [[float("nan") if v is None else v for v in line] for line in cells]
    axes.imshow(filled, cmap="Blues", vmin=low - 0.15 * (high - low), vmax=high + 1e-9,
                aspect="auto")  # fmt: skip
    for i, line in enumerate(cells):
        for j, value in enumerate(line):
            dark = value is not None and value > low + 0.5 * (high - low)
            axes.text(j, i, "-" if value is None else f"{value:.2f}×", ha="center", va="center",
                      color="white" if dark else "black")  # fmt: skip
    axes.add_patch(Rectangle((base[1] - 0.5, base[0] - 0.5), 1, 1, fill=False, linewidth=2,
                             edgecolor="black", clip_on=False))  # fmt: skip
    axes.set_xticks(range(len(drafts)), [word(mtp) for mtp in drafts])
    axes.set_yticks(range(len(keeps)), [word(keep) for keep in keeps])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# Ops ---------------------------------------------------------------------------------------------


def _roofline(meta: Mapping[str, Any], rows: Sequence[Row], base: Path) -> list[Path]:
    """Achieved products against work for a byte, under what the machine was measured to do."""
    shown = [row for row in rows if _intensity(row) and median(row.get("flop_per_s"))]
    if not shown:
        return []
    figure, axes = new_figure((9.5, 6))
    curves, hidden = _curves(shown, "rows")
    table = []
    for curve in curves:
        x = [{"median": _intensity(row)} for row in curve.rows]
        y = [_scaled(row["flop_per_s"], 1e-9) for row in curve.rows]
        _line(axes, x, y, curve)
        table += [
            [curve.name, row["axes"].get("rows"), here["median"], *_three(there),
             median(row.get("gb_per_s"))]
            for row, here, there in zip(curve.rows, x, y, strict=True)
        ]  # fmt: skip
    reach = [_intensity(row) for row in shown]
    _roofs(axes, meta, min(reach) / 2, max(reach) * 2)
    _logarithmic(axes)
    axes.set_xlabel("FLOP for each byte moved")
    axes.set_ylabel("GFLOP/s")
    title = "Ops against the measured ceilings\npoints: rows; bars: 5th to 95th percentile"
    _finish(figure, axes, shown, title, hidden)
    head = ("op", "rows", "flop_per_byte", *_heads("gflop_per_s"), "gb_per_s")
    return save_figure(figure, base, head, table)


def _roofs(axes: Any, meta: Mapping[str, Any], low: float, high: float) -> None:
    """The slope of the copy bandwidth, up to each flat roof of a matmul rate."""
    known = {name: value for name, value, _ in ceilings(meta) if value}
    copies = [value for name, value in known.items() if name.endswith("_gb_per_s")]
    for name, value in known.items():
        end, unit = next(((e, u) for e, u in UNITS.items() if name.endswith(e)), ("", 0.0))
        if not unit:
            continue
        roof = value * unit / 1e9
        knee = roof / max(copies) if copies else low
        x = [low, *((knee,) if low < knee < high else ()), high]
        y = [min(roof, max(copies) * at) if copies else roof for at in x]
        axes.plot(x, y, color=GREY, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{name.removesuffix(end)} matmul {roof:,.4g}" if y[-1] == roof else
            f"copy {max(copies):,.4g} GB/s", (x[-1], y[-1]), (-2, 4),
            textcoords="offset points", ha="right", fontsize=8, color=GREY,
        )  # fmt: skip
    if copies:
        axes.annotate(
            f"copy {max(copies):,.4g} GB/s", (low, low * max(copies)), (8, -8),
            textcoords="offset points", fontsize=8, color=GREY,
        )  # fmt: skip


# Parts of pictures -------------------------------------------------------------------------------


def _curves(rows: Sequence[Row], along: str) -> tuple[list[Curve], int]:
    """Rows that differ in nothing but one axis, in its order, and how many curves are too many.

    The last other axis gives the colour, all before it the marker and the stroke.
    """
    names = [name for name in varying(rows) if name != along]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((label(row, names[:-1]), label(row, names[-1:])), []).append(row)
    marks, colours = (list(dict.fromkeys(part)) for part in zip(*groups, strict=True))
    curves = [
        Curve(
            label(some[0], names) if names else "measured", colours.index(colour),
            marks.index(mark), sorted(some, key=lambda row: row["axes"].get(along) or 0),
        )
        for (mark, colour), some in groups.items()
    ]  # fmt: skip
    return curves[:CURVES], max(len(curves) - CURVES, 0)


def _line(
    axes: Any, x: Sequence[Mapping[str, float]], y: Sequence[Mapping[str, float]], curve: Curve
) -> None:
    """Points with the spread of both measures, joined in the order given."""
    if not x:
        return
    for bars in axes.errorbar(
        [value["median"] for value in x], [value["median"] for value in y],
        xerr=list(zip(*map(spread, x), strict=True)), yerr=list(zip(*map(spread, y), strict=True)),
        color=COLOURS[curve.colour % len(COLOURS)], marker=MARKERS[curve.mark % len(MARKERS)],
        linestyle=STROKES[curve.mark % len(STROKES)], markersize=5, linewidth=1.3,
        elinewidth=0.8, capsize=2, label=_plain(curve.name),
    )[2]:  # fmt: skip
        bars.set_alpha(0.5)


def _finish(figure: Any, axes: Any, rows: Sequence[Row], title: str, hidden: int) -> None:
    """Legend below the axes, title, watermark."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    figure.legend(
        [getattr(handle, "lines", [handle])[0] for handle in handles], labels, frameon=False,
        loc="outside lower center", fontsize=8, ncols=max(1, min(4, 110 // (longest + 8))),
    )  # fmt: skip
    first, _, second = title.partition("\n")
    more = f" ({hidden} further curves left out)" if hidden else ""
    _title(figure, rows, first + more, second)


def _title(figure: Any, rows: Sequence[Row], first: str, last: str = "") -> None:
    """What is shown, of what, and how to read it."""
    names = varying(rows)
    fixed = [
        name for name in ("model", "synthetic", "accelerator", "backend", "workload", "cached")
        if name not in names and rows[0]["axes"].get(name)
    ]  # fmt: skip
    shaky = sum(row.get("steady") is False for row in rows)
    if shaky:
        last += ("; " if last else "") + f"{shaky} of {len(rows)} rows not steady"
    lines = [first, _plain(label(rows[0], fixed)) if fixed else "", last]
    figure.suptitle("\n".join(line for line in lines if line), fontsize=10)
    _watermark(figure, rows)


def _watermark(figure: Any, rows: Iterable[Row]) -> None:
    """Says across the picture that weights were random."""
    if any(row["axes"].get("synthetic") for row in rows):
        figure.text(
            0.5, 0.5, "SYNTHETIC WEIGHTS", ha="center", va="center", rotation=28, fontsize=38,
            color="#B3261E", alpha=0.16, zorder=10,
        )  # fmt: skip


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(xscale="log", yscale="log")
    axes.margins(0.12)
    axes.autoscale_view()
    for one, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        wide = high / low
        subs = (1, 1.5, 2, 3, 4, 6, 8) if wide < 10 else (1, 2, 5) if wide < 3e3 else (1,)
        one.set_major_locator(LogLocator(subs=subs))
        one.set_major_formatter(
            FuncFormatter(lambda at, _: f"{at:,.4g}" if at < 1e4 else f"{at:,.0f}")
        )
        one.set_minor_formatter(NullFormatter())
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)


def _plain(text: str) -> str:
    """A font has few alphabets, and a dollar would begin a formula."""
    return text.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


# Numbers -----------------------------------------------------------------------------------------


def _at(row: Row, name: str) -> float:
    return median(row[name]) or 0.0


def _card(row: Row) -> dict[str, float]:
    """Tokens a second of one card while all requests decode; empty where nobody knows."""
    found = row.get("decode_tok_s")
    return _scaled(found, 1 / row["cards"]) if found else {}


def _user(row: Row) -> dict[str, float]:
    """Tokens a second of one request while all decode."""
    found = row.get("decode_tok_s")
    return _scaled(found, 1 / row["axes"]["batch_size"]) if found else {}


def _share(row: Row, part: str) -> float | None:
    known = row.get("ceiling_fraction")
    return median(known.get(part)) if isinstance(known, Mapping) else None


def _intensity(row: Row) -> float:
    bytes_, flops = median(row.get("bytes")), median(row.get("flops"))
    return flops / bytes_ if bytes_ and flops else 0.0


def _scaled(value: object, size: float) -> dict[str, float]:
    middle, (below, above) = median(value) or 0.0, spread(value)
    return {"median": middle * size, "p5": (middle - below) * size, "p95": (middle + above) * size}


def _three(value: Mapping[str, float]) -> tuple[Any, ...]:
    return tuple(value.get(name) for name in ("median", "p5", "p95"))


def _heads(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{which}" for which in ("median", "p5", "p95"))


def _keep_order(keep: object) -> tuple[bool, float]:
    return (True, 0.0) if isinstance(keep, str) else (False, float(keep))  # type: ignore[arg-type]


def _spelled(axis: str) -> str:
    return {"batch_size": "batch size", "prompt_len": "prompt tokens"}[axis]
