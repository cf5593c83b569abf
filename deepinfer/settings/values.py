"""Resolved settings: frozen values, each with where it came from.

Comes in: the result of resolution. Goes out: attributes (`settings.mtp`), sources, and the JSON
that results record. It must not know how values are looked up or checked.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer.settings import registry

__all__ = ["SOURCES", "Settings", "Value"]

# From weakest to strongest; "argument" is a keyword of `deepinfer.LLM`, "flag" an option.
SOURCES = ("default", "model", "file", "environment", "argument", "flag")


@dataclass(frozen=True)
class Value:
    """One setting's value, its source (one of `SOURCES`) and its origin in words."""

    value: Any
    source: str = "default"
    origin: str = "the default"

    @property
    def chosen(self) -> bool:
        """True if somebody asked for this value: not a built-in or model default."""
        return SOURCES.index(self.source) > SOURCES.index("model")


@dataclass(frozen=True)
class Settings:
    """All settings of one run; read a value as an attribute by its Python name."""

    values: Mapping[str, Value]
    warnings: tuple[str, ...] = field(default=())

    def __getattr__(self, name: str) -> Any:
        # `values` itself is looked up here while an instance is being unpickled.
        if name.startswith("__") or name == "values" or name not in self.values:
            raise AttributeError(f"no setting named {name!r}")
        return self.values[name].value

    def source(self, name: str) -> str:
        """`flag`, `argument`, `environment`, `file`, `model` or `default`."""
        return self.values[name].source

    def origin(self, name: str) -> str:
        """Where exactly: `--mtp`, `DEEPINFER_USE_NEXTN_DECODE`, `deepinfer.toml`, ..."""
        return self.values[name].origin

    def changed(self, values: Mapping[str, Value], warnings: tuple[str, ...] = ()) -> Settings:
        """A copy with some values replaced and warnings added."""
        return replace(self, values={**self.values, **values}, warnings=self.warnings + warnings)

    def as_json(self) -> dict[str, dict[str, Any]]:
        """`{NAME: {"value", "source", "origin"}}`; a setting without variable has its Python name.

        Folders are shortened to their last part, so that a result can be shared.
        """
        shown = {}
        for setting in registry.SETTINGS:
            if setting.attribute not in self.values:
                continue
            entry = self.values[setting.attribute]
            value, origin = entry.value, entry.origin
            if setting.kind.name == "path" and value:
                value = os.path.basename(os.path.normpath(value))
            if entry.source == "file":
                origin = os.path.basename(origin)
            shown[setting.key] = {"value": value, "source": entry.source, "origin": origin}
        return shown
