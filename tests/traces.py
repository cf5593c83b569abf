"""Traces without a model: requests that draft, a `Schedule` that chooses, luck that judges."""

from __future__ import annotations

import random

from deepinfer.speculative.schedule import Schedule, confidences, split, survivals
from deepinfer.speculative.trace import Trace, TraceStep, lines

WORDS = ["def", " f", "(n", "):\n", "    ", "return", " n", "\n", " +", " 1"]


def spell(token):
    return WORDS[token % len(WORDS)].encode() if token >= 10 else b""


def simulate(
    seed=0, requests=1, tokens=60, mtp=5, varlen=False, threshold=None, temperatures=(1.0,),
    time=None, noise=0.0, prompt_tokens=3,
):  # fmt: skip
    """(steps, answers, budgets of the schedule): the engine's order of events (choose, verify,
    draft), request by request until each has its tokens. time: seconds by rows and requests."""
    draw = random.Random(seed)
    schedule = Schedule(time or (lambda rows, requests: 1.0))
    answers = [[draw.randrange(10, 99)] for _ in range(requests)]
    held, out, budgets, number = {}, [], {}, 0
    while any(len(answer) < tokens for answer in answers):
        running = [seq for seq in range(requests) if len(answers[seq]) < tokens]
        ready = [seq for seq in running if seq in held]
        values = [held[seq]["survival"] for seq in ready]
        budget = None
        limit = draw.randrange(2, 6 * requests + 1) if varlen else mtp * requests
        if varlen and ready:
            counts = dict.fromkeys(running, mtp)  # who drafted less has survivals of 0
            budget = budgets[number] = schedule.budget(number, counts, noise, limit)
            shares = split(values, budget)
        elif threshold is not None:
            shares = [sum(value >= threshold for value in some) for some in values]
        else:
            shares = [mtp] * len(ready)
        chosen = {s: min(n, len(held[s]["ids"])) for s, n in zip(ready, shares, strict=True)}
        rows = len(running) + sum(chosen.values())
        times = ()
        if budget is not None:
            most = sum(len(held[seq]["ids"]) for seq in ready)
            times = tuple(
                schedule.time(len(running) + k, len(running)) * 1e3 for k in range(most + 1)
            )
        for seq in running:
            drafts = held.get(seq, {"ids": (), "logits": (), "confidence": (), "survival": ()})
            verified = chosen.get(seq, 0)
            accepted = 0
            while accepted < verified and draw.random() < drafts["truth"][accepted]:
                accepted += 1
            own = draw.randrange(10, 99)
            while accepted < verified and own == drafts["ids"][accepted]:
                own = draw.randrange(10, 99)
            pos = prompt_tokens + len(answers[seq])
            answers[seq] += [*drafts["ids"][:accepted], own]
            out.append(
                TraceStep(
                    step=number, seq=seq, pos=pos, draft_ids=drafts["ids"],
                    confidence=drafts["confidence"], logits=drafts["logits"],
                    survival=drafts["survival"], useful=len(drafts["ids"]), budget=budget,
                    limit=limit, split=verified, verified=verified, accepted=accepted, discarded=0,
                    committed=accepted + 1, target_id=own, rows=rows, requests=len(running),
                    ms=draw.uniform(20, 40), time_ms=times,
                )
            )  # fmt: skip
            times = ()
        held, learned = {}, {}
        for seq in running:
            n = min(mtp, tokens - len(answers[seq]) - 1)
            if n > 0:
                held[seq] = _drafts(draw, n, temperatures)
            if n >= 0:  # it goes on
                survival = held[seq]["survival"] if n > 0 else ()
                learned[seq] = (*survival, *(0.0,) * (mtp - len(survival)))
        schedule.learn(number, learned)
        number += 1
    return out, answers, budgets


def _drafts(draw, count, temperatures):
    """Drafts whose confidences are too high, as those of a network: the truth is logit / 2."""
    logits = tuple(draw.gauss(2.5, 2.0) for _ in range(count))
    confidence = tuple(confidences(logits, temperatures[:count]))
    return {
        "ids": tuple(draw.randrange(10, 99) for _ in range(count)),
        "logits": logits,
        "confidence": confidence,
        "survival": survivals(confidence),
        "truth": confidences(logits, (2.0,)),
    }


def trace(steps, answers, prompts=None, prompt_tokens=3, spelled=spell, **speculation):
    """A `Trace` of such steps, as the command makes it, without the head of a document."""
    found, texts = lines(steps, [(prompt_tokens, ids) for ids in answers], spelled)
    sequences = [
        {
            "seq": seq, "prompt": prompts[seq] if prompts else f"prompt {seq}",
            "prompt_tokens": prompt_tokens, "text": "".join(text), "token_ids": list(ids),
            "token_text": text, "finish_reason": "length", "seed": seq,
        }
        for seq, (ids, text) in enumerate(zip(answers, texts, strict=True))
    ]  # fmt: skip
    rule = {"mtp": 5, "varlen": False, "verify": "rejection", "temperatures": [1.0], **speculation}
    header = {
        "schema": "deepinfer.trace/1", "model": {"name": "a model", "block": 5},
        "speculation": rule, "sampling": {}, "sequences": sequences, "lines": len(found),
    }  # fmt: skip
    return Trace(header, found)
