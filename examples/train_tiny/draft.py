"""Trains the draft stages of the embedded checkpoint over its frozen backbone, by the clock.

    python -m examples.train_tiny.draft --out out --seconds 520
    python -m examples.train_tiny.draft --out /tmp/out --smoke        # a rehearsal on a CPU

Comes in: a checkpoint and the data folder made by `prepare.py`. Goes out: the checkpoint with draft
stages, and `draft.json` with their accepted lengths and those of other drafters trained beside
them. Four parts: the backbone writes text, its hidden states over that and over training rows are
pooled, all drafters are trained on the same anchors of the pool, and they are measured on text that
the backbone wrote from held-out prompts. It must not know formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

START = time.monotonic()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepinfer.checkpoint.layout import open_checkpoint, read_token_map  # noqa: E402
from deepinfer.checkpoint.load import load_weights  # noqa: E402
from deepinfer.checkpoint.synth import write_checkpoint  # noqa: E402
from deepinfer.model.config import ModelConfig  # noqa: E402
from deepinfer.model.draft import Draft  # noqa: E402
from deepinfer.model.transformer import Transformer  # noqa: E402
from deepinfer.quant import codec  # noqa: E402
from deepinfer.quant.formats import Packed  # noqa: E402
from examples.train_tiny import draft_ablation, draft_quality, exercises, streams  # noqa: E402
from examples.train_tiny.chat import ANSWER, WEIGHTS  # noqa: E402
from examples.train_tiny.draft_parts import (  # noqa: E402
    Anchors,
    accepted,
    draft_loss,
    fit_confidence,
    raw_confidence,
    teacher_forced,
)
from examples.train_tiny.frozen import DraftOps, Recorded, frozen  # noqa: E402
from examples.train_tiny.memory import SequenceMemory  # noqa: E402
from examples.train_tiny.optim import Optimiser  # noqa: E402
from examples.train_tiny.own_text import StepMemory, Writer  # noqa: E402
from examples.train_tiny.parameters import Parameters  # noqa: E402
from examples.train_tiny.tokenizer import ASSISTANT, EOS, SYSTEM  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "deepinfer" / "embedded"
MIX = (0.2, 0.4, 0.4)  # library, packages, exercises
TEMPERATURES = (1.0, 1.0, 0.0)  # of the backbone's own training text
TALK = 0.25  # share of it that goes on from conversations
KINDS = ("code", "arithmetic", "retrieval", "chat", "tools", "copying")
HEADS = ("dspark", "parallel", "autoregressive")
SLOTS = 5


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--out", type=Path, required=True, help="folder of checkpoint and results")
    a.add_argument("-m", "--model-dir", type=Path, default=MODEL, help="the backbone")
    a.add_argument("--data", type=Path, default=streams.WORK, help="folder made by prepare.py")
    a.add_argument("--seconds", type=float, default=520.0, help="for everything")
    a.add_argument("--heads", default=",".join(HEADS), help="what to train; dspark is exported")
    a.add_argument(
        "--trained", type=Path, nargs="+", help="checkpoints whose stages are measured instead"
    )
    a.add_argument("--stages", type=int, default=2)
    a.add_argument("--experts", type=int, default=8)
    a.add_argument("--rank", type=int, default=96, help="of the Markov head")
    a.add_argument("--length", type=int, default=1024, help="tokens of a row")
    a.add_argument("--batch", type=int, default=64, help="rows a step")
    a.add_argument("--anchors", type=int, default=48, help="anchors a row and step")
    a.add_argument("--writers", type=int, default=1024, help="texts written at once")
    a.add_argument("--own", type=int, default=6, help="batches of own text to train on")
    a.add_argument("--pool", type=int, default=12288, help="rows pooled at most")
    a.add_argument("--shared", type=Path, help="folder of --parts runs that write text together")
    a.add_argument("--part", type=int, default=0, help="which of them this one is")
    a.add_argument("--parts", type=int, default=1)
    a.add_argument("--steps", type=int, help="training steps at most")
    a.add_argument("--rate", type=float, default=1.0, help="multiplies every learning rate")
    a.add_argument("--n", type=int, default=80, help="evaluation texts a kind and temperature")
    a.add_argument("--new", type=int, default=192, help="tokens of an evaluation text at most")
    a.add_argument("--distance", type=int, default=512, help="of the retrieval questions")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--workers", type=int, help="data processes")
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--no-graph", action="store_true", help="launch every kernel by itself")
    a.add_argument("--smoke", action="store_true", help="sizes for a minute on a CPU")
    args = a.parse_args(argv)
    if args.smoke:
        args.device, args.seconds, args.workers = "cpu", 300.0, 1
        args.length, args.batch, args.anchors, args.writers, args.own = 128, 2, 4, 12, 1
        args.pool, args.steps, args.n, args.new, args.distance = 14, 3, 1, 8, 60
    return args


# --- what the drafters learn from -----------------------------------------------------------


class Reader:
    """Hidden states and target rows of [batch, T] tokens, every quantiser on."""

    @torch.no_grad()
    def __init__(self, model: Transformer, memory: SequenceMemory, graph: bool = True):
        self.model, self.memory = model, memory
        memory.sparse, memory.teach = True, False
        shape = (memory.batch, memory.length)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=memory.positions.device)
        self._pass = Recorded(self._read, self.tokens.device, warm=1, graph=graph)
        self.error = self._pass.error

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden bf16 [batch, T, H], targets bf16 [batch, T, 3 H]); valid until the next call."""
        self.tokens.copy_(tokens)
        self._pass()
        return self.hidden, self.targets

    @torch.no_grad()
    def _read(self) -> None:
        self.memory.ops.start()
        self.memory.start()
        self.memory.read(self.tokens)
        x, targets = self.model.hidden_and_targets(self.tokens.flatten(), self.memory)
        self.hidden = x.view(*self.tokens.shape, -1)
        self.targets = targets.view(*self.tokens.shape, -1)


