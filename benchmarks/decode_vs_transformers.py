"""Decode tokens/s beside transformers' `deepseek_v4` of the same sizes, and the profile of the gap.

Both engines in one process, interleaved, greedy, with their caches, at batch 1 and 32; a run is the
next few decode steps of answers that stay open, so prefill is in none. The peer is the closest
public architecture under the shortest loop there is: the same widths, layers, heads, experts and
vocabulary, random weights; it has no Engram, compresses by 4 where V4.1 compresses by 2 or 1, and
computes in its plain dtype.

    pip install transformers==5.24.0
    python -m benchmarks.decode_vs_transformers
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import deepinfer
from benchmarks import measure, models
from deepinfer.core.request import SamplingParams
from deepinfer.model.config import ModelConfig

PROMPT_TOKENS = 16
CONTEXT = 256
TOKENS = {1: 8, 32: 2}  # of each request in a run: short runs, many of them
TIMED, PROFILED = 3, 1  # decode steps under the clock of each op, under torch's profiler
BATCH_BAR = 4.0  # batch 32 over batch 1
SAME = (  # what the peer's configuration shares with ours
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank"
    " o_groups o_lora_rank qk_rope_head_dim sliding_window index_n_heads index_head_dim"
    " index_topk hc_mult hc_sinkhorn_iters n_routed_experts n_shared_experts"
    " num_experts_per_tok moe_intermediate_size max_position_embeddings"
)


def prompts(batch: int, vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(11, vocab, (batch, PROMPT_TOKENS), generator=draw).tolist()


@dataclass
class Session:
    """Requests in the middle of their answers; `advance(n)` gives each of them n tokens more."""

    advance: Callable[[int], None]
    answers: list[list[int]]
    close: Callable[[], None] = lambda: None

    def decode(self, tokens: int) -> float:
        """Tokens/s over the next `tokens` of each request."""
        start = time.perf_counter()
        self.advance(tokens)
        return len(self.answers) * tokens / (time.perf_counter() - start)


class Ours:
    """deepinfer's engine over a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.llm = deepinfer.LLM(
            folder, accelerator="cpu", max_num_seqs=max(TOKENS), max_model_len=CONTEXT
        )
        self.config = self.llm.parts.runner.config
        self.parameters = sum(_numbers(w) for w in _matrices(self.llm.parts.runner.model))

    def session(self, ids: list[list[int]]) -> Session:
        """A running call; every request has its first token."""
        asked = SamplingParams(temperature=0, max_tokens=CONTEXT - PROMPT_TOKENS, ignore_eos=True)
        stream = self.llm.stream(ids, asked)
        answers: list[list[int]] = [[] for _ in ids]

        def advance(tokens: int) -> None:
            for _ in range(tokens * len(ids)):
                delta = next(stream)
                answers[delta.index] += delta.token_ids

        advance(1)
        return Session(advance, answers, stream.close)


class Peer:
    """transformers' `deepseek_v4` with random weights and the sizes of a V4.1 configuration."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        import transformers

        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        transformers.logging.set_verbosity_error()
        self.version = transformers.__version__
        torch.manual_seed(0)
        ratios = config.compress_ratios[: config.num_hidden_layers]
        self.model = transformers.AutoModelForCausalLM.from_config(
            transformers.DeepseekV4Config(
                **{name: getattr(config, name) for name in SAME.split()},
                compress_ratios=[4 if ratio else 0 for ratio in ratios],
                num_hash_layers=0,
            ),
            dtype=getattr(torch, dtype),
        ).eval()
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def session(self, ids: list[list[int]]) -> Session:
        """The shortest loop around the model: forward with its cache, argmax."""
        answers: list[list[int]] = [[] for _ in ids]
        tokens, cache = torch.tensor(ids), None

        @torch.inference_mode()
        def advance(count: int) -> None:
            nonlocal tokens, cache
            for _ in range(count):
                out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                for answer, token in zip(answers, tokens[:, 0].tolist(), strict=True):
                    answer.append(token)

        advance(1)
        return Session(advance, answers)


def _matrices(module: object) -> list[object]:
    """Every tensor behind the model's weights, found by walking its records."""
    found: list[object] = []
    stack, seen = [vars(module)], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) or type(item).__name__ == "Packed":
            found.append(item)
        elif type(item).__name__ == "Weight":
            stack.append(item.source)
        elif isinstance(item, dict):
            stack += list(item.values())
        elif isinstance(item, list | tuple):
            stack += list(item)
        elif type(item).__module__.startswith("deepinfer.model.") and hasattr(item, "__dict__"):
            stack += [v for k, v in vars(item).items() if k not in ("config", "rotary")]
    return found


