"""Does drafting change what comes out? Three checks on the embedded checkpoint.

Greedy: ids of prompts of every kind with and without drafts, batch 1, 3 and 32, draft lengths 1 to
5, confidence-scheduled or not; each prompt runs in every batch size, and the other two axes go
round over the prompts. Coupled: ids at temperature 1 for many seeds and prompts. Law: first and
second drafted tokens of one prompt over many seeds, by rejection, against those of plain decoding,
by a chi-square test of homogeneity.

    python -m benchmarks.lossless --greedy 200 --jobs 10               # or an hour on one core
    python -m benchmarks.lossless --accelerator nvidia --coupled 100 --law 20000
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections import Counter

import torch

from benchmarks.prompts import KINDS, prompts
from deepinfer import LLM, SamplingParams

LENGTHS = (1, 2, 3, 4, 5)
BATCHES = (1, 3, 32)
P_BAR = 0.001  # a test of a true law is red in one of a thousand runs


def mixed(count: int) -> list[list[int]]:
    """Prompts of every kind in turn."""
    each = -(-count // len(KINDS))
    kinds = [prompts(kind, each, seed=3) for kind in KINDS]
    return [one for several in zip(*kinds, strict=True) for one in several][:count]


def greedy(
    model: str | None, accelerator: str, count: int, tokens: int, jobs: int
) -> dict[str, object]:
    """Prompts whose ids differ, by batch size."""
    cells = list(itertools.product(LENGTHS, (False, True)))
    asked = [
        (model, accelerator, count, tokens, number, len(cells), *cell)
        for number, cell in enumerate(cells)
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.starmap(_cell, asked)
    wrong = {str(b): [line for _, lines in found for line in lines[b]] for b in BATCHES}
    return {"bar": "greedy ids with drafts", "prompts": count, "tokens": tokens,
            "accepted": sum(accepted for accepted, _ in found), "wrong": wrong}  # fmt: skip


def _cell(
    model: str | None, accelerator: str, count: int, tokens: int, number: int, cells: int,
    mtp: int, varlen: bool,
) -> tuple[int, dict[int, list[str]]]:  # fmt: skip
    """Accepted drafts, and wrong prompts by batch size, of one draft length and schedule."""
    if accelerator == "cpu":
        torch.set_num_threads(1)
    asked, params = mixed(count), SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    # A batch of 32 is filled up with other prompts, whose ids are compared as well.
    mine = list(range(number, count, cells))
    filled = mine + [at for at in range(count) if at not in mine][: max(BATCHES) - len(mine)]
    with LLM(model, accelerator=accelerator, mtp=0, max_num_seqs=64) as llm:
        plain = llm.generate([asked[at] for at in filled], params)
    expected = {at: one.token_ids for at, one in zip(filled, plain, strict=True)}
    accepted, wrong = 0, {batch: [] for batch in BATCHES}
    with LLM(
        model, accelerator=accelerator, mtp=mtp, mtp_varlen=varlen, max_num_seqs=max(BATCHES),
        prefix_cache=False,
    ) as llm:  # fmt: skip
        for batch in BATCHES:
            order = mine if batch < len(mine) else filled
            for first in range(0, len(order), batch):
                some = order[first : first + batch]
                got = llm.generate([asked[at] for at in some], params)
                for at, one in zip(some, got, strict=True):
                    accepted += one.speculation["accepted"]
                    if one.token_ids != expected[at]:
                        wrong[batch].append(f"prompt {at}, mtp {mtp}, varlen {varlen}")
    print(f"greedy: mtp {mtp}, varlen {varlen}: {accepted} accepted, wrong {wrong}", flush=True)
    return accepted, wrong


def coupled(
    model: str | None, accelerator: str, seeds: int, count: int, tokens: int
) -> dict[str, object]:
    """(seed, prompt) pairs whose ids differ with drafts, confidence-scheduled and not."""
    asked = mixed(count)
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seq_seed=seed, ignore_eos=True)
        for seed in range(seeds)
        for _ in asked
    ]
    found = {}
    settings = {"off": {"mtp": 0}, "fixed": {}, "varlen": {"mtp_varlen": True}}
    for name, more in settings.items():
        with LLM(model, accelerator=accelerator, verify="coupled", max_num_seqs=256, **more) as llm:
            got = llm.generate(asked * seeds, params)
            found[name] = [one.token_ids for one in got]
        print(f"coupled: {name} done", flush=True)
    wrong = {
        name: sum(a != b for a, b in zip(found["off"], found[name], strict=True))
        for name in ("fixed", "varlen")
    }
    return {"bar": "coupled ids with drafts", "seeds": seeds, "prompts": count, "tokens": tokens,
            "different_answers": len(set(found["off"])), "wrong": wrong}  # fmt: skip


def law(model: str | None, accelerator: str, draws: int) -> dict[str, object]:
    """p values of the first two tokens that drafting decides, and of a broken rule beside it."""
    [prompt] = prompts("code", 1, seed=5)
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, more in (("off", {"mtp": 0}), ("fixed", {}), ("varlen", {"mtp_varlen": True})):
        with LLM(
            model, accelerator=accelerator, verify="rejection", max_num_seqs=256, **more
        ) as llm:
            # The same first token, so that the tokens after it are drafted from one distribution.
            first = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))[0]
            params = [
                SamplingParams(max_tokens=4, temperature=1.0, seq_seed=seed * 4 + len(found),
                               ignore_eos=True)
                for seed in range(draws)
            ]  # fmt: skip
            got = llm.generate([[*prompt, *first.token_ids]] * draws, params)
            found[name] = [one.token_ids for one in got]
        print(f"law: {name} done", flush=True)
    out: dict[str, object] = {"bar": "law of drafted tokens", "draws": draws}
    for name in ("fixed", "varlen"):
        for at in (1, 2):
            ours, plain = (Counter(ids[at] for ids in found[n]) for n in (name, "off"))
            out[f"p_{name}_token_{at}"] = homogeneous(ours, plain)
            out[f"kinds_{name}_token_{at}"] = len(ours | plain)
    # Power: would tokens drawn at temperature 0.9 have been seen?
    with LLM(model, accelerator=accelerator, mtp=0, max_num_seqs=256) as llm:
        params = [
            SamplingParams(max_tokens=4, temperature=0.9, seq_seed=seed * 4 + 3, ignore_eos=True)
            for seed in range(draws)
        ]
        other = llm.generate([[*prompt, *first.token_ids]] * draws, params)
    cold = Counter(one.token_ids[2] for one in other)
    out["p_temperature_0.9"] = homogeneous(cold, Counter(ids[2] for ids in found["off"]))
    return out


def homogeneous(one: Counter[int], other: Counter[int]) -> float:
    """p value that both counts are draws of one law; ids seen fewer than 10 times are one class."""
    rare = [token for token in one | other if one[token] + other[token] < 10]
    table = [[c[t] for t in one | other if t not in rare] + [sum(c[t] for t in rare)]
             for c in (one, other)]  # fmt: skip
    counts = torch.tensor(table, dtype=torch.float64)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a checkpoint with draft stages")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "nvidia", "ascend"))
    parser.add_argument("--greedy", type=int, default=0, help="prompts")
    parser.add_argument("--coupled", type=int, default=0, help="seeds, for each of 20 prompts")
    parser.add_argument("--law", type=int, default=0, help="draws")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the greedy check")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    asked = parser.parse_args()
    if asked.accelerator == "cpu":
        torch.set_num_threads(1)
    where, good = (asked.model, asked.accelerator), True
    if asked.greedy:
        found = greedy(*where, asked.greedy, asked.tokens, asked.jobs)
        good = not any(found["wrong"].values())
        print(json.dumps(found))
    if asked.coupled:
        found = coupled(*where, asked.coupled, 20, asked.tokens)
        good = good and not any(found["wrong"].values())
        print(json.dumps(found))
    if asked.law:
        found = law(*where, asked.law)
        values = [v for key, v in found.items() if key.startswith(("p_fixed", "p_varlen"))]
        good = good and min(values) >= P_BAR and found["p_temperature_0.9"] < P_BAR
        print(json.dumps(found))
    print(f"lossless: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
