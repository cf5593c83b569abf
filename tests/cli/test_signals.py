"""Ctrl-C, SIGTERM and closed pipes: exit codes, what was said so far, nothing left running."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

PIECES = json.dumps([f"{i}\n" for i in range(2000)])


@pytest.fixture
def running(fake_script, environment):
    """A run that has printed its first line; killed at the end whatever happens."""
    started = []

    def start(*args, **env):
        process = subprocess.Popen(
            [sys.executable, fake_script, "run", "-p", "x", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(FAKE_PIECES=PIECES, FAKE_DELAY="0.02", **env),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_interrupted(running, number, status):
    process = running()
    assert process.stdout.readline() == b"0\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert b"Traceback" not in err
    assert b"stopped after" in err
    lines = (b"0\n" + out).splitlines()
    assert lines == [str(i).encode() for i in range(len(lines))]


def test_interrupted_json_keeps_what_was_made(running):
    process = running("--json", "-v")
    while b"ready" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    document = json.loads(out)
    assert document["error"]["code"] == "interrupted"
    lines = document["text"].splitlines()
    assert lines and lines == [str(i) for i in range(len(lines))]


def test_interrupted_before_the_model_is_there(fake_script, environment):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, fake_script, "run", "hello"], stdin=reader, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    os.close(reader)
    assert b"reading stdin" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    os.close(writer)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_a_closed_pipe_is_quiet(running):
    process = running()
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 141
    assert b"Traceback" not in err and b"BrokenPipe" not in err and b"Exception" not in err


@pytest.mark.parametrize("args", [["--help"], ["run", "--help-all"], ["doctor", "--settings"]])
def test_a_pipe_closed_before_anything_is_written(args, environment):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", *args], stdin=subprocess.DEVNULL, stdout=writer,
        stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    os.close(writer)
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err and b"Exception ignored" not in err
