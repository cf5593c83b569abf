"""Decode tokens/s beside transformers' `deepseek_v4` of the same sizes, and the profile of the gap.

Both engines in one process, interleaved, greedy, with their caches, at batch 1 and 32, behind code
that the embedded model has not seen; a run is the next few decode steps of answers that stay open,
so prefill is in none. deepinfer runs twice, without drafts and with its default of them, on the
back end that is there. The peer is the closest public architecture under the shortest loop there
is: the same widths, layers, heads, experts and vocabulary, random weights; it has no Engram,
compresses by 4 where V4.1 compresses by 2 or 1, and computes in its plain dtype.

    pip install transformers==5.24.0
    deepinfer build --accelerator cpu
    python -m benchmarks.decode_vs_transformers --bar 15
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
from benchmarks import prompts as texts
from deepinfer.core.request import SamplingParams
from deepinfer.model.config import ModelConfig

PROMPT_TOKENS = 32
CONTEXT = 512
TOKENS = {1: 8, 32: 12}  # of each request in a run, at least: several steps with drafts, no more
TIMED, PROFILED = 3, 1  # decode steps under the clock of each op, under torch's profiler
PLAIN, DRAFTS, PEER = "deepinfer", "deepinfer with drafts", "transformers"
SAME = (  # what the peer's configuration shares with ours
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank"
    " o_groups o_lora_rank qk_rope_head_dim sliding_window index_n_heads index_head_dim"
    " index_topk hc_mult hc_sinkhorn_iters n_routed_experts n_shared_experts"
    " num_experts_per_tok moe_intermediate_size max_position_embeddings"
)


def prompts(batch: int) -> list[list[int]]:
    """Each the beginning of one of the code prompts."""
    return [ids[:PROMPT_TOKENS] for ids in texts.prompts("code", 2 * batch)
            if len(ids) >= PROMPT_TOKENS][:batch]  # fmt: skip


@dataclass
class Session:
    """Requests in the middle of their answers; `advance(n)` gives n tokens a request, or some more,
    and says how many it gave in all."""

    advance: Callable[[int], int]
    answers: list[list[int]]
    close: Callable[[], None] = lambda: None

    def decode(self, tokens: int) -> float:
        """Tokens/s over the next `tokens` of each request."""
        start = time.perf_counter()
        given = self.advance(tokens)
        return given / (time.perf_counter() - start)


class Ours:
    """deepinfer's engine over a checkpoint folder; drafts: settings of speculation."""

    def __init__(self, folder: Path, **drafts: int) -> None:
        self.llm = deepinfer.LLM(
            folder, accelerator="cpu", max_num_seqs=max(TOKENS), max_model_len=CONTEXT, **drafts
        )
        self.config = self.llm.parts.runner.config
        self.parameters = sum(_numbers(w) for w in _matrices(self.llm.parts.runner.model))

    def session(self, ids: list[list[int]]) -> Session:
        """A running call; every request has its first token."""
        asked = SamplingParams(temperature=0, max_tokens=CONTEXT - PROMPT_TOKENS, ignore_eos=True)
        stream = self.llm.stream(ids, asked)
        answers: list[list[int]] = [[] for _ in ids]

        def advance(tokens: int) -> int:
            given = 0
            while given < tokens * len(ids):
                delta = next(stream)
                answers[delta.index] += delta.token_ids
                given += len(delta.token_ids)
            return given

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
        def advance(count: int) -> int:
            nonlocal tokens, cache
            for _ in range(count):
                out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                for answer, token in zip(answers, tokens[:, 0].tolist(), strict=True):
                    answer.append(token)
            return count * len(ids)

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
        elif type(item).__name__ in ("Weight", "PanelWeight"):
            found.append(getattr(item, "panels", None) or item.source)
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
    """(op, ms a step, calls a step) of deepinfer's op table over decode steps, op by op: a graph
    of a step would hide them."""
    ops = ours.llm.parts.runner.ops
    plain = {n: op for n, op in vars(ops).items() if callable(op) and not isinstance(op, partial)}
    spent, calls = dict.fromkeys(plain, 0.0), dict.fromkeys(plain, 0)

    def timed(name: str) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            result = plain[name](*args, **kwargs)
            spent[name] += time.perf_counter() - start
            calls[name] += 1
            return result

        return run

    with ops.replaced({name: timed(name) for name in plain}):
        start = time.perf_counter()
        session.advance(TIMED)
        whole = (time.perf_counter() - start) / TIMED * 1e3
    rows = [(name, spent[name] / TIMED * 1e3, calls[name] / TIMED) for name in plain]
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

    rows = ops_of_the_table(ours, sessions[PLAIN])
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
    parser.add_argument("--bar", type=float, default=0.0, help="times the peer at batch 1")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("the peer is missing: pip install transformers==5.24.0", file=sys.stderr)
        return 3
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), asked.model)
        ours = {PLAIN: Ours(folder, mtp=0), DRAFTS: Ours(folder)}
    config = ours[PLAIN].config
    backend = ours[PLAIN].llm.parts.settings["DEEPINFER_CPU_LEVEL"]["value"]
    peer = Peer(config, asked.peer_dtype)
    called = f"transformers {peer.version} deepseek_v4 {asked.peer_dtype}"
    entries, rows, shown = [], [], []
    for batch, tokens in TOKENS.items():
        ids = prompts(batch)
        sessions = {side: engine.session(ids) for side, engine in ours.items()}
        sessions[PEER] = peer.session(ids)
        samples = measure.interleave(
            {side: partial(session.decode, tokens) for side, session in sessions.items()},
            asked.runs,
        )
        steps = {PLAIN: batch * 1e3, PEER: batch * 1e3}
        for side, values in samples.items():
            count = peer.parameters if side == PEER else ours[side].parameters
            middle = statistics.median(values)
            rows.append(
                (called if side == PEER else f"{side}, {name}", f"{count / 1e6:.1f} M",
                 str(batch), middle, measure.quantile(values, 0.05),
                 measure.quantile(values, 0.95), steps[side] / middle if side in steps else None,
                 None if side == PEER else middle / statistics.median(samples[PEER]))
            )  # fmt: skip
        if asked.top:
            shown += profiles(ours[PLAIN], batch, {s: sessions[s] for s in (PLAIN, PEER)},
                              asked.top)  # fmt: skip
        for side, engine in ours.items():
            sessions[side].close()
            entry = measure.record(
                f"decode tokens/s, batch {batch}, {side}",
                samples[side],
                "tokens/s",
                peer=called,
                peer_samples=samples[PEER],
                correct=correct(engine, ids, sessions[side].answers),
                peer_self_ratio=round(measure.self_ratio(samples[PEER]), 4),
                model=name,
                backend=backend,
                threads=asked.threads,
                context=PROMPT_TOKENS,
            )
            entries.append(entry)
    measure.table(
        ("engine", "weights", "batch", "tokens/s", "p5", "p95", "ms a step", "ratio"), rows
    )
    for title, head, lines in shown:
        print(f"{title}\n")
        measure.table(head, lines)
    by_batch = [e for e in entries if e["bar"].endswith(PLAIN)]
    gain, peer_gain = (by_batch[1][key] / by_batch[0][key] for key in ("value", "peer_value"))
    by_batch[1]["times_batch_1"] = round(gain, 3)
    good = all(e["correct"] for e in entries)
    best = max(e["ratio"] for e in entries[:2])
    print(
        f"batch 32 gives {gain:.2f} times batch 1 (the peer {peer_gain:.2f})\n"
        f"at batch 1 {entries[0]['ratio']:.2f} times the peer, with drafts"
        f" {entries[1]['ratio']:.2f}{f' (bar {asked.bar:g})' if asked.bar else ''}\n"
        f"tokens equal those of one whole forward pass: {good}\n"
        f"threads {asked.threads}, {asked.runs} runs a side, prompts of {PROMPT_TOKENS} tokens\n"
    )
    measure.lines(entries)
    if asked.out:
        asked.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return 0 if good and best >= asked.bar else 1


if __name__ == "__main__":
    sys.exit(main())
