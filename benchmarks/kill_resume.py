"""A sweep killed with SIGKILL at random moments and resumed, beside the same one uninterrupted.

Both must have the same rows, none twice, with equal answers. The killed one is started again by the
same command with `--resume` until it has been killed as often as asked, and then left to end.

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
        whole, cut = Path(scratch, "whole"), Path(scratch, "cut")
        start = time.perf_counter()
        subprocess.run(command(whole, asked.grid), check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        print(f"uninterrupted: {len(rows(whole))} rows in {seconds:.0f} s", flush=True)
        within = asked.within or seconds
        kept = []
        for kill in range(asked.kills):
            process = subprocess.Popen(command(cut, asked.grid), stdout=subprocess.DEVNULL)
            try:
                process.wait(draw.uniform(0, within))
                break  # it ended before its time came
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            file = cut / "rows.jsonl"
            kept.append(file.read_bytes().count(b"\n") if file.exists() else 0)
            print(f"kill {kill + 1}: {kept[-1]} rows are there", flush=True)
        subprocess.run(command(cut, asked.grid), check=True, stdout=subprocess.DEVNULL)
        one, other = rows(whole), rows(cut)
    same = sorted(str(row["row_id"]) for row in one) == sorted(str(row["row_id"]) for row in other)
    alike = {row["row_id"]: row["prompt_digest"] for row in one} == {
        row["row_id"]: row["prompt_digest"] for row in other
    }
    grew = kept == sorted(kept)
    steady = all(row["same_answers"] for row in (*one, *other))
    good = same and alike and grew and steady
    print(json.dumps({"bar": "bench killed and resumed", "kills": len(kept), "rows": len(other),
                      "same_rows": same, "never_lost": grew, "same_answers": steady,
                      "correct": good}))  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
