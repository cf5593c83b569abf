"""What a constraint costs, and that it holds: validity, overhead of decoding, time of a mask.

`valid`: 200 JSON schemas (nested objects, enums, arrays, $ref, numbers, patterns beyond ASCII) on
the embedded model at temperature 1, without drafts, with five, and with rows shared out by
confidence. Every answer is checked with `jsonschema`; one that was cut counts apart. Coupled
verification: the ids must be those without drafts.

`overhead`: 16 requests decode with a constraint and without, a few steps each in turn, in one
process; the schema is one that no answer ends early. What text is read changes the time of a step
too, by the experts it wakes: a third engine, free, reads the constrained one's. The bar is 10 %.

`mask`: microseconds of one mask over walks through grammars, drawn as the masks allow, for the
embedded vocabulary and for a tokenizer.json of the published size. The bar is a median of 100.

    python -m benchmarks.structured valid --out benchmarks/results/structured-valid.json
    python -m benchmarks.structured overhead --out benchmarks/results/structured-overhead.json
    python -m benchmarks.structured mask --tokenizer tokenizer.json --vocab 129280
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from deepinfer import LLM, SamplingParams
from deepinfer.core.request import Structured
from deepinfer.engine.assembly import embedded_model
from deepinfer.structured import grammar
from deepinfer.structured.constraint import Constraint
from deepinfer.tokenizer.tokenizer import Tokenizer

MODES = {
    "mtp 0": dict(mtp=0),
    "mtp 5": dict(mtp=5, verify="coupled"),
    "mtp 5, varlen": dict(mtp=5, mtp_varlen=True, verify="coupled"),
}
WORDS = ["alpha", "größe", "naïve", "東京", "🚀", "with space", 'quote"', "back\\slash", "x" * 20]


def schemas(count: int) -> list[dict[str, Any]]:
    """So many different schemas; the n-th is always the same."""
    return [_object(random.Random(at), 2, f"#/$defs/part{at}") for at in range(count)]


def _object(rng: random.Random, depth: int, name: str) -> dict[str, Any]:
    keys = rng.sample(["id", "name", "kind", "size", "tags", "äöü", "left", "right"], 3)
    properties = {key: _value(rng, depth - 1) for key in keys}
    schema: dict[str, Any] = {
        "type": "object", "properties": properties, "additionalProperties": False,
        "required": sorted(rng.sample(keys, rng.randint(1, 3))),
    }  # fmt: skip
    if depth == 2 and rng.random() < 0.4:
        part = name.rsplit("/", 1)[-1]
        schema["$defs"] = {part: _value(rng, 1)}
        properties[keys[0]] = {"$ref": name}
        schema["required"] = sorted({*schema["required"], keys[0]})
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [
        lambda: {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 999)},
        lambda: {"type": "number", "minimum": -1.5, "exclusiveMaximum": rng.randint(2, 50)},
        lambda: {"type": "string", "maxLength": rng.randint(1, 12)},
        lambda: {"type": "string", "pattern": rng.choice(
            ["^[a-zäöü]{1,6}$", r"^\d{4}-\d{2}$", "^[一-龥]{1,3}$", "^(ja|nein|¿qué\\?)$"])},
        lambda: {"enum": rng.sample(WORDS, 3)},
        lambda: {"const": rng.choice([*WORDS, 5, -0.5, None, True])},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"anyOf": [{"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
                           {"type": "string", "format": "date"}]},
    ]  # fmt: skip
    if depth > 0:
        kinds += [
            lambda: _object(rng, depth, ""),
            lambda: {"type": "array", "items": _value(rng, depth - 1), "minItems": 1,
                     "maxItems": rng.randint(1, 4)},
            lambda: {"type": "array", "prefixItems": [_value(rng, 0), _value(rng, 0)],
                     "items": False, "minItems": 2},
        ] * 2  # fmt: skip
    return rng.choice(kinds)()


def valid(count: int, tokens: int, modes: dict[str, dict[str, Any]] = MODES) -> dict[str, Any]:
    """Check every answer; raises AssertionError where ids or finish reasons are not right."""
    import jsonschema

    asked = schemas(count)
    params = [
        SamplingParams(max_tokens=tokens, seq_seed=at, structured={"json_schema": schema})
        for at, schema in enumerate(asked)
    ]
    prompts = [f"Record {at} as JSON:\n" for at in range(count)]
    record: dict[str, Any] = {"schemas": count, "max_tokens": tokens, "modes": {}}
    ids = None
    for name, settings in modes.items():
        began = time.perf_counter()
        with LLM(on_warning=lambda line: None, **settings) as llm:
            results = llm.generate(prompts, params)
        found: Counter[str] = Counter()
        for schema, result in zip(asked, results, strict=True):
            assert result.error is None, result.error
            found[str(result.finish_reason)] += 1
            assert (result.finish_reason == "stop") == bool(result.complete) or (
                result.usage.completion_tokens == tokens
            )
            if result.complete:
                jsonschema.validate(json.loads(result.text), schema)
                found["valid"] += 1
        assert found["valid"] >= found["stop"]
        mine = [result.token_ids for result in results]
        assert ids in (None, mine), "the same ids with drafts and without"
        ids = mine
        sums = [r.speculation for r in results if r.speculation]
        record["modes"][name] = {
            **found,
            "tokens": sum(map(len, mine)),
            "accepted": sum(s["accepted"] for s in sums),
            "drafted": sum(s["drafted"] for s in sums),
            "s": round(time.perf_counter() - began, 1),
        }
        print(name, record["modes"][name], file=sys.stderr)
    return record


LONG = {
    "type": "array", "minItems": 1000, "items": {
        "type": "object", "required": ["name", "size", "kind"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 40}, "size": {"type": "number"},
            "kind": {"enum": ["file", "folder", "link"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
}  # fmt: skip
_TURN = 8  # steps of one engine before the next
GRAMMARS = {"schema": {"json_schema": LONG}, "regex": {"regex": r"([a-z]+ ){400,}"}}


def overhead(batch: int, turns: int, rounds: int, mtp: int, settings: dict) -> dict[str, Any]:
    """What a step of constrained requests takes beside one of free ones, and where nothing is
    drafted beside one that is free and yet reads the same text: so the same experts are at work,
    and the difference is the constraint's. Quartiles over turns of `_TURN` steps."""
    ways = ("held", "free") if mtp else ("held", "free", "same text")
    settings = dict(settings, mtp=mtp, on_warning=lambda line: None)
    if mtp:
        settings["verify"] = "coupled"
    rows: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {way: stack.enter_context(LLM(**settings)) for way in ways}
        for temperature in (1.0, 0.0):
            for name, source in GRAMMARS.items():
                base = dict(max_tokens=_TURN * (turns + 1) * (1 + mtp), temperature=temperature)
                asked = {way: dict(base, ignore_eos=True) for way in ways}
                asked["held"] = dict(base, structured=source)
                runs = [_in_turn(engines, asked, batch, turns) for _ in range(rounds + 1)][1:]
                spans = {way: [span for run in runs for span in run[0][way]] for way in ways}
                row: dict[str, Any] = {
                    f"{way}, ms": round(statistics.median(spans[way]) * 1e3, 3) for way in ways
                }
                for way in ways[1:]:
                    pairs = zip(spans["held"], spans[way], strict=True)
                    cuts = statistics.quantiles([held / free - 1 for held, free in pairs], n=4)
                    row[f"over {way}"] = [round(cut, 4) for cut in cuts]
                if mtp:
                    tokens = {way: sum(run[1][way] for run in runs) for way in ways}
                    ratio = row["held, ms"] / row["free, ms"] * tokens["free"] / tokens["held"]
                    row["over free, a token"] = round(ratio - 1, 4)
                rows[f"{name}, temperature {temperature:g}"] = row
                print(name, temperature, row, file=sys.stderr)
    return {"batch": batch, "turns": turns, "rounds": rounds, "mtp": mtp, "rows": rows}


