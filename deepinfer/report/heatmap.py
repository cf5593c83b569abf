"""The layer x token map of a replay document: growing bins, and the strip for a terminal.

Comes in: a `deepinfer.replay/1` document, as saved. Goes out: bin edges, ticks, cells and lines of
text. It must not know plans, models, colours or the terminal; the pictures use the same bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer.report.replay import STATES

__all__ = ["WORDS", "drawable", "edges", "label", "marks", "span", "state_of", "strip", "ticks"]

WORDS = {"computed": "computed", "keys_only": "keys only", "read": "cached", "skipped": "skipped"}
_GLYPHS = dict(zip(STATES, "█░▒·", strict=True))
_ASCII = dict(zip(STATES, "#:+.", strict=True))
_EIGHTHS = " ▏▎▍▌▋▊▉"
_AXIS = "tokens before the end of the prompt"
_GUTTER = 2
_WIDE = 100


def drawable(encoding: str) -> bool:
    """Whether a stream of this encoding can show the map's own characters."""
    try:
        f"{''.join(_GLYPHS.values())}{_EIGHTHS}│→−".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def span(document: Mapping[str, Any]) -> tuple[int, int]:
    """What is shown, as distances from the end of the prompt: (nearest, farthest)."""
    start, stop = document["shown"]["tokens"]
    return document["prompt_tokens"] - stop, document["prompt_tokens"] - start


def marks(document: Mapping[str, Any], view: Mapping[str, Any]) -> dict[str, int]:
    """Where the keep and the cache hit lie, as distances from the end; none that is not inside."""
    tokens, (near, far) = document["prompt_tokens"], span(document)
    found = {}
    if view["mode"] != "off":
        found["keep"] = view["keep"]
    if view["cached_tokens"]:
        found["cache hit"] = tokens - view["cached_tokens"]
    return {name: d for name, d in found.items() if near < d < far}


def edges(document: Mapping[str, Any], view: Mapping[str, Any], columns: int) -> list[int]:
    """Edges of at most `columns` bins, as distances from the end, ascending.

    Every end of a range is an edge, so a bin has one state in every layer; the marks and powers of
    four are, for the ticks. The rest halves the widest bin, measured in logarithms.
    """
    tokens, (near, far) = document["prompt_tokens"], span(document)
    ends = {tokens - t for layer in view["layers"] for s in STATES for r in layer[s] for t in r}
    forced = (*ends, *marks(document, view).values(), *_powers(far))
    found = sorted({near, far} | {d for d in forced if near < d < far})
    while len(found) <= columns:
        splittable = [(a, b) for a, b in zip(found, found[1:], strict=False) if b - a > 1]
        if not splittable:
            break
        a, b = max(splittable, key=lambda pair: math.log((1 + pair[1]) / (1 + pair[0])))
        middle = round(math.sqrt((1 + a) * (1 + b))) - 1
        found = sorted({*found, min(max(middle, a + 1), b - 1)})
    return found


def state_of(layer: Mapping[str, Any], token: int) -> str:
    """What becomes of a token in a layer: one of `STATES`."""
    return next(s for s in STATES if any(a <= token < b for a, b in layer[s]))


def ticks(
    document: Mapping[str, Any], view: Mapping[str, Any], found: Sequence[int], digit: float = 1
) -> dict[int, str]:
    """Labels by edge (index from the left) that do not touch; `digit`: columns a digit takes.

    The ends and the marks come first, then round numbers where there is space.
    """
    last = len(found) - 1
    wanted = [found[0], found[-1], *marks(document, view).values(), *reversed(_powers(found[-1]))]
    placed: dict[int, str] = {}
    for distance in wanted:
        if distance not in found:
            continue
        at, text = last - found.index(distance), label(distance)
        if all(
            abs(at - other) >= ((len(text) + len(there)) / 2 + 1) * digit
            for other, there in placed.items()
        ):
            placed[at] = text
    return placed


def label(count: int) -> str:
    """A short number of tokens: 140, 64k, 1M (1k = 1,024)."""
    if count and count % 2**20 == 0:
        return f"{count >> 20}M"
    if count >= 2**10 and count % 2**10 == 0:
        return f"{count >> 10}k"
    return str(count) if count < 10_000 else f"{count / 1024:.1f}k"