def _numbers(weight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


def operators(session: Session) -> tuple[list, float]:
    """torch's operators over decode steps, by self time, and milliseconds a step in all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watcher:
        session.advance(PROFILED)
    events = sorted(watcher.key_averages(), key=lambda e: -e.self_cpu_time_total)
    return events, sum(e.self_cpu_time_total for e in events) / PROFILED / 1e3


def ops_of_the_table(ours: Ours, session: Session) -> list[tuple[str, float, float]]:
    """(op, ms a step, calls a step) of deepinfer's op table over decode steps."""
    table = vars(ours.llm.parts.runner.ops)
    plain, spent, calls = dict(table), dict.fromkeys(table, 0.0), dict.fromkeys(table, 0)

    def timed(name: str) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            result = plain[name](*args, **kwargs)
            spent[name] += time.perf_counter() - start
            calls[name] += 1
            return result

        return run

    table.update({name: timed(name) for name in plain})
    start = time.perf_counter()
    session.advance(TIMED)
    whole = (time.perf_counter() - start) / TIMED * 1e3
    table.update(plain)
    rows = [(name, spent[name] / TIMED * 1e3, calls[name] / TIMED) for name in table]
    rows.sort(key=lambda row: -row[1])
    rest = whole - sum(row[1] for row in rows)
    return [*rows, ("(engine, memory, glue)", rest, 0.0), ("whole step", whole, 0.0)]


def correct(ours: Ours, ids: list[list[int]], answers: list[list[int]]) -> bool:
    """Are the tokens of the first and the last request those of one whole forward pass?"""
    for at in {0, len(ids) - 1}:
        rows = ours.llm.logits([*ids[at], *answers[at]])[PROMPT_TOKENS - 1 : -1]
        if rows.argmax(-1).tolist() != answers[at]:
            return False
    return True


Shown = tuple[str, tuple[str, ...], list[tuple[object, ...]]]  # title, head and rows of a table


def profiles(ours: Ours, batch: int, sessions: dict[str, Session], top: int) -> list[Shown]:
    """Tables of where a decode step goes."""

    def row(name: str, ms: float, calls: float) -> tuple[object, ...]:
        return name, ms, f"{ms / whole:.0%}", f"{calls:.0f}" if calls else "-"

    rows = ops_of_the_table(ours, sessions["deepinfer"])
    whole = rows[-1][1]
    head = ("op", "ms", "share", "calls")
    title = f"Batch {batch}: deepinfer by op of its table, a decode step"
    shown: list[Shown] = [(title, head, [row(*line) for line in [*rows[:top], *rows[-2:]]])]
    for name, session in sessions.items():
        events, whole = operators(session)
        calls = sum(e.count for e in events if e.key.startswith("aten::")) / PROFILED
        title = (
            f"Batch {batch}: {name} by torch operator, self time of a decode step"
            f" ({whole:.1f} ms under the profiler, {calls:,.0f} operator calls)"
        )
        lines = [
            row(e.key, e.self_cpu_time_total / PROFILED / 1e3, e.count / PROFILED)
            for e in events[:top]
        ]
        shown.append((title, ("operator", *head[1:]), lines))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="of each side and batch; 21 for a bar")
    parser.add_argument("--model", help='a checkpoint folder, or "random"; default: embedded')
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--top", type=int, default=10, help="lines of a profile; 0: no profiles")
    asked = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("the peer is missing: pip install transformers==5.24.0", file=sys.stderr)
        return 3
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), asked.model)
        ours = Ours(folder)
    peer = Peer(ours.config, asked.peer_dtype)
    entries, rows, shown = [], [], []
    for batch, tokens in TOKENS.items():
        ids = prompts(batch, ours.config.vocab_size)
        sessions = {"deepinfer": ours.session(ids), "transformers": peer.session(ids)}
        samples = measure.interleave(
            {name: partial(session.decode, tokens) for name, session in sessions.items()},
            asked.runs,
        )
        entry = measure.record(
            f"decode tokens/s, batch {batch}",
            samples["deepinfer"],
            "tokens/s",
            peer=f"transformers {peer.version} deepseek_v4 {asked.peer_dtype}",
            peer_samples=samples["transformers"],
            model=name,
            threads=asked.threads,
            context=PROMPT_TOKENS,
        )
        entries.append(entry)
        for side, values in samples.items():
            label = f"deepinfer, {name}" if side == "deepinfer" else entry["peer"]
            count = ours.parameters if side == "deepinfer" else peer.parameters
            middle = statistics.median(values)
            rows.append(
                (label, f"{count / 1e6:.1f} M", str(batch), middle,
                 measure.quantile(values, 0.05), measure.quantile(values, 0.95),
                 batch * 1e3 / middle)
            )  # fmt: skip
        rows[-2] += (entry["ratio"],)
        rows[-1] += (None,)
        if asked.top:
            shown += profiles(ours, batch, sessions, asked.top)
        sessions["deepinfer"].close()
        entry["correct"] = correct(ours, ids, sessions["deepinfer"].answers)
    measure.table(
        ("engine", "weights", "batch", "tokens/s", "p5", "p95", "ms a step", "ratio"), rows
    )
    for title, head, lines in shown:
        print(f"{title}\n")
        measure.table(head, lines)
    one, many = entries
    gain, peer_gain = (many[key] / one[key] for key in ("value", "peer_value"))
    many["times_batch_1"] = round(gain, 3)
    good = one["correct"] and many["correct"]
    print(
        f"batch 32 gives {gain:.2f} times batch 1 (bar {BATCH_BAR:.0f}; the peer {peer_gain:.2f})\n"
        f"tokens equal those of one whole forward pass: {good}\n"
        f"threads {asked.threads}, {asked.runs} runs a side, prompts of {PROMPT_TOKENS} tokens\n"
    )
    measure.lines(entries)
    return 0 if good and gain >= BATCH_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
