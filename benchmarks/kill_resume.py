"""A sweep killed with SIGKILL at random moments and resumed, beside the same one uninterrupted.

Both must have the same rows, none twice, of equal prompts, and no kill may lose a row. The same
command with `--resume` starts it again until it ends; then another sweep begins, until there were
as many kills as asked.

    python -m benchmarks.kill_resume --kills 20
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRID = ("--swa-keep", "140,256,full", "--mtp", "0,1,3,5", "--batch-size", "1,8",
        "--prompt-len", "32", "--gen-len", "4", "-r", "2", "--warmup", "0")  # fmt: skip


def command(folder: Path, grid: list[str]) -> list[str]:
    base = [sys.executable, "-m", "deepinfer", "bench", *grid, "--no-plot", "-q"]
    return [*base, "--out", str(folder), *(["--resume"] if folder.exists() else [])]


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def killed(
    cut: Path, asked: argparse.Namespace, draw: random.Random, within: float, left: int
) -> int:
    """One sweep, killed until it ends or no kills are left; how many are left then."""
    kept = 0
    while left:
        process = subprocess.Popen(command(cut, asked.grid), stdout=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0, within))
            return left  # it ended before its time came
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        left -= 1
        file = cut / "rows.jsonl"
        here = file.read_bytes().count(b"\n") if file.exists() else 0
        assert here >= kept, "a kill lost a row"
        kept = here
        print(f"kill {asked.kills - left}: {kept} rows are there", flush=True)
    subprocess.run(command(cut, asked.grid), check=True, stdout=subprocess.DEVNULL)
    return 0


def same(one: list[dict[str, object]], other: list[dict[str, object]]) -> bool:
    """The same rows, each once, of the same prompts, with the same answers in every repeat."""

    def told(rows: list[dict[str, object]]) -> list[tuple[object, ...]]:
        names = ("row_id", "prompt_digest", "same_answers", "status")
        return sorted(tuple(str(row[name]) for name in names) for row in rows)

    return told(one) == told(other) and all(row["same_answers"] for row in one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, help="seconds of a run in which it is killed; "
                        "default: those of the uninterrupted one")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("grid", nargs="*", default=list(GRID), help="options of `deepinfer bench`")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        start = time.perf_counter()
        subprocess.run(command(whole, asked.grid), check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        print(f"uninterrupted: {len(rows(whole))} rows in {seconds:.0f} s", flush=True)
        expected, left = rows(whole), asked.kills
        good, sweeps = True, 0
        while left:
            sweeps += 1
            cut = Path(scratch, f"cut{sweeps}")
            left = killed(cut, asked, draw, asked.within or seconds, left)
            good = same(expected, rows(cut)) and good
    print(json.dumps({"bar": "bench killed and resumed", "kills": asked.kills, "sweeps": sweeps,
                      "rows": len(expected), "correct": good}))  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
