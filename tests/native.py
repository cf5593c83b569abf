"""The compiled cpu library for tests: built once into `build/tests`, and only if a test asks."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepinfer.toolchain import built, compile, plan
from deepinfer.toolchain.probe import compiler, version_line

if TYPE_CHECKING:
    from deepinfer.ops.cpu.library import Library

ROOT = Path(__file__).parents[1]
BUILD_DIR = ROOT / "build" / "tests"


@functools.cache
def made(extra: tuple[str, ...] = ()) -> plan.Plan:
    """The plan whose library is there; the test is skipped where no compiler is.

    extra: further flags, such as `-fsanitize=address`; then only for the portable level and the
    best one of this processor. Workers that ask at once build once, and a second run of the tests
    finds everything there.
    """
    found = compiler(os.environ)
    if found.verdict != "ok":
        pytest.skip(f"C++ compiler: {found.found}, needed: {found.needed}")
    folder = built.folder(BUILD_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    tool = plan.Compiler(found.path, version_line(found.path))
    levels = plan.levels_for(platform.machine())
    if extra:
        from deepinfer.ops.cpu.library import Library

        best = Library(library_path()).level
        levels = tuple(level for level in levels if level in ("portable", best))
    whole = plan.plan(plan.read(ROOT / "csrc"), tool, folder, levels, extra)
    compile.execute(whole, len(os.sched_getaffinity(0)), os.environ, lambda done: None)
    return whole


def library_path(extra: tuple[str, ...] = ()) -> Path:
    """The library's file."""
    return made(extra).link.output


def libraries() -> dict[str, Library]:
    """The open library by back end where the tests run on it (`--native`), else nothing."""
    from deepinfer.ops.cpu.library import Library

    native = os.environ.get("DEEPINFER_BUILD_DIR") == str(BUILD_DIR)
    return {"cpu": Library(library_path())} if native else {}
