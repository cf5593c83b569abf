"""Reads typed values out of a JSON object and refuses what it does not understand.

Comes in: one JSON object and the name under which messages speak of it. Goes out: values of a known
type, or a `CheckpointError` that names the key, what was got and what was expected. It must not
know which keys a model has, nor what they mean.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.errors import CheckpointError

__all__ = ["REQUIRED", "Reader", "invalid"]

REQUIRED: Any = object()  # a default that means: the key must be there


def invalid(where: str, key: str, got: object, expected: str) -> CheckpointError:
    """The error for a value that is there but cannot be used (code `config-invalid`)."""
    try:
        shown = json.dumps(got, ensure_ascii=False)
    except (TypeError, ValueError):
        shown = repr(got)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return CheckpointError(
        "config-invalid",
        f"{where}: `{key}` cannot be used",
        facts=[f"got {shown}, expected {expected}"],
    )


class Reader:
    """One JSON object, read key by key; `finish` complains about the keys nobody asked for."""

    def __init__(self, data: object, where: str, prefix: str = "") -> None:
        if not isinstance(data, Mapping):
            raise invalid(where, prefix.rstrip(".") or "the file", data, "a JSON object")
        self.data = data
        self.where = where
        self.prefix = prefix
        self.seen: set[str] = set()

    def error(self, key: str, expected: str) -> CheckpointError:
        return invalid(self.where, self.prefix + key, self.data.get(key), expected)

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it stands; without a default a missing key is an error."""
        self.seen.add(key)
        if key in self.data:
            return self.data[key]
        if default is REQUIRED:
            raise CheckpointError(
                "config-invalid",
                f"{self.where}: `{self.prefix}{key}` is missing",
                facts=["the key is required for DeepSeek-V4.1"],
            )
        return default

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> int:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: Any = REQUIRED, minimum: float = 0.0) -> float:
        value = self.raw(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value < minimum:
            raise self.error(key, f"a finite number of at least {minimum:g}")
        return float(value)

    def integers(self, key: str, default: Any = REQUIRED) -> tuple[int, ...]:
        value = self.raw(key, default)
        good = isinstance(value, (list, tuple)) and all(
            isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
        )
        if not good:
            raise self.error(key, "a list of whole numbers of at least 0")
        return tuple(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, choices: Iterable[str], default: Any = REQUIRED) -> str:
        value = self.raw(key, default)
        choices = tuple(choices)
        if value not in choices:
            raise self.error(key, " or ".join(json.dumps(c) for c in choices))
        return value

    def fixed(self, key: str, value: Any, default: Any = REQUIRED) -> Any:
        """A key of which one value only is implemented; booleans do not pass for numbers."""
        got = self.raw(key, default)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            raise self.error(key, f"{json.dumps(value)} (no other value is implemented)")
        return value

    def section(self, key: str, default: Any = REQUIRED) -> Reader | None:
        """A nested object; absent or null gives None where a default of None allows it."""
        value = self.raw(key, default)
        if value is None and default is None:
            return None
        return Reader(value, self.where, f"{self.prefix}{key}.")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuses keys that were never asked for: they may change what the model computes."""
        unknown = [k for k in self.data if k not in self.seen and k not in set(harmless)]
        if not unknown:
            return
        facts = [f"unknown: {', '.join(self.prefix + str(k) for k in unknown[:8])}"]
        near = difflib.get_close_matches(str(unknown[0]), sorted(self.seen), n=1)
        if near:
            facts.append(f"did you mean `{self.prefix}{near[0]}`?")
        raise CheckpointError(
            "config-invalid",
            f"{self.where}: `{self.prefix}{unknown[0]}` is not a key of DeepSeek-V4.1",
            facts=facts,
        )
