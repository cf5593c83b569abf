"""What has been compiled: the manifest beside a library, and whether it fits the sources here.

Comes in: the build folder. Goes out: `Built`, found in milliseconds and without a compiler. It must
not load the library, nor know how it was made.
"""

from __future__ import annotations

import json
import os.path
import platform
from dataclasses import dataclass
from pathlib import Path

from deepinfer.toolchain.plan import csrc, read

__all__ = ["COMMAND", "Built", "find", "folder", "shown"]

COMMAND = "deepinfer build --accelerator cpu"


@dataclass(frozen=True)
class Built:
    """The library of the cpu back end. `state`: fresh (of these sources), stale (of others only) or
    missing; the rest is empty unless it is fresh."""

    state: str
    path: Path | None = None
    sources: str = ""
    levels: tuple[str, ...] = ()
    compiler: str = ""

    @property
    def problem(self) -> str:
        """What "the compiled cpu kernels are", where they are not fresh."""
        return {"missing": "not built", "stale": "built from other sources"}.get(self.state, "")


def folder(build_dir: str | Path) -> Path:
    """Where the cpu library is kept; machines of several kinds may share a build folder."""
    return Path(build_dir) / f"cpu-{platform.machine()}"


def find(build_dir: str | None, root: Path | None = None) -> Built:
    """The library in a build folder for the sources in `root` (default: this installation's).

    None: there is no build folder. What cannot be read counts as missing.
    """
    if build_dir is None:
        return Built("missing")
    place = folder(build_dir)
    try:
        sources = read(csrc() if root is None else root).key()
        known = json.loads((place / sources / "manifest.json").read_text(encoding="utf-8"))
        path = place / sources / known["library"]
        if path.is_file():
            return Built("fresh", path, sources, tuple(known["levels"]), known["compiler"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        others = any(place.glob("*/manifest.json"))
    except OSError:
        others = False
    return Built("stale" if others else "missing")


def shown(path: Path) -> str:
    """A path for people: below the current folder, below home, else the way from here."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return os.path.relpath(path)
