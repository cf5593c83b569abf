"""Compile steps: what they are keyed by, what runs again, and what is left when something fails."""

import ctypes
import json
import os
import platform
import shutil
import threading
import time

import pytest

from deepinfer.errors import EnvironmentProblem
from deepinfer.toolchain import built, compile, plan
from deepinfer.toolchain.probe import compiler, version_line

LEVELS = ("portable", "avx2")
# Writes what it was asked for, and a line for each call; odd sources make it odd.
FAKE = """#!/bin/sh
for word in "$@"; do
  [ "$last" = -o ] && out=$word
  [ "$last" = -c ] && in=$word
  last=$word
done
echo x >> "$FAKE_CALLS"
case $(cat "$in" 2>/dev/null) in
  *slow*) echo half > "$out"; echo $$ > "$FAKE_CALLS.pid"; sleep 60 ;;
  *wrong*) echo half > "$out"; echo "$in:3:1: error: no such thing" >&2
    echo "$in:4:1: error: another" >&2; exit 1 ;;
  *dead*) exit 1 ;;
  *mumbling*) echo "I would rather not" >&2; exit 1 ;;
  *odd*) echo "$in:1:1: warning: odd" >&2 ;;
esac
sleep 0.02
echo made > "$out"
"""


@pytest.fixture
def place(tmp_path):
    """A folder whose name has a blank and letters beyond ASCII."""
    folder = tmp_path / "my größe 文"
    folder.mkdir()
    return folder


class Build:
    """A tree of sources, a fake compiler that counts its calls, and a build folder."""

    def __init__(self, place):
        self.root, self.build_dir = place / "csrc", place / "built"
        self.folder = built.folder(self.build_dir)
        self.folder.mkdir(parents=True)
        self.calls = place / "calls"
        for name in ("cpu/one.cpp", "cpu/two.cpp", "cpu/threads.cpp", "include/deepinfer/all.h"):
            self.write(name, f"// {name}\n")
        self.tool = place / "tools" / "g++"
        self.tool.parent.mkdir()
        self.tool.write_text(FAKE)
        self.tool.chmod(0o755)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def plan(self, version="g++ 12", levels=LEVELS, **more):
        tool = plan.Compiler(str(self.tool), version)
        return plan.plan(plan.read(self.root), tool, self.folder, levels, **more)

    def run(self, made=None, jobs=2, report=None, **more):
        """{(op, level): status} of the steps; the library's are ("", "")."""
        done = {}

        def note(step):
            done[step.step.op, step.step.level] = step.status

        environ = {"PATH": os.environ["PATH"], "FAKE_CALLS": str(self.calls)}
        self.calls.write_text("")
        compile.execute(made or self.plan(), jobs, environ, report or note, **more)
        return done

    def called(self):
        return len(self.calls.read_text().splitlines())

    def find(self):
        return built.find(str(self.build_dir), self.root)

    def halves(self):
        return [p for p in self.folder.rglob("*") if ".part" in p.name]


@pytest.fixture
def build(place):
    return Build(place)


def test_every_file_at_every_level_and_some_once(build):
    made = build.plan()
    assert [(s.source, s.level) for s in made.steps] == [
        ("csrc/cpu/one.cpp", "portable"), ("csrc/cpu/one.cpp", "avx2"),
        ("csrc/cpu/threads.cpp", ""),
        ("csrc/cpu/two.cpp", "portable"), ("csrc/cpu/two.cpp", "avx2"),
    ]  # fmt: skip
    words = {s.level: s.command for s in made.steps}
    assert "-mfma" in words["avx2"] and "-DDI_LEVEL=1" in words["avx2"]
    assert "-DDI_LEVEL=0" in words["portable"]
    assert not any(w.startswith("-m") for w in (*words["portable"], *words[""]))
    assert not any(w.startswith("-DDI") for w in words[""])
    for step in made.steps:
        assert "-ffp-contract=off" in step.command, "a * b + c must have two roundings"
        assert not {"-march=native", "-ffast-math", "-Ofast"} & set(step.command)


def test_levels_are_those_of_the_architecture():
    assert plan.levels_for("x86_64") == ("portable", "avx2", "avx512", "avx512bf16")
    assert plan.levels_for("aarch64") == plan.levels_for("riscv64") == ("portable",)


def test_each_level_has_all_that_the_one_below_has():
    levels = list(plan.LEVELS.values())
    for below, above in zip(levels, levels[1:], strict=False):
        assert set(below) < set(above)


