"""`deepinfer run --batch`: killed and resumed, and how its memory grows with the file.

`kills`: one batch of mixed requests on the embedded model, stopped with SIGINT or SIGKILL at random
moments and started again with `--resume` until it ends; every custom_id must be there once, with
the answer that an uninterrupted run gives. When it ends before its time, it is begun anew.

`memory`: files of 1,000 and more lines, checked and answered by a stand-in for the engine that
says one token at once; peak resident memory of the process, and seconds.

    python -m benchmarks.batch kills --kills 20
    python -m benchmarks.batch memory --lines 1000 10000 100000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
_TIMES = ("created", "created_at", "completed_at", "usage")


def line(number: int, tokens: int) -> dict[str, Any]:
    """A request: its kind, its question, its length and whether it thinks follow from `number`."""
    url, question = URLS[number % 4], f"What is {number} + {number * 7 % 1000}?"
    think = number % 3 == 0
    bodies: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "user", "content": question}], "max_tokens": tokens,
         "reasoning_effort": "high" if think else "none", "stop": ["\n\n\n"]},
        {"input": question, "max_output_tokens": tokens,
         "reasoning": {"effort": "high" if think else "none"}},
        {"messages": [{"role": "user", "content": question}], "max_tokens": tokens},
        {"prompt": f"def add_{number}(", "max_tokens": tokens},
    )  # fmt: skip
    body = {"model": "any", **bodies[number % 4]}
    return {"custom_id": f"request {number}", "method": "POST", "url": url, "body": body}


def write(path: Path, lines: int, tokens: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            file.write(json.dumps(line(number, tokens)) + "\n")


def answers(path: Path) -> dict[str, Any]:
    """What was said, by custom_id. Raises AssertionError for one that is there twice."""
    found: dict[str, Any] = {}
    for raw in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(raw)
        assert row["custom_id"] not in found, "a custom_id twice"
        body = row["result"]["message"] if "result" in row else row["response"]["body"]
        found[row["custom_id"]] = {k: v for k, v in body.items() if k not in _TIMES}
    return found


def command(source: Path, out: Path) -> list[str]:
    base = [sys.executable, "-m", "deepinfer", "run", "--batch", str(source), "-o", str(out)]
    return [*base, "-q", "--threads", "1", "--resume"]


def kills(asked: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(asked.seed)
    left, starts, batches, good = asked.kills, 0, 0, True
    sent = {signal.SIGINT: 0, signal.SIGKILL: 0}
    with tempfile.TemporaryDirectory() as scratch:
        source, whole = Path(scratch, "in.jsonl"), Path(scratch, "whole.jsonl")
        write(source, asked.lines[0], asked.tokens)
        begun = time.perf_counter()
        subprocess.run(command(source, whole), check=True)
        seconds = time.perf_counter() - begun
        expected = answers(whole)
        assert len(expected) == asked.lines[0]
        print(f"uninterrupted: {len(expected)} answers in {seconds:.0f} s", flush=True)
        while left:
            batches += 1
            out, kept, ended = Path(scratch, f"out{batches}.jsonl"), 0, False
            while not ended:
                starts += 1
                process = subprocess.Popen(command(source, out))
                try:
                    ended = process.wait(draw.uniform(0, seconds) if left else None) == 0
                    assert ended, process.returncode
                except subprocess.TimeoutExpired:
                    number = draw.choice((signal.SIGINT, signal.SIGKILL))
                    process.send_signal(number)
                    status = process.wait()
                    # A second or two after its start it has no handler of its own yet.
                    allowed = {signal.SIGINT: (130, -2), signal.SIGKILL: (-9,)}[number]
                    ended = status == 0
                    assert ended or status in allowed, status
                    sent[number] += 1
                    left -= 1
                here = out.read_bytes().count(b"\n") if out.exists() else 0
                assert here >= kept, "an answer was lost"
                kept = here
                print(f"{asked.kills - left} kills, {here} answers", flush=True)
            good = answers(out) == expected and good
    return {
        "bar": "batch killed and resumed", "lines": asked.lines[0], "tokens": asked.tokens,
        "kills": asked.kills, "sigint": sent[signal.SIGINT], "sigkill": sent[signal.SIGKILL],
        "starts": starts, "batches": batches, "seconds_uninterrupted": round(seconds, 1),
        "correct": good,
    }  # fmt: skip


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for lines in asked.lines:
        with tempfile.TemporaryDirectory() as scratch:
            source, out = Path(scratch, "in.jsonl"), Path(scratch, "out.jsonl")
            write(source, lines, 1)
            begun = time.perf_counter()
            child = subprocess.run(
                [sys.executable, "-m", "benchmarks.batch", "one", str(source), str(out)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            peaks = json.loads(child.stdout)
            assert out.read_bytes().count(b"\n") == lines
            rows.append({
                "lines": lines, "in_bytes": source.stat().st_size,
                "out_bytes": out.stat().st_size, **peaks,
                "seconds": round(time.perf_counter() - begun, 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
    grown = (rows[-1]["peak_bytes"] - rows[0]["peak_bytes"]) / max(lines - asked.lines[0], 1)
    return {"bar": "memory of a batch", "engine": "stand-in, one token at once", "rows": rows,
            "bytes_a_line": round(grown, 1)}  # fmt: skip


def one(source: str, out: str) -> None:
    """A batch around the stand-in, in this process: where its memory stood when the model would be
    loaded, and its peak."""
    import deepinfer
    from benchmarks.batch_stand_in import StandIn
    from deepinfer.cli.main import main

    deepinfer.LLM = StandIn  # type: ignore[attr-defined]
    assert main(["run", "--batch", source, "-o", out, "-q"]) == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ready_bytes": StandIn.ready_bytes, "peak_bytes": peak}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("kills", "memory", "one"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lines", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.what == "one":
        one(*asked.files)
        return 0
    asked.lines = asked.lines or ([200] if asked.what == "kills" else [1000, 10_000, 100_000])
    record = kills(asked) if asked.what == "kills" else memory(asked)
    print(json.dumps({**record, "load": os.getloadavg()[0]}))
    return 0 if record.get("correct", True) else 1


if __name__ == "__main__":
    sys.exit(main())
