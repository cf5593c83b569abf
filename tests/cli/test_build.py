"""`deepinfer build`: probe table, steps, JSON, exit 3 with the way out, what serves what."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer.toolchain.built import folder

ROOT = Path(__file__).parents[2]
# Makes a file of what it is asked for, unless the source's name is in FAKE_WRONG.
GXX = """#!/bin/sh
[ "$1" = --version ] && echo "g++ (Debian 12.2.0-14) 12.2.0" && exit
for word in "$@"; do
  [ "$last" = -o ] && out=$word
  [ "$last" = -c ] && in=$word
  last=$word
done
case "$in" in */$FAKE_WRONG.cpp) echo "$in:1:2: error: bad" >&2; exit 1;; esac
[ -n "$FAKE_SLOW" ] && echo half > "$out" && touch "$FAKE_SLOW" && sleep 60
echo made > "$out"
"""


@pytest.fixture
def toolchain(tmp_path):
    """A folder for PATH with a g++ and nvcc and nothing else but what scripts need."""
    tools = tmp_path / "tool chain"
    tools.mkdir()
    nvcc = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    for name, text in {"g++": GXX, "nvcc": nvcc}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:/bin:/usr/bin", "CUDA_HOME": "", "CUDA_PATH": "", "CXX": "",
        "DEEPINFER_BUILD_DIR": str(tmp_path / "bü ilt"),
    }  # fmt: skip


def steps(done):
    return [line.split("] ")[1].split("  ") for line in done.err.splitlines() if line[:1] == "["]


def test_every_step_is_a_line_and_nothing_is_done_twice(cli, toolchain):
    done = cli("build", "--accelerator", "cpu", "-j", "1", **toolchain)
    assert done.status == 0, done.err
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert header == ["probe", "found", "needed", "verdict", "path"]
    assert [row[0] for row in rows][:3] == ["torch", "C++ compiler", "operation"]
    ops = dict(row for row in rows if len(row) == 2)
    assert ops["rmsnorm"] == "torch, cpu" and ops["rope_table"].startswith("torch")
    first, *_, last = [line for line in done.err.splitlines() if line[:1] == "["]
    count = len(steps(done))
    width = len(str(count))
    assert first.startswith(f"[{1:{width}}/{count}] csrc/cpu/")
    assert last.startswith(f"[{count}/{count}] library")
    assert ["csrc/cpu/rmsnorm.cpp", "portable"] in [step[:2] for step in steps(done)]
    assert all(step[-1].endswith(" s") for step in steps(done))
    assert f"cpu: {count} steps, 0 up to date; portable" in done.err

    again = cli("build", "--accelerator", "cpu", **toolchain)
    assert again.status == 0 and again.out == done.out
    assert [step[-1] for step in steps(again)] == ["up to date"] * count
    fresh = cli("build", "--accelerator", "cpu", "--clean", "--no-progress", **toolchain)
    assert f"{count} steps, 0 up to date" in fresh.err and "[" not in fresh.err


def test_what_serves_nvidia(cli, toolchain):
    done = cli("build", "--accelerator", "nvidia", **toolchain)
    assert done.status == 0, done.err
    assert "\t13.0 (from PATH)\t" in done.out and "rmsnorm\ttorch\n" in done.out
    assert (
        "nvidia: no compiled kernels in this version; the torch back end serves this accelerator"
    ) in done.err
    assert steps(done) == [] and not Path(toolchain["DEEPINFER_BUILD_DIR"]).exists()


def test_the_default_is_what_is_there(cli, toolchain):
    assert steps(cli("build", **toolchain))
    assert cli("build", "--dry-run", **toolchain).status == 0


def test_the_default_builds_for_the_cpu_beside_a_device(cli, toolchain, monkeypatch):
    from deepinfer.device import detect

    found = detect.find(query=False)
    gpu = detect.Device("nvidia", "Some GPU", "9.0")
    monkeypatch.setattr(detect, "find", lambda *_, **__: detect.Found((gpu,), found.cpu))
    done = cli("build", **toolchain)
    assert done.status == 0 and steps(done)
    assert "Some GPU (9.0)" in done.out and "nvidia: no compiled kernels" in done.err


def test_the_variable_counts_as_asked_for(cli, toolchain):
    done = cli("build", **{**toolchain, "DEEPINFER_ACCELERATOR": "ascend"})
    assert done.status == 3 and "the toolchain for ascend is not complete" in done.err


def test_ascend_without_cann_shows_the_table_and_the_way_out(cli, toolchain):
    done = cli("build", "--accelerator", "ascend", **toolchain)
    assert done.status == 3
    assert "CANN\tASCEND_HOME_PATH is not set\t9.0 or newer\tmissing" in done.out
    assert "hint: install CANN 9.0 or newer, source " in done.err
    assert "Traceback" not in done.err


def test_nothing_to_compile_with(cli, tmp_path):
    empty = {"PATH": str(tmp_path), "CXX": "", "CUDA_HOME": ""}
    assert cli("build", "--accelerator", "cpu", **empty).status == 3
    # Nobody asked for a compiler by name: the torch back end serves without one.
    assert cli("build", **empty).status == 0


def test_di_50_an_old_compiler_stops_before_anything_is_compiled(cli, toolchain, tmp_path):
    old = tmp_path / "tool chain" / "g++"
    old.write_text("#!/bin/sh\necho 'g++ (Debian 9.4.0-1) 9.4.0'\n")
    done = cli("build", "--accelerator", "cpu", **toolchain)
    assert done.status == 3 and steps(done) == []
    assert f"C++ compiler: found gcc 9.4, needed g++ 11.0 or clang++ 14.0, or newer ({old})" in (
        done.err
    )
    assert not Path(toolchain["DEEPINFER_BUILD_DIR"]).exists()


def test_di_50_the_nvcc_of_cuda_home_is_printed_and_an_old_one_refused(cli, toolchain, tmp_path):
    nvcc = tmp_path / "tool chain" / "nvcc"
    home = tmp_path / "cuda 13"
    (home / "bin").mkdir(parents=True)
    shutil.move(nvcc, home / "bin" / "nvcc")
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.5, V11.5.119'\n")
    nvcc.chmod(0o755)
    done = cli("build", "--accelerator", "nvidia", **toolchain)
    assert done.status == 3 and "Traceback" not in done.err
    assert f"nvcc: found 11.5 (from PATH), needed 12.8 or newer ({nvcc})" in done.err
    assert "CUDA_HOME" in done.err and "--accelerator cpu" in done.err
    done = cli("build", "--accelerator", "nvidia", **{**toolchain, "CUDA_HOME": str(home)})
    assert done.status == 0
    assert f"13.0 (from CUDA_HOME)\t12.8 or newer\tok\t{home / 'bin' / 'nvcc'}" in done.out


def test_di_51_the_folder_and_the_setting_that_moves_it(cli, toolchain, tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "built"
    for args, env, origin in (
        (["--build-dir", place], {}, "--build-dir"),
        ([], {"DEEPINFER_BUILD_DIR": str(place)}, "DEEPINFER_BUILD_DIR"),
    ):
        for more in ([], ["--dry-run"]):
            done = cli("build", "--accelerator", "cpu", *args, *more, **{**toolchain, **env})
            assert done.status == 3 and steps(done) == []
            assert f"error: the build folder {folder(place)} cannot be written" in done.err
            assert f"from {origin}\n" in done.err and "set DEEPINFER_BUILD_DIR" in done.err
    nowhere = {**toolchain, "DEEPINFER_BUILD_DIR": "", "HOME": "", "XDG_CACHE_HOME": ""}
    done = cli("build", "--accelerator", "cpu", **nowhere)
    assert done.status == 3 and "neither HOME nor XDG_CACHE_HOME is set" in done.err


def test_the_default_folder_is_the_user_s_cache(cli, toolchain, tmp_path):
    for name, place in (("HOME", ".cache/deepinfer"), ("XDG_CACHE_HOME", "deepinfer")):
        home = tmp_path / name
        env = {**toolchain, "XDG_CACHE_HOME": "", name: str(home), "DEEPINFER_BUILD_DIR": ""}
        assert cli("build", "--accelerator", "cpu", **env).status == 0
        assert list(folder(home / place).glob("*/manifest.json"))


def test_json(cli, valid, toolchain):
    done = cli("build", "--accelerator", "cpu", "--json", **toolchain)
    document = valid("build", json.loads(done.out))
    assert done.status == 0 and done.err == ""
    assert document["accelerator"] == "cpu"
    assert {step["status"] for step in document["steps"]} == {"compiled", "linked"}
    [library] = document["artifacts"]
    assert library["levels"][0] == "portable" and library["bytes"] == 5
    assert not library["path"].startswith("/")
    assert document["ops"]["rmsnorm"] == ["torch", "cpu"]
    assert all("torch" in backends for backends in document["ops"].values())
    done = cli("build", "--accelerator", "ascend", "--json", **toolchain)
    document = valid("error", valid("build", json.loads(done.out)))
    assert done.status == 3
    assert document["error"]["code"] == "toolchain-missing"


def test_ops_are_what_the_registry_would_choose_from():
    from deepinfer.cli.compiling import operations
    from deepinfer.ops.registry import explain

    for device, compiled in (("cpu", ("cpu",)), ("cpu", ()), ("cuda", ("cpu",))):
        choices = explain(device, built=compiled)
        assert operations(device, compiled) == {c.op: list(c.available) for c in choices}


def test_dry_run_prints_commands_and_runs_none(cli, valid, toolchain):
    done = cli("build", "--accelerator", "cpu", "--dry-run", **toolchain)
    assert done.status == 0 and steps(done) == []
    commands = [line for line in done.out.splitlines() if "-std=c++17" in line]
    assert commands and all("g++' -" in line and line.count(" -o ") == 1 for line in commands)
    assert sum("rmsnorm.cpp" in line for line in commands) >= 1
    assert "nothing was run" in done.err
    assert not list(folder(toolchain["DEEPINFER_BUILD_DIR"]).glob("*/*"))
    done = cli("build", "--accelerator", "cpu", "--dry-run", "--json", **toolchain)
    document = valid("build", json.loads(done.out))
    assert len(document["steps"]) == len(commands) + 1
    words = [word for step in document["steps"] for word in step["command"]]
    assert "-std=c++17" in words and not any(word.startswith("/") for word in words)


def test_only_some_ops_and_levels(cli, toolchain):
    asked = ("build", "--accelerator", "cpu", "--only", "rmsnorm", "--arch", "portable")
    done = cli(*asked, **toolchain)
    assert done.status == 0
    assert [step[:2] for step in steps(done)] == [["csrc/cpu/rmsnorm.cpp", "portable"]]
    assert "nothing linked: deepinfer build --accelerator cpu" in done.err
    assert "rmsnorm\ttorch\n" in done.out
    done = cli("build", "--accelerator", "cpu", "--arch", "portable", "--json", **toolchain)
    [library] = json.loads(done.out)["artifacts"]
    assert library["levels"] == ["portable"]


@pytest.mark.parametrize(
    ("option", "word", "near"),
    [("--only", "rmsnrom", "rmsnorm"), ("--arch", "portabel", "portable"), ("--arch", "90", "")],
)
def test_unknown_names(cli, toolchain, option, word, near):
    done = cli("build", "--accelerator", "cpu", option, word, **toolchain)
    assert done.status == 2 and f"error: {option} {word} is not there" in done.err
    assert f"did you mean {near}?" in done.err or not near
    assert "to choose from: " in done.err


def test_a_file_that_does_not_compile(cli, valid, toolchain):
    wrong = {**toolchain, "FAKE_WRONG": "rmsnorm"}
    done = cli("build", "--accelerator", "cpu", "-j", "1", **wrong)
    assert done.status == 3 and "Traceback" not in done.err
    assert "error: csrc/cpu/rmsnorm.cpp does not compile for portable" in done.err
    assert (
        f"\n  csrc/cpu/rmsnorm.cpp:1:2: error: bad\n  log: bü ilt/{folder('').name}/objects/"
        in done.err
    )
    again = "deepinfer build --accelerator cpu --only rmsnorm --arch portable"
    assert f"hint: {again}\n" in done.err
    log = next(line for line in done.err.splitlines() if "log: " in line).split("log: ")[1]
    assert "error: bad" in Path(log).read_text()
    assert cli(*again.split()[1:], **wrong).status == 3
    done = cli("build", "--accelerator", "cpu", "--json", **wrong)
    document = valid("error", valid("build", json.loads(done.out)))
    assert done.status == 3 and document["error"]["code"] == "compile-failed"
    assert "failed" in {step["status"] for step in document["steps"]}


def test_an_installation_without_sources(cli, toolchain, tmp_path, monkeypatch):
    from deepinfer.toolchain import plan

    monkeypatch.setattr(plan, "csrc", lambda: tmp_path / "csrc")
    done = cli("build", "--accelerator", "cpu", **toolchain)
    assert done.status == 3 and "has no sources of the cpu kernels" in done.err


def test_a_folder_that_fills_up_while_it_compiles(cli, toolchain, monkeypatch):
    from deepinfer.toolchain import compile

    def full(*_):
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(compile, "_publish", full)
    done = cli("build", "--accelerator", "cpu", **toolchain)
    assert (
        done.status == 3 and "cannot be written\n  No space left on device: some/file" in done.err
    )


def test_ctrl_c_tells_how_to_go_on_and_leaves_no_half_file(toolchain, environment, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "build", "--accelerator", "cpu", "-j", "1"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(**toolchain, FAKE_SLOW=str(tmp_path / "begun")), cwd=tmp_path,
    )  # fmt: skip
    objects = folder(toolchain["DEEPINFER_BUILD_DIR"]) / "objects"
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert b"stopped after 0 of " in err and b"the same command goes on from there" in err
    assert list(objects.iterdir()) == []


def test_a_checkout_in_a_folder_with_a_blank(toolchain, environment, tmp_path):
    place = tmp_path / "eine Größe"
    shutil.copytree(ROOT / "csrc", place / "csrc")
    (place / "deepinfer").symlink_to(ROOT / "deepinfer")
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer", "build", "--accelerator", "cpu", "--dry-run"],
        env=environment(**{**toolchain, "PYTHONPATH": str(place)}), cwd=place,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"'{place / 'csrc' / 'cpu' / 'rmsnorm.cpp'}'" in done.stdout


def test_a_build_with_nothing_to_do_loads_no_torch(toolchain, environment, tmp_path):
    code = """
import sys
from deepinfer.cli.main import main
assert main(["build", "--accelerator", "cpu"]) == 0
assert main(["build", "--accelerator", "cpu", "--json"]) == 0
assert not {"torch", "numpy"} & set(sys.modules), "slow"
"""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**toolchain), cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - before.children_user < 3


def test_a_table_on_a_terminal_reads_no_markup_and_cuts_nothing(terminal, tmp_path):
    name = "[/INST]" + "x" * 90
    for columns in (80, 120):
        done = terminal("build", columns=columns, CXX=name, PATH=str(tmp_path), NO_COLOR="1")
        assert done.status == 0
        assert "[/INST]" in done.out and "\u2026" not in done.out
        assert sum(line.count("x") for line in done.out.splitlines()) >= 90
        assert "\x1b" not in done.out
