"""Runs a plan: what is not there yet is compiled, several files at once, and joined to a library.

Comes in: a `Plan` and how many compilers may run. Goes out: files that appear complete or not at
all, a log for each step whose compiler said something, and a `Done` for each step. One build at a
time works in a folder; others wait. It must not know settings, and prints nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import deepinfer
from deepinfer.errors import EnvironmentProblem
from deepinfer.toolchain.built import COMMAND, shown
from deepinfer.toolchain.plan import Plan, Step

__all__ = ["Done", "check_folder", "current", "execute", "unwritable"]

_POLL_S = 0.01
_KEPT = 4  # libraries of other sources: further checkouts, or the version before
_UNUSED_S = 14 * 86400  # objects that no build has used for so long go
_ERROR = re.compile(
    r"(?:fatal |internal compiler )?error[: ]|undefined reference|cannot find|: not found"
)


@dataclass(frozen=True)
class Done:
    """A step that ended: `compiled`, `linked`, `up to date` or `failed`. `log` is None where the
    compiler said nothing."""

    step: Step
    status: str
    seconds: float = 0.0
    log: Path | None = None


def check_folder(folder: Path, origin: str) -> None:
    """Raises EnvironmentProblem unless files can be made in `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as why:
        raise unwritable(folder, origin, why) from None


def unwritable(folder: Path, origin: str, why: OSError) -> EnvironmentProblem:
    """The error for a build folder that is read only, full, or somebody else's."""
    where = f": {shown(Path(why.filename))}" if isinstance(why.filename, str) else ""
    return EnvironmentProblem(
        "build-dir-unwritable",
        f"the build folder {folder} cannot be written",
        [f"{why.strerror or why}{where}", f"from {origin}"],
        f"{COMMAND} --build-dir DIR, or set DEEPINFER_BUILD_DIR",
    )


def current(plan: Plan) -> bool:
    """Whether the plan's library is there and its manifest names it."""
    try:
        known = json.loads(plan.manifest.read_text(encoding="utf-8"))
        return known["library"] == plan.link.output.name and plan.link.output.is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def execute(
    plan: Plan,
    jobs: int,
    environ: Mapping[str, str],
    report: Callable[[Done], None],
    *,
    only: Collection[str] = (),
    clean: bool = False,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Run what is missing and publish the library; `report` gets each step as it ends.

    only: these ops alone, and nothing is linked. clean: forget what was built before. waiting:
    called once if another build is at work. Raises EnvironmentProblem with the compiler's first
    error, and OSError where the folder cannot be written.
    """
    steps = [step for step in plan.steps if not only or step.op in only]

    def nothing_to_do() -> bool:
        made = not only and not clean and current(plan)
        for step in (*steps, plan.link) if made else ():
            report(Done(step, "up to date"))
        return made

    if nothing_to_do():  # without a lock, which a folder that is read only does not have
        return
    with _alone(plan.folder, waiting):
        if nothing_to_do():  # another build has just done it
            return
        if clean:
            for place in plan.folder.iterdir():
                if place.is_dir():
                    shutil.rmtree(place)
        objects = plan.folder / "objects"
        objects.mkdir(exist_ok=True)
        for half in plan.folder.glob("*/*.part*"):
            half.unlink(missing_ok=True)  # of a build that was killed: nobody else is here
        there = [step for step in steps if step.output.exists()]
        for step in there:
            os.utime(step.output)
            report(Done(step, "up to date"))
        started = time.monotonic()
        _run([step for step in steps if step not in there], jobs, environ, plan, report)
        if only:
            return
        plan.link.output.parent.mkdir(exist_ok=True)
        _run([plan.link], 1, environ, plan, report)
        _publish(plan, time.monotonic() - started)
        _prune(plan)


@contextmanager
def _alone(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """One build at a time in `folder`; the system lets go of the lock of one that was killed."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


@dataclass
class _Running:
    step: Step
    process: subprocess.Popen[bytes]
    started: float
    part: Path
    log: Path


def _run(
    steps: Sequence[Step],
    jobs: int,
    environ: Mapping[str, str],
    plan: Plan,
    report: Callable[[Done], None],
) -> None:
    """Run the steps, `jobs` at a time; after a failure no further one begins."""
    left, failure = list(steps), None
    running: list[_Running] = []
    try:
        while running or (left and failure is None):
            while left and failure is None and len(running) < jobs:
                running.append(_start(left.pop(0), environ))
            time.sleep(_POLL_S)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                done = _finish(one, plan)
                report(done)
                if done.status == "failed":
                    failure = failure or done
    finally:
        for one in running:
            _stop(one)
    if failure is not None:
        raise _failed(failure, plan)


def _start(step: Step, environ: Mapping[str, str]) -> _Running:
    part = step.output.with_suffix(".part" + step.output.suffix)
    log = step.output.with_suffix(".log")
    command = step.writing(part)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**environ, "LC_ALL": "C"},
            process_group=0,  # a compiler has children, which end with it
        )
    return _Running(step, process, time.monotonic(), part, log)


def _finish(one: _Running, plan: Plan) -> Done:
    seconds = time.monotonic() - one.started
    said = one.log.stat().st_size > 0
    if one.process.returncode == 0 and one.part.is_file():
        one.part.replace(one.step.output)
        if not said:
            one.log.unlink()
        word = "linked" if one.step is plan.link else "compiled"
        return Done(one.step, word, seconds, one.log if said else None)
    one.part.unlink(missing_ok=True)
    if not said:
        ended = f"it ended with {one.process.returncode} and made nothing"
        one.log.write_text(f"error: the compiler said nothing; {ended}\n")
    with open(one.log, "a", encoding="utf-8") as file:
        file.write(f"\n{shlex.join(one.step.writing(one.step.output))}\n")
    return Done(one.step, "failed", seconds, one.log)


def _stop(one: _Running) -> None:
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGTERM)
    try:
        one.process.wait(5)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    one.part.unlink(missing_ok=True)
    one.log.unlink(missing_ok=True)


def _failed(done: Done, plan: Plan) -> EnvironmentProblem:
    lines = done.log.read_text(errors="replace").splitlines() if done.log else []
    first = next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "?")
    first = first.replace(f"{plan.root}{os.sep}", "csrc/").strip()
    step = done.step
    what = "the library cannot be linked"
    again = COMMAND
    if step is not plan.link:
        what = f"{step.source} does not compile" + (f" for {step.level}" if step.level else "")
        again += f" --only {step.op}" + (f" --arch {step.level}" if step.level else "")
    if "Killed" in first:
        again += " -j 1, with more memory"
    facts = [first, f"log: {shown(done.log)}"] if done.log else [first]
    return EnvironmentProblem("compile-failed", what, facts, again)


def _publish(plan: Plan, seconds: float) -> None:
    """Write the manifest, which makes the library found, and drop the ones it replaces."""
    facts = {
        "library": plan.link.output.name,
        "sources": plan.sources,
        "compiler": plan.compiler.version,
        "levels": list(plan.levels),
        "seconds": round(seconds, 1),
        "deepinfer_version": deepinfer.__version__,
    }
    part = plan.manifest.with_suffix(".part.json")
    part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    part.replace(plan.manifest)
    for old in plan.manifest.parent.glob("*.so"):
        if old != plan.link.output:
            old.unlink(missing_ok=True)


def _prune(plan: Plan) -> None:
    others = sorted(plan.folder.glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
    others = [place for place in others if place != plan.manifest]
    for place in others[: max(len(others) - _KEPT, 0)]:
        shutil.rmtree(place.parent, ignore_errors=True)
    for path in (plan.folder / "objects").iterdir():
        if time.time() - path.stat().st_mtime > _UNUSED_S:
            path.unlink(missing_ok=True)
