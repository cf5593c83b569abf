"""A sweep killed with SIGKILL at random moments and resumed, beside the same one uninterrupted.

Both must have the same rows, none twice, of equal prompts and with equal answers; every run that is
not killed must end with exit 0, `summary.csv` must be the table of `rows.jsonl`, and no kill may
lose a row. The same command with `--resume` starts it again until it ends; then another sweep
begins, until there were as many kills as asked.

    python -m benchmarks.kill_resume --kills 20 --out benchmarks/results/kill-resume.json
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

from benchmarks import measure
from deepinfer.report.bench import csv

GRID = ("--swa-keep", "140,256,full", "--mtp", "0,1,3,5", "--batch-size", "1,8",
        "--prompt-len", "32", "--gen-len", "4", "-r", "2", "--warmup", "0")  # fmt: skip


def command(folder: Path, grid: list[str]) -> list[str]:
    base = [sys.executable, "-m", "deepinfer", "bench", *grid, "--no-plot", "--json"]
    return [*base, "--out", str(folder), *(["--resume"] if folder.exists() else [])]


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def ended(status: int, said: bytes, folder: Path) -> list[str]:
    """What is wrong with a run that nobody killed."""
    if status:
        return [f"exit {status}"]
    held, shown = rows(folder), json.loads(said)["rows"]
    by_id = {row["row_id"]: row for row in held}
    checks = {
        "a row is there twice": len(by_id) == len(held),
        "the document has other rows": shown == [by_id.get(row["row_id"]) for row in shown],
        "summary.csv is not the table of rows.jsonl": csv(held)
        == (folder / "summary.csv").read_text(encoding="utf-8"),
        "single repeats are left": not (folder / "samples.jsonl").exists(),
    }
    return [what for what, good in checks.items() if not good]


def killed(
    cut: Path, asked: argparse.Namespace, draw: random.Random, within: float, left: int
) -> tuple[int, list[str]]:
    """One sweep, killed until it ends or no kills are left; how many are left then, and what is
    wrong."""
    kept, wrong = 0, []
    while True:
        process = subprocess.Popen(command(cut, asked.grid), stdout=subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=draw.uniform(0, within) if left else None)
            return left, wrong + ended(process.returncode, said, cut)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        left -= 1
        file = cut / "rows.jsonl"
        here = file.read_bytes().count(b"\n") if file.exists() else 0
        wrong += [] if here >= kept else [f"kill {asked.kills - left} lost a row"]
        kept = here
        print(f"kill {asked.kills - left}: {kept} rows are there", flush=True)


# What a row says beside times.
ALIKE = ("row_id", "axes", "status", "prompt_digest", "answers", "output_tokens", "prompt_tokens",
         "prefill_saved_rows", "prefill_saved_flops", "acceptance_rate")  # fmt: skip


def differs(one: list[dict[str, object]], other: list[dict[str, object]]) -> list[str]:
    """In what two sweeps are not alike; every row must have answered the same in every repeat."""

    def told(rows: list[dict[str, object]], name: str) -> dict[object, object]:
        return {row["row_id"]: row[name] for row in rows}

    wrong = [name for name in ALIKE if told(one, name) != told(other, name)]
    same = all(len(row["answers"]) == 1 for row in (*one, *other))
    return [f"{name} differs" for name in wrong] + ([] if same else ["repeats differ"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, help="seconds of a run in which it is killed; "
                        "default: those of the uninterrupted one")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the record")
    parser.add_argument("grid", nargs="*", default=list(GRID), help="options of `deepinfer bench`")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        start = time.perf_counter()
        done = subprocess.run(command(whole, asked.grid), stdout=subprocess.PIPE)
        seconds = time.perf_counter() - start
        wrong = ended(done.returncode, done.stdout, whole)
        expected, left, sweeps = rows(whole), asked.kills, 0
        print(f"uninterrupted: {len(expected)} rows in {seconds:.0f} s", flush=True)
        while left:
            sweeps += 1
            cut = Path(scratch, f"cut{sweeps}")
            left, found = killed(cut, asked, draw, asked.within or seconds, left)
            wrong += found + differs(expected, rows(cut))
    record = {
        "bar": "bench killed and resumed", "kills": asked.kills, "sweeps": sweeps,
        "rows": len(expected), "seconds": round(seconds), "correct": not wrong, "wrong": wrong,
        "seed": asked.seed, "grid": asked.grid, "git": measure.git(),
    }  # fmt: skip
    measure.lines([record])
    if asked.out:
        asked.out.write_text(json.dumps([record], indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