def strip(document: Mapping[str, Any], view: Mapping[str, Any], width: int, plain: bool) -> str:
    """The map of one keep as text, at most `width` columns (80 or more). plain: ASCII only.

    Layers that share role and ranges are one line, the last layer on top.
    """
    glyphs, arrow, bar = (_ASCII, "->", "|") if plain else (_GLYPHS, "→", "│")
    groups = _groups(view["layers"])
    names = [_layers(group) for group in groups]
    digits = max(len(name) for name in names)
    heads = [f"{n:>{digits}} {g[0]['role']:<8}  " for n, g in zip(names, groups, strict=True)]
    longest = max(1, *(_full_rows(document, view, group[0]) for group in groups))
    size = 12 if width >= _WIDE else 8
    tails = [_work(document, view, g[0], longest, size, arrow, plain, width) for g in groups]
    room = width - len(heads[0]) - _GUTTER - max(len(tail) for tail in tails) - 1
    found = edges(document, view, room)
    columns = list(zip(found[1:], found, strict=False))[::-1]
    cut = marks(document, view).get("keep")
    wide = len(columns) + (cut is not None)
    axis = _AXIS if wide >= len(_AXIS) else _AXIS[: len("tokens before the end")]
    wide = max(wide, len(axis)) + _GUTTER
    lines = []
    for head, group, tail in zip(heads, groups, tails, strict=True):
        cells, before = "", ""
        for far, _ in columns:
            glyph = glyphs[state_of(group[0], document["prompt_tokens"] - far)]
            if far == cut:
                cells += bar if before != glyph else glyph
            cells += glyph
            before = glyph
        lines.append(f"{head}{cells:<{wide}}{tail}".rstrip())
    pad = " " * len(heads[0])
    first = "layers".ljust(len(pad)) + axis.ljust(wide)
    scale = _scale(ticks(document, view, found), len(columns), cut and found.index(cut))
    legend = "   ".join(f"{glyphs[s]} {WORDS[s]}" for s in STATES)
    return "\n".join(
        [f"{first}rows full {arrow} {view['mode']}", (pad + scale).rstrip(), *lines, legend]
    )


def _scale(placed: Mapping[int, str], columns: int, cut: int | None) -> str:
    """The line of tick labels, each centred on its edge, the outer ones inside the map."""
    line = [" "] * (columns + 8)
    for at, text in placed.items():
        start = 0 if at == 0 else at - len(text) // 2
        # The line at the keep takes a column of its own.
        start += cut is not None and at > columns - cut
        if at == columns:
            start = columns - len(text) + (cut is not None)
        if not "".join(line[max(start - 1, 0) : start + len(text) + 1]).strip():
            line[start : start + len(text)] = text
    return "".join(line)


def _work(
    document: Mapping[str, Any], view: Mapping[str, Any], layer: Mapping[str, Any], longest: int,
    size: int, arrow: str, plain: bool, width: int,
) -> str:  # fmt: skip
    full, rows = _full_rows(document, view, layer), _count(layer["computed"])
    bars = f"{_bar(full / longest, size, plain)} {arrow} {_bar(rows / longest, size, plain)}"
    keys = " + keys" if layer["keys_only"] else ""
    return bars + (f"  {full:,} {arrow} {rows:,}" if width >= _WIDE else "") + keys


def _full_rows(
    document: Mapping[str, Any], view: Mapping[str, Any], layer: Mapping[str, Any]
) -> int:
    """Rows of a layer inside what is shown if nothing were cut."""
    start, stop = document["shown"]["tokens"]
    first = view["cached_tokens"] - view["replayed_tokens"]
    return max(stop - max(start, first), 0)


def _bar(share: float, size: int, plain: bool) -> str:
    eighths = max(round(share * size * 8), 1 if share else 0)
    if plain:
        return ("#" * -(-eighths // 8)).ljust(size)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(size)


def _groups(layers: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Neighbours with the same role and ranges, the last layers first."""
    found: list[list[Mapping[str, Any]]] = []
    alike = ("role", *STATES)
    for layer in layers:
        if found and all(found[-1][0][key] == layer[key] for key in alike):
            found[-1].append(layer)
        else:
            found.append([layer])
    return found[::-1]


def _layers(group: Sequence[Mapping[str, Any]]) -> str:
    first, last = group[0]["index"], group[-1]["index"]
    return str(first) if first == last else f"{first}-{last}"


def _count(ranges: Iterable[Sequence[int]]) -> int:
    return sum(b - a for a, b in ranges)


def _powers(far: int) -> list[int]:
    return [4**k for k in range(1, 32) if 4**k < far]
