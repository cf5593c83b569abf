"""The compiling half of `deepinfer build`: checked, run or shown, and told step by step.

Comes in: settings, probes and what the user asked for. Goes out: lines as steps end, and the parts
of the JSON document. It must not know how a step is made or run.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.cli.output import Output
from deepinfer.device.detect import Found, version_of
from deepinfer.errors import EnvironmentProblem, UsageError
from deepinfer.settings import Settings
from deepinfer.toolchain import built, compile, plan
from deepinfer.toolchain.probe import Probe, version_line

__all__ = ["Compiling", "operations"]


class Compiling:
    """One build of the cpu library. `steps` are those that ended, as the document lists them."""

    def __init__(self, output: Output, settings: Settings) -> None:
        self.steps: list[dict[str, Any]] = []
        self._output, self._settings = output, settings
        self._plan: plan.Plan | None = None
        self._only: tuple[str, ...] = ()

    def prepare(
        self, rows: Sequence[Probe], found: Found, only: Sequence[str], arch: str | None
    ) -> None:
        """Plan, and refuse what cannot be done: UsageError, EnvironmentProblem."""
        sources = plan.read(plan.csrc())
        if not sources.units:
            raise EnvironmentProblem(
                "sources-missing",
                "this installation has no sources of the cpu kernels",
                hint="install from a checkout, or --backend all=torch",
            )
        self._only = _names("--only", only, sources.ops)
        levels = plan.levels_for(found.cpu.machine)
        wanted = _names("--arch", [arch] if arch else [], levels)
        path = next(row.path for row in rows if row.name == "C++ compiler")
        compiler = plan.Compiler(path, version_line(path))
        folder = self._folder()
        self._plan = plan.plan(
            sources, compiler, folder, [x for x in levels if x in wanted or not wanted]
        )
        if self._only or not compile.current(self._plan):
            compile.check_folder(folder, self._settings.origin("build_dir"))

    def run(self, environ: Mapping[str, str], jobs: int, clean: bool) -> None:
        """Compile what is not there; a line for each step."""
        made = self._plan
        if made is None:
            return
        width = len(str(self._count()))

        def report(done: compile.Done) -> None:
            step, log = done.step, built.shown(done.log) if done.log else ""
            self.steps.append(
                {"source": step.source, "level": step.level, "status": done.status,
                 "ms": round(done.seconds * 1000), **({"log": log} if log else {})}
            )  # fmt: skip
            took = f"{done.seconds:.1f} s" if done.seconds else ""
            state = took if done.status in ("compiled", "linked") else done.status
            if log and done.status != "failed":
                state += f", with warnings: {log}"
            name = step.source or "library"
            parts = [f"[{len(self.steps):{width}}/{self._count()}] {name}", step.level, state]
            if not self._settings.no_progress:
                self._output.say("  ".join(filter(None, parts)))

        try:
            compile.execute(
                made, jobs, environ, report, only=self._only, clean=clean,
                waiting=lambda: self._output.note("another build is at work here; waiting for it"),
            )  # fmt: skip
        except OSError as why:
            raise compile.unwritable(made.folder, self._settings.origin("build_dir"), why) from None
        except BaseException as leaving:
            if not isinstance(leaving, Exception):
                ended = f"stopped after {len(self.steps)} of {self._count()} steps"
                self._output.note(f"{ended}; the same command goes on from there")
            raise

    def show(self) -> None:
        """The commands, one a line, without running them; JSON has them as lists."""
        for step in self._chosen():
            words = step.writing(step.output)
            there = step.output.exists()
            shared = [built.shown(Path(word)) if word[:1] == "/" else word for word in words]
            self.steps.append(
                {"source": step.source, "level": step.level, "command": shared,
                 "status": "up to date" if there else "to run"}
            )  # fmt: skip
            if self._output.mode != "json":
                self._output.data(shlex.join(words))

    def summary(self) -> None:
        """The last line: what there is now."""
        if self._plan is None:
            return
        ready = sum(step["status"] == "up to date" for step in self.steps)
        line = f"cpu: {len(self.steps)} steps, {ready} up to date"
        if self.steps and "command" in self.steps[0]:
            line += "; nothing was run"
        elif self._only:
            line += f"; nothing linked: {built.COMMAND}"
        for made in self.artifacts():
            size = f"{made['bytes'] / 2**20:.1f} MiB"
            line += f"; {', '.join(made['levels'])} in {made['path']} ({size})"
        self._output.say(line)

    def artifacts(self) -> list[dict[str, Any]]:
        """The library that is there now, if any."""
        here = built.find(self._settings.build_dir)
        if self._plan is None or here.path is None:
            return []
        return [
            {"path": built.shown(here.path), "bytes": here.path.stat().st_size,
             "levels": list(here.levels), "compiler": here.compiler}
        ]  # fmt: skip

    def built(self) -> tuple[str, ...]:
        """The compiled back ends whose library is there."""
        return ("cpu",) if built.find(self._settings.build_dir).path else ()

    def _folder(self) -> Path:
        if self._settings.build_dir is None:
            raise EnvironmentProblem(
                "build-dir-missing",
                "there is no folder to build in: neither HOME nor XDG_CACHE_HOME is set",
                hint=f"{built.COMMAND} --build-dir DIR, or set DEEPINFER_BUILD_DIR",
            )
        return built.folder(self._settings.build_dir)

    def _chosen(self) -> list[plan.Step]:
        if self._plan is None:
            return []
        steps = [s for s in self._plan.steps if not self._only or s.op in self._only]
        return steps if self._only else [*steps, self._plan.link]

    def _count(self) -> int:
        return len(self._chosen())


def operations(device: str, compiled: Collection[str]) -> dict[str, list[str]]:
    """Back ends of every operation on a torch device type; empty where torch is missing.

    Read from the back ends' files: importing them loads torch, which takes longer than a build in
    which nothing changed.
    """
    from deepinfer.ops import registry

    if version_of("torch") is None:
        return {}
    usable = [
        name
        for name, devices in registry.BACKENDS.items()
        if device in devices and (name in compiled or name not in registry.COMPILED)
    ]
    families = {spec.family for spec in registry.SPECS.values()}
    held = {(name, family): _functions(name, family) for name in usable for family in families}
    return {
        op: [name for name in usable if op in held[name, spec.family]]
        for op, spec in registry.SPECS.items()
    }


def _functions(backend: str, family: str) -> list[str]:
    from deepinfer import ops

    path = Path(ops.__file__ or "").parent / backend / f"{family}.py"
    return re.findall(r"^def (\w+)\(", path.read_text("utf-8"), re.M) if path.is_file() else []


def _names(option: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The words of a repeatable or comma-separated option; raises UsageError for an unknown one."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            raise UsageError(
                "bad-option",
                f"{option} {word} is not there" + (f"; did you mean {near[0]}?" if near else ""),
                [f"to choose from: {', '.join(known)}"],
                f"deepinfer build {option} {near[0] if near else known[0]}",
            )
    return tuple(words)
