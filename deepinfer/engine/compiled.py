"""The compiled back ends of an engine: opened where settings and device call for them.

Comes in: settings, the device type. Goes out: open libraries, a line about each that is not there
though it would serve, and what results depend on. It must not know how libraries are made, nor
which op will use one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.errors import EnvironmentProblem
from deepinfer.toolchain import built

if TYPE_CHECKING:
    from deepinfer.ops.cpu.library import Library
    from deepinfer.settings import Settings

__all__ = ["Compiled", "open_compiled"]


@dataclass(frozen=True)
class Compiled:
    """Libraries by back end. `identity`: level and sources, which decide bits."""

    libraries: Mapping[str, Library] = field(default_factory=dict)
    identity: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def level(self) -> str | None:
        return self.identity[0] if self.identity else None


def open_compiled(settings: Settings, device: str) -> Compiled:
    """The cpu library, if it would serve something; its threads are torch's.

    What is missing is a warning, unless the user asked for the back end or a level by name: then
    EnvironmentProblem, or UsageError for a level that this processor does not have.
    """
    backends = settings.backend
    asked = "cpu" in backends.values()
    # The registry refuses `cpu` on other devices, and float32 is what the torch back end is for.
    if device != "cpu" or settings.dtype == "fp32":
        return Compiled()
    if backends.get("all") == "torch" and not asked:
        return Compiled()
    here = built.find(settings.build_dir)
    try:
        return _open(here, settings.cpu_level)
    except EnvironmentProblem as problem:
        if asked or settings.cpu_level:
            raise
        line = "; ".join((problem.message, *problem.facts))
        return Compiled(warnings=(f"{line}: {problem.hint}",))


def _open(here: built.Built, level: str | None) -> Compiled:
    from deepinfer.ops.cpu.library import LEVELS, Library

    if here.path is None:
        raise _not_built(here.problem)
    library = Library(here.path)
    usable = LEVELS[: LEVELS.index(library.level) + 1]
    if level is None:
        level = next((x for x in reversed(usable) if x in here.levels), library.level)
    if level in usable and level not in here.levels:
        raise _not_built(f"built without {level}")
    if level != library.level:
        library = Library(here.path, level)
    return Compiled({"cpu": library}, (level, here.sources))


def _not_built(how: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        "extension-not-built",
        f"the compiled cpu kernels are {how}",
        hint=f"{built.COMMAND}, or --backend all=torch",
    )
