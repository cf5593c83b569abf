"""`deepinfer build`: probe table, JSON, exit 3 with the way out, an honest word about compiling."""

import json

import pytest


@pytest.fixture
def toolchain(tmp_path):
    """A folder for PATH with a good g++ and nvcc and nothing else but what scripts need."""
    folder = tmp_path / "tool chain"
    folder.mkdir()
    for name, text in {
        "g++": "g++ (Debian 12.2.0-14) 12.2.0",
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin", "CUDA_HOME": "", "CUDA_PATH": "", "CXX": ""}


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia"])
def test_what_serves_an_accelerator(cli, toolchain, accelerator):
    done = cli("build", "--accelerator", accelerator, **toolchain)
    assert done.status == 0, done.err
    header, *rows = done.out.splitlines()
    assert header.split("\t") == ["probe", "found", "needed", "verdict", "path"]
    assert [row.split("\t")[0] for row in rows][:2] == ["torch", "C++ compiler"]
    assert (
        f"{accelerator}: no compiled kernels in this version; "
        "the torch back end serves this accelerator"
    ) in done.err
    if accelerator == "nvidia":
        assert "\t13.0 (from PATH)\t" in done.out


def test_the_default_is_what_is_there(cli, toolchain):
    assert cli("build", **toolchain).status == 0
    assert cli("build", "--dry-run", **toolchain).status == 0


def test_the_variable_counts_as_asked_for(cli, toolchain):
    done = cli("build", **toolchain, DEEPINFER_ACCELERATOR="ascend")
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


def test_json(cli, valid, toolchain):
    done = cli("build", "--accelerator", "cpu", "--json", **toolchain)
    document = valid("build", json.loads(done.out))
    assert document["accelerator"] == "cpu" and document["steps"] == []
    assert all("torch" in backends for backends in document["ops"].values())
    done = cli("build", "--accelerator", "ascend", "--json", **toolchain)
    document = valid("error", valid("build", json.loads(done.out)))
    assert done.status == 3
    assert document["error"]["code"] == "toolchain-missing"


def test_a_table_on_a_terminal_reads_no_markup_and_cuts_nothing(terminal, tmp_path):
    name = "[/INST]" + "x" * 90
    for columns in (80, 120):
        done = terminal("build", columns=columns, CXX=name, PATH=str(tmp_path), NO_COLOR="1")
        assert done.status == 0
        assert "[/INST]" in done.out and "\u2026" not in done.out
        assert sum(line.count("x") for line in done.out.splitlines()) >= 90
        assert "\x1b" not in done.out
