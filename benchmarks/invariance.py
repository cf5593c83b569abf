"""Bar C6: every composition gives a request the bits that it has alone, and 1,000 repeats of one
prompt beside random neighbours are one output.

Matrix: batch 1 to 64 x three orders x row budgets x chunks x prefix hit or cold x speculation off,
fixed and varlen; prompts greedy and seeded at temperature 1. `--cells` of its cells are tried: the
first 192 hold every pair of values (0: all 10,368). A cell is equal if ids and log-probability bits
of every request are those of its run alone. `--share 2/8` tries every eighth of them. Repeats: two
prompts, one greedy and one seeded, again and again at random places among neighbours that are new
each time, with drafts. Control: the same cells over plain torch matmuls, which must differ.

    python -m benchmarks.invariance --cells 40 --repeats 200            # two cores, half an hour
    python -m benchmarks.invariance --accelerator nvidia --out invariance-h200.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import measure, models, plain_ops
from deepinfer import LLM, SamplingParams
from deepinfer.engine.invariance import SETTINGS, Cell, Check, Matrix, pairs_of, subjects

BATCH, COPIES = 64, 26  # requests at once in the repeats, and of each repeated prompt among them
CONTROL = [Cell(2), Cell(8, "shuffled", None, 7), Cell(5, "reversed", 64)]


def said(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def matrix(
    llm: LLM, count: int, share: tuple[int, int], prompts: int, tokens: int
) -> dict[str, object]:
    """One record of the matrix."""
    check = Check(llm, subjects(llm, prompts, tokens))
    whole = check.possible(Matrix())
    cells = whole.sample(count or len(whole.cells()))[share[0] - 1 :: share[1]]
    start = time.perf_counter()
    report = check.run(
        cells,
        len(whole.cells()),
        lambda cell, n, of: said(f"{time.perf_counter() - start:7.0f} s  {n} of {of}: {cell}"),
    )
    equal = report.cells - len(report.failures)
    for failure in report.failures:
        said(str(failure))
    return measure.record(
        "C6 equal cells", [equal / report.cells], "share", correct=report.invariant,
        share=f"{share[0]}/{share[1]}", sample=count, cells=report.cells, cells_equal=equal,
        cells_in_matrix=report.of,
        pairs_of_values=pairs_of(cells), pairs_in_matrix=whole.pairs(), prompts=prompts,
        tokens=tokens, requests=report.requests, requests_resumed=report.resumed,
        drafts_accepted=report.accepted, failures=[f.as_json() for f in report.failures],
    )  # fmt: skip


def repeats(llm: LLM, count: int, tokens: int) -> list[dict[str, object]]:
    """One record for the greedy prompt and one for the seeded one."""
    vocab, draw = llm.parts.vocab_size, random.Random(7)
    kinds = {
        "greedy": SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2),
        "seeded, T = 1": SamplingParams(max_tokens=tokens, seq_seed=9, ignore_eos=True, logprobs=2),
    }
    mine = {name: models.random_ids(12, vocab, seed=n) for n, name in enumerate(kinds)}
    found: dict[str, dict[object, int]] = {name: {} for name in kinds}
    accepted, made = dict.fromkeys(kinds, 0), 0
    while made < count:
        copies = min(COPIES, count - made)
        call = [(name, mine[name], params) for name, params in kinds.items() for _ in range(copies)]
        for _ in range(BATCH - len(call)):
            ids = [draw.randrange(16, vocab) for _ in range(draw.randrange(1, 40))]
            other = SamplingParams(
                max_tokens=draw.randrange(1, tokens + 1), temperature=draw.choice((0, 1)),
                ignore_eos=True,
            )  # fmt: skip
            call.append((None, ids, other))
        draw.shuffle(call)
        results = llm.generate([ids for _, ids, _ in call], [params for *_, params in call])
        for (name, *_), result in zip(call, results, strict=True):
            if name is not None:
                bits = result.token_ids, result.logprobs, str(result.finish_reason)
                found[name][bits] = found[name].get(bits, 0) + 1
                accepted[name] += (result.speculation or {}).get("accepted", 0)
        made += copies
        said(f"{made} of {count} repeats: {[len(outputs) for outputs in found.values()]} outputs")
    return [
        measure.record(
            f"C6 unique outputs of {count} repeats, {name}", [len(outputs)], "outputs",
            correct=len(outputs) == 1, repeats=sum(outputs.values()), tokens=tokens,
            beside=BATCH - 2 * COPIES, drafts_accepted=accepted[name],
        )
        for name, outputs in found.items()
    ]  # fmt: skip


def control(folder: Path, accelerator: str) -> dict[str, object]:
    """One record of cells over plain products: correct where the matrix sees that they differ."""
    plain_ops.register()
    with LLM(
        folder, **{**SETTINGS, "batch_invariant": False, "max_num_seqs": 8}, verify="coupled",
        accelerator=accelerator, backend={"all": plain_ops.NAME}, max_model_len=1024,
    ) as llm:  # fmt: skip
        report = Check(llm, subjects(llm, 8, 3)).run(CONTROL)
    first = report.failures[0] if report.failures else None
    return measure.record(
        "C6 control: differing cells over plain products", [len(report.failures)], "cells",
        cells=report.cells, correct=first is not None, first=None if first is None else str(first),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a checkpoint folder; default: the embedded one")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia"))
    parser.add_argument("--cells", type=int, default=192, help="cells to try; 0: all of them")
    parser.add_argument("--share", default="1/1", help="of the cells, for several processes")
    parser.add_argument("--prompts", type=int, default=16, help="distinct; larger batches repeat")
    parser.add_argument("--tokens", type=int, default=6, help="of each answer in the matrix")
    parser.add_argument("--repeats", type=int, default=1000, help="of each of the two prompts")
    parser.add_argument("--answer", type=int, default=16, help="tokens of a repeated answer")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a processor")
    parser.add_argument("--out", type=Path, help="a file for the records")
    asked = parser.parse_args()
    if asked.accelerator == "cpu":
        torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = models.folder(Path(scratch), asked.model)
        entries = [control(folder, asked.accelerator)]
        said(f"control: {entries[0]['first']}")
        settings = {**SETTINGS, "accelerator": asked.accelerator, "max_model_len": 1024}
        with LLM(folder, **settings) as llm:
            kernels = llm.parts.settings["DEEPINFER_CPU_LEVEL"]["value"] or "torch"
            if asked.repeats:
                entries += repeats(llm, asked.repeats, asked.answer)
            share = tuple(map(int, asked.share.split("/")))
            entries.append(matrix(llm, asked.cells, share, asked.prompts, asked.tokens))
    for at, entry in enumerate(entries):
        entry["model"], entry["kernels"] = name, kernels if at else plain_ops.NAME
    measure.table(
        ("bar", "value", "unit", "correct"),
        [(e["bar"], e["value"], e["unit"], str(e["correct"])) for e in entries],
    )
    last = entries[-1]
    print(
        f"{last['cells']} of {last['cells_in_matrix']} cells, {last['pairs_of_values']} of "
        f"{last['pairs_in_matrix']} pairs of values, {last['requests']} requests, "
        f"{last['requests_resumed']} resumed, {last['drafts_accepted']} drafts accepted\n"
    )
    measure.lines(entries)
    if asked.out:
        asked.out.write_text(json.dumps(entries, indent=1) + "\n")
    return 0 if all(entry["correct"] for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
