"""The axes of a sweep, how their lists are spelled, and the rows of a grid.

Comes in: words such as `140,256,full` or `1k-64k*2`, or the tables of a sweep file. Goes out: the
values of each axis, and their combinations; a row is named by a hash of its values. It must not
know settings' sources, the engine or torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError
from deepinfer.settings import kinds, registry
from deepinfer.settings.kinds import BadValue, Kind

__all__ = [
    "AXES", "KINDS", "MOST", "Axis", "combinations", "parse", "read_bars", "read_sweep", "row_id",
    "table_of",
]  # fmt: skip

KINDS = ("code", "arithmetic", "retrieval", "chat", "agent")
"""Text kinds of the embedded checkpoint; `agent` are sessions whose history grows."""

_SIZES = {"": 1, "k": 2**10, "m": 2**20}
_COUNT = re.compile(r"([0-9]{1,15})([km]?)", re.IGNORECASE)
_END = "([0-9]{1,15}[km]?)"
_RANGE = re.compile(rf"{_END}-{_END}(?:([*+]){_END})?", re.IGNORECASE)
MOST = 10_000  # values of one axis, and rows of a sweep


@dataclass(frozen=True)
class Axis:
    """One axis. parse: one word to its value, raises BadValue. counts: ranges are allowed.
    setting: it is one of the settings, and rows that share all of these share an engine."""

    name: str
    parse: Callable[[str], object]
    accepted: str
    counts: bool = False
    setting: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _count(minimum: int) -> Kind:
    def parse(word: object) -> int:
        match = _COUNT.fullmatch(str(word).strip())
        if not match:
            raise BadValue("is not a whole number")
        value = int(match[1]) * _SIZES[match[2].lower()]
        if value < minimum:
            raise BadValue(f"is out of range ({minimum} or more)")
        return value

    return Kind("count", f"whole numbers from {minimum}, also 4k or 1m; ranges 1-9+2, 1k-64k*2",
                parse)  # fmt: skip


def _cached(word: object) -> object:
    text = str(word).strip()
    if text.endswith("%"):
        share = kinds.number(0.0, 100.0).parse(text[:-1])
        return f"{share:g}%"
    return _count(0).parse(text)


def _backend(word: object) -> str:
    """`auto`, a back end for every op, or OP=NAME pairs joined by `+`."""
    text = str(word).strip()
    if text in ("", "auto"):
        return "auto"
    pairs = [part if "=" in part else f"all={part}" for part in text.split("+")]
    chosen = kinds.backends.parse(pairs)
    assert isinstance(chosen, dict)
    return "+".join(f"{op}={name}" if op != "all" else name for op, name in sorted(chosen.items()))


def _own(name: str) -> Axis:
    setting = registry.find(name)
    assert setting is not None, name
    counts = setting.kind.name.startswith("whole number")
    accepted = setting.kind.accepted + ("; ranges 1-9+2, 64-512*2" if counts else "")
    return Axis(name, setting.kind.parse, accepted, counts, True)


_PLAIN = (
    ("prompt_len", _count(1)), ("gen_len", _count(1)), ("batch_size", _count(1)),
)  # fmt: skip

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        *(Axis(name, kind.parse, kind.accepted, True) for name, kind in _PLAIN),
        Axis("cached", _cached, "tokens of each prompt, or a share of it such as 75%", True),
        *map(_own, ("swa_keep", "replay_mode", "mtp", "mtp_varlen", "verify", "batch_invariant",
                    "overlap")),
        Axis("backend", _backend, "auto, a back end, or OP=NAME pairs joined by +", setting=True),
        *map(_own, ("dtype", "accelerator")),
        Axis("workload", kinds.choice(*KINDS).parse, ", ".join(KINDS)),
    )
}  # fmt: skip


def parse(name: str, words: object) -> tuple[Any, ...]:
    """The values of an axis, each once, in their order.

    words: a text with commas and ranges (`a-b` by ones, `a-b+step`, `a-b*factor`, both ends
    included), a plain value, or a list of such. Raises UsageError bad-axis.
    """
    axis = AXES[name]
    found: list[object] = []
    for item in words if isinstance(words, list | tuple) else [words]:
        text = str(item).lower() if isinstance(item, bool) else str(item)
        for word in text.split(","):
            try:
                found += _values(axis, word.strip())
            except BadValue as bad:
                raise UsageError(
                    "bad-axis", f'{axis.flag} "{word.strip()}" {bad}',
                    [f"accepted, several with commas: {axis.accepted}"],
                    f"deepinfer bench {axis.flag} {_example(axis)}",
                ) from None  # fmt: skip
    return tuple(dict.fromkeys(found))


def _values(axis: Axis, word: str) -> Sequence[object]:
    match = _RANGE.fullmatch(word) if axis.counts else None
    if not match:
        return [axis.parse(word)]
    count = _count(0).parse
    low, high = int(str(count(match[1]))), int(str(count(match[2])))
    step = int(str(count(match[4] or "1")))
    grows = match[3] == "*"
    if high < low or step < (2 if grows else 1) or (grows and low < 1):
        raise BadValue("is no range that ends")
    values, value = [], low
    while value <= high and len(values) <= MOST:
        values.append(value)
        value = value * step if grows else value + step
    if len(values) > MOST:
        raise BadValue(f"has more than {MOST:,} values")
    return [axis.parse(str(value)) for value in values]


def _example(axis: Axis) -> str:
    examples = {
        "swa_keep": "140,256,full", "cached": "0,75%", "mtp": "0,5", "workload": "code,chat",
        "backend": "auto,torch", "replay_mode": "compact,off", "dtype": "bf16",
        "accelerator": "cpu", "verify": "coupled",
    }  # fmt: skip
    return examples.get(axis.name, "1k-64k*2" if axis.counts else "on,off")


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination, the last axis fastest, axes in the order of `AXES`; what has no values is
    left out of the result."""
    names = [name for name in AXES if values.get(name)]
    for chosen in itertools.product(*(values[name] for name in names)):
        yield dict(zip(names, chosen, strict=True))


