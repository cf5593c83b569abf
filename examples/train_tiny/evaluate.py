"""Measures a trained state: held-out bits per byte and exact match per exercise.

Comes in: a state folder and the data folder. Goes out: a table and `evaluation.json`. Answers are
scored with the expected answer as input (argmax at every answer token), which equals greedy
decoding where the answer is unique. It must not train.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepinfer.model.transformer import Transformer  # noqa: E402
from examples.train_tiny import configuration, exercises, state, streams  # noqa: E402
from examples.train_tiny.memory import SequenceMemory  # noqa: E402
from examples.train_tiny.ops import TrainingOps  # noqa: E402
from examples.train_tiny.optim import Optimiser  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402
from examples.train_tiny.step import Step  # noqa: E402

LAYOUTS = ("needle", "table", "conversation")
DISTANCES = (512, 2048, 4096, 7900)


def batches_of(rows: np.ndarray, batch: int):
    """Chunks of ``batch`` rows, the last one filled up with its first row; (rows, how many)."""
    for i in range(0, len(rows), batch):
        part = rows[i : i + batch]
        filler = np.repeat(part[:1], batch - len(part), 0)
        yield np.concatenate((part, filler)), len(part)


def bits_per_byte(step: Step, data: Path, windows: int) -> float:
    """Over disjoint held-out windows of the step's length."""
    ids, sizes = streams.heldout_windows(step.memory.length, windows, data)
    nats = 0.0
    for rows, count in batches_of(ids, step.memory.batch):
        tokens = torch.from_numpy(rows.astype(np.int64)).to(step.p.device)
        nats += step.nll(tokens)[:count].double().sum().item()
    return nats / math.log(2) / float(sizes.sum())


def exact(step: Step, questions: list[exercises.Question]) -> list[bool]:
    """Whether every token of the target (thinking included) is the model's first choice."""
    length = step.memory.length
    rows = np.full((len(questions), length), 2, np.int32)
    spans = []
    for i, q in enumerate(questions):
        ids = [*q.prompt, *q.target]
        if len(ids) > length:
            raise ValueError(f"a question of {len(ids)} tokens in rows of {length}")
        rows[i, : len(ids)] = ids
        spans.append((len(q.prompt), len(ids)))
    right: list[bool] = []
    for part, count in batches_of(rows, step.memory.batch):
        tokens = torch.from_numpy(part.astype(np.int64)).to(step.p.device)
        choice = step.logits(tokens).argmax(-1).view(tokens.shape)
        same = (choice[:, :-1] == tokens[:, 1:]).cpu().numpy()
        for i in range(count):
            first, end = spans[len(right)]
            right.append(bool(same[i, first - 1 : end - 1].all()))
    return right


class Evaluation:
    """One state, evaluated in several forms of the model."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, torch.device(args.device)
        token_map = json.loads((args.data / "engram_token_map.json").read_text())
        self.token_map = torch.tensor(token_map, device=self.device)
        self.config = configuration.complete(max(token_map) + 1, args.template)
        self.p = Parameters(configuration.model_config(self.config, True), self.device)
        saved = state.load(args.state)
        if saved is None:
            raise SystemExit(f"no state in {args.state}")
        self.p.restore(saved["tensors"])
        self.optimiser = Optimiser(self.p)
        self.results: dict[str, object] = {"facts": saved["facts"]}
        on = {"auto": self.device.type == "cuda", "on": True, "off": False}[args.compile]
        self.ops = TrainingOps(compiled=on)

    def step(self, length: int, batch: int, sparse: bool, quantised: bool) -> Step:
        config = configuration.model_config(self.config, quantised)
        self.p.quantise = quantised
        self.p.refresh()
        model = Transformer(config, self.p.weights(), self.ops)
        fused = self.device.type == "cuda" and not self.args.no_fused
        memory = SequenceMemory(config, batch, length, self.token_map, self.ops, fused)
        memory.sparse = sparse
        return Step(self.p, self.optimiser, model, memory, self.ops)

    def run(self) -> None:
        """Most important first; every result is written as soon as it is there."""
        n, data = self.args.n, self.args.data
        short = self.args.length
        batch = self.args.batch
        vocabulary = streams.load_vocabulary(data)
        material = streams.heldout_material(data)
        step = self.step(short, batch, True, True)
        windows = self.args.windows
        self._do("bits_per_byte sparse quantised", lambda: bits_per_byte(step, data, windows))
        for op in "+-*":
            self._score(step, f"arithmetic {op}", exercises.arithmetic_eval(vocabulary, op, n))
        for name in ("copying", "sorting", "tools"):
            make = getattr(exercises, f"{name}_eval")
            self._score(step, name, make(vocabulary, n))
        each = -(-n // len(LAYOUTS))
        long = self.step(self.args.long, max(1, batch * short // self.args.long), True, True)
        for distance in DISTANCES:
            for layout in LAYOUTS:
                with_room = step if distance + 192 <= short else long
                if distance + 192 > with_room.memory.length:
                    continue
                questions = exercises.retrieval_eval(material, distance, layout, each)
                self._score(with_room, f"retrieval {distance} {layout}", questions)
        for name, sparse, quantised in (
            ("dense quantised", False, True),
            ("sparse unquantised", True, False),
            ("dense unquantised", False, False),
        ):
            self._do(
                f"bits_per_byte {name}",
                lambda s=sparse, q=quantised: bits_per_byte(
                    self.step(short, batch, s, q), data, self.args.windows
                ),
            )
        self._do(
            f"bits_per_byte sparse quantised {self.args.long}",
            lambda: bits_per_byte(
                self.step(self.args.long, max(1, batch * short // self.args.long), True, True),
                data, max(1, self.args.windows // 4),
            ),
        )  # fmt: skip

    def _score(self, step: Step, name: str, questions: list[exercises.Question]) -> None:
        def measure() -> dict[str, float]:
            return {"n": len(questions), "exact": float(np.mean(exact(step, questions)))}

        self._do(name, measure)

    def _do(self, name: str, measure) -> None:
        begin = time.monotonic()
        try:
            self.results[name] = measure()
            print(f"{name}: {self.results[name]} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception:  # noqa: BLE001 - one failed measurement must not cost the others
            traceback.print_exc()
        self.args.out.mkdir(parents=True, exist_ok=True)
        partial = self.args.out / "evaluation.partial"
        partial.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        os.replace(partial, self.args.out / "evaluation.json")


def main(argv: list[str] | None = None) -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--state", type=Path, required=True)
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--data", type=Path, default=streams.WORK)
    a.add_argument("--template", type=Path, default=configuration.TEMPLATE)
    a.add_argument("--n", type=int, default=210, help="questions a kind")
    a.add_argument("--windows", type=int, default=128)
    a.add_argument("--length", type=int, default=2048)
    a.add_argument("--long", type=int, default=8192)
    a.add_argument("--batch", type=int, default=32, help="rows of --length at once")
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    a.add_argument("--no-fused", action="store_true")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 128
    torch._dynamo.config.accumulated_recompile_limit = 1024
    # The gradient tape stays on: with the shapes of training, its compiled pieces are found again.
    Evaluation(a.parse_args(argv)).run()


if __name__ == "__main__":
    main()
