"""What a warm hit costs: rows that run, seconds and instructions, at a short and a long prefix
(bars C2 and the flat warm hit).

A prompt is a cached prefix and 64 tokens more. Rows: counted from what ran, the encoder half
against suffix + window, the decoder half against the kept tail. Purity: random prompts resumed at
random places, in random chunks, give the bits of a fresh engine. Clock: hits at both lengths,
interleaved. Instructions: of one hit, in a process that finds the prefix in a cache folder, under
callgrind (needs `valgrind` and a C compiler). The index scores of a row read every entry before it,
as the model is defined: their share is counted apart, by a hit that does the selection twice.

    python -m benchmarks.warm_hit                                       # 2K and 8K, no callgrind
    python -m benchmarks.warm_hit --long 32768 --instructions           # the bars on two cores
    python -m benchmarks.warm_hit --accelerator nvidia --long 32768

The model has random weights of the embedded sizes and takes 262,144 positions.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import measure, models
from deepinfer import LLM, SamplingParams
from deepinfer.core.step import StepPlan
from deepinfer.kvcache.live import LiveRows
from deepinfer.kvcache.memory import StepMemory
from deepinfer.replay.meter import Meter

KEEP = 140
SUFFIX = 64
ROWS_BAR = 1.05
FLAT_BAR = 1.05
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
SEEN = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=20)


class Warm:
    """An engine that has seen a prefix of each length; `hit` continues one."""

    def __init__(self, folder: Path, accelerator: str, lengths: list[int], cache: Path | None):
        self.llm = LLM(
            folder, accelerator=accelerator, swa_keep=KEEP, max_num_seqs=1,
            max_model_len=max(lengths) + 2 * SUFFIX,
            kv_cache_tokens=4 * max(lengths),
            max_num_batched_tokens=2048 if accelerator == "cpu" else 16384,
            **({} if cache is None else {"prefix_cache_dir": str(cache)}),
        )  # fmt: skip
        self.config = self.llm.parts.runner.config
        self.suffixes = 0

    def prefix(self, length: int) -> list[int]:
        return models.random_ids(length, self.config.vocab_size, seed=length)

    def prefill(self, length: int) -> float:
        """Seconds of a prefix that nobody has seen."""
        start = time.perf_counter()
        self.llm.generate([self.prefix(length)], ONE)
        return time.perf_counter() - start

    def prompt(self, length: int) -> list[int]:
        """A prefix with a suffix that is new."""
        self.suffixes += 1
        more = models.random_ids(SUFFIX, self.config.vocab_size, seed=1_000_000 + self.suffixes)
        return [*self.prefix(length), *more]

    def hit(self, ids: list[int]) -> float:
        """Seconds of a prompt whose prefix is cached. Fails where it was not found."""
        start = time.perf_counter()
        [result] = self.llm.generate([ids], ONE)
        seconds = time.perf_counter() - start
        if result.usage.cached_tokens < len(ids) - KEEP - SUFFIX - self.llm.parts.sizes.page_tokens:
            raise RuntimeError(f"no hit: {result.usage}")
        return seconds

    def rows(self, length: int) -> dict[str, object]:
        """Rows that a hit runs in each half, over the least that must run."""
        with Meter(self.llm.parts.runner) as meter:
            self.hit(self.prompt(length))
        layers = meter.measured(length + SUFFIX).layers
        start = self.config.decoder_start
        halves = {"encoder": layers[:start], "decoder": layers[start:]}
        rows = {
            name: statistics.mean(sum(b - a for a, b in layer.computed) for layer in half)
            for name, half in halves.items()
        }
        floor = {"encoder": SUFFIX + self.config.sliding_window, "decoder": KEEP}
        return {
            "prefix": length,
            **{f"{name}_rows": held for name, held in rows.items()},
            **{f"{name}_ratio": round(held / floor[name], 4) for name, held in rows.items()},
        }


def purity(folder: Path, accelerator: str, cases: int) -> int:
    """How many of `cases` random splits and chunk sizes answer as a fresh engine does, to the bit
    of every log-probability."""
    draw, equal = random.Random(11), 0
    fresh = LLM(
        folder,
        accelerator=accelerator,
        swa_keep=KEEP,
        max_num_seqs=1,
        max_model_len=2048,
        prefix_cache=False,
    )
    for _ in range(cases):
        length, chunk = draw.randrange(300, 900), draw.choice((7, 64, 127, 128, 129, 500))
        warm = LLM(
            folder, accelerator=accelerator, swa_keep=KEEP, max_num_seqs=1, max_model_len=2048,
            prefill_chunk=chunk,
        )  # fmt: skip
        ids = models.random_ids(length, fresh.parts.vocab_size, seed=draw.randrange(1 << 30))
        warm.generate([ids[: draw.randrange(KEEP, length)]], ONE)
        pair = [llm.generate([ids], SEEN)[0] for llm in (fresh, warm)]
        equal += pair[0].logprobs == pair[1].logprobs
        warm.close()
    fresh.close()
    return equal


MARKS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


@dataclass(frozen=True)
class Instructions:
    """Of a warm hit; of these, of the selection, and of the engine around the model."""

    whole: int
    selection: int
    engine: int


def instructions(folder: Path, cache: Path, length: int, scratch: Path) -> Instructions:
    """Counted in a process under callgrind."""
    source, library = scratch / "marks.c", scratch / "marks.so"
    source.write_text(MARKS, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    out = scratch / f"callgrind-{length}"
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}",
         sys.executable, "-m", "benchmarks.warm_hit", "--serve", str(library),
         "--long", str(length), "--model", str(folder), "--cache", str(cache)],
        cwd=measure.ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"callgrind: {done.stderr[-2000:]}")
    once, twice, engine = (_total(Path(f"{out}.{number}")) for number in (1, 2, 3))
    return Instructions(once, twice - once, engine)


def _total(dump: Path) -> int:
    return int(re.search(r"^(?:summary|totals): (\d+)", dump.read_text(), re.MULTILINE)[1])


def serve(folder: Path, cache: Path, length: int, library: str) -> None:
    """The process that callgrind watches: a hit that fills the device's memory from the folder,
    one that counts, one whose selections run twice, and one without the model."""
    marks = ctypes.CDLL(library)
    warm = Warm(folder, "cpu", [length], cache)
    warm.hit(warm.prompt(length))
    select = StepMemory.select

    def twice(self: StepMemory, *rest: object) -> None:
        select(self, *rest)
        select(self, *rest)

    def nothing(plan: StepPlan, live: LiveRows | None = None) -> torch.Tensor:
        rows = sum(chunk.logits for chunk in plan.chunks) + (0 if live is None else len(live.of))
        return torch.zeros(rows, warm.config.vocab_size)

    runner = warm.llm.parts.runner
    for how, forward in ((select, runner.forward), (twice, runner.forward), (select, nothing)):
        StepMemory.select, runner.forward = how, forward
        ids = warm.prompt(length)
        marks.start()
        warm.hit(ids)
        marks.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia", "ascend"))
    parser.add_argument("--short", type=int, default=2048)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=7, help="hits at each length")
    parser.add_argument("--cases", type=int, default=20, help="random splits")
    parser.add_argument("--instructions", action="store_true", help="minutes under callgrind")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.model, asked.cache, asked.long, asked.serve)
        return 0
    if asked.instructions and not (shutil.which("valgrind") and shutil.which("cc")):
        print("--instructions needs valgrind and a C compiler (cc)", file=sys.stderr)
        return 3
    lengths = [asked.short, asked.long]
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), "long")
        cache = Path(scratch) / "cache" if asked.instructions else None
        warm = Warm(folder, asked.accelerator, lengths, cache)
        cold = {length: warm.prefill(length) for length in lengths}
        rows = [warm.rows(length) for length in lengths]
        sides: dict[str, Callable[[], float]] = {
            str(length): (lambda n=length: warm.hit(warm.prompt(n))) for length in lengths
        }
        seconds = measure.interleave(sides, asked.runs)
        warm.llm.close()
        equal = purity(folder, asked.accelerator, asked.cases)
        counted = {}
        if cache is not None:
            counted = {
                length: instructions(folder, cache, length, Path(scratch)) for length in lengths
            }
    entries = [
        measure.record(
            f"C2 warm hit behind {length} tokens", seconds[str(length)], "s", model=name,
            cold_s=round(cold[length], 3),
            instructions=asdict(counted[length]) if counted else None,
            correct=equal == asked.cases, **found,
        )
        for length, found in zip(lengths, rows, strict=True)
    ]  # fmt: skip
    measure.table(
        ("prefix", "cold s", "warm s", "p5", "p95", "encoder rows", "of suffix + window",
         "decoder rows", "of keep"),
        [(e["prefix"], e["cold_s"], e["value"], e["p5"], e["p95"], e["encoder_rows"],
          e["encoder_ratio"], e["decoder_rows"], e["decoder_ratio"])
         for e in entries],
    )  # fmt: skip
    if counted:
        measure.table(
            ("instructions behind", "whole, G", "selection", "engine alone"),
            [(str(length), *(f"{value / 1e9:.4f}" for value in asdict(held).values()))
             for length, held in counted.items()],
        )  # fmt: skip
    few = all(e[f"{half}_ratio"] <= ROWS_BAR for e in entries for half in ("encoder", "decoder"))
    clock = entries[1]["value"] / entries[0]["value"]
    flat = whole = None
    if counted:
        short, long = counted.values()
        whole = long.whole / short.whole
        flat = (long.whole - long.selection) / (short.whole - short.selection)
    print(
        f"resumed equals fresh: {equal} of {asked.cases}; rows at most {ROWS_BAR}: {few}\n"
        f"{asked.long} / {asked.short} tokens: seconds {clock:.3f}"
    )
    if counted:
        print(f"instructions {whole:.3f}, without the selection {flat:.4f} (bar {FLAT_BAR})")
    print()
    measure.lines(entries)
    return 0 if few and equal == asked.cases and (flat is None or flat <= FLAT_BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
