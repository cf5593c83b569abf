"""Bytes of the pools that requests hold, over what the state of their tokens needs (bar C7).

64 requests of 1K to 128K tokens (log-uniform) answer side by side; after every 16 tokens of all a
fifth of them ends and others come. Scheduler, allocator and prefix cache are the engine's, no model
runs. What a page and a slot weigh is read off real pools; what they should weigh comes from the
ledger: growing bytes a token, and per request (window + rollback) rows a layer and the open groups.

    python -m benchmarks.kv_memory
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import measure, models
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.core.request import Request, SamplingParams
from deepinfer.core.sequence import Sequence
from deepinfer.kvcache import BlockAllocator, PrefixCache
from deepinfer.kvcache.pools import Pools
from deepinfer.kvcache.prefix import Reuse
from deepinfer.model import cost
from deepinfer.model.config import ModelConfig
from deepinfer.replay import ReplayRule
from deepinfer.scheduler.policy import Policy, Step

REQUESTS = 64
SHORTEST, LONGEST = 1 << 10, 1 << 17
CHURN = 0.2
ROUND = 16  # steps in which all answer, between arrivals
KEEP = 140
ROLLBACK = 6  # rows that can be taken back with drafts of 5
PAGE_TOKENS = 128
BAR = 1.03


@dataclass(frozen=True)
class Weights:
    """Bytes of a page and of a slot in real pools, and what the ledger grants: a token, a
    request."""

    page: int
    slot: int
    token: float
    request: int

    @classmethod
    def of(cls, config: ModelConfig) -> Weights:
        def pools(slots: int, pages: int) -> int:
            return Pools(
                config, slots=slots, pages=pages, page_tokens=PAGE_TOKENS, rollback=ROLLBACK
            ).nbytes

        return cls(
            page=pools(1, 2) - pools(1, 1),
            slot=pools(2, 1) - pools(1, 1),
            token=cost.growing_bytes_per_token(config),
            request=cost.fixed_bytes(config, ROLLBACK, config.num_nextn_predict_layers),
        )


class Load:
    """Requests that come, answer and go, under the engine's scheduler."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.draw = random.Random(seed)
        self.arrivals = itertools.count()
        pages = REQUESTS * LONGEST // PAGE_TOKENS
        rule = ReplayRule.of(config, "compact", KEEP)
        self.prefix = PrefixCache(
            rule,
            BlockAllocator(pages, PAGE_TOKENS),
            BlockAllocator(4 * REQUESTS, PAGE_TOKENS),
            Reuse(context=config.engram_max_ngram_size - 1),
        )
        self.policy = Policy(self.prefix, slots=REQUESTS, max_rows=1 << 16, chunk=1 << 14)
        self.landed: Step | None = None
        self.ends: list[tuple[Sequence, int, int]] = []

    def arrive(self) -> None:
        """One more request."""
        at = next(self.arrivals)
        tokens = int(math.exp(self.draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
        ids = (at % 4096, *(self.draw.randrange(4096) for _ in range(7))) * (tokens // 8)
        request = Request(at, 0, ids, SamplingParams(), seed=at, max_new=1 << 12)
        self.policy.add(Sequence(request, at))

    def step(self) -> None:
        """What the engine does around a forward pass, with a token of no meaning."""
        step = self.policy.next_step()
        self._settle()
        if step is None:
            return
        for (sequence, run), chunk in zip(step.chunks, step.plan.chunks, strict=True):
            self.ends.append((sequence, run, chunk.end))
        for sequence in step.choosing:
            self.ends.append((sequence, sequence.preemptions, len(sequence.tokens)))
            sequence.append(11 + sequence.order % 4000)
        self.landed = step
        self.prefix.leaving()

    def _settle(self) -> None:
        """What the scheduler hears of a step, after the next one is planned."""
        if self.landed is None:
            return
        self.policy.settle(self.landed, np.ones(len(self.landed.choosing), dtype=np.int64))
        for sequence, run, end in self.ends:
            if sequence.slot is not None and sequence.preemptions == run:
                self.policy.advance(sequence, end)
        self.landed, self.ends = None, []

    def leave(self) -> None:
        """A fifth of the running requests ends, whichever."""
        for sequence in self.draw.sample(self.policy.running, round(CHURN * REQUESTS)):
            self.policy.remove(sequence)

    @property
    def settled(self) -> bool:
        """Has every prompt been computed?"""
        return not self.policy.waiting and all(s.generated for s in self.policy.running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path, name = models.folder(Path(scratch), "long")
        config = open_checkpoint(path).config
    weights, load = Weights.of(config), Load(config, asked.seed)
    ratios, settled, partial = [], [], []
    for _ in range(asked.rounds):
        for _ in range(REQUESTS - len(load.policy.running)):
            load.arrive()
        answered = 0
        while answered < ROUND:
            load.step()
            answered += load.settled
            running, blocks = load.policy.running, load.policy.blocks
            used = (blocks.total - blocks.free) * weights.page
            used += load.policy.slots_in_use * weights.slot
            tokens = sum(len(sequence.tokens) for sequence in running)
            ratios.append(used / (tokens * weights.token + len(running) * weights.request))
            if load.settled:
                settled.append(ratios[-1])
                needed = sum(len(s.tokens) // PAGE_TOKENS for s in running)
                partial.append((blocks.total - blocks.free - needed) / len(running))
        load.leave()
    entry = measure.record(
        "C7 pool bytes over the ledger", ratios, "ratio", model=name, worst=round(max(ratios), 5),
        page_bytes=weights.page, slot_bytes=weights.slot, ledger_token=weights.token,
        ledger_request=weights.request, requests=next(load.arrivals), rollback=ROLLBACK,
        partial_pages=round(max(partial), 4), floor=1.0,
    )  # fmt: skip
    measure.table(
        ("steps", "samples", "median", "p5", "p95", "worst"),
        [(label, len(held), *(f"{value:.5f}" for value in
          (statistics.median(held), measure.quantile(held, 0.05), measure.quantile(held, 0.95),
           max(held))))
         for label, held in (("all", ratios), ("no prompt in work", settled)) if held],
    )  # fmt: skip
    print(f"bar {BAR}; pages not full, a request: at most {max(partial):.3f}\n")
    print(json.dumps(entry))
    return 0 if max(ratios) <= BAR and max(partial) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