def test_an_object_is_keyed_by_all_that_decides_it_and_by_nothing_else(build, tmp_path):
    def names(made):
        return {(s.op, s.level): s.output.name for s in (*made.steps, made.link)}

    def changed(made):
        return {key for key, name in names(made).items() if before[key] != name}

    before = names(build.plan())
    everything = set(before)
    assert changed(build.plan(version="g++ 13")) == everything
    assert changed(build.plan(extra=("-g",))) == everything
    build.write("cpu/two.cpp", "int x;")
    assert changed(build.plan()) == {("two", "portable"), ("two", "avx2"), ("", "")}
    build.write("cpu/two.cpp", "// cpu/two.cpp\n")
    build.write("include/deepinfer/all.h", "int y;")
    assert changed(build.plan()) == everything
    build.write("include/deepinfer/all.h", "// include/deepinfer/all.h\n")
    build.write("cpu/README.md", "not a source")
    moved = shutil.copytree(build.root, tmp_path / "elsewhere" / "csrc")
    build.root = moved
    assert changed(build.plan()) == set(), "a checkout elsewhere shares the objects"


def test_nothing_runs_twice(build):
    done = build.run()
    assert set(done.values()) == {"compiled", "linked"} and len(done) == build.called() == 6
    assert set(build.run().values()) == {"up to date"} and build.called() == 0
    build.write("cpu/one.cpp", "int x;")
    done = build.run()
    assert {k for k, v in done.items() if v != "up to date"} == {
        ("one", "portable"), ("one", "avx2"), ("", ""),
    }  # fmt: skip
    assert build.called() == 3
    assert set(build.run(clean=True).values()) == {"compiled", "linked"}


def test_a_library_alone_is_up_to_date(build):
    build.run()
    shutil.rmtree(build.folder / "objects")
    assert set(build.run().values()) == {"up to date"} and build.called() == 0


def test_found_without_a_compiler(build):
    assert build.find() == built.Built("missing")
    made = build.plan()
    build.run(made)
    here = build.find()
    assert (here.state, here.path, here.levels) == ("fresh", made.link.output, LEVELS)
    assert here.compiler == "g++ 12" and here.problem == ""
    known = json.loads(made.manifest.read_text())
    assert known["sources"] == here.sources == made.sources
    assert {"library", "levels", "compiler", "seconds", "deepinfer_version"} <= set(known)
    started = time.perf_counter()
    build.find()
    assert time.perf_counter() - started < 0.1

    build.write("include/deepinfer/all.h", "int y;")
    assert build.find() == built.Built("stale")
    assert build.find().problem == "built from other sources"
    build.write("include/deepinfer/all.h", "// include/deepinfer/all.h\n")
    assert build.find().state == "fresh", "going back needs no build"
    made.manifest.write_text("{")
    assert build.find().path is None
    assert built.find(None) == built.Built("missing")


def test_other_levels_replace_the_library(build):
    build.run()
    before = build.find()
    build.run(build.plan(levels=("avx2",)))
    assert build.find().levels == ("avx2",) and not before.path.exists()
    assert set(build.run().values()) == {"up to date", "linked"}
    assert build.find().levels == LEVELS


def test_another_compiler_builds_again(build):
    build.run()
    build.run(build.plan(version="clang 19"))
    assert build.called() == 6 and build.find().compiler == "clang 19"


def test_one_op_alone_links_nothing(build):
    assert set(build.run(only=("two",))) == {("two", "portable"), ("two", "avx2")}
    assert build.find().state == "missing"
    assert build.run()[("two", "avx2")] == "up to date"


def test_the_first_error_the_log_and_the_way_to_run_it_again(build, monkeypatch):
    monkeypatch.chdir(build.folder)
    build.write("cpu/one.cpp", "wrong")
    done = []
    with pytest.raises(EnvironmentProblem) as caught:
        build.run(jobs=1, report=done.append)
    error = caught.value
    assert (error.code, error.exit_status) == ("compile-failed", 3)
    assert error.message == "csrc/cpu/one.cpp does not compile for portable"
    first, log = error.facts
    assert first == "csrc/cpu/one.cpp:3:1: error: no such thing"
    assert log.startswith("log: objects/one.portable-")
    text = (build.folder / log.removeprefix("log: ")).read_text()
    assert "error: another" in text and str(build.tool) in text and "-DDI_LEVEL=0" in text
    assert error.hint == "deepinfer build --accelerator cpu --only one --arch portable"
    assert [d.status for d in done] == ["failed"], "nothing else was started"
    assert build.halves() == [] and build.find().state == "missing"
    build.write("cpu/one.cpp", "// right")
    build.run()
    assert build.find().state == "fresh"


def test_a_compiler_that_ends_without_a_word(build):
    build.write("cpu/threads.cpp", "dead")
    with pytest.raises(EnvironmentProblem) as caught:
        build.run()
    assert caught.value.message == "csrc/cpu/threads.cpp does not compile"
    assert "ended with 1" in caught.value.facts[0]
    assert caught.value.hint == "deepinfer build --accelerator cpu --only threads"


