"""The types a setting can have: how each is spelled, and how a spelling becomes a value.

Comes in: what a flag, a variable, a TOML file or a Python caller gave. Goes out: the typed value,
or `BadValue` whose text continues the sentence "X=... is not". It must not know which setting
has which type, nor where a value came from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BadValue",
    "Kind",
    "backends",
    "boolean",
    "choice",
    "keep",
    "number",
    "path",
    "size",
    "temperatures",
    "text",
    "whole",
]

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class BadValue(ValueError):
    """A malformed value; the text says what it is not ("not a whole number")."""


@dataclass(frozen=True)
class Kind:
    """A type: `name` for documents, `accepted` spellings for errors, `parse` raises BadValue."""

    name: str
    accepted: str
    parse: Callable[[object], object]
    choices: tuple[str, ...] = ()


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise BadValue("is not a switch")


boolean = Kind("switch", "0 1 true false yes no on off, any case", _boolean)


def whole(minimum: int = 0, maximum: int | None = None) -> Kind:
    """A whole number within bounds (both included)."""
    bounds = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"

    def parse(raw: object) -> int:
        integral = isinstance(raw, int) and not isinstance(raw, bool)
        if not integral and not re.fullmatch(r"[+-]?[0-9]+", str(raw).strip()):
            raise BadValue("is not a whole number")
        value = int(str(raw))
        if value < minimum or (maximum is not None and value > maximum):
            raise BadValue(f"is out of range ({bounds})")
        return value

    return Kind("whole number", f"a whole number, {bounds}", parse)


def number(minimum: float, maximum: float | None = None) -> Kind:
    """A finite number within bounds (both included)."""
    bounds = f"{minimum:g} or more" if maximum is None else f"{minimum:g} to {maximum:g}"

    def parse(raw: object) -> float:
        try:
            value = math.nan if isinstance(raw, bool) else float(str(raw))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadValue("is not a number")
        if value < minimum or (maximum is not None and value > maximum):
            raise BadValue(f"is out of range ({bounds})")
        return value

    return Kind("number", f"a number, {bounds}", parse)


def choice(*names: str) -> Kind:
    """One of a few words, any case."""

    def parse(raw: object) -> str:
        word = str(raw).strip().lower()
        if word not in names:
            raise BadValue("is not one of " + ", ".join(names))
        return word

    return Kind(" or ".join(names), ", ".join(names), parse, names)


def _keep(raw: object) -> int | str:
    if str(raw).strip().lower() == "full":
        return "full"
    try:
        return int(str(whole().parse(raw)))
    except BadValue as bad:
        raise BadValue(f"{bad} and not `full`") from None


keep = Kind("whole number or full", "a whole number, or full", _keep, ("140", "256", "full"))


def _size(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", str(raw).strip().lower())
    if not match or (match[3] and not match[2]):
        raise BadValue("is not a size")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]])


size = Kind("size", "bytes, or a number with KB MB GB TB (1000) or KiB MiB GiB TiB (1024)", _size)


def _path(raw: object) -> str:
    if not isinstance(raw, str | Path) or "\0" in str(raw) or not str(raw):
        raise BadValue("is not a path")
    return str(Path(raw).expanduser())


path = Kind("path", "a path", _path)
text = Kind("text", "text", str)


def _backends(raw: object) -> dict[str, str]:
    if isinstance(raw, Mapping):
        pairs = [f"{op}={name}" for op, name in raw.items()]
    elif isinstance(raw, str):
        pairs = [part for part in raw.split(",") if part.strip()]
    elif isinstance(raw, Sequence):
        pairs = [part for item in raw for part in str(item).split(",") if part.strip()]
    else:
        raise BadValue("is not OP=NAME")
    chosen: dict[str, str] = {}
    for pair in pairs:
        op, equals, name = (part.strip() for part in pair.partition("="))
        if not (op and equals and name):
            raise BadValue("is not OP=NAME")
        chosen[op] = name
    return chosen


backends = Kind("OP=NAME list", "OP=NAME, several with commas; OP may be all", _backends)


def _temperatures(raw: object) -> tuple[float, ...]:
    many = raw if isinstance(raw, list | tuple) else str(raw).split(",")
    one = number(0.0)
    return tuple(float(str(one.parse(item))) for item in many)


temperatures = Kind(
    "number or list", "one number, or one per draft position with commas", _temperatures
)
