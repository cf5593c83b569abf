"""The price of batch invariance: the invariant path beside the fastest one of torch (bar H3).

Both engines decode at several batch sizes and prefill one long prompt, A B A B in one process; the
price is the ratio of the medians less one, by the clock and, on a processor, by its own time, which
busy neighbours disturb less. The fastest path (`plain_ops.py`) has plain matmuls and softmax; it is
checked against the reference, mean KL divergence and top-1 agreement of the next token over a text,
and its own answers are compared alone and beside others. Drafts are off.

    python -m benchmarks.price --prefill 1024                          # two cores
    python -m benchmarks.price --accelerator nvidia --runs 51 --out price-h200.json

The bar (at most 5 % in the geometric mean, 8 % at worst) is for native kernels; these are figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import measure, models, plain_ops
from benchmarks.prompts import prompts
from deepinfer import LLM, SamplingParams
from deepinfer.engine.assembly import Model, assemble, assemble_model, embedded_model
from deepinfer.settings import resolve

KL_LIMIT, TOP_LIMIT = 0.01, 0.95  # of the plain path beside the reference
PROMPT, STEPS = 16, 4  # tokens of a prompt to decode from; steps of a sample
CHECKED = 256  # rows whose logits are compared
MOVED = 1.03  # ceilings that move more make a run void


class Side:
    """An engine on one back end, without drafts; model: a folder, or weights to be made."""

    def __init__(
        self,
        model: Path | Model,
        accelerator: str,
        backend: str,
        invariant: bool,
        batch: int,
        longest: int,
    ):
        settings = resolve({
            "accelerator": accelerator, "backend": {"all": backend}, "mtp": 0,
            "prefix_cache": False, "batch_invariant": invariant, "max_num_seqs": batch,
            "max_model_len": longest + 8, "kv_cache_tokens": 2 * longest + 256 * batch,
            "model_dir": model if isinstance(model, Path) else None,
        })  # fmt: skip
        if isinstance(model, Path):
            parts = assemble(settings, warnings.warn)
        else:
            parts = assemble_model(model, settings, warnings.warn)
        self.llm = LLM.from_parts(parts)
        self.vocab = self.llm.parts.vocab_size
        self.busy: list[float] = []

    def decode(self, batch: int) -> float:
        """Seconds of a step at `batch` requests."""
        asked = [models.random_ids(PROMPT, self.vocab, seed=n) for n in range(batch)]
        params = SamplingParams(max_tokens=STEPS + 2, temperature=0, ignore_eos=True)
        stream, made, times = self.llm.stream(asked, params), 0, []
        for delta in stream:
            made += len(delta.token_ids)
            if made % batch == 0:  # every request has as many: a step has ended
                times.append((time.perf_counter(), time.process_time()))
        # The first step is prefill, the last has no next one to wait for.
        return self._took(times[0], times[STEPS], STEPS)

    def _took(self, start: tuple[float, float], end: tuple[float, float], steps: int) -> float:
        """Seconds of a step; its processor time is kept."""
        self.busy.append((end[1] - start[1]) / steps)
        return (end[0] - start[0]) / steps

    def prefill(self, tokens: int) -> float:
        """Seconds to the first token of a prompt."""
        ids = models.random_ids(tokens, self.vocab, seed=tokens)
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        start = time.perf_counter(), time.process_time()
        self.llm.generate([ids], params)
        return self._took(start, (time.perf_counter(), time.process_time()), 1)

    def kept_alone(self) -> bool:
        """Has a request the same bits alone as beside others?"""
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
        asked = [models.random_ids(5 + 9 * n, self.vocab, seed=50 + n) for n in range(8)]
        together = self.llm.generate(asked, params)
        alone = [self.llm.generate([ids], params)[0] for ids in asked]
        return [r.logprobs for r in together] == [r.logprobs for r in alone]


def distance(one: Side, other: Side, ids: list[int]) -> dict[str, float]:
    """Of the next-token distributions over one text: mean KL, top-1 agreement, largest logit
    difference."""
    a, b = (side.llm.logits(ids).double() for side in (one, other))
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return {
        "kl": round(float((p.exp() * (p - q)).sum(-1).mean()), 6),
        "top1": round(float((a.argmax(-1) == b.argmax(-1)).double().mean()), 4),
        "largest_difference": round(float((a - b).abs().max()), 4),
    }


def ceilings(accelerator: str) -> dict[str, float]:
    """GB/s of a copy and TFLOP/s of a bf16 product on the accelerator."""
    if accelerator == "cpu":
        return {}
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target, a = torch.empty_like(source), torch.randn(8192, 8192, device="cuda").bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found[2:])

    copied = 2 * source.numel() / seconds(lambda: target.copy_(source))
    return {
        "copy_gb_per_s": round(copied / 1e9, 1),
        "bf16_tflop_per_s": round(2 * 8192**3 / seconds(lambda: a @ a) / 1e12, 1),
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a checkpoint folder; default: the embedded one")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=8192, help="long prompt; 0: none")
    parser.add_argument("--runs", type=int, default=21, help="of each decode batch and side")
    parser.add_argument("--prefill-runs", type=int, help="default: as --runs")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a processor")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    if asked.accelerator == "cpu":
        torch.set_num_threads(asked.threads)
    plain_ops.register()
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), asked.model)
        sides = {
            path: Side(folder, asked.accelerator, backend, path == "invariant",
                       max([8, *asked.batches]), max(asked.prefill, CHECKED))
            for path, backend in (("invariant", "torch"), ("plain", plain_ops.NAME))
        }  # fmt: skip
        text = models.random_ids(CHECKED, sides["plain"].vocab)
        if folder == embedded_model():
            text = [token for ids in prompts("code", 3) for token in ids][:CHECKED]
        apart = distance(*sides.values(), text)
        kept = {path: side.kept_alone() for path, side in sides.items()}
        correct = apart["kl"] <= KL_LIMIT and apart["top1"] >= TOP_LIMIT and kept["invariant"]
        print(f"plain beside the reference: {apart}; bits alone = beside others: {kept}",
              file=sys.stderr, flush=True)  # fmt: skip
        before = ceilings(asked.accelerator)
        works: list[tuple[str, int, Callable[[Side], float]]] = [
            (f"decode, batch {n}", asked.runs, lambda side, n=n: side.decode(n))
            for n in asked.batches
        ]
        if asked.prefill:
            count = asked.prefill_runs or asked.runs
            works.append((f"prefill of {asked.prefill}", count,
                          lambda side: side.prefill(asked.prefill)))  # fmt: skip
        entries = []
        for what, runs, work in works:
            for side in sides.values():
                side.busy.clear()
            samples = measure.interleave(
                {path: (lambda s=side, w=work: w(s)) for path, side in sides.items()}, runs
            )
            mine, fastest = samples["invariant"], samples["plain"]
            busy = [statistics.median(side.busy[1:]) for side in sides.values()]
            entry = measure.record(
                f"H3 price of invariance, {what}", mine, "s", peer="plain torch ops",
                peer_samples=fastest, correct=correct, model=name, threads=asked.threads,
                peer_p5=round(measure.quantile(fastest, 0.05), 4),
                peer_p95=round(measure.quantile(fastest, 0.95), 4),
                peer_self_ratio=round(measure.self_ratio(fastest), 4) if runs > 1 else None,
                price=round(statistics.median(mine) / statistics.median(fastest) - 1, 4),
                price_by_processor_time=(
                    round(busy[0] / busy[1] - 1, 4) if asked.accelerator == "cpu" else None
                ),
                plain_beside_reference=apart, bits_kept=kept,
                limits={"kl": KL_LIMIT, "top1": TOP_LIMIT},
            )  # fmt: skip
            entries.append(entry)
            print(what, entry["value"], entry["peer_value"], entry["price"],
                  file=sys.stderr, flush=True)  # fmt: skip
        after = ceilings(asked.accelerator)
    still = all(max(before[k], after[k]) <= MOVED * min(before[k], after[k]) for k in before)
    for entry in entries:
        entry["ceilings"] = {"before": before, "after": after} if before else None
        entry["ceilings_still"] = still
    measure.table(
        ("work", "invariant ms", "p5", "p95", "plain ms", "p5", "p95", "price",
         "by processor", "self ratios"),
        [
            (e["bar"].split(", ", 1)[1], 1e3 * e["value"], 1e3 * e["p5"], 1e3 * e["p95"],
             1e3 * e["peer_value"], 1e3 * e["peer_p5"], 1e3 * e["peer_p95"],
             _percent(e["price"]), _percent(e["price_by_processor_time"]),
             f"{e['self_ratio']} {e['peer_self_ratio']}")
            for e in entries
        ],
    )  # fmt: skip
    mean = math.exp(statistics.mean(math.log1p(e["price"]) for e in entries)) - 1
    print(f"geometric mean {100 * mean:.1f} %; correct: {correct}; ceilings still: {still}\n")
    measure.lines(entries)
    if asked.out:
        asked.out.write_text(json.dumps(entries, indent=1) + "\n")
    return 0 if correct and still else 1


if __name__ == "__main__":
    sys.exit(main())
