"""Trains the embedded checkpoint, segment by segment, each run ending by the clock.

One command, for example:

    python -m examples.train_tiny.train --plan dense@280,sparse@560 --state /tmp/state --out out

Comes in: the data folder made by `prepare.py`, a plan, a state folder (continued if it holds a
state). Goes out: the state, a copy that travels, a log of JSON lines. On several GPUs:
`torchrun --nproc-per-node 2 -m examples.train_tiny.train ...`. It must not know formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

START = time.monotonic()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Multicast over NVLink can leave a shared host's GPUs unusable: never on.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from deepinfer.model.transformer import Transformer  # noqa: E402
from examples.train_tiny import configuration, evaluate, feed, state, streams  # noqa: E402
from examples.train_tiny.memory import SequenceMemory  # noqa: E402
from examples.train_tiny.ops import TrainingOps  # noqa: E402
from examples.train_tiny.optim import Optimiser  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402
from examples.train_tiny.schedule import Segment, factor, parse_plan  # noqa: E402
from examples.train_tiny.step import Step  # noqa: E402


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--plan", required=True, help="kind@end,... in seconds since the start")
    a.add_argument("--state", type=Path, required=True, help="folder of the state on this machine")
    a.add_argument("--out", type=Path, required=True, help="folder for log and travelling state")
    a.add_argument("--data", type=Path, default=streams.WORK, help="folder made by prepare.py")
    a.add_argument("--template", type=Path, default=configuration.TEMPLATE)
    a.add_argument("--batch", type=int, default=32, help="rows of 2,048 a step and process")
    a.add_argument("--length", type=int, help="row length instead of the kind's (rehearsals)")
    a.add_argument("--steps", type=int, help="steps a segment at most (rehearsals)")
    a.add_argument("--rate", type=float, default=1.0, help="multiplies every learning rate")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--workers", type=int, help="data processes")
    a.add_argument("--windows", type=int, default=64, help="held-out windows after a segment")
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    a.add_argument("--no-graph", action="store_true")
    a.add_argument("--no-fused", action="store_true", help="plain attention instead of flex")
    a.add_argument("--synthetic", action="store_true", help="random tokens instead of data")
    a.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    return a.parse_args(argv)


class Trainer:
    """Parameters, optimiser and counters across the segments of one command."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device(args.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        args.out.mkdir(parents=True, exist_ok=True)
        args.state.mkdir(parents=True, exist_ok=True)
        self.log = open(args.out / "log.jsonl", "a", encoding="utf-8") if self.rank == 0 else None
        if not args.synthetic:
            if self.rank == 0:
                streams.unpack(args.data)
            if self.world > 1:
                dist.barrier()
            token_map = json.loads((args.data / "engram_token_map.json").read_text())
            classes = max(token_map) + 1
        else:
            classes = None
        self.config = configuration.complete(classes, args.template)
        if args.synthetic:
            text = self.config["text_config"]
            size = text.get("engram_compressed_vocab_size") or 1
            token_map = [i % size for i in range(text["vocab_size"])]
        self.token_map = torch.tensor(token_map, device=self.device)
        config = configuration.model_config(self.config, True)
        self.vocabulary = config.vocab_size
        self.p = Parameters(config, self.device)
        self.p.initialise(args.seed)
        self.optimiser = Optimiser(self.p)
        self.facts = {"steps": 0, "tokens": 0, "seconds": 0.0, "segments": []}
        self._resume()
        self.say(f"{self.p.master.numel():,} parameters on {self.device} x {self.world}")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - START:6.1f}] {text}", flush=True)

    def note(self, **facts) -> None:
        if self.log is not None:
            self.log.write(json.dumps(facts) + "\n")
            self.log.flush()

    def run(self) -> None:
        """All segments of the plan; the state is saved at the end of each."""
        plan = parse_plan(self.args.plan)
        for segment in plan:
            step = self._step(segment)
            trained = self._train(segment, step)
            self.save(segment, trained, travels=segment is plan[-1])
            self._evaluate(segment, step)
            del step
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def _resume(self) -> None:
        saved = state.load(self.args.state)
        if saved is None:
            self.say("new model")
            return
        self.p.restore(saved["tensors"])
        self.facts = saved["facts"]
        if "optimiser" in saved:
            self.optimiser.restore(saved["optimiser"])
        done = ", ".join(s["name"] for s in self.facts["segments"])
        self.say(f"continuing after {done}: {self.facts['tokens'] / 1e6:.1f} M tokens")

    def _step(self, segment: Segment) -> Step:
        args, kind = self.args, segment.kind
        config = configuration.model_config(self.config, kind.quantised)
        self.p.quantise = kind.quantised
        self.p.refresh()
        if kind.fresh and (not self.facts["segments"]
                           or self.facts["segments"][-1]["name"] != segment.name):
            self.optimiser.reset()
        self.warmup = 100 if self.facts["steps"] == 0 else 30
        on = {"auto": self.device.type == "cuda", "on": True, "off": False}[args.compile]
        ops = TrainingOps(compiled=on)
        model = Transformer(config, self.p.weights(), ops)
        length = args.length or kind.length
        batch = max(1, int(args.batch * kind.share))
        fused = self.device.type == "cuda" and not args.no_fused
        memory = SequenceMemory(config, batch, length, self.token_map, ops, fused)
        memory.sparse = kind.sparse
        if fused:
            self._check(memory)
        return Step(
            self.p, self.optimiser, model, memory, ops,
            barriers=kind.barriers, graph=not args.no_graph,
            seed=args.seed + 1000 * self.rank + self.facts["steps"],
        )  # fmt: skip

    def _check(self, memory: SequenceMemory) -> None:
        """The fused attention must agree with the plain one; else the plain one runs."""
        try:
            worst = memory.check()
            self.say(f"fused attention differs from plain by {worst:.4f}")
            if worst < 0.03:
                return
        except Exception:  # noqa: BLE001 - whatever it is, there is another way
            traceback.print_exc()
        self.say("plain attention is used")
        memory.fall_back()

    def _data(self, segment: Segment, step: Step) -> feed.Feed:
        length, batch = step.memory.length, step.memory.batch
        if self.args.synthetic:
            seed = self.args.seed + self.rank
            return feed.Feed(feed.synthetic(self.vocabulary, length, batch, seed))
        workers = self.args.workers
        source = streams.Batches(
            length, batch, seed=self.args.seed + 7 * len(self.facts["segments"]),
            rank=self.rank, world=self.world, workers=workers, work=self.args.data,
            first_step=0,
        )  # fmt: skip
        return feed.Feed(source)

    def _train(self, segment: Segment, step: Step) -> dict:
        args, kind = self.args, segment.kind
        data = self._data(segment, step)
        name = segment.name
        self.say(f"{name}: batch {step.memory.batch} x {step.memory.length}, until {segment.end:g}")
        batches = iter(data.next, None)
        done = step.warm(batches, factor(kind, 0.0, 0, self.warmup))
        count = int(step.read_stats()["steps"])
        self.say(f"{name}: warm, {done}")
        if args.profile:
            self._profile(step, batches)
        begin = shown = kept = time.monotonic()
        since, per_step = count, self.world * step.memory.batch * step.memory.length
        while True:
            now = time.monotonic()
            progress = (now - begin) / max(1e-6, segment.end - (begin - START))
            stop = now - START >= segment.end or (args.steps and count >= args.steps)
            if self._agree(bool(stop), count):
                break
            step(next(batches), args.rate * factor(kind, progress, count, self.warmup))
            count += 1
            if now - shown >= 5.0 and self.rank == 0:
                self._show(segment, step, count, (count - since) * per_step / (now - shown), data)
                shown, since = now, count
            if now - kept >= 100.0 and self.rank == 0:
                self._keep()
                kept = now
        seen = self._show(segment, step, count, (count - since) * per_step
                          / max(1e-6, time.monotonic() - shown), data)
        data.close()
        facts = self.facts
        facts["steps"] += count
        facts["tokens"] += count * per_step
        facts["seconds"] += time.monotonic() - begin
        record = {"name": name, "steps": count, "tokens": count * per_step, "world": self.world,
                  "seconds": round(time.monotonic() - begin, 1), "repeated": data.repeated, **seen}
        facts["segments"].append(record)
        return record

    def _agree(self, stop: bool, count: int) -> bool:
        """All processes end with the same step; asked every 16 steps where there are several."""
        if self.world == 1:
            return stop
        if count % 16:
            return False
        flag = torch.tensor(float(stop), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _show(self, segment: Segment, step: Step, count: int, speed: float, data) -> dict:
        stats = step.read_stats()
        stats.pop("steps")
        stats = {k: round(v, 4) for k, v in stats.items()}
        rate = round(step.optimiser.factor.item(), 4)
        text = " ".join(f"{k} {v:.3f}" for k, v in stats.items())
        self.say(f"{segment.name} {count} {speed / 1e6:.2f} M/s {text} rate {rate} "
                 f"repeated {data.repeated}")
        self.note(segment=segment.name, step=count, seconds=round(time.monotonic() - START, 1),
                  speed=round(speed), rate=rate, repeated=data.repeated, **stats)
        return stats

    def save(self, segment: Segment, record: dict, travels: bool) -> None:
        """The whole state here, and a small copy that travels (it takes seconds to pack)."""
        if self.rank:
            return
        tensors = self._keep()
        self.say(f"{segment.name}: saved {record}")
        if not travels:
            return
        files = state.pack(self.args.out, tensors, self.facts)
        self.say("packed " + " ".join(f"{f.name} {f.stat().st_size / 1e6:.1f} MB" for f in files))

    def _keep(self) -> dict[str, torch.Tensor]:
        tensors = self.p.snapshot()
        saved = {"tensors": tensors, "facts": self.facts, "optimiser": self.optimiser.snapshot()}
        state.save(self.args.state / "state.pt", saved)
        return tensors

    def _evaluate(self, segment: Segment, step: Step) -> None:
        """Held-out bits per byte; whatever fails here costs nothing that was trained."""
        if self.args.synthetic or not self.args.windows or self.rank:
            return
        try:
            begin = time.monotonic()
            bits = evaluate.bits_per_byte(step, self.args.data, self.args.windows)
            self.say(f"{segment.name}: held out {bits:.4f} bits per byte"
                     f" ({time.monotonic() - begin:.1f} s)")
            self.note(segment=segment.name, heldout=bits)
        except Exception:  # noqa: BLE001 - see above
            traceback.print_exc()

    def _profile(self, step: Step, batches) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        graphs, step._graphs = step._graphs, []
        step(next(batches), 0.0)
        with profile(activities=kinds) as seen:
            step(next(batches), 0.0)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        step._graphs = graphs
        key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        print(seen.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=60))


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 128
    torch._dynamo.config.accumulated_recompile_limit = 1024
    Trainer(arguments(argv)).run()


if __name__ == "__main__":
    main()
