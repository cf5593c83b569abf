"""What truncated prefill does to the embedded model, beside the noise of legal rounding.

Code prompts are prefilled whole and cut; the next 64 greedy tokens of the whole one are forced
through both, and their logits compared. Exercises are answered after each prefill: right where
every token of the expected answer is the most likely one. The noise floor is the same without a
cut, but with another rounding that the model's definition allows.

    python -m benchmarks.drift                        # two cores: two minutes, few prompts
    python -m benchmarks.drift --accelerator nvidia   # the numbers of the table, eight minutes

Comes in: the data folder made by `examples/train_tiny/prepare.py`. Goes out: a table, a picture and
the data behind them in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepinfer
from benchmarks import measure
from deepinfer.ops.torch import blocked
from deepinfer.replay.drift import Trial, compare, joined
from examples.train_tiny import exercises, streams

KEEPS = (134, 140, 256, 512)
TOKENS = 64
LAYOUTS = ("needle", "table", "conversation")
TASKS = (  # most important first, longest last
    "retrieval 512", "retrieval 2048", "arithmetic", "copying", "tools", "sorting",
    "retrieval 4096",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


# --- other roundings that are as legal ----------------------------------------------------------


@contextmanager
def replaced(holder: Any, name: str, value: Callable) -> Iterator[None]:
    """`holder.name` is `value` inside the block."""
    plain = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, plain)


def fp32_softmax(ops: Any) -> Any:
    """Probabilities go into the product with the values as they are, not rounded to bf16."""
    plain = ops.sparse_attention

    def sparse_attention(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(q.float(), *rest).to(q.dtype)

    return replaced(ops, "sparse_attention", sparse_attention)


def reversed_keys(ops: Any) -> Any:
    """Every row visits its keys from the newest to the oldest."""
    plain = ops.sparse_attention

    def sparse_attention(q, window, window_slots, form, entries, entry_slots, *rest):
        slots = None if entry_slots is None else entry_slots.flip(1)
        return plain(q, window, window_slots.flip(1), form, entries, slots, *rest)

    return replaced(ops, "sparse_attention", sparse_attention)


def reversed_sums(ops: Any) -> Any:
    """Every matrix product adds its blocks of 128 in float32, from the last to the first."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total, *others = reversed(torch.matmul(a.transpose(-2, -3), b).float().unbind(-3))
        for sums in others:
            total = total + sums
        return total

    return replaced(blocked, "_matmul", product)


NOISE = {
    "fp32 softmax": fp32_softmax,
    "reversed keys": reversed_keys,
    "reversed sums": reversed_sums,
}


def settings() -> Iterator[tuple[str, int | None, Callable]]:
    """(name, keep, rounding) of each line of the table."""
    for keep in KEEPS:
        yield f"K = {keep}", keep, nullcontext
    yield "full", None, nullcontext
    for name, rounding in NOISE.items():
        yield f"full, {name}", None, rounding


# --- the study ----------------------------------------------------------------------------------