def _in_turn(
    engines: dict[str, LLM], asked: dict[str, dict[str, Any]], batch: int, turns: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """For each way the median step of each turn, less its first, which finds caches as others left
    them, and how many tokens there were."""
    prompts = [f"List {at}:\n" for at in range(batch)]
    spans: dict[str, list[float]] = {way: [] for way in engines}
    lives = {way: llm._device.live for way, llm in engines.items()}
    tokens = dict.fromkeys(engines, 0)
    read: list[torch.Tensor] = []  # what the steps of the constrained one read
    with ExitStack() as stack:
        flows = {way: stack.enter_context(llm.flow()) for way, llm in engines.items()}
        for way, flow in flows.items():
            params = [SamplingParams(seq_seed=n, **asked[way]) for n in range(batch)]
            flow.submit(way, prompts, params)
            while not _decodes(engines[way], batch):
                assert not [*flow.step()]
        for _ in range(turns):
            for way, flow in flows.items():
                before, took = int(lives[way].length.sum()), []
                for at in range(_TURN):
                    if way == "held":
                        read[at:] = [lives[way].last.clone()]
                    elif way == "same text":
                        lives[way].last.copy_(read[at])
                    began = time.perf_counter()
                    ended = [*flow.step()]
                    took.append(time.perf_counter() - began)
                    assert not ended
                spans[way].append(statistics.median(took[1:]))
                tokens[way] += int(lives[way].length.sum()) - before
            if "same text" in flows:
                assert lives["same text"].length.equal(lives["held"].length)
    return spans, tokens


def _decodes(llm: LLM, batch: int) -> bool:
    """Has every request its first token?"""
    first = [answer.first for answer, _ in llm._running.values()]
    return len(first) == batch and None not in first


def masks(path: Path, vocab: int, walks: int) -> dict[str, Any]:
    """Microseconds of a mask in walks of up to 64 tokens through each grammar."""
    tokenizer = Tokenizer(path, None, vocab)
    began = time.perf_counter()
    tokens = grammar.vocabulary(tokenizer, vocab, (1,))
    rows: dict[str, Any] = {"vocabulary_s": round(time.perf_counter() - began, 2)}
    rng = random.Random(1)
    for name, source in {**GRAMMARS, "any JSON": {"json_schema": {}}}.items():
        start = grammar.compiled(Structured.of(source), tokens)
        took: list[float] = []
        for _ in range(walks):
            follows = Constraint(start, (1,), ())
            for _ in range(64):
                began = time.perf_counter()
                mask = follows.allowed()
                took.append(time.perf_counter() - began)
                legal = np.unpackbits(mask, bitorder="little").nonzero()[0]
                token = int(rng.choice(legal))
                if token == 1:
                    break
                follows.push(token)
        cuts = statistics.quantiles(took, n=100)
        rows[name] = {
            "masks": len(took), "median_us": round(cuts[49] * 1e6, 1),
            "p90_us": round(cuts[89] * 1e6, 1), "p99_us": round(cuts[98] * 1e6, 1),
        }  # fmt: skip
        print(name, rows[name], file=sys.stderr)
    return {"vocab": vocab, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("valid", "overhead", "mask"))
    parser.add_argument("--count", type=int, default=200, help="schemas")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, for `valid`")
    parser.add_argument("--turns", type=int, default=6, help="for `overhead`: of 8 steps each")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mtp", type=int, default=0)
    parser.add_argument("--backend", default=None, help="OP=NAME, as of `deepinfer run`")
    parser.add_argument("--tokenizer", type=Path, default=embedded_model() / "tokenizer.json")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.what == "valid":
        record = valid(given.count, given.tokens)
    elif given.what == "mask":
        record = masks(given.tokenizer, given.vocab, 40)
    else:
        settings = {"backend": given.backend} if given.backend else {}
        record = overhead(given.batch, given.turns, given.rounds, given.mtp, settings)
        record["backend"] = given.backend or "auto"
    load = round(os.getloadavg()[0], 2)
    record = {"what": given.what, **record, "git": measure.git(), "load": load}
    text = json.dumps(record, indent=1, ensure_ascii=False)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
