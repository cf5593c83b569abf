"""`build.sh`: uses a complete active Python as it is, from any folder, with a blank in its path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the script needs, without an environment of its own."""
    place = tmp_path / "a check out"
    place.mkdir()
    for name in ("build.sh", "pyproject.toml", "setup.py", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, place / name)
    (place / "deepinfer").symlink_to(ROOT / "deepinfer")
    (place / "tests").mkdir()
    (place / "tests" / "test_one.py").write_text("def test_one():\n    import deepinfer\n")
    return place


@pytest.fixture
def script(checkout, environment, tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    # Not a link: a virtual environment is found by the place of its interpreter.
    python = bin_folder / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)

    def run(*args, cwd=tmp_path, **env):
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(checkout / "build.sh"), *args],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
            env=environment(PATH=path, **env),
            stdin=subprocess.DEVNULL,
        )

    return run


def test_a_complete_python_is_used_as_it_is(script, checkout):
    done = script("--version")
    assert done.returncode == 2  # plain arguments belong to `build`
    done = script("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (checkout / ".venv").exists()


def test_plain_call_builds_for_the_variable(script):
    done = script(DEEPINFER_ACCELERATOR="foo")
    assert done.returncode == 2 and "is not one of auto, nvidia, ascend, cpu" in done.stderr


def test_paths_are_those_of_the_caller(script, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    done = script("run", "-f", "prompt.txt")
    assert "prompt.txt is not UTF-8 text" in done.stderr


def test_test_runs_pytest_in_the_checkout(script):
    done = script("test", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_exit_codes_come_through(script):
    assert script("run").returncode == 2
    assert script("python", "-c", "raise SystemExit(7)").returncode == 7
