"""Does truncated prefill save the work that it should? Counters, then the clock (bar C1).

Counters: FLOPs of a prompt prefilled whole and cut, counted from what ran, against the plan's; the
ratio of ratios must be 1.000 +- 0.002. Clock: seconds of both, interleaved in one process; their
ratio must reach 0.95 of the plan's.

    python -m benchmarks.replay_work                          # 1K on the clock, 1K and 8K counted
    python -m benchmarks.replay_work --clock 8192 --runs 21   # the bar on two cores: half an hour
    python -m benchmarks.replay_work --accelerator nvidia     # 8K and 32K on the clock

Prompts up to 8K run on the embedded checkpoint, longer ones on random weights of its sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks import measure, models
from deepinfer import LLM, SamplingParams
from deepinfer.model import cost
from deepinfer.replay import ReplayPlan, ReplayRule
from deepinfer.replay.meter import Measured, Meter

KEEP = 140
COUNTED = 0.002  # the counters' ratio may be off by this
CLOCK_BAR = 0.95
EMBEDDED_UP_TO = 8192
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Pair:
    """Engines around one model that prefill whole and cut."""

    def __init__(self, folder: Path, accelerator: str, longest: int) -> None:
        self.sides = {
            name: LLM(
                folder, accelerator=accelerator, swa_keep=keep, prefix_cache=False,
                max_model_len=longest + 1, max_num_seqs=1,
                max_num_batched_tokens=2048 if accelerator == "cpu" else 16384,
            )
            for name, keep in (("full", "full"), ("compact", KEEP))
        }  # fmt: skip
        self.config = self.sides["full"].parts.runner.config
        self.busy: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def plan(self, side: str, tokens: int) -> ReplayPlan:
        rule = ReplayRule.of(self.config, "compact", KEEP)
        return rule.plan(tokens, full=side == "full")

    def ideal(self, tokens: int) -> float:
        """FLOPs of the whole prefill over those of the cut one."""
        full, cut = (cost.total_flops(self.config, self.plan(s, tokens)) for s in self.sides)
        return full / cut

    def ids(self, tokens: int) -> list[int]:
        return models.random_ids(tokens, self.config.vocab_size)

    def counted(self, side: str, tokens: int) -> Measured:
        llm = self.sides[side]
        with Meter(llm.parts.runner) as meter:
            llm.generate([self.ids(tokens)], ONE)
        return meter.measured(tokens)

    def clock(self, side: str, tokens: int) -> Callable[[], float]:
        """Seconds from prompt to first token; the processor's go to `busy`."""
        llm, ids = self.sides[side], self.ids(tokens)

        def run() -> float:
            busy, start = time.process_time(), time.perf_counter()
            llm.generate([ids], ONE)
            self.busy[side, tokens].append(time.process_time() - busy)
            return time.perf_counter() - start

        return run


def counters(pair: Pair, tokens: int, name: str) -> dict[str, object]:
    """One record: measured ratio of FLOPs over the plan's, and whether every layer agrees."""
    found = {side: pair.counted(side, tokens) for side in pair.sides}
    same = all(
        found[side].layers == pair.plan(side, tokens).all_ranges()
        and found[side].flops_by_layer == cost.plan_flops(pair.config, pair.plan(side, tokens))
        for side in pair.sides
    )
    ratio = found["full"].total_flops / found["compact"].total_flops
    rows = found["full"].layer_rows / found["compact"].layer_rows
    return measure.record(
        f"C1 counters, {tokens} tokens", [ratio / pair.ideal(tokens)], "of the plan's ratio",
        correct=same, model=name, flops_ratio=round(ratio, 4), rows_ratio=round(rows, 4),
        flops_full=found["full"].total_flops, flops_compact=found["compact"].total_flops,
    )  # fmt: skip


def clock(pair: Pair, tokens: int, name: str, runs: int) -> dict[str, object]:
    """One record: seconds of the cut prefill, of the whole one beside it, and the ratio."""
    samples = measure.interleave({side: pair.clock(side, tokens) for side in pair.sides}, runs)
    middle = {side: statistics.median(held) for side, held in samples.items()}
    speedup, ideal = middle["full"] / middle["compact"], pair.ideal(tokens)
    # Its first sample of each side is the warm-up. Steadier where other programs use the cores.
    busy = {side: statistics.median(pair.busy[side, tokens][1:]) for side in pair.sides}
    entry = measure.record(
        f"C1 clock, {tokens} tokens", samples["compact"], "s", peer="full",
        peer_samples=samples["full"], model=name, tokens=tokens,
        speedup=round(speedup, 4), ideal=round(ideal, 4), of_ideal=round(speedup / ideal, 4),
        busy_of_ideal=round(busy["full"] / busy["compact"] / ideal, 4),
    )  # fmt: skip
    for key, share in (("peer_p5", 0.05), ("peer_p95", 0.95)):
        entry[key] = round(measure.quantile(samples["full"], share), 4)
    if runs > 1:
        entry["peer_self_ratio"] = round(measure.self_ratio(samples["full"]), 4)
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia", "ascend"))
    parser.add_argument("--count", type=int, nargs="*", help="prompt lengths to count")
    parser.add_argument("--clock", type=int, nargs="*", help="prompt lengths to time")
    parser.add_argument("--runs", type=int, help="of each side; default 3, 21 on a device")
    asked = parser.parse_args()
    host = asked.accelerator == "cpu"
    counted = asked.count if asked.count is not None else [1024, 8192] + [32768] * (not host)
    timed = asked.clock if asked.clock is not None else [1024] if host else [8192, 32768]
    runs = asked.runs or (3 if host else 21)
    count_entries: list[dict[str, object]] = []
    clock_entries: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for given, lengths in (
            (None, [n for n in {*counted, *timed} if n <= EMBEDDED_UP_TO]),
            ("long", [n for n in {*counted, *timed} if n > EMBEDDED_UP_TO]),
        ):
            if not lengths:
                continue
            path, name = models.folder(Path(scratch), given)
            pair = Pair(path, asked.accelerator, max(lengths))
            for tokens in sorted(lengths):
                if tokens in counted:
                    count_entries.append(counters(pair, tokens, name))
                if tokens in timed:
                    clock_entries.append(clock(pair, tokens, name, runs))
            for llm in pair.sides.values():
                llm.close()
    measure.table(
        ("counted", "FLOPs full / compact", "layer rows", "of the plan's ratio", "every layer"),
        [(e["bar"], e["flops_ratio"], e["rows_ratio"], f"{e['value']:.4f}", str(e["correct"]))
         for e in count_entries],
    )  # fmt: skip
    measure.table(
        ("timed", "full s", "p5", "p95", "compact s", "p5", "p95", "speed-up", "ideal",
         "of ideal", "processor time", "self ratios"),
        [(e["bar"], e["peer_value"], e["peer_p5"], e["peer_p95"], e["value"], e["p5"], e["p95"],
          e["speedup"], e["ideal"], e["of_ideal"], e["busy_of_ideal"],
          f"{e['self_ratio']} {e.get('peer_self_ratio')}") for e in clock_entries],
    )  # fmt: skip
    measure.lines([*count_entries, *clock_entries])
    good = all(e["correct"] and abs(e["value"] - 1) <= COUNTED for e in count_entries)
    fast = all(e["of_ideal"] >= CLOCK_BAR for e in clock_entries)
    print(f"counters within {COUNTED}: {good}; clock at least {CLOCK_BAR} of ideal: {fast}")
    return 0 if good and fast else 1


if __name__ == "__main__":
    sys.exit(main())
