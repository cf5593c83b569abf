"""The compiled cpu kernels: beside the torch back end, and against what the machine can do.

`beside`: decode at batch 1 and 32 and a prefill of 4,096 tokens on the embedded checkpoint, both
back ends in one process, A B A B; bars 5, 4 and 4 times. The distance of their next-token
distributions over a text is the correctness line.

`ceiling`: a model bigger than any cache (random weights, 2.5 GB packed). Decode at batch 1:
bytes of the weights that a step touches (`model/cost`) over its time, beside the read and copy
bandwidth; bar 60 % of copy. Prefill: products of the model's matrices, attention and scores, over
time, beside float32 and bfloat16 matrix products of torch; bar 40 % of the rate of the kernels' own
type. Ceilings are taken before and after, with the same threads. `--llama PYTHON` decodes a Llama
model of as many bytes a token with llama.cpp in turn.

    python -m benchmarks.native beside --threads 2 --out benchmarks/results/native-beside.json
    python -m benchmarks.native ceiling --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.price import KL_LIMIT, MOVED, STEPS, TOP_LIMIT, Side, distance
from benchmarks.prompts import prompts
from deepinfer.bench.synthetic import Random, Size
from deepinfer.engine.assembly import embedded_model
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig

BARS = {"decode, batch 1": 5.0, "decode, batch 32": 4.0, "prefill of 4096": 4.0}
STREAM_BAR, MATMUL_BAR = 0.6, 0.4
TEXT = 256
# Sizes of the large model: 2.5 GB packed, 0.7 GB of which a token touches; a layer is a quarter of
# the published one.
LARGE = {
    "hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": 512, "o_lora_rank": 512,
    "n_routed_experts": 24, "num_experts_per_tok": 6, "moe_intermediate_size": 3072,
    "num_nextn_predict_layers": 0, "engram_layer_ids": [], "engram_num_embeddings": [],
    "dspark_target_layer_ids": [],
}  # fmt: skip
PREFILL = 2048


def large() -> Random:
    """Random weights of `LARGE` sizes on the embedded model's layers."""
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    stages = text["num_nextn_predict_layers"]
    text.update(LARGE, engram_compressed_vocab_size=text["vocab_size"])
    text["compress_ratios"] = text["compress_ratios"][:-stages]
    return Random(Size(), ModelConfig.from_dict(config), drafts=False)


def best(work: Callable[[], object], runs: int = 7) -> float:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def ceilings() -> dict[str, float]:
    """GB/s of a copy (bytes read plus bytes written) and of reading; GFLOP/s of matrix products."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    found = {
        "copy_gb_per_s": 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9,
        "read_gb_per_s": source.nbytes / best(lambda: source.sum()) / 1e9,
    }
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(1536, 1536).to(dtype)
        found[f"{name}_gflop_per_s"] = 2 * 1536**3 / best(lambda a=a: a @ a, 5) / 1e9
    return {key: round(value, 2) for key, value in found.items()}


def beside(runs: int, prefill_runs: int, threads: int) -> list[dict[str, object]]:
    sides = {name: Side(embedded_model(), "cpu", name, True, 32, 4096) for name in ("cpu", "torch")}
    text = [token for ids in prompts("code", 3) for token in ids][:TEXT]
    apart = distance(*sides.values(), text)
    kept = sides["cpu"].kept_alone()
    correct = apart["kl"] <= KL_LIMIT and apart["top1"] >= TOP_LIMIT and kept
    print(f"beside the reference: {apart}; bits alone = beside others: {kept}", file=sys.stderr)
    works = {
        "decode, batch 1": (runs, lambda side: side.decode(1)),
        "decode, batch 32": (runs, lambda side: side.decode(32)),
        "prefill of 4096": (prefill_runs, lambda side: side.prefill(4096)),
    }
    entries = []
    for name, (count, work) in works.items():
        samples = measure.interleave(
            {side: (lambda s=s, w=work: w(s)) for side, s in sides.items()}, count
        )
        mine, theirs = samples["cpu"], samples["torch"]
        times = statistics.median(theirs) / statistics.median(mine)
        entry = measure.record(
            f"native beside torch, {name}", mine, "s", peer="torch back end", peer_samples=theirs,
            correct=correct, times=round(times, 3), at_least=BARS[name], met=times >= BARS[name],
            threads=threads, apart=apart, peer_self_ratio=round(measure.self_ratio(theirs), 4),
            level=sides["cpu"].llm.parts.settings["DEEPINFER_CPU_LEVEL"],
        )  # fmt: skip
        entries.append(entry)
        print(name, entry["value"], entry["peer_value"], entry["times"], file=sys.stderr)
    measure.table(
        ("work", "cpu ms", "torch ms", "times", "bar", "self ratios"),
        [(e["bar"].split(", ", 1)[1], 1e3 * e["value"], 1e3 * e["peer_value"], e["times"],
          e["at_least"], f"{e['self_ratio']} {e['peer_self_ratio']}") for e in entries],
    )  # fmt: skip
    return entries


def flops(side: Side, config: ModelConfig, tokens: int) -> int:
    """Two for each multiplication of a prompt's matrices, attention and index scores."""
    return cost.total_flops(config, side.llm.parts.rule.plan(tokens=tokens), cost.PLAIN)