class Study:
    """One engine, measured under every setting; `results` grows as it goes."""

    def __init__(self, llm: deepinfer.LLM, data: Path) -> None:
        self.runner = llm.parts.runner
        self.trial = Trial(self.runner, llm.parts.sizes)
        vocabulary = streams.load_vocabulary(data)
        code = np.memmap(data / "heldout.bin", np.uint16, "r")
        self.code = code
        self.material = exercises.Material(vocabulary, (code,), streams.load_docs(data))
        self.results: dict[str, dict[str, Any]] = {name: {} for name, *_ in settings()}
        self.exact = True  # forced rows of the uncut engine are the rows that it decoded

    def drift(self, count: int, length: int) -> None:
        """KL and agreement over `count` prompts of held-out code, `length` tokens with BOS."""
        starts = np.linspace(0, len(self.code) - length, count).astype(int)
        prompts = [[0, *self.code[s : s + length - 1].tolist()] for s in starts]
        parts: dict[str, list] = {name: [] for name in self.results}
        for group in self.trial.groups(prompts, TOKENS):
            answers, full = self.trial.greedy(group, TOKENS)
            for name, keep, rounding in settings():
                with rounding(self.runner.ops):
                    cut = self.trial.forced(group, answers, keep)
                parts[name] += [compare(a, b) for a, b in zip(full, cut, strict=True)]
        for name, found in parts.items():
            by_prompt = sorted(part.kl for part in found)
            self.results[name]["drift"] = {
                **asdict(joined(found)),
                "prompts": count,
                "prompt_tokens": length,
                "kl_median": statistics.median(by_prompt),
                "kl_p95": measure.quantile(by_prompt, 0.95),
            }
        self.exact = joined(parts["full"]).max_abs_dlogit == 0

    def questions(self, task: str, n: int) -> list[exercises.Question]:
        """`n` of a kind: of each operation; of retrieval a third of each layout."""
        if task.startswith("retrieval"):
            distance, each = int(task.split()[1]), -(-n // len(LAYOUTS))
            held = [exercises.retrieval_eval(self.material, distance, layout, each)
                    for layout in LAYOUTS]  # fmt: skip
        elif task == "arithmetic":
            held = [exercises.arithmetic_eval(self.material.vocabulary, op, n) for op in "+-*"]
        else:
            held = [getattr(exercises, f"{task}_eval")(self.material.vocabulary, n)]
        return [question for part in held for question in part]

    def accuracy(self, task: str, n: int) -> None:
        """Exact answers under every setting, with the changes against the uncut engine."""
        questions = self.questions(task, n)
        right = {setting: self._right(questions, *how) for setting, *how in settings()}
        full = right["full"]
        for setting, found in right.items():
            pairs = list(zip(full, found, strict=True))
            self.results[setting][task] = {
                "n": len(found),
                "exact": sum(found) / len(found),
                "lost": pairs.count((True, False)),
                "gained": pairs.count((False, True)),
                "prompt_tokens_median": statistics.median(len(q.prompt) for q in questions),
            }

    def _right(
        self, questions: list[exercises.Question], keep: int | None, rounding: Callable
    ) -> list[bool]:
        targets = iter([q.target for q in questions])
        most = max(len(q.target) for q in questions)
        found = []
        for group in self.trial.groups([q.prompt for q in questions], most):
            answers = [next(targets) for _ in group]
            with rounding(self.runner.ops):
                rows = self.trial.forced(group, answers, keep)
            found += [
                logits.argmax(-1).tolist() == list(answer)
                for logits, answer in zip(rows, answers, strict=True)
            ]
        return found


# --- what is shown ------------------------------------------------------------------------------


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Two Markdown tables: drift, and exact answers in percent (lost and gained against full)."""
    first = ["| prefill | KL, nats | median | p95 | top-1 agreement | max \\|Δlogit\\| |",
             "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    tasks = [name for name in next(iter(results.values())) if name != "drift"]
    second = [f"| prefill | {' | '.join(tasks)} |", f"|---|{'--:|' * len(tasks)}"]
    for name, held in results.items():
        if "drift" in held:
            d = held["drift"]
            first.append(
                f"| {name} | {d['kl']:.5f} | {d['kl_median']:.5f} | {d['kl_p95']:.5f} "
                f"| {d['top1_agreement'] * 100:.2f} % | {d['max_abs_dlogit']:.2f} |"
            )
        cells = [
            f"{held[task]['exact'] * 100:.1f} (−{held[task]['lost']} +{held[task]['gained']})"
            for task in tasks
        ]
        second.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*first, *(["", *second] if tasks else [])]) + "\n"


def picture(results: dict[str, dict[str, Any]], path: Path, title: str) -> None:
    """KL of every line of the table, the noise floor as a band; exact answers, points against the
    uncut prefill, and the point that retrieval may fall by."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.4), layout="constrained", width_ratios=(1, 1.5)
    )
    names = [name for name in results if name != "full"]
    cuts = [name for name in names if name.startswith("K")]
    kl = {name: results[name]["drift"]["kl"] for name in names}
    floor = [value for name, value in kl.items() if name not in cuts]
    colours = {name: plt.cm.Blues(0.95 - 0.16 * at) for at, name in enumerate(cuts)}
    colours |= {name: str(0.45 + 0.14 * at) for at, name in enumerate(NOISE)}
    labels = {name: name.removeprefix("full, ") for name in names}
    left.bar(labels.values(), kl.values(), color=[colours[labels[name]] for name in names])
    left.axhspan(min(floor), max(floor), color="#999999", alpha=0.25, linewidth=0)
    left.tick_params(axis="x", rotation=35)
    left.set_ylabel("KL(full || other), nats a token")
    left.set_title("cut prefill (blue), uncut with another rounding (grey)", fontsize=10)
    full = {task: held for task, held in results["full"].items() if task != "drift"}
    marks = dict(zip(names, "osD^v<>P", strict=False))
    most = 2.0
    for at, name in enumerate(names):
        moved = [(results[name][task]["exact"] - full[task]["exact"]) * 100 for task in full]
        most = max([most, *(abs(value) + 0.5 for value in moved)])
        places = [i + (at - (len(names) - 1) / 2) * 0.1 for i in range(len(full))]
        right.scatter(
            places, moved, color=colours[labels[name]], marker=marks[name], s=34, label=labels[name]
        )
    right.axhline(0, color="black", linewidth=0.8)
    right.axhline(-1, color="#B3261E", linewidth=1, linestyle="--")
    right.set_ylim(-most, most * 1.3)
    shown = [f"{task}\nfull {held['exact'] * 100:.1f} %" for task, held in full.items()]
    right.set_xticks(range(len(full)), shown, fontsize=8)
    right.set_ylabel("exact answers, points against full")
    right.set_title("exercises; red: the point that retrieval may fall by", fontsize=10)
    right.legend(loc="upper left", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def save(study: Study, about: dict[str, Any], out: Path) -> None:
    """Data and tables so far."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"about": {**about, "exact": study.exact}, "results": study.results}
    (out / "drift.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "drift.md").write_text(tables(study.results), encoding="utf-8")


def draw(out: Path) -> None:
    """The picture of what `save` wrote."""
    document = json.loads((out / "drift.json").read_text(encoding="utf-8"))
    picture(document["results"], out / "drift.png", document["about"]["title"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia", "ascend"))
    parser.add_argument("-m", "--model-dir", default=None)
    parser.add_argument("--data", type=Path, default=streams.WORK)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=int, help="of held-out code; default 2, 128 on a device")
    parser.add_argument("--length", type=int, help="tokens of them; default 512, 2048 on a device")
    parser.add_argument("--n", type=int, help="questions a kind; default 3, 210 on a device")
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS)
    parser.add_argument("--seconds", type=float, help="begin no exercise after these; 60, or 380")
    parser.add_argument("--redraw", action="store_true", help="the picture alone, of saved data")
    asked = parser.parse_args()
    if asked.redraw:
        draw(asked.out)
        return 0
    begin = time.monotonic()
    host = asked.accelerator == "cpu"
    prompts = asked.prompts or (2 if host else 128)
    length = asked.length or (512 if host else 2048)
    n = asked.n or (3 if host else 210)
    seconds = asked.seconds or (60 if host else 380)
    llm = deepinfer.LLM(
        asked.model_dir,
        accelerator=asked.accelerator,
        max_model_len=8192,
        max_num_seqs=8 if host else 64,
        max_num_batched_tokens=2048 if host else 16384,
    )
    about = {
        "title": f"truncated prefill beside other roundings: {prompts} prompts of {length} tokens",
        "model": "embedded" if asked.model_dir is None else Path(asked.model_dir).name,
        "accelerator": asked.accelerator,
        "git": measure.git(),
        "torch": torch.__version__,
        "questions": n,
        "tokens": TOKENS,
    }
    with llm:
        study = Study(llm, asked.data)
        study.drift(prompts, length)
        print(f"drift: {time.monotonic() - begin:.0f} s", flush=True)
        save(study, about, asked.out)
        for task in asked.tasks:
            if time.monotonic() - begin > seconds:
                print(f"{task}: no time left", flush=True)
                continue
            study.accuracy(task, n)
            print(f"{task}: {time.monotonic() - begin:.0f} s", flush=True)
            save(study, about, asked.out)
    print("\n" + tables(study.results))
    draw(asked.out)
    print(f"forced rows equal decoded rows bit for bit: {study.exact}")
    return 0 if study.exact else 1


if __name__ == "__main__":
    sys.exit(main())
