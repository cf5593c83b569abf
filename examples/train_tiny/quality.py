"""Measures a checkpoint through the engine: bits per byte and exact match, as users get them.

    python -m examples.train_tiny.quality --out quality.json            # the embedded model
    python -m examples.train_tiny.quality -m DIR --windows 4 --n 20     # a quick look

Comes in: a checkpoint folder and the data folder made by `prepare.py`. Goes out: a table and a
JSON file, rewritten after each result. Answers are generated greedily and compared id by id.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from deepinfer import LLM, SamplingParams  # noqa: E402
from examples.train_tiny import exercises, streams  # noqa: E402

LAYOUTS = ("needle", "table", "conversation")
DISTANCES = (512, 2048, 4096, 7900)


def bits_per_byte(llm: LLM, length: int, windows: int, data: Path) -> dict[str, float]:
    """Over disjoint held-out windows of ``length`` tokens; bytes are those of the predicted ids."""
    ids, sizes = streams.heldout_windows(length, windows, data)
    nats = 0.0
    for row in ids:
        logits = llm.logits(row[:-1].tolist()).double()
        target = torch.as_tensor(row[1:].astype("int64"), device=logits.device)
        nats += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
    return {"windows": len(ids), "bits_per_byte": nats / math.log(2) / float(sizes.sum())}


def exact(llm: LLM, questions: list[exercises.Question]) -> dict[str, float]:
    """Share of questions whose greedy answer, thinking included, is the expected one, id by id."""
    params = [
        SamplingParams(max_tokens=len(q.target), temperature=0.0) for q in questions
    ]
    answers = llm.generate([list(q.prompt) for q in questions], params)
    right = [
        list(a.token_ids) == list(q.target) for a, q in zip(answers, questions, strict=True)
    ]
    return {"n": len(right), "exact": sum(right) / len(right)}


def tasks(n: int, data: Path):
    """(name, questions), most important first."""
    vocabulary, material = streams.load_vocabulary(data), streams.heldout_material(data)
    for op in "+-*":
        yield f"arithmetic {op}", exercises.arithmetic_eval(vocabulary, op, n)
    each = -(-n // len(LAYOUTS))
    for distance in DISTANCES:
        for layout in LAYOUTS:
            questions = exercises.retrieval_eval(material, distance, layout, each)
            yield f"retrieval {distance} {layout}", questions
    for kind in ("copying", "sorting", "tools"):
        yield kind, getattr(exercises, f"{kind}_eval")(vocabulary, n)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("-m", "--model-dir", default=None)
    a.add_argument("--out", type=Path, default=Path("quality.json"))
    a.add_argument("--data", type=Path, default=streams.WORK)
    a.add_argument("--n", type=int, default=210, help="questions a kind")
    a.add_argument("--windows", type=int, default=128)
    a.add_argument("--length", type=int, default=2048)
    a.add_argument("--only", default="", help="run only the measurements that start with this")
    args = a.parse_args()
    results: dict[str, object] = {}

    def note(name: str, measure) -> None:
        if not name.startswith(args.only):
            return
        begin = time.monotonic()
        results[name] = {**measure(), "seconds": round(time.monotonic() - begin, 1)}
        print(f"{name}: {results[name]}", flush=True)
        partial = args.out.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1), encoding="utf-8")
        os.replace(partial, args.out)

    with LLM(args.model_dir, max_model_len=8192) as llm:
        note(
            f"bits per byte {args.length}",
            lambda: bits_per_byte(llm, args.length, args.windows, args.data),
        )
        for name, questions in tasks(args.n, args.data):
            note(name, lambda q=questions: exact(llm, q))


if __name__ == "__main__":
    main()