class Llama:
    """llama.cpp in a process of its own; see `llama_peer`."""

    def __init__(self, python: str, folder: Path, touched: float, threads: int):
        command = [python, str(Path(__file__).with_name("llama_peer.py")), str(folder)]
        self._process = subprocess.Popen(
            [*command, str(round(touched)), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        read, self.version = self._line().split()
        self.bytes = int(read)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def decode(self) -> float:
        """Seconds of a token."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STEPS}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.communicate()


def ceiling(runs: int, threads: int, llama: str | None) -> list[dict[str, object]]:
    before = ceilings()
    with tempfile.TemporaryDirectory() as scratch:
        model = large()
        config = model.config
        side = Side(model, "cpu", "cpu", True, 1, PREFILL)
        touched = sum(
            size
            for layer in range(config.num_hidden_layers)
            for size in cost.weight_bytes(config, layer, 1).values()
        ) + 2 * config.vocab_size * config.hidden_size  # fmt: skip
        sides: dict[str, Callable[[], float]] = {"cpu": lambda: side.decode(1)}
        if llama:
            peer = Llama(llama, Path(scratch), touched, threads)
            sides["llama"] = peer.decode
        samples = measure.interleave(sides, runs)
        if llama:
            peer.close()
        decode = samples["cpu"]
        prefill = [side.prefill(PREFILL) for _ in range(max(3, runs // 4))]
        work = flops(side, config, PREFILL)
        side.llm.close()
    after = ceilings()
    rate = touched / statistics.median(decode) / 1e9
    done = work / statistics.median(prefill) / 1e9
    peak = before["float32_gflop_per_s"]
    still = all(max(before[k], after[k]) <= MOVED * min(before[k], after[k]) for k in before)
    common = {"threads": threads, "ceilings": {"before": before, "after": after}, "still": still}
    beside: dict[str, object] = {}
    if llama:
        theirs = peer.bytes / statistics.median(samples["llama"]) / 1e9
        beside = {
            "peer": f"llama.cpp (llama-cpp-python {peer.version}), Q8_0",
            "peer_samples": samples["llama"], "peer_bytes": peer.bytes,
            "peer_gb_per_s": round(theirs, 2), "at_least_as_high": rate >= theirs,
            "peer_self_ratio": round(measure.self_ratio(samples["llama"]), 4),
        }  # fmt: skip
    entries = [
        measure.record("native weight streaming, batch 1", decode, "s", floor=None,
                       bytes_touched=round(touched), gb_per_s=round(rate, 2),
                       share_of_copy=round(rate / before["copy_gb_per_s"], 4),
                       share_of_read=round(rate / before["read_gb_per_s"], 4),
                       at_least=STREAM_BAR, met=rate >= STREAM_BAR * before["copy_gb_per_s"],
                       **beside),
        measure.record(f"native prefill of {PREFILL}", prefill, "s", gflop_per_s=round(done, 1),
                       share_of_float32=round(done / peak, 4),
                       share_of_bf16=round(done / before["bf16_gflop_per_s"], 4),
                       at_least=MATMUL_BAR, met=done >= MATMUL_BAR * peak),
    ]  # fmt: skip
    for entry in entries:
        entry.update(common)
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("beside", "ceiling"))
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--prefill-runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", metavar="PYTHON", help="one that has llama-cpp-python and gguf")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.what == "beside":
        entries = beside(asked.runs, asked.prefill_runs, asked.threads)
    else:
        entries = ceiling(asked.runs, asked.threads, asked.llama)
    measure.lines(entries)
    if asked.out:
        asked.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return 0 if all(e["met"] and e.get("correct") is not False for e in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