def test_a_compiler_whose_words_nobody_knows(build):
    build.write("cpu/threads.cpp", "mumbling")
    with pytest.raises(EnvironmentProblem) as caught:
        build.run()
    assert caught.value.facts[0] == "I would rather not"


def test_warnings_leave_a_log(build):
    build.write("cpu/one.cpp", "odd")
    done = []
    build.run(report=done.append)
    logs = {d.step.op: d.log for d in done if d.log}
    assert list(logs) == ["one"] and "warning: odd" in logs["one"].read_text()


def test_an_interrupt_ends_the_compilers_and_leaves_no_half_file(build):
    build.write("cpu/two.cpp", "slow")
    pid = build.calls.with_name("calls.pid")

    def report(done):
        if done.step.op == "threads":
            while not pid.exists() or not pid.read_text().strip():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.run(jobs=4, report=report)
    number = int(pid.read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{number}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{number}")
    assert build.halves() == []
    assert not list(build.folder.glob("objects/two*"))


def test_what_a_killed_build_left_is_swept(build):
    objects = build.folder / "objects"
    objects.mkdir()
    (objects / "one.avx2-0.part.o").write_text("half")
    build.run()
    assert build.halves() == []


def test_two_builds_at_once_do_the_work_of_one(build):
    build.calls.write_text("")
    waited, made = [], build.plan()
    environ = {"PATH": os.environ["PATH"], "FAKE_CALLS": str(build.calls)}

    def go():
        compile.execute(
            made, 1, environ, lambda done: None, waiting=lambda: waited.append(1)
        )  # fmt: skip

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.called() == 6 and len(waited) <= 1
    assert build.find().state == "fresh" and build.halves() == []


def test_libraries_of_other_sources_do_not_pile_up(build):
    for number in range(8):
        build.write("cpu/one.cpp", f"int x{number};")
        build.run()
    assert len(list(build.folder.glob("*/manifest.json"))) == 5
    old = next(build.folder.glob("objects/one.avx2-*"))
    os.utime(old, (0, 0))
    build.write("cpu/two.cpp", "int y;")
    build.run()
    assert not old.exists()


@pytest.mark.parametrize("blocked", ["a file", "a folder that is read only"])
def test_di_51_a_folder_that_cannot_be_written(tmp_path, monkeypatch, blocked):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cpu"
    if blocked != "a file":
        # Who may do everything may also write there, so the system's answer is made up.
        folder = tmp_path / "cpu"

        def refuse(**_):
            raise PermissionError(30, "Read-only file system")

        monkeypatch.setattr(compile.tempfile, "TemporaryFile", refuse)
    with pytest.raises(EnvironmentProblem) as caught:
        compile.check_folder(folder, "--build-dir")
    error = caught.value
    assert (error.code, error.exit_status) == ("build-dir-unwritable", 3)
    assert str(folder) in error.message and "DEEPINFER_BUILD_DIR" in error.hint
    assert error.facts[1] == "from --build-dir" and error.facts[0]


def test_di_51_a_real_compiler_in_a_path_with_a_blank(build):
    found = compiler(os.environ)
    if found.verdict != "ok":
        pytest.skip(f"C++ compiler: {found.found}")
    build.write("include/deepinfer/all.h", "#pragma once\nconstexpr int kOne = 1;\n")
    call = '#include "deepinfer/all.h"\nextern "C" __attribute__((visibility("default"))) int '
    build.write("cpu/one.cpp", call + "one_level() { return kOne; }\n")
    build.write("cpu/two.cpp", 'static_assert(DI_LEVEL == 0, "");\n')
    build.write("cpu/threads.cpp", call + "threads() { return kOne + 1; }\n")
    tool = plan.Compiler(found.path, version_line(found.path))
    made = plan.plan(plan.read(build.root), tool, build.folder, ("portable",))
    build.run(made)
    library = ctypes.CDLL(str(build.find().path))
    assert (library.one_level(), library.threads()) == (1, 2)
    build.write("cpu/two.cpp", "int x = nowhere;\n")
    with pytest.raises(EnvironmentProblem) as caught:
        build.run(plan.plan(plan.read(build.root), tool, build.folder, ("portable",)))
    assert caught.value.facts[0].startswith("csrc/cpu/two.cpp:1:9: error:")
    assert "nowhere" in caught.value.facts[0]


def test_the_sources_here_are_found():
    sources = plan.read(plan.csrc())
    assert {"rmsnorm", "threads"} <= set(sources.ops)
    assert any(name.startswith("include/deepinfer/") for name in sources.digests)
    assert plan.levels_for(platform.machine())[0] == "portable"
