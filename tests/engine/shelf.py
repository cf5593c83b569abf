"""A scripted model whose only memory are its pages and rings, and random workloads for it.

What a row sees is what its pages hold, so a page that is given to somebody too early, a row at a
wrong place or a token that came late changes what is said. `Work` is a workload by step number;
`play` runs it on an engine and tells everything that must not depend on how the loop overlaps.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepinfer.core.request import SamplingParams
from deepinfer.engine.assembly import Parts, Sizes
from deepinfer.engine.engine import LLM, _Call
from deepinfer.kvcache.prefix import Reuse
from deepinfer.replay import ReplayRule
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from tests.engine.fakes import ScriptedBlock, idle, ops

VOCAB, EOS = 12, 11
WINDOW = 3
POISON = -7


def table(seed: int, broken: int = 0) -> np.ndarray:
    """Logits of 509 kinds of prefix; the first `broken` of them are not finite."""
    rows = np.random.default_rng(seed).normal(size=(509, VOCAB)).astype(np.float32) * 2
    rows[:, EOS] -= 1.0
    rows[:broken] = np.nan
    return rows


def kind(prefix) -> int:
    """Which row of a table a prefix has; one that holds poison has another one."""
    return hash(tuple(prefix)) % 509  # ints hash to themselves: the same in every process


class Shelf:
    """Pages of tokens, a window ring per slot, and the text that each slot's rows saw last."""

    graphs = None

    def __init__(self, rows: np.ndarray, page_tokens: int, agrees: int, block: int) -> None:
        self.ops = ops()
        self.table, self.size, self.agrees, self.block = rows, page_tokens, agrees, block
        self.cells: dict[str, dict[int, list[int]]] = {"entries": {}, "windows": {}}
        self.rings: dict[int, dict[int, int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.prefix = None
        self.certain = _Anywhere()

    def _cell(self, what: str, page: int) -> list[int]:
        return self.cells[what].setdefault(page, [POISON] * self.size)

    def poison(self) -> None:
        """Whatever pages nobody holds and nobody can find."""
        for what, pool in (("entries", self.prefix.entries), ("windows", self.prefix.windows)):
            for page in pool._free:
                self.cells[what].pop(page, None)

    def forward(self, plan, live=None) -> torch.Tensor:
        assert not plan.loads
        out: list[int] = []
        if live is not None:
            ids, offsets = live.ids.tolist(), [*live.offsets.tolist(), len(live.ids)]
            windows = live.windows.tolist()
            for r, (slot, start) in enumerate(
                zip(live.slots.tolist(), live.starts.tolist(), strict=True)
            ):
                mine = ids[offsets[r] : offsets[r + 1]]
                kept = dict(enumerate(windows[r]))
                pages = live.pages[r].tolist()
                assert 1 <= len(mine) <= live.most and start + len(mine) <= live.longest
                out += self._rows(slot, start, mine, pages, kept)
        for chunk in plan.chunks:
            assert len(chunk.pages) == -(-chunk.end // self.size)
            if chunk.start == 0 or chunk.start == chunk.replay.first:
                ring = self.rings[chunk.slot] = {}
                first = chunk.start - len(chunk.restore) * self.size
                for p in range(first, chunk.start):
                    page = chunk.restore[(p - first) // self.size]
                    ring[p] = self._cell("windows", page)[p % self.size]
            rows = self._rows(
                chunk.slot, chunk.start, chunk.token_ids, chunk.pages, dict(chunk.windows)
            )
            out += rows[len(rows) - chunk.logits :]
        return torch.from_numpy(self.table[out])

    def _rows(self, slot, start, tokens, pages, kept) -> list[int]:
        ring, size, out = self.rings[slot], self.size, []
        text = [self._cell("entries", pages[p // size])[p % size] for p in range(start)]
        for p, token in enumerate(tokens, start=start):
            text.append(token)
            ring[p] = token
            self._write("entries", pages[p // size], p, token)
            if p // size in kept:
                self._write("windows", kept[p // size], p, token)
            seen = [ring.get(q, POISON) for q in range(max(p - WINDOW + 1, 0), p + 1)]
            out.append(kind(text if seen == text[-len(seen) :] else [*text, POISON]))
        self.slots[slot] = text
        return out

    def _write(self, what: str, page: int, p: int, token: int) -> None:
        pool = self.prefix.entries if what == "entries" else self.prefix.windows
        assert page not in pool._names, "a page that others can find was written"
        self._cell(what, page)[p % self.size] = token

    def draft(self, prefix, i):
        """The target's own logits in `agrees` of 8 cases, and about as sure of itself."""
        row = kind(prefix)
        luck = (row * 7 + i) % 8
        raw = 3.0 - 0.5 * luck if row % 61 else float("nan")
        return self.table[row if luck < self.agrees else (row + 1 + i) % 509], raw

    def draft_block(self, *asked: torch.Tensor) -> ScriptedBlock:
        return ScriptedBlock(self, *(x.tolist() for x in asked))

    def read(self, what, pages):
        raise AssertionError("there is no other tier")


class _Anywhere(dict):
    def __missing__(self, slot):
        return 0


class FixedTimes(StepTimes):
    """A time curve that learns nothing: seconds by rows."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def __call__(self, rows, requests):
        return 1.0 + self.slope * rows

    def knows(self, rows):
        return True

    def target(self, rows):
        return 1.0 + self.slope * rows

    def observe(self, rows, requests, target, rest):
        pass


@dataclass
class Asked:
    """One call: what it asks for, at which steps it comes and is withdrawn, how often, and whether
    the same comes again at once. `first`: it is the copy of that call."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    streams: bool = False
    goes: int | None = None
    twice: bool = False
    again: bool = False


@dataclass
class Work:
    """Calls, and the engine that they are made for."""

    calls: list[Asked]
    sizes: Sizes
    rows: np.ndarray
    reuse: bool
    rules: DraftRules | None
    slope: float = 0.1
    agrees: int = 6
    told: bool = False
    steps: list = field(default_factory=list)

    def engine(self, overlap: bool, tokenizer=None) -> LLM:
        block = self.rules.length if self.rules else 0
        shelf = Shelf(self.rows, self.sizes.page_tokens, self.agrees, block)
        parts = Parts(
            runner=shelf,
            tokenizer=tokenizer,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            sizes=self.sizes,
            rule=ReplayRule(layers=1, boundary=None, window=WINDOW),
            reuse=Reuse(self.reuse, b"m" * 32),
            drafting=self.rules,
            times=FixedTimes(self.slope),
            overlap=overlap,
        )
        llm = LLM.from_parts(parts, on_warning=lambda line: None)
        shelf.prefix = llm._prefix
        return llm


def work(seed: int, **force) -> Work:
    """A random workload; `force` replaces fields of it."""
    draw = random.Random(seed)
    size = draw.choice((2, 3, 4))
    tight = draw.random() < 0.6
    length = draw.choice((0, 0, 1, 3, 5))
    rules = None
    if length:
        kinds = draw.choice(("fixed", "varlen", "varlen", "threshold"))
        rules = DraftRules(
            length,
            draw.choice(("rejection", "coupled")),
            varlen=kinds == "varlen",
            threshold=0.3 if kinds == "threshold" else None,
            temperatures=(1.0,),
        )
    reuse = draw.random() < 0.5
    tokens = draw.randrange(32, 60) if tight else 400
    sizes = Sizes(
        slots=draw.choice((1, 2, 3, 4, 4, 8, 8)),
        pages=tokens // size,
        page_tokens=size,
        max_model_len=draw.choice((40, 60)),
        max_rows=draw.choice((1, 3, 6, 12, 30, 30)),
        chunk=draw.choice((1, 3, 7, 30)),
        window_pages=draw.choice((3, 12)) if reuse else 0,
    )
    told = draw.random() < 0.3
    calls = []
    for _ in range(draw.randrange(2, 7)):
        texts = [one.prompt for one in calls]
        prompt = [draw.randrange(VOCAB - 1) for _ in range(draw.randrange(1, 16))]
        if texts and draw.random() < 0.4:  # a prefix that somebody has had
            prompt = (draw.choice(texts) + prompt)[: draw.randrange(6, 24)]
        comes = draw.choice((0, 0, draw.randrange(12), draw.randrange(30)))
        goes = comes + draw.choice((0, 1, 2, 4, 9)) if draw.random() < 0.25 else None
        calls.append(
            Asked(
                prompt, params(draw, told), comes, draw.random() < 0.3, goes,
                draw.random() < 0.5, draw.random() < 0.5,
            )
        )  # fmt: skip
    broken = draw.choice((0, 0, 0, 8))
    made = Work(
        calls, sizes, table(seed, broken), reuse, rules, draw.choice((0.0, 0.05, 0.4)),
        draw.choice((0, 4, 6, 8)), told,
    )  # fmt: skip
    return replace(made, **force)


def params(draw: random.Random, told: bool) -> SamplingParams:
    given = {
        "max_tokens": draw.choice((0, 1, 2, 3, 5, 9, 16, 16, 24, 24)),
        "temperature": draw.choice((0.0, 1.0, 0.6)),
        "seed": draw.choice((1, draw.randrange(1 << 40))),
        "n": draw.choice((1, 1, 1, 2, 3)),
        "ignore_eos": draw.random() < 0.6,
    }
    if draw.random() < 0.3:
        given["top_k"] = draw.choice((1, 2, 5))
    if draw.random() < 0.2:
        given["top_p"] = 0.7
    if draw.random() < 0.2:
        given["min_p"] = 0.1
    if draw.random() < 0.25:
        given["stop_token_ids"] = tuple(draw.sample(range(VOCAB), draw.choice((1, 2))))
    if draw.random() < 0.25:
        given["stop"] = tuple(chr(draw.randrange(VOCAB)) * draw.choice((1, 1, 2)) for _ in "ab")
    if draw.random() < 0.3:
        given["logprobs"] = draw.choice((0, 2))
    if draw.random() < 0.1:
        given["prompt_logprobs"] = 1
    if told and draw.random() < 0.5:
        given |= draw.choice(
            (
                {"min_tokens": draw.randrange(1, 8)},
                {"presence_penalty": 1.0, "frequency_penalty": 0.5},
                {"repetition_penalty": 1.3},
                {"logit_bias": {EOS: -3.0, 2: 2.0}},
            )
        )
        if given.get("min_tokens", 0) > given["max_tokens"]:
            given["min_tokens"] = given["max_tokens"]
    return SamplingParams(**given)


def play(work: Work, overlap: bool, tokenizer=None, before_end=None):
    """Run a workload. (plans, results by call, which calls were withdrawn, preemptions)."""
    llm = work.engine(overlap, tokenizer)
    policy, shelf = llm._policy, llm.parts.runner
    plans, taken = [], 0
    plan, preempt = policy.next_step, policy.preempt

    def watched(*rest):
        step = plan(*rest)
        if step is not None:
            names = [s.order for s in step.decoding], [(s.order, r) for s, r in step.chunks]
            plans.append((step.number, step.plan, names, step.finishing))
        return step

    def counted(sequence):
        nonlocal taken
        taken += 1
        preempt(sequence)

    policy.next_step, policy.preempt = watched, counted
    judge = llm._device.judge

    def judged(step, *rest):
        # Nobody waits here, so only steps whose rows are shared out run those of who has ended.
        if not overlap and not (work.rules and work.rules.varlen):
            assert all(sequence in llm._running for sequence in step.choosing), "it has ended"
        chosen.update(sequence for sequence in step.choosing if sequence in llm._running)
        return judge(step, *rest)

    llm._device.judge = judged
    chosen: Counter = Counter()
    calls: list[list] = []
    events: dict[int, list] = {}
    for one in work.calls:
        events.setdefault(one.comes, []).append(("comes", one, None))
    step = 0
    while events or _busy(llm):
        for what, one, call in events.pop(step, []):
            if what == "comes":
                call = _Call(streams=one.streams)
                llm._submit(call, llm._read([one.prompt], one.params))
                calls.append([call, False, one])
                if one.goes is not None:
                    now = "goes", one, call
                    if one.goes == step:
                        _withdraw(llm, calls, one, call)
                    else:
                        events.setdefault(one.goes, []).append(now)
            else:
                _withdraw(llm, calls, one, call)
        if _busy(llm):
            llm._step()
            shelf.poison()
        step += 1
        assert step < 5000, "it does not end"
    llm._withdraw(_Call())
    assert idle(llm), "something did not come back"
    for call, gone, _ in calls:
        for answer in call.answers:
            error = answer.result.error
            if not (overlap or gone or error or work.rules):
                made = len(answer.result.token_ids)
                assert chosen[answer.sequence] == made, "a token was lost or chosen twice"
    results = [[answer.result for answer in call.answers] for call, *_ in calls]
    deltas = [list(call.deltas) for call, *_ in calls]
    made = [one for *_, one in calls]
    return plans, results, [gone for _, gone, _ in calls], taken, deltas, made


def _busy(llm: LLM) -> bool:
    return bool(llm._running or llm._leaving or llm._landed or llm._flight)


def _withdraw(llm, calls, one, call) -> None:
    """End a call and, where it is asked for, end it again and make it again at once."""
    entry = next(entry for entry in calls if entry[0] is call)
    entry[1] = call.open > 0
    running = bool(llm._running)
    for answer in call.answers:  # what `_withdraw` does, but for writing pages to another tier
        if answer.result is None:
            llm._abort(answer, call)
    assert not call.open
    if one.twice and running:
        for answer in call.answers:
            assert answer.result is not None
    if one.again:
        more = _Call(streams=one.streams)
        llm._submit(more, llm._read([one.prompt], one.params))
        calls.append([more, False, one])
