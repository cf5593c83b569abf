"""How long the device waits for the host, and what the overlapped loop recovers of it (bar H2).

64 requests decode and churn: where an answer ends a waiting prompt comes in. Overlap on against
off, interleaved, with and without drafts, on the embedded checkpoint and on random weights four
times as wide. `off` and `on` are milliseconds of a step by the clock, `gpu` the union of what runs
on the device in one (kernels and copies, from torch's profiler). busy: that union over the time
from the first of it to the last, in the profiled window. recovered = (off - on) / (off - gpu).
Waits: calls that torch's sync debug mode warns of, a step, in this load and in one where nobody
comes or goes; the bar is none in either.

    python -m benchmarks.idle --accelerator nvidia --out benchmarks/results/idle-h200.json
    python -m benchmarks.idle --accelerator cpu --smoke     # that it runs; no figures of a device
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import measure, models
from deepinfer import LLM, SamplingParams
from deepinfer.bench import timed
from deepinfer.engine.assembly import embedded_model

BUSY_BAR = 0.995
RECOVERED_BAR = 0.97
PROMPT = 32  # tokens
SHOWN = 5  # places that wait, in a record
WIDE = {
    "hidden_size": 1024, "num_attention_heads": 16, "q_lora_rank": 512, "o_lora_rank": 256,
    "moe_intermediate_size": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """requests run at once, of `answer` tokens; the first ones are shorter, so that ends are
    spread. Steps: before a window, in a timed one, in a watched one."""

    requests: int = 64
    answer: int = 64
    before: int = 4
    timed: int = 16
    watched: int = 4

    def call(self, vocab: int, steady: bool) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and their parameters, enough for a window; steady: no answer ends in one."""
        most = 6 * (self.before + self.timed)  # a step gives up to six tokens
        count = self.requests if steady else self.requests * (2 + most // self.answer)
        ids = models.random_ids(count * PROMPT, vocab)
        prompts = [ids[at : at + PROMPT] for at in range(0, len(ids), PROMPT)]
        params = []
        for at in range(count):
            length = max(self.answer * min(at + 1, self.requests) // self.requests, 2)
            params.append(
                SamplingParams(
                    max_tokens=most if steady else length, temperature=0, ignore_eos=True
                )
            )
        return prompts, params


class Side:
    """An engine with overlap on or off that counts its steps. ids: of the last run's answers."""

    def __init__(
        self, folder: Path, accelerator: str, overlap: bool, mtp: int, load: Load, cache: bool
    ):
        self.load, self.on_device = load, accelerator == "nvidia"
        self.llm = LLM(
            folder, accelerator=accelerator, overlap=overlap, mtp=mtp, max_num_seqs=load.requests,
            max_model_len=512, prefix_cache=cache,
        )  # fmt: skip
        self.steps, self.step = 0, self.llm._step
        self.llm._step = self._counted
        self.ids: dict[int, list[int]] = {}

    def _counted(self) -> None:
        self.step()
        self.steps += 1

    def run(
        self, steps: int, watch: AbstractContextManager | None = None, steady: bool = False
    ) -> tuple[float, float]:
        """Seconds and tokens of a step, in a window of so many that `watch` encloses."""
        self.steps, self.ids = 0, {}
        made = 0
        stream = self.llm.stream(*self.load.call(self.llm.parts.vocab_size, steady))

        def until(step: int) -> int:
            made = 0
            for delta in stream:
                self.ids.setdefault(delta.index, []).extend(delta.token_ids)
                made += len(delta.token_ids)
                if self.steps >= step:
                    break
            return made

        until(self.load.before)
        self._wait()
        begun, started = self.steps, time.perf_counter()
        with watch or nullcontext():
            made = until(begun + steps)
            self._wait()
        seconds = time.perf_counter() - started
        stream.close()
        return seconds / (self.steps - begun), made / (self.steps - begun)

    def _wait(self) -> None:
        if self.on_device:
            torch.cuda.synchronize()

    def watched(self) -> dict[str, float]:
        """What ran on the device: its milliseconds and its kernels a step, and how busy it was."""
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.run(self.load.watched, profile)
        spans = timed.kernels(profile)
        busy = timed.union(spans)
        return {
            "gpu_ms": busy / 1e6 / self.load.watched,
            "kernels": len(spans) / self.load.watched,
            "busy": busy / (max(stop for _, stop in spans) - spans[0][0]),
        }

    def waits(self, steady: bool) -> tuple[float, dict[str, float]]:
        """Calls a step that wait for the device, and the places with most of them."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.run(self.load.watched, _Warned(), steady)
        torch.cuda.set_sync_debug_mode(before)
        places = Counter(
            f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}"
            for one in caught
            if "called a synchronizing" in str(one.message)
        )
        steps = self.load.watched
        most = {place: count / steps for place, count in places.most_common(SHOWN)}
        return places.total() / steps, most


class _Warned(AbstractContextManager):
    """torch warns of each call that waits, but not of the one that ends the window."""

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def wide(path: Path) -> Path:
    """A checkpoint of the embedded depth, four times as wide, with random weights."""
    from deepinfer.checkpoint.synth import random_tensors, write_checkpoint
    from deepinfer.model.config import ModelConfig

    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    text.update(WIDE, engram_compressed_vocab_size=text["vocab_size"])  # so it needs no tokenizer
    tensors = random_tensors(ModelConfig.from_dict(config), seed=0)
    return write_checkpoint(path, config, tensors, shards=1)


def cell(
    folder: Path, name: str, accelerator: str, mtp: int, load: Load, cache: bool, runs: int,
    limit: float,
):  # fmt: skip
    """One record: a model with or without drafts, both loops in turn, for `limit` seconds or so."""
    until = time.perf_counter() + limit
    sides = {
        overlap: Side(folder, accelerator, overlap == "on", mtp, load, cache)
        for overlap in ("off", "on")
    }
    seconds: dict[str, list[float]] = {overlap: [] for overlap in sides}
    seen: dict[str, object] = {}
    same = True
    for side in sides.values():
        side.run(load.watched)
    if accelerator == "nvidia":
        for overlap, side in sides.items():
            seen |= {f"{key}_{overlap}": value for key, value in side.watched().items()}
            for steady in (False, True):
                load_name = "steady" if steady else "churn"
                count, places = side.waits(steady)
                seen[f"waits_{load_name}_{overlap}"] = count
                seen[f"waiting_{load_name}_{overlap}"] = places
    while len(seconds["on"]) < runs and (time.perf_counter() < until or len(seconds["on"]) < 2):
        ids = []
        for overlap, side in sides.items():
            taken, tokens = side.run(load.timed)
            seconds[overlap].append(1e3 * taken)
            ids.append(side.ids)
        same = same and _agree(*ids)
    for side in sides.values():
        side.llm.close()
    off, on = (statistics.median(samples) for samples in seconds.values())
    if seen:
        seen["recovered"] = (off - on) / (off - seen["gpu_ms_on"])
    return measure.record(
        f"H2 {name}, {f'{mtp} drafts' if mtp else 'no drafts'}", seconds["on"], "ms a step",
        peer="overlap off", peer_samples=seconds["off"], correct=same, tokens_a_step=tokens,
        prefix_cache=cache,
        device=torch.cuda.get_device_name() if accelerator == "nvidia" else "cpu",
        torch=torch.__version__, **seen,
    )  # fmt: skip


def _agree(one: dict[int, list[int]], other: dict[int, list[int]]) -> bool:
    """Are the tokens equal, as far as both have got?"""
    pairs = [(one[at], other[at]) for at in one.keys() & other.keys()]
    return bool(pairs) and all(a[: len(b)] == b[: len(a)] for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="nvidia", choices=("cpu", "nvidia"))
    parser.add_argument("--runs", type=int, default=21, help="of each loop, if there is time")
    parser.add_argument("--limit", type=float, default=200, help="seconds in all, roughly")
    parser.add_argument("--prefix-cache", action="store_true", help="keep and find state")
    parser.add_argument("--smoke", action="store_true", help="few requests, few steps")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    load, runs = Load(), asked.runs
    if asked.smoke:
        load, runs = Load(requests=4, answer=6, before=2, timed=5, watched=3), 2
    entries = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"embedded checkpoint": embedded_model()}
        if not asked.smoke:
            folders["four times as wide"] = wide(Path(scratch) / "wide")
        cells = [(name, mtp) for name in folders for mtp in (0, 5)]
        ends = time.perf_counter() + asked.limit
        for at, (name, mtp) in enumerate(cells):
            limit = (ends - time.perf_counter()) / (len(cells) - at)
            entry = cell(
                folders[name], name, asked.accelerator, mtp, load, asked.prefix_cache, runs, limit
            )
            print(entry["bar"], entry["peer_value"], entry["value"], entry["unit"], flush=True)
            entries.append(entry)
    print()
    measure.table(
        ("model", "off ms", "on ms", "gpu ms", "busy off", "busy on", "recovered", "kernels",
         "waits", "waits, steady", "tokens", "ids equal"),
        [(e["bar"][3:], e["peer_value"], e["value"], e.get("gpu_ms_on"), e.get("busy_off"),
          e.get("busy_on"), e.get("recovered"), e.get("kernels_on"), e.get("waits_churn_on"),
          e.get("waits_steady_on"), e["tokens_a_step"], str(e["correct"])) for e in entries],
    )  # fmt: skip
    measure.lines(entries)
    if asked.out:
        asked.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    good = all(e["correct"] for e in entries)
    met = all(
        e.get("busy_on", 1) >= BUSY_BAR
        and e.get("recovered", 1) >= RECOVERED_BAR
        and not (e.get("waits_steady_on") or e.get("waits_churn_on"))
        for e in entries
    )
    verdict = (
        "no figures of a device"
        if asked.accelerator == "cpu"
        else (f"busy {BUSY_BAR}, recovered {RECOVERED_BAR}, no waits: {'met' if met else 'missed'}")
    )
    print(f"\nids equal: {good}; {verdict}")
    return 0 if good and met else 1


if __name__ == "__main__":
    sys.exit(main())
