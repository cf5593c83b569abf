"""Fixtures of the command line: in this process, in a child, in a pseudo-terminal; schemas."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_llm.py")
SCHEMAS = Path(__file__).with_name("schemas")
Done = namedtuple("Done", "status out err")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without anything that changes what the command line does."""
    # The folder for compiled kernels is the tests' own: see tests/conftest.py.
    more.setdefault("DEEPINFER_BUILD_DIR", os.environ["DEEPINFER_BUILD_DIR"])
    ours = ("DEEPINFER_", "FAKE_")
    unset = ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "COLUMNS", "LINES", "CXX")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in unset}
    path = str(ROOT) + os.pathsep + kept.get("PYTHONPATH", "")
    return {**kept, "PYTHONPATH": path, "PYTHONUTF8": "1", "TERM": "xterm", **more}


@pytest.fixture(scope="session")
def environment():
    """`environment(NAME="value")`: variables for a child process."""
    return clean_environment


@pytest.fixture(scope="session")
def fake_script():
    """The program that runs the command line around the scripted model."""
    return str(FAKE)


@pytest.fixture
def terminal():
    """Run the command line with stdin, stdout and stderr on a pseudo-terminal."""

    def run(*args, columns=80, fake=True, **env):
        master, slave = pty.openpty()
        base = [sys.executable, str(FAKE)] if fake else [sys.executable, "-m", "deepinfer"]
        process = subprocess.Popen(
            [*base, *map(str, args)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=clean_environment(COLUMNS=str(columns), **env),
        )
        os.close(slave)
        data = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            if not piece:
                break
            data += piece
        os.close(master)
        text = data.decode().replace("\r\n", "\n")
        return Done(process.wait(timeout=30), text, text)

    return run


@pytest.fixture
def child(tmp_path):
    """Run the command line around the scripted model in a child process, stdin empty."""

    def run(*args, stdin=b"", env=None, fake=True, cwd=tmp_path):
        base = [sys.executable, str(FAKE)] if fake else [sys.executable, "-m", "deepinfer"]
        done = subprocess.run(
            [*base, *map(str, args)],
            input=stdin,
            capture_output=True,
            timeout=120,
            cwd=cwd,
            env=clean_environment(**(env or {})),
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def fake_llm(monkeypatch):
    """The scripted model in place of `deepinfer.LLM` in this process."""
    import deepinfer

    spec = importlib.util.spec_from_file_location("fake_llm", FAKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(deepinfer, "LLM", module.FakeLLM, raising=False)
    return module.FakeLLM


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path, fake_llm):
    """Run the command line in this process, in an empty folder, with a clean environment."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("DEEPINFER_") and name != "DEEPINFER_BUILD_DIR":
            monkeypatch.delenv(name)

    def run(*args, **env):
        from deepinfer.cli.main import main

        for name, value in env.items():
            monkeypatch.setenv(name, value)
        words = [str(arg) for arg in args]
        monkeypatch.setattr(sys, "argv", ["deepinfer", *words])
        capsys.readouterr()
        status = main(words)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def valid():
    """`valid("run", document)` checks a document against tests/cli/schemas/run.schema.json."""
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    loaded = {p.name: json.loads(p.read_text()) for p in SCHEMAS.glob("*.json")}
    registry = referencing.Registry().with_resources(
        (name, referencing.Resource.from_contents(schema)) for name, schema in loaded.items()
    )

    def check(name, document):
        schema = loaded[f"{name}.schema.json"]
        jsonschema.Draft202012Validator(schema, registry=registry).validate(document)
        return document

    return check