class Pool:
    """Rows with the backbone's outputs on the device. ``allowed``: where an anchor may stand."""

    def __init__(self, rows: int, length: int, config: ModelConfig, device: torch.device):
        hidden, width = config.hidden_size, config.hidden_size * len(config.dspark_target_layer_ids)
        self.count, self.size = 0, rows
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.int32, device=device)
        self.allowed = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(rows, length, hidden, dtype=torch.bfloat16, device=device)
        self.targets = torch.zeros(rows, length, width, dtype=torch.bfloat16, device=device)

    def add(self, tokens: np.ndarray, allowed: np.ndarray, reader: Reader) -> None:
        """Reads int64 [N, T + 1] tokens; N is at most the reader's batch, surplus rows are cut."""
        count = min(len(tokens), self.size - self.count)
        given = torch.zeros_like(reader.tokens)
        given[: len(tokens)] = torch.from_numpy(tokens[:, :-1])
        hidden, targets = reader(given)
        place = slice(self.count, self.count + count)
        self.tokens[place] = torch.from_numpy(tokens[:count]).to(self.tokens)
        self.allowed[place] = torch.from_numpy(allowed[:count]).to(self.allowed.device)
        self.hidden[place], self.targets[place] = hidden[:count], targets[:count]
        self.count += count


def may_anchor(first: np.ndarray, written: int) -> np.ndarray:
    """bool [N, T]: P whose first drafted token, P + 2, is one of ``first`` bool [N, T + 1], with
    all that the slots need among the ``written`` tokens."""
    allowed = np.zeros((len(first), first.shape[1] - 1), bool)
    last = min(written, first.shape[1]) - SLOTS - 2
    allowed[:, : last + 1] = first[:, 2 : last + 3]
    return allowed


def in_answer(tokens: np.ndarray) -> np.ndarray:
    """bool [N, L]: tokens that an assistant says, from the token after its mark to the eos."""
    at = np.arange(tokens.shape[1])
    opened = np.maximum.accumulate(np.where(tokens == ASSISTANT, at, -1), 1)
    closed = np.maximum.accumulate(np.where(tokens == EOS, at, -1), 1)
    before = np.concatenate((np.zeros((len(tokens), 1), bool), (opened > closed)[:, :-1]), 1)
    return before & (tokens != ASSISTANT)


