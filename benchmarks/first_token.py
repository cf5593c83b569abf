"""Seconds from the start of `deepinfer run` to its first byte on stdout.

The whole program as a user starts it, median of several, beside the time the same Python needs to
import torch (a floor for every program that uses it).

    python -m benchmarks.first_token
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measure, models

BAR = 3.0  # seconds, on two CPU cores
PROMPT = "def fibonacci(n):"


def first_byte(command: list[str]) -> float:
    """Seconds until the first byte of stdout; raises CalledProcessError if the command fails."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=measure.ROOT) as process:
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help='a checkpoint folder, or "random"; default: embedded')
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), asked.model)
        python = [sys.executable]
        run = [
            *python, "-m", "deepinfer", "run", "-m", str(folder), PROMPT,
            "--max-tokens", "1", "--temperature", "0",
        ]  # fmt: skip
        torch = [*python, "-c", "import torch; print()"]
        cold = first_byte(run)
        samples = measure.interleave(
            {"run": lambda: first_byte(run), "torch": lambda: first_byte(torch)}, asked.runs
        )
    entry = measure.record(
        "first token of deepinfer run",
        samples["run"],
        "s",
        peer="import torch",
        peer_samples=samples["torch"],
        model=name,
        bar_value=BAR,
        very_first=round(cold, 3),
    )
    rows = [
        ("deepinfer run, first byte", entry["value"], entry["p5"], entry["p95"]),
        ("python -c 'import torch'", entry["peer_value"], *(
            measure.quantile(samples["torch"], share) for share in (0.05, 0.95)
        )),
    ]  # fmt: skip
    print(f"{name}; very first run {cold:.2f} s; bar {BAR:.0f} s\n")
    measure.table(("what", "median s", "p5", "p95"), rows)
    measure.lines([entry])
    return 0 if entry["value"] < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
