"""What every JSON document carries about the run: versions, command, settings, environment.

Comes in: a schema name, the argument list, settings, detected devices. Goes out: a dictionary
without host names, user names or absolute paths, so that a result can be shared as it is. It must
not know torch or the engine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer.device.detect import Found, version_of

__all__ = ["document", "environment", "shareable"]


def document(
    schema: str, command: Sequence[str], settings: Mapping[str, Any], found: Found
) -> dict[str, Any]:
    """The head of a document; `schema` as in "deepinfer.run/1"."""
    return {
        "schema": schema,
        "deepinfer_version": deepinfer.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["deepinfer", *(shareable(word) for word in command)],
        "settings": dict(settings),
        "environment": environment(found),
    }


def environment(found: Found) -> dict[str, Any]:
    """Devices, drivers, library versions, CPU flags and the commit; what is unknown is absent."""
    facts: dict[str, Any] = {
        "devices": [
            {k: v for k, v in vars(device).items() if v not in ("", None)}
            for device in found.devices
        ],
        "cpu": {
            "name": found.cpu.name,
            "machine": found.cpu.machine,
            "cores": found.cpu.cores,
            "flags": list(found.cpu.flags),
        },
    }
    for library in ("torch", "triton", "torch-npu"):
        version = version_of(library)
        if version:
            facts[library.replace("-", "_")] = version
    facts.update(_commit())
    return facts


def shareable(word: str) -> str:
    """An argument with absolute paths cut to their last part."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("/", "~")) and "\n" not in value and Path(value).name:
        value = Path(value).name
    return option + equals + value


def _commit() -> dict[str, Any]:
    """Commit of the checkout this package runs from; nothing for an installed copy."""
    root = Path(deepinfer.__file__).parents[1]
    if not (root / ".git").exists():
        return {}
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "-uno"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": head.stdout.strip(), "dirty": bool(changes.stdout.strip())}