def cut_prompts(
    weights: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(prompt lengths, whether a row is of code): an exercise is cut where an answer starts, code
    anywhere in the first half."""
    code = ~(weights < 1.0).any(1)
    prompts = rng.integers(min(64, length // 4), length // 2, len(weights))
    for i in np.flatnonzero(~code):
        starts = np.flatnonzero((weights[i, 1:] == 1.0) & (weights[i, :-1] < 1.0)) + 1
        starts = starts[(starts >= 4) & (starts < 3 * length // 4)]
        if len(starts):
            prompts[i] = rng.choice(starts)
    return prompts, code


def anchors_in(model: Transformer, ops: DraftOps, tokens, hidden, targets, last, valid) -> Anchors:
    """Anchors ``last`` int64 [N, A] of rows tokens int64 [N, T + 1], hidden and targets [N, T]."""
    n, t = hidden.shape[:2]
    device = hidden.device
    flat = torch.arange(n, device=device).unsqueeze(1) * t + last
    ahead = torch.arange(1, SLOTS + 2, device=device)
    found = tokens.gather(1, (last.unsqueeze(-1) + ahead).flatten(1)).view(-1, SLOTS + 1)
    rows = flat.flatten().unsqueeze(-1) + ahead[:-1]
    teacher = model.logits(hidden.flatten(0, 1)[rows.flatten()]).view(len(rows), SLOTS, -1)
    return Anchors(targets, last, flat.flatten(), found, teacher, valid.float().flatten())


# --- the drafters ---------------------------------------------------------------------------


class Head:
    """One drafter: its network, weights and optimiser."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        model: Transformer,
        ops: DraftOps,
        device: torch.device,
        seed: int,
    ):
        self.name, self.ops, self.config = name, ops, config
        self.markov = name not in ("parallel", "autoregressive")
        extra = ()
        if name == "parallel":
            self.config = draft_ablation.parallel_config(config)
        if name == "autoregressive":
            self.config = draft_ablation.autoregressive_config(config)
            extra = (draft_ablation.join_leaf(config),)
        self.p = Parameters(self.config, device, quantise=True, group="draft", extra=extra)
        self.p.initialise(seed)
        self.optimiser = Optimiser(self.p)
        weights = self.p.weights()
        self.draft = Draft(self.config, weights, ops, model.embed, model.head)
        self.join = weights.get(draft_ablation.JOIN)

    def __call__(self, anchors: Anchors) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [R, B, V], raw confidence [R, B])."""
        logits, seen = self.read(anchors)
        return logits, raw_confidence(self.draft, seen)

    def read(self, anchors: Anchors) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [R, B, V], what the confidence is read from [R, B, F])."""
        if self.name == "autoregressive":
            return draft_ablation.autoregressive(self.draft, self.join, self.ops, anchors)
        return teacher_forced(self.draft, self.ops, anchors, self.markov)

    @torch.no_grad()
    def take(self, path: Path) -> None:
        """The stages of a checkpoint."""
        stored = load_weights(open_checkpoint(path), self.p.device)
        values = {
            name: codec.unpack(value, torch.float32) if isinstance(value, Packed) else value
            for name, value in stored.items()
        }
        values["router_bias"] = torch.stack(
            [stored[f"mtp.{s}.ffn.gate.bias"] for s in range(len(self.config.stages))]
        )
        self.p.restore(values)

    @torch.no_grad()
    def set_confidence(self, weights: torch.Tensor) -> None:
        """float32 [F]; also makes the next confidences read them."""
        name = f"mtp.{len(self.config.stages) - 1}.confidence_head.proj.weight"
        self.p.tensors[name].copy_(weights.view_as(self.p.tensors[name]))
        self.p.refresh()

    def learn(self, anchors: Anchors) -> torch.Tensor:
        """One update; returns acceptance by slot."""
        self.ops.start()
        loss, accept = draft_loss(*self(anchors), anchors)
        loss.backward()
        with torch.no_grad():
            bias = self.p.router_bias
            load = torch.stack(self.ops.loads).view(-1, *bias.shape).sum(0)
            load = load / load.mean(-1, keepdim=True)
            self.optimiser.step()
            bias.add_(self.optimiser.factor * 0.002 * torch.sign(1.0 - load))
            self.p.refresh()
        return accept


