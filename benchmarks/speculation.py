"""What drafting gives: accepted length by kind of text, and tokens a second against plain decoding
(bar C4 and the CPU bars of speculation).

Length: greedy, and at temperature 1 by rejection and coupled. Clock: one request at a time, with
and without drafts, interleaved in one process, the same prompts and as many tokens; processor time
beside it, which a busy neighbour disturbs less.

    python -m benchmarks.speculation --clock arithmetic code        # the CPU bars
    python -m benchmarks.speculation --length --prompts 64 --accelerator nvidia
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from benchmarks import measure
from benchmarks.prompts import KINDS, prompts
from deepinfer import LLM, SamplingParams

BARS = {"arithmetic": 1.5, "code": 1.2}
SEED = 1


def lengths(model: str | None, accelerator: str, kinds: list[str], count: int, tokens: int):
    """One record per kind and rule."""
    rules = (("greedy", 0.0, "rejection"), ("T = 1, rejection", 1.0, "rejection"),
             ("T = 1, coupled", 1.0, "coupled"))  # fmt: skip
    for name, temperature, verify in rules:
        with LLM(model, accelerator=accelerator, verify=verify, max_num_seqs=64) as llm:
            for kind in kinds:
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=SEED)
                got = llm.generate(prompts(kind, count), params)
                steps, drafted, accepted = (
                    sum(one.speculation[key] for one in got)
                    for key in ("steps", "drafted", "accepted")
                )
                committed = sum(one.usage.completion_tokens - 1 for one in got)
                each = [one.speculation["accepted_length"] or 1.0 for one in got]
                yield measure.record(
                    f"C4 accepted length, {kind}, {name}", [committed / steps], "tokens a step",
                    prompts=count, steps=steps, acceptance_rate=round(accepted / drafted, 4),
                    standard_error=round(statistics.stdev(each) / len(each) ** 0.5, 4),
                )  # fmt: skip


class Clock:
    """Engines with and without drafts; seconds and processor seconds per token of each prompt."""

    def __init__(self, model: str | None, accelerator: str, kind: str, count: int, tokens: int):
        self.prompts = prompts(kind, count, seed=7)
        self.params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.sides = {
            f"mtp {mtp}": LLM(model, accelerator=accelerator, mtp=mtp, prefix_cache=False)
            for mtp in (0, 5)
        }
        self.busy: defaultdict[str, list[float]] = defaultdict(list)
        self.ids: defaultdict[str, list[object]] = defaultdict(list)
        self.turn: defaultdict[str, int] = defaultdict(int)

    def side(self, name: str) -> Callable[[], float]:
        """Seconds per token of decoding alone, one prompt after the other in turn."""

        def run() -> float:
            prompt = self.prompts[self.turn[name] % len(self.prompts)]
            self.turn[name] += 1
            stream = self.sides[name].stream([prompt], self.params)
            made = len(next(stream).token_ids)  # the first token is prefill
            busy, start = time.process_time(), time.perf_counter()
            rest = [token for delta in stream for token in delta.token_ids]
            seconds = time.perf_counter() - start
            self.busy[name].append((time.process_time() - busy) / len(rest))
            self.ids[name].append(rest)
            assert made == 1
            return seconds / len(rest)

        return run

    def record(self, kind: str, runs: int) -> dict[str, object]:
        samples = measure.interleave({name: self.side(name) for name in self.sides}, runs)
        plain, drafted = samples.values()
        # Every prompt gives as many tokens, so sums of times are times of all of them.
        ratio = sum(plain) / sum(drafted)
        busy = sum(self.busy["mtp 0"][1:]) / sum(self.busy["mtp 5"][1:])
        middle = statistics.median(a / b for a, b in zip(plain, drafted, strict=True))
        same = self.ids["mtp 0"] == self.ids["mtp 5"]
        return measure.record(
            f"decode with drafts, {kind}", [1 / x for x in drafted], "tokens/s", peer="mtp 0",
            peer_samples=[1 / x for x in plain], floor=BARS.get(kind), correct=same,
            speedup=round(ratio, 3), speedup_processor=round(busy, 3),
            speedup_of_the_middle_prompt=round(middle, 3),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a checkpoint with draft stages")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia", "ascend"))
    parser.add_argument("--length", nargs="*", choices=KINDS, help="kinds whose length to measure")
    parser.add_argument("--clock", nargs="*", choices=KINDS, help="kinds to time")
    parser.add_argument("--prompts", type=int, default=16, help="of each kind, for the length")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--runs", type=int, default=11, help="prompts a kind on the clock")
    asked = parser.parse_args()
    if asked.accelerator == "cpu":
        torch.set_num_threads(1)
    records = []
    if asked.length is not None:
        kinds = asked.length or list(KINDS)
        for entry in lengths(asked.model, asked.accelerator, kinds, asked.prompts, asked.tokens):
            print(entry["bar"], entry["value"], flush=True)
            records.append(entry)
    good = True
    for kind in asked.clock or []:
        clock = Clock(asked.model, asked.accelerator, kind, asked.runs + 1, asked.tokens)
        entry = clock.record(kind, asked.runs)
        for llm in clock.sides.values():
            llm.close()
        good = good and entry["correct"] and entry["speedup"] >= (entry["floor"] or 0)
        print(entry["bar"], entry["speedup"], entry["speedup_processor"], flush=True)
        records.append(entry)
    measure.lines(records)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