def row_id(axes: Mapping[str, Any]) -> str:
    """16 hexadecimal digits: what the row is, whatever the order of its axes."""
    text = json.dumps(axes, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_sweep(path: Path) -> tuple[list[dict[str, tuple[Any, ...]]], dict[str, Any]]:
    """The grids of a sweep file, and its other entries.

    `[axes]` is one grid, several `[[axes]]` are run one behind the other. Values are written as on
    the command line, or as TOML lists. Raises UsageError.
    """
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UsageError(
            "sweep-unreadable", f"{path} cannot be read as a sweep", [str(problem)],
            "a TOML file with a table [axes], such as: mtp = [0, 5]",
        ) from None  # fmt: skip
    grids = table.pop("axes", {})
    grids = [grids] if isinstance(grids, dict) else grids
    if not isinstance(grids, list) or not grids or not all(isinstance(g, dict) for g in grids):
        raise UsageError(
            "sweep-unreadable", f"{path.name}: axes is no table", ["[axes], or several [[axes]]"],
            "deepinfer bench --help",
        )  # fmt: skip
    return [_grid(path, grid) for grid in grids], table


def read_bars(path: Path, tables: object) -> tuple[dict[str, Any], ...]:
    """The tables `[[bar]]` of a sweep file, with the values of axes as rows have them.

    name; figure: a measured field of a row; rows: which are judged, by their axes, over: by which
    other rows' best they are divided, each: the axis in which these must be equal; at_least or
    at_most: the limit. Raises UsageError.
    """
    out = []
    for table in tables if isinstance(tables, list) else [tables]:
        try:
            bar = {"rows": {}, **table}
            number = bar.pop("at_least", None), bar.pop("at_most", None)
            [(way, limit)] = [
                (way, float(value)) for way, value in zip(("at_least", "at_most"), number,
                                                          strict=True) if value is not None
            ]  # fmt: skip
            picked = {key: _grid(path, bar.pop(key)) for key in ("rows", "over") if key in bar}
            names = {key: str(bar.pop(key)) for key in ("name", "figure")}
            each = {"each": bar.pop("each")} if "each" in bar else {}
            if bar or not all(name in AXES for name in each.values()):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(
                "sweep-unreadable", f"{path.name}: a bar is not as it must be",
                ["name, figure, at_least or at_most; rows and over: tables of axes; each: an axis"],
                '[[bar]] name = "S2", figure = "decode_tok_s", at_least = 100',
            ) from None  # fmt: skip
        out.append({**names, **picked, **each, way: limit})
    return tuple(out)


def table_of(path: Path, tables: dict[str, Any], name: str) -> dict[str, Any]:
    """Take a table out of a sweep file's others, empty if it is not there. Raises UsageError."""
    found = tables.pop(name, {})
    if not isinstance(found, dict):
        raise UsageError(
            "sweep-unreadable", f"{path.name}: {name} is no table", [f"a table [{name}]"],
            "deepinfer bench --help",
        )  # fmt: skip
    return found


def _grid(path: Path, grid: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    out = {}
    for key, words in grid.items():
        name = key.replace("-", "_")
        if name not in AXES:
            raise UsageError(
                "sweep-unreadable", f"{path.name}: {key} is not an axis",
                [f"axes: {', '.join(AXES)}"], "deepinfer bench --help",
            )  # fmt: skip
        out[name] = parse(name, words)
        if not out[name]:
            raise UsageError(
                "sweep-unreadable", f"{path.name}: {key} has no values",
                [f"accepted: {AXES[name].accepted}"], f"{key} = [...], or leave it out",
            )  # fmt: skip
    return out


def tokens_cached(cached: object, prompt_len: int) -> int:
    """Tokens of a prompt that a hit is asked for: a count, or a share of the prompt."""
    if isinstance(cached, str):
        return int(prompt_len * float(cached[:-1]) / 100)
    return min(int(str(cached)), prompt_len)


def settings_axes() -> Iterable[str]:
    """The axes that are settings of the engine."""
    return [axis.name for axis in AXES.values() if axis.setting]