class Learner:
    """All drafters on the same anchors, step by step."""

    def __init__(
        self,
        args: argparse.Namespace,
        heads: list[Head],
        model: Transformer,
        ops: DraftOps,
        pool: Pool,
    ):
        self.args, self.heads, self.model, self.ops, self.pool = args, heads, model, ops, pool
        device = pool.tokens.device
        self.accept = torch.zeros(len(heads), SLOTS, device=device)
        self.count = torch.zeros((), device=device)
        self.set_rate(0.0)
        # The first calls change nothing but momenta, which are then forgotten.
        self._step = Recorded(self._learn, device, graph=not args.no_graph)
        self.error = self._step.error
        for head in heads:
            head.optimiser.reset()
        self.read()

    def set_rate(self, factor: float) -> None:
        for head in self.heads:
            head.optimiser.factor.fill_(factor)

    def __call__(self, factor: float) -> None:
        self.set_rate(factor)
        self._step()

    def pace(self) -> float:
        """Seconds a step takes; they move nothing but momenta, which are then forgotten."""
        steps = 30 if self.pool.tokens.is_cuda else 1
        self.set_rate(0.0)
        self.read()
        begin = time.monotonic()
        for _ in range(steps):
            self._step()
        self.read()
        for head in self.heads:
            head.optimiser.reset()
        return (time.monotonic() - begin) / steps

    def read(self) -> dict[str, list[float]]:
        """Mean acceptance by slot since the last call; waits for the device."""
        mean = (self.accept / self.count.clamp_min(1.0)).tolist()
        self.accept.zero_()
        self.count.zero_()
        return {h.name: [round(x, 4) for x in m] for h, m in zip(self.heads, mean, strict=True)}

    def _learn(self) -> None:
        anchors = self._draw()
        for i, head in enumerate(self.heads):
            self.accept[i].add_(head.learn(anchors))
        self.count.add_(1.0)

    @torch.no_grad()
    def _draw(self) -> Anchors:
        pool, args = self.pool, self.args
        rows = torch.randint(0, pool.count, (args.batch,), device=pool.tokens.device)
        allowed = pool.allowed[rows]
        score = torch.where(allowed, torch.rand(allowed.shape, device=rows.device), -1.0)
        best = torch.topk(score, args.anchors, dim=1)
        # A row with too few places fills up with its first, which counts for nothing.
        valid = best.values >= 0.0
        last = torch.where(valid, best.indices, 0)
        return anchors_in(
            self.model, self.ops, pool.tokens[rows].long(), pool.hidden[rows], pool.targets[rows],
            last, valid,
        )  # fmt: skip


# --- the run --------------------------------------------------------------------------------


