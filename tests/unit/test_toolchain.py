"""Probes on fake toolchains (DI-50, DI-51): the choice, found and needed versions, the way out."""

import os
from pathlib import Path

import pytest

from deepinfer.device.detect import Cpu, Device, Found
from deepinfer.toolchain import probe as probes
from deepinfer.toolchain.probe import compiler, probe, problem

CPU = Cpu("cpu", "x86_64", 2, (), 1 << 30, 1 << 30)
BARE = Found((), CPU)
GXX = "g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022"


def tool(folder, name, text):
    """A fake program that prints `text`; the folder's name may hold a blank."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def nvcc(folder, version):
    return tool(
        folder, "nvcc", f"nvcc: NVIDIA (R) Cuda compiler\nCuda tools, release {version}, V1"
    )


def by_name(rows):
    return {row.name: row for row in rows}


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    """Installed distributions as the test wants them."""
    installed = {"torch": "2.13.0"}
    monkeypatch.setattr(probes, "version_of", installed.get)
    return installed


@pytest.fixture
def path(tmp_path):
    """A PATH with a good g++ and what fake tools need; /bin has no compiler of its own here."""
    tools = tmp_path / "some tools"
    tool(tools, "g++", GXX)
    for needed in ("sh", "cat"):
        (tools / needed).symlink_to(Path("/bin") / needed)
    return tools


# DI-50


def test_di_50_cuda_home_wins_over_the_path_and_is_printed(tmp_path, path):
    nvcc(path, "11.5")
    home = tmp_path / "cuda 13"
    nvcc(home / "bin", "13.0")
    environ = {"PATH": str(path), "CUDA_HOME": str(home)}
    row = by_name(probe("nvidia", environ, BARE))["nvcc"]
    assert (row.verdict, row.found) == ("ok", "13.0 (from CUDA_HOME)")
    assert row.path == str(home / "bin" / "nvcc")
    assert problem("nvidia", probe("nvidia", environ, BARE)) is None


def test_di_50_an_old_nvcc_stops_with_found_needed_and_path(path):
    old = nvcc(path, "11.5")
    error = problem("nvidia", probe("nvidia", {"PATH": str(path)}, BARE))
    assert error.exit_status == 3 and error.code == "toolchain-missing"
    [fact] = error.facts
    assert fact == f"nvcc: found 11.5 (from PATH), needed 12.8 or newer ({old})"
    assert "CUDA_HOME" in error.hint and "--accelerator cpu" in error.hint


def test_a_cuda_home_without_a_compiler_does_not_fall_back_silently(tmp_path, path):
    nvcc(path, "13.0")
    environ = {"PATH": str(path), "CUDA_HOME": str(tmp_path / "empty")}
    row = by_name(probe("nvidia", environ, BARE))["nvcc"]
    assert (row.verdict, row.found) == ("missing", "nothing at CUDA_HOME")


def test_di_50_an_old_gcc_is_named(path):
    tool(path, "g++", "g++ (Debian 9.4.0-1) 9.4.0\nCopyright (C) 2019")
    row = compiler({"PATH": str(path)})
    assert (row.verdict, row.found, row.path) == ("missing", "gcc 9.4", str(path / "g++"))
    error = problem("cpu", probe("cpu", {"PATH": str(path)}, BARE))
    assert "gcc 9.4" in error.facts[0] and "g++ 11.0" in error.facts[0]


def test_a_new_clang_stands_in_for_an_old_gcc(path):
    tool(path, "g++", "g++ (Debian 9.4.0-1) 9.4.0\nCopyright (C) 2019")
    tool(path, "clang++", "Debian clang version 16.0.6 (15~deb12u1)")
    row = compiler({"PATH": str(path)})
    assert (row.verdict, row.found, row.path) == ("ok", "clang 16.0", str(path / "clang++"))


def test_di_50_no_compiler_at_all(tmp_path):
    error = problem("cpu", probe("cpu", {"PATH": str(tmp_path)}, BARE))
    assert error.facts == ("C++ compiler: found none, needed g++ 11.0 or clang++ 14.0, or newer",)
    assert "install g++" in error.hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GXX, "gcc 12.2"),
        ("g++ (Ubuntu 13.2.0-23ubuntu4) 13.2.0", "gcc 13.2"),
        ("g++ (GCC) 14.1.1 20240522", "gcc 14.1"),
        ("Debian clang version 16.0.6 (15~deb12u1)", "clang 16.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang 18.1"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "clang 15.0"),
    ],
)
def test_compiler_versions(text, found, path):
    tool(path, "g++", text)
    row = compiler({"PATH": str(path)})
    assert (row.found, row.verdict) == (found, "ok")


def test_cxx_wins(tmp_path, path):
    other = tool(tmp_path / "other", "my++", "Debian clang version 19.1.7")
    assert compiler({"PATH": str(path), "CXX": str(other)}).found == "clang 19.1"
    assert compiler({"PATH": str(path), "CXX": "gone++"}).verdict == "missing"


@pytest.mark.parametrize(("arch", "verdict"), [("9.0", "ok"), ("10.0", "ok"), ("8.0", "missing")])
def test_di_50_device_architecture(arch, verdict, path):
    nvcc(path, "13.0")
    found = Found((Device("nvidia", "Some GPU", arch),), CPU)
    row = by_name(probe("nvidia", {"PATH": str(path)}, found))["device"]
    assert row.verdict == verdict and f"({arch})" in row.found
    assert row.needed == "compute capability 9.0, 10.0, 10.3"
    if verdict == "missing":
        assert "--accelerator cpu" in row.hint


def test_a_machine_without_the_device_can_still_cross_build(path):
    nvcc(path, "13.0")
    rows = probe("nvidia", {"PATH": str(path)}, BARE)
    assert problem("nvidia", rows) is None
    assert by_name(rows)["device"].hint == "cross build: nothing can run here"


# DI-51


def cann(tmp_path, text, name="version.cfg"):
    home = tmp_path / "ascend toolkit"
    home.mkdir()
    (home / name).write_text(text)
    return home


def test_di_51_no_cann_names_the_variable_and_the_script(path, tmp_path):
    rows = probe("ascend", {"PATH": str(path)}, BARE, tmp_path)
    error = problem("ascend", rows)
    assert error.exit_status == 3
    text = "\n".join((*error.facts, error.hint))
    for word in ("ASCEND_HOME_PATH", "set_env.sh", "9.0 or newer", "hivmc-a5", "torch-npu"):
        assert word in text
    assert by_name(rows)["CANN"].verdict == "missing"


def test_di_51_a_toolkit_that_was_not_sourced(path, tmp_path):
    (tmp_path / probes.CANN_FOLDER).mkdir(parents=True)
    row = by_name(probe("ascend", {"PATH": str(path)}, BARE, tmp_path))["CANN"]
    assert row.found == "ASCEND_HOME_PATH is not set, but a toolkit is installed"
    assert row.hint.startswith("source ")


@pytest.mark.parametrize(
    ("text", "found", "verdict"),
    [
        ("Version=8.0.RC1\n", "8.0", "missing"),
        ("version=8.5.0\ninner=1\n", "8.5", "missing"),
        ("# head\nruntime_running_version=[9.1.0:CANN]\n", "9.1", "ok"),
        ("nothing here", "no version file", "missing"),
    ],
)
def test_di_51_cann_versions(text, found, verdict, path, tmp_path):
    environ = {"PATH": str(path), "ASCEND_HOME_PATH": str(cann(tmp_path, text))}
    row = by_name(probe("ascend", environ, BARE))["CANN"]
    assert (row.found, row.needed, row.verdict) == (found, "9.0 or newer", verdict)


def test_di_51_complete_toolkit(path, tmp_path, versions):
    versions["torch-npu"] = "2.13.0"
    tool(path, "hivmc-a5", "x")
    environ = {"PATH": str(path), "ASCEND_TOOLKIT_HOME": str(cann(tmp_path, "version=9.0.0"))}
    rows = probe("ascend", environ, BARE)
    assert problem("ascend", rows) is None
    assert by_name(rows)["device"].verdict == "warn"


def test_di_51_without_torch_npu(path, tmp_path):
    row = by_name(probe("ascend", {"PATH": str(path)}, BARE, tmp_path))["torch-npu"]
    assert (row.verdict, row.found) == ("missing", "none")


def test_a_torch_npu_of_another_torch(path, tmp_path, versions):
    versions["torch-npu"] = "2.14.0"
    row = by_name(probe("ascend", {"PATH": str(path)}, BARE, tmp_path))["torch-npu"]
    assert row.verdict == "missing" and row.needed == "torch 2.14.*"
    assert row.hint == 'pip install "torch==2.14.*" "torch-npu==2.14.0"'


# torch


@pytest.mark.parametrize(("text", "verdict"), [
    ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.10.1", "missing"), (None, "missing"),
])  # fmt: skip
def test_torch_versions(text, verdict, path, versions):
    versions["torch"] = text
    assert by_name(probe("cpu", {"PATH": str(path)}, BARE))["torch"].verdict == verdict


def test_a_cpu_torch_cannot_run_nvidia(path, versions):
    versions["torch"] = "2.13.0+cpu"
    nvcc(path, "13.0")
    row = by_name(probe("nvidia", {"PATH": str(path)}, BARE))["torch"]
    assert row.verdict == "warn" and "no CUDA" in row.found


def test_good_rows_carry_no_hint(path):
    nvcc(path, "13.0")
    for row in probe("nvidia", dict(os.environ, PATH=str(path), CUDA_HOME=""), BARE):
        assert not (row.verdict == "ok" and row.hint), row