class Run:
    """The parts in order, each until its share of the time is over."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, torch.device(args.device)
        args.out.mkdir(parents=True, exist_ok=True)
        paths = ("out", "model_dir", "data", "shared", "trained")
        given = {k: v for k, v in vars(args).items() if k not in paths}
        self.results: dict[str, object] = {"arguments": given}
        self.material: exercises.Material | None = None
        streams.unpack(args.data)
        checkpoint = open_checkpoint(args.model_dir)
        self.path = checkpoint.path
        self.token_ids = read_token_map(checkpoint.token_map_file, checkpoint.config)
        self.config_dict = self._with_stages(checkpoint.config_dict)
        self.config = ModelConfig.from_dict(self.config_dict)
        self.stored = load_weights(checkpoint, self.device, draft=False)
        self.token_map = torch.tensor(self.token_ids, device=self.device)
        self.ops = DraftOps(compiled=False)
        self.model = Transformer(self.config, frozen(self.stored), self.ops)
        self.say(f"backbone on {self.device}")

    def _with_stages(self, config: dict) -> dict:
        args, text = self.args, dict(config["text_config"])
        layers = text["num_hidden_layers"]
        text["compress_ratios"] = text["compress_ratios"][:layers] + [0] * args.stages
        text["num_nextn_predict_layers"] = args.stages
        text["dspark_block_size"] = SLOTS
        text["dspark_noise_token_id"] = SYSTEM
        text["dspark_target_layer_ids"] = [layers - 3, layers - 2, layers - 1]
        text["dspark_markov_rank"] = args.rank
        text["dspark_n_routed_experts"] = args.experts
        text["dspark_num_experts_per_tok"] = min(2, args.experts)
        return {**config, "text_config": text}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - START:6.1f}] {text}", flush=True)

    def until(self, share: float) -> float:
        """Monotonic seconds at a share of the time."""
        return START + share * self.args.seconds

    def note(self, name: str, value: object) -> None:
        """Results are written as soon as they are there."""
        self.results[name] = value
        partial = self.args.out / "draft.partial"
        partial.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.args.out / "draft.json")

    def run(self) -> None:
        args = self.args
        with streams.Batches(
            args.length, args.batch, seed=args.seed, mix=MIX, workers=args.workers, work=args.data
        ) as batches:
            texts, own = self._write(batches)
            memory = SequenceMemory(
                self.config, args.batch, args.length, self.token_map, self.ops, fused=False
            )
            reader = Reader(self.model, memory, not args.no_graph)
            if reader.error:
                self.say(f"reading is not recorded: {reader.error}")
            pool = None if args.trained else self._read(batches, own, reader)
        if pool is None:
            heads = [self._trained(path) for path in args.trained]
            self._export(heads[0])
        else:
            heads = self._learned(pool)
        del pool
        self._evaluate(heads, texts, reader)

    def _learned(self, pool: Pool) -> list[Head]:
        args = self.args
        heads = [
            Head(name, self.config, self.model, self.ops, self.device, args.seed)
            for name in args.heads.split(",")
        ]
        sizes = {head.name: head.p.master.numel() for head in heads}
        self.say(f"parameters {sizes}")
        self.note("parameters", sizes)
        torch.manual_seed(args.seed)
        self._train(heads, pool)
        for head in heads:
            if head.name == "dspark":
                self._export(head)
        return heads

    def _trained(self, path: Path) -> Head:
        checkpoint = open_checkpoint(path)
        name = "dspark" if path == self.args.trained[0] else str(path)
        head = Head(name, checkpoint.config, self.model, self.ops, self.device, 0)
        head.take(path)
        self.config_dict = checkpoint.config_dict if name == "dspark" else self.config_dict
        return head

    # the backbone's own text

    def _write(self, batches) -> tuple[list[dict], list[tuple[np.ndarray, np.ndarray]]]:
        args = self.args
        memory = StepMemory(self.config, args.writers, args.length, self.token_map, self.ops)
        writer = Writer(self.model, memory, args.length, not args.no_graph)
        if writer.error:
            self.say(f"writing is not recorded: {writer.error}")
        prompts = self._prompts()[: args.writers * args.parts]
        mine = prompts[args.part :: args.parts]
        rows = np.full((len(mine), args.length + 1), EOS, np.int64)
        for row, text in zip(rows, mine, strict=True):
            row[: len(text["prompt"])] = text["prompt"]
        lengths = np.array([len(text["prompt"]) for text in mine])
        temperatures = np.array([text["temperature"] for text in mine], np.float32)
        # Half of the writing time at most: without a graph the texts are shorter.
        torch.manual_seed(args.seed + args.part)
        tokens, written = writer.write(rows, lengths, temperatures, self.until(0.16))
        self.say(f"{len(mine)} evaluation texts, {written} tokens long")
        answers = {"rows": tokens, "written": np.array(written)}
        for number in range(args.own * args.parts):
            # Every part draws all batches and continues its own: later rows are the same for all.
            parts = [next(batches) for _ in range(-(-args.writers // args.batch))]
            if number % args.parts != args.part or time.monotonic() > self.until(0.24):
                continue
            rng = np.random.default_rng((args.seed, number))
            rows = np.concatenate([p[0] for p in parts])[: args.writers].astype(np.int64)
            weights = np.concatenate([p[1] for p in parts])[: args.writers]
            talk = int(TALK * len(rows))
            rows[:talk], weights[:talk] = self._conversations(talk, number)
            lengths, code = cut_prompts(weights, args.length, rng)
            warmth = rng.choice(TEMPERATURES, len(rows)).astype(np.float32)
            tokens, written = writer.write(rows, lengths, warmth, self.until(0.26))
            first = in_answer(tokens) | code[:, None]
            first &= np.arange(tokens.shape[1]) > lengths[:, None]
            answers[f"tokens {number}"] = tokens.astype(np.int32)
            answers[f"allowed {number}"] = may_anchor(first, written)
            self.say(
                f"{len(rows)} texts of its own, {written} tokens long,"
                f" {int(answers[f'allowed {number}'].sum())} anchors"
            )
        own: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for part, found in enumerate(self._exchange("text", answers)):
            for text, row in zip(prompts[part :: args.parts], found["rows"], strict=True):
                text["row"], text["written"] = row, int(found["written"])
            for name in found:
                if name.startswith("tokens "):
                    number = int(name.removeprefix("tokens "))
                    tokens, allowed = found[name], found[f"allowed {number}"]
                    own[number] = (tokens.astype(np.int64), allowed)
        return prompts, [own[number] for number in sorted(own)]

    def _exchange(self, name: str, mine: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """What every part gave under the name, in their order; waits for the others."""
        args, shared = self.args, self.args.shared
        if args.parts == 1:
            return [mine]
        shared.mkdir(parents=True, exist_ok=True)
        partial = shared / f"{name}.{args.part}.partial"
        with partial.open("wb") as f:
            np.savez(f, **mine)
        partial.rename(shared / f"{name}.{args.part}.npz")
        out = []
        for part in range(args.parts):
            path = shared / f"{name}.{part}.npz"
            while not path.exists():
                if time.monotonic() > self.until(0.4):
                    raise TimeoutError(f"part {part} gave no {name}")
                time.sleep(0.05)
            with np.load(path) as found:
                out.append(dict(found))
        return out

    def _conversations(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [count, T + 1], weights) of rows of short conversations."""
        if self.material is None:
            self.material = streams.training_material(self.args.data)
        rng = random.Random(f"draft conversations {self.args.seed} {seed}")
        rows, weights = [], []
        for _ in range(count):
            ids: list[int] = []
            codes: list[int] = []
            while len(ids) <= self.args.length:
                segments = exercises.chat_short(rng, self.material).segments()
                more = exercises.encode_segments(self.material.vocabulary, segments)
                ids, codes = ids + more[0], codes + more[1]
            rows.append(ids[: self.args.length + 1])
            weights.append(np.array(WEIGHTS, np.float32)[codes[: self.args.length + 1]])
        return np.array(rows, np.int64).reshape(count, -1), np.array(weights).reshape(count, -1)

    def _prompts(self) -> list[dict]:
        """Held-out prompts of every kind at temperature 0 and 1, in an order of equal shares."""
        args = self.args
        vocabulary, material = (
            streams.load_vocabulary(args.data), streams.heldout_material(args.data)
        )  # fmt: skip
        size = min(256, args.length // 2)
        windows, _ = streams.heldout_windows(size, 2 * args.n, args.data)
        found: dict[str, list[list[int]]] = {
            "code": [row[:size].tolist() for row in windows],
            "chat": [self._chat(vocabulary, material, seed) for seed in range(2 * args.n)],
            "arithmetic": [], "retrieval": [],
        }  # fmt: skip
        for op in "+-*":
            found["arithmetic"] += [
                q.prompt for q in exercises.arithmetic_eval(vocabulary, op, 1 + 2 * args.n // 3)
            ]
        for layout in ("needle", "table", "conversation"):
            count = 1 + 2 * args.n // 3
            found["retrieval"] += [
                q.prompt for q in exercises.retrieval_eval(material, args.distance, layout, count)
            ]
        found["tools"] = [q.prompt for q in exercises.tools_eval(vocabulary, 2 * args.n)]
        found["copying"] = [q.prompt for q in exercises.copying_eval(vocabulary, 2 * args.n)]
        out = []
        rng = random.Random(args.seed)
        for kind in KINDS:
            room = args.length - args.new - SLOTS - 2
            prompts = [p for p in found[kind] if len(p) <= room]
            rng.shuffle(prompts)
            for i, prompt in enumerate(prompts[: 2 * args.n]):
                out.append({"kind": kind, "prompt": prompt, "temperature": float(i % 2)})
        rng.shuffle(out)
        return out

    @staticmethod
    def _chat(vocabulary, material, seed: int) -> list[int]:
        rng = random.Random(f"draft evaluation {seed}")
        segments = exercises.chat_short(rng, material).segments()
        ids, codes = exercises.encode_segments(vocabulary, segments)
        start = len(ids)
        while codes[start - 1] == ANSWER:
            start -= 1
        return ids[:start]

    # the pool

    def _read(self, batches, own, reader: Reader) -> Pool:
        args = self.args
        pool = Pool(args.pool, args.length, self.config, self.device)
        for tokens, allowed in own:
            for i in range(0, len(tokens), args.batch):
                pool.add(tokens[i : i + args.batch], allowed[i : i + args.batch], reader)
        mine = pool.count
        while pool.count < pool.size and time.monotonic() < self.until(0.36):
            ids, weights = next(batches)
            allowed = may_anchor(weights == 1.0, args.length + 1)
            pool.add(ids.astype(np.int64), allowed, reader)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        self.say(f"pool: {pool.count} rows, {mine} of its own text")
        self.note("pool", {"rows": pool.count, "own": mine})
        return pool

    # training

    def _train(self, heads: list[Head], pool: Pool) -> None:
        args = self.args
        learner = Learner(args, heads, self.model, self.ops, pool)
        self.say(f"step is not recorded: {learner.error}" if learner.error else "step is ready")
        end = self.until(0.89)
        limit = args.steps
        if args.parts > 1:
            # The slowest part says how many steps all take.
            paces = self._exchange("pace", {"pace": np.array(learner.pace())})
            pace = max(float(p["pace"]) for p in paces)
            limit = limit or int(0.98 * (end - time.monotonic()) / pace)
            self.say(f"{limit} steps at {[round(float(p['pace']), 4) for p in paces]} s")
        begin = time.monotonic()
        history: list[dict] = []
        events: list[torch.cuda.Event] = []
        step, shown = 0, begin
        while time.monotonic() < end and (limit is None or step < limit):
            now = time.monotonic()
            progress = (now - begin) / max(end - begin, 1e-6)
            if limit is not None:
                progress = step / limit
            fall = 1.0 - 0.98 * max(0.0, (progress - 0.4) / 0.6)
            learner(args.rate * fall * min(1.0, (step + 1) / 50))
            step += 1
            if self.device.type == "cuda":
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > 2:
                    events.pop(0).synchronize()
            if now - shown >= 10.0:
                history.append({"step": step, "seconds": round(now - begin, 1), **learner.read()})
                self.say(f"{history[-1]}")
                shown = now
        seen = learner.read()
        seconds = time.monotonic() - begin
        history.append({"step": step, "seconds": round(seconds, 1), **seen})
        self.say(f"trained {history[-1]}")
        memory = 0
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated() // 2**20
        self.note("training", {
            "steps": step, "seconds": round(seconds, 1), "peak_mib": memory,
            "anchors": step * args.batch * args.anchors, "history": history,
        })  # fmt: skip

    def _export(self, head: Head) -> None:
        """The checkpoint with stages; the other drafters leave nothing but their figures."""
        snapshot = Parameters.exported(head.p.snapshot(), "draft")
        folder, partial = self.args.out / "checkpoint", self.args.out / "checkpoint.partial"
        write_checkpoint(
            partial,
            self.config_dict,
            {**self.stored, **snapshot},
            tokenizer_json=(self.path / "tokenizer.json").read_text(encoding="utf-8"),
            token_map=self.token_ids,
        )
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sizes = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
        self.say(f"{folder}: {sum(sizes.values()) / 1e6:.2f} MB, {sizes}")
        self.note("checkpoint", {"bytes": sum(sizes.values()), "files": sizes})

    # evaluation

    def _evaluate(self, heads: list[Head], texts: list[dict], reader: Reader) -> None:
        """Accepted length of every kind; whatever fails here costs nothing that was trained."""
        try:
            for text in texts:
                self._measure_end(text)
            texts = [text for text in texts if text["count"] > 0]
            judged = self._judge(heads, texts, reader)
            self.note("texts", [
                {"kind": t["kind"], "temperature": t["temperature"], "tokens": t["count"]}
                | {
                    h.name: round(draft_quality.walk(t[h.name][0], t["count"])[0], 3)
                    for h in heads
                }
                for t in judged
            ])  # fmt: skip
            self.note("quality", self._tables(heads, judged))
        except Exception:  # noqa: BLE001 - see above
            traceback.print_exc()

    def _measure_end(self, text: dict) -> None:
        """``count``: committed tokens after the first generated one, the eos included."""
        first = len(text["prompt"])
        last = min(text["written"] - SLOTS - 2, first + self.args.new - 1)
        ends = np.flatnonzero(text["row"][first : last + 1] == EOS)
        end = first + int(ends[0]) if len(ends) else last
        text["count"] = end - first

    @torch.no_grad()
    def _judge(self, heads: list[Head], texts: list[dict], reader: Reader) -> list[dict]:
        """Adds per head acceptance and confidence [count, B] to the texts it had time for."""
        args, done = self.args, []
        for i in range(0, len(texts), args.batch):
            if time.monotonic() > self.until(0.97):
                self.say(f"evaluation ends after {len(done)} of {len(texts)} texts")
                break
            part = texts[i : i + args.batch]
            rows = np.zeros((args.batch, args.length + 1), np.int64)
            rows[: len(part)] = np.stack([text["row"] for text in part])
            tokens = torch.from_numpy(rows).to(self.device)
            hidden, targets = reader(tokens[:, :-1])
            count = max(text["count"] for text in part)
            first = torch.tensor(
                [len(t["prompt"]) for t in part] + [1] * (args.batch - len(part)),
                device=self.device,
            )
            last = first.unsqueeze(1) - 1 + torch.arange(count, device=self.device)
            last = last.clamp_max(args.length - SLOTS - 1)
            anchors = anchors_in(
                self.model, self.ops, tokens, hidden, targets, last, torch.ones_like(last)
            )
            warm = torch.tensor([t["temperature"] > 0 for t in part], device=self.device)
            for head in heads:
                accept, chance, logit, seen = self._accepted(head, anchors)
                accept = accept.view(args.batch, count, 2, SLOTS)[: len(part)]
                chosen = torch.where(warm.view(-1, 1, 1), accept[:, :, 1], accept[:, :, 0])
                chosen = chosen.double().cpu().numpy()
                chance = chance.view(args.batch, count, SLOTS).double().cpu().numpy()
                logit = logit.view(args.batch, count, SLOTS).double().cpu().numpy()
                for text, a, b, c in zip(part, chosen, chance, logit, strict=False):
                    size = text["count"]
                    text[head.name] = (a[:size], b[:size], c[:size])
                for i, text in enumerate(part):
                    if text["temperature"] == 1.0:
                        # Places with all slots within the text, as `States` counts them.
                        room = max(0, text["count"] - SLOTS + 1)
                        text[f"{head.name} seen"] = seen[i * count : i * count + room].cpu()
            done += part
        return done

    def _accepted(self, head: Head, anchors: Anchors) -> tuple[torch.Tensor, ...]:
        """(chance that each next token is accepted, greedy and at temperature 1, [R, 2, B], chance
        that a drawn one would be at temperature 1, [R, B], raw confidence [R, B], what that is read
        from [R, B, F])."""
        self.ops.start()
        logits, seen = head.read(anchors)
        confidence = raw_confidence(head.draft, seen)
        wanted = anchors.tokens[:, 1:]
        greedy = (logits.argmax(-1) == wanted).float()
        q = torch.log_softmax(logits.float(), -1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        p = torch.log_softmax(anchors.teacher.float(), -1)
        p = p.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        drawn = (q - p).exp().clamp_max(1.0)
        chance = accepted(logits, anchors.teacher)
        return torch.stack((greedy, drawn), 1), chance, confidence, seen

    def _tables(self, heads: list[Head], texts: list[dict]) -> dict[str, object]:
        out: dict[str, object] = {}
        for temperature, name in ((0.0, "greedy"), (1.0, "t1")):
            for kind in (*KINDS, "all"):
                chosen = [
                    t for t in texts
                    if t["temperature"] == temperature and kind in ("all", t["kind"])
                ]  # fmt: skip
                if not chosen:
                    continue
                counts = [t["count"] for t in chosen]
                row = {
                    head.name: draft_quality.summary([t[head.name][0] for t in chosen], counts)
                    for head in heads
                }
                out[f"{name} {kind}"] = row
                lengths = {h: (r["accepted_length"], r["interval"]) for h, r in row.items()}
                self.say(f"{name} {kind}: {len(chosen)} texts, {sum(counts)} tokens, {lengths}")
        warm = [t for t in texts if t["temperature"] == 1.0]
        for head in heads:
            if len(warm) > 1:
                accepts, chances, logits = zip(*(t[head.name] for t in warm), strict=True)
                counts, kinds = [t["count"] for t in warm], [t["kind"] for t in warm]
                states = draft_quality.States.of(logits, accepts, chances, counts)
                found = draft_quality.calibration(states, kinds)
                out[f"confidence {head.name}"] = found
                self.say(f"confidence {head.name}: {found}")
                seen = torch.cat([t[f"{head.name} seen"] for t in warm])
                found = draft_quality.calibration(self._refit(head, states, seen), kinds)
                out[f"refitted {head.name}"] = found
                self.say(f"refitted {head.name}: {found}")
                if head.name == "dspark":
                    self._export(head)
                    self._calibrate(found)
        return out

    def _refit(
        self, head: Head, states: draft_quality.States, seen: torch.Tensor
    ) -> draft_quality.States:
        """The confidences fitted anew to where steps of every second text stand: training draws
        its anchors evenly, from colder text too."""
        places = torch.from_numpy(states.text % 2 == 0)
        weights = fit_confidence(
            seen[places].flatten(0, 1).to(self.device),
            torch.from_numpy(states.chance)[places].flatten().to(self.device),
            torch.from_numpy(states.reach)[places].flatten().to(self.device),
        )
        head.set_confidence(weights)
        with torch.no_grad():
            parts = [
                raw_confidence(head.draft, part.to(self.device)).double().cpu()
                for part in seen.split(8192)
            ]
        return replace(states, logit=torch.cat(parts).numpy())

    def _calibrate(self, found: dict) -> None:
        """Leaves the temperatures beside the stages."""
        value = {
            "schema": "deepinfer.calibration/1", "temperatures": found["temperatures"],
            "samples": found["fitted_on"],
            "ece": {"before": found["all"]["ece_raw"], "after": found["all"]["ece"]},
        }  # fmt: skip
        path = self.args.out / "checkpoint" / "confidence_temperatures.json"
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    torch.set_float32_matmul_precision("high")
    Run(arguments(argv)).run()


if __name__ == "__main__":
    main()
