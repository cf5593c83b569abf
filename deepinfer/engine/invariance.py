"""The proof of batch invariance: the same requests in many compositions, compared bit for bit.

An open engine comes in, a report goes out: which compositions were tried, which request got other
token ids or log-probability bits than alone, and the first op and row that made the difference. It
runs engines and watches their op table; it must not know how a step is planned or run. Source:
serving semantics §6.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.core.request import Completion, SamplingParams
from deepinfer.engine.engine import LLM
from deepinfer.kvcache.prefix import Reuse
from deepinfer.model.config import ModelConfig
from deepinfer.ops.registry import Ops
from deepinfer.ops.rows import Difference, Watch

ORDERS = ("forward", "reversed", "shuffled")
SPECULATION = ("off", "fixed", "varlen")
MOST = 64
# For an engine to be checked: small pages, so that short prompts can resume.
SETTINGS = {"batch_invariant": True, "max_num_seqs": MOST, "page_tokens": 16}


@dataclass(frozen=True)
class Cell:
    """One composition: how many requests at once, in which order, rows of a step and of a prompt's
    chunk (None: no limit of its own), whether prompts resume from kept state, speculation."""

    batch: int
    order: str = "forward"
    budget: int | None = None
    chunk: int | None = None
    hit: bool = False
    speculation: str = "off"

    @property
    def engine(self) -> tuple[int | None, int | None, bool, str]:
        """What is fixed for all calls of an engine."""
        return self.budget, self.chunk, self.hit, self.speculation

    def __str__(self) -> str:
        limits = (("budget", self.budget), ("chunk", self.chunk))
        words = [f"{self.batch} {self.order}", *(f"{n} {v}" for n, v in limits if v is not None)]
        words += ["prefix hit" if self.hit else "cold", f"speculation {self.speculation}"]
        return ", ".join(words)


@dataclass(frozen=True)
class Matrix:
    """The cross of all axes."""

    batches: Sequence[int] = range(1, MOST + 1)
    orders: Sequence[str] = ORDERS
    budgets: Sequence[int | None] = (16, 64, None)
    chunks: Sequence[int | None] = (7, 48, None)
    hits: Sequence[bool] = (False, True)
    speculation: Sequence[str] = SPECULATION

    def cells(self) -> list[Cell]:
        return [Cell(*values) for values in itertools.product(*self._axes)]

    def sample(self, count: int) -> list[Cell]:
        """`count` cells, always the same ones and all if there are no more: random ones behind the
        fewest that hold every pair of values with a batch, in random order."""
        draw, whole = random.Random(0), self.cells()
        batches, *others = self._axes
        most = max(map(len, others))
        first = []
        for batch in batches:
            columns = [itertools.cycle(draw.sample(axis, len(axis))) for axis in others]
            first += [Cell(batch, *map(next, columns)) for _ in range(most)]
        draw.shuffle(first)
        draw.shuffle(whole)
        return list(dict.fromkeys(first + whole))[:count]

    def pairs(self) -> int:
        """How many pairs of values of two axes there are."""
        return sum(len(a) * len(b) for a, b in itertools.combinations(self._axes, 2))

    @property
    def _axes(self) -> list[Sequence[object]]:
        return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _pairs(cell: Cell) -> set[object]:
    values = list(enumerate(dataclasses.astuple(cell)))
    return set(itertools.combinations(values, 2))


def pairs_of(cells: Iterable[Cell]) -> int:
    """How many pairs of values of two axes are in some of these cells."""
    return len(set().union(*map(_pairs, cells)))


@dataclass(frozen=True)
class Subject:
    """A prompt and how it is sampled: all that its answer depends on."""

    tokens: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Failure:
    """A request that is not as alone. prompt: which subject; token: the first that differs, or
    whose log-probabilities do; difference: where it began, sought for the first failure only.
    alone: the code of the error that the run alone ended in, with which nothing can be compared."""

    cell: Cell
    prompt: int
    token: int
    what: str
    difference: Difference | None = None
    sought: bool = False
    alone: str | None = None

    def as_json(self) -> dict[str, object]:
        out = {**dataclasses.asdict(self.cell), "prompt": self.prompt, "token": self.token}
        out["what"] = self.what
        if self.alone is not None:
            out["alone"] = self.alone
        if self.difference is not None:
            out |= dataclasses.asdict(self.difference)
        return out

    def __str__(self) -> str:
        if self.alone is not None:
            return f"{self.cell}: prompt {self.prompt} has no answer alone ({self.alone})"
        text = f"{self.cell}: prompt {self.prompt} has other {self.what} at token {self.token}"
        if self.difference is not None:
            return f"{text}; first differing op: {self.difference}"
        return f"{text}; no op differs on equal inputs" if self.sought else text


@dataclass
class Report:
    """cells: tried, `of`: in the whole matrix; requests: compared; resumed: of them, those that
    began behind a prefix hit; accepted: drafts that were; failures: at most one a cell."""

    of: int
    cells: int = 0
    requests: int = 0
    resumed: int = 0
    accepted: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def invariant(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, object]:
        return {
            "invariant": self.invariant,
            "cells": self.cells,
            "failures": [failure.as_json() for failure in self.failures],
            "cells_in_matrix": self.of,
            "requests": self.requests,
            "requests_resumed": self.resumed,
            "drafts_accepted": self.accepted,
        }


def subjects(llm: LLM, count: int, tokens: int = 6) -> list[Subject]:
    """`count` prompts of this engine's vocabulary, as many greedy as seeded at temperature 1.

    Every eighth fills the window, every eighth is long enough to resume behind two pages.
    """
    parts = llm.parts
    page, rule = parts.sizes.page_tokens, parts.rule
    resumes = (rule.keep if rule.cuts else rule.window) + 2 * page + 3
    lengths = (3, 1, resumes, 2, rule.window, 5, 17, 33)
    most = parts.sizes.max_model_len - tokens
    draw = random.Random(1)
    found = []
    for at in range(count):
        length = max(1, min(lengths[at % 8], most))
        ids = tuple(draw.randrange(parts.vocab_size // 16, parts.vocab_size) for _ in range(length))
        greedy = (at + at // 8) % 2 == 0
        params = SamplingParams(
            max_tokens=tokens, temperature=0 if greedy else 1, seq_seed=None if greedy else at,
            ignore_eos=True, logprobs=2,
        )  # fmt: skip
        found.append(Subject(ids, params))
    return found


class Check:
    """The matrix on one engine, whose weights and pools all compositions share.

    llm: an idle engine, with batch invariance on, drafts and prefix reuse as the checkpoint and the
    user allow: what it lacks is left out of the matrix.
    """

    def __init__(self, llm: LLM, asked: Sequence[Subject]) -> None:
        self.llm, self.subjects = llm, tuple(asked)
        self._alone: dict[int, tuple[object, ...] | str] = {}

    def possible(self, matrix: Matrix) -> Matrix:
        """The matrix without what this engine cannot do."""
        if self.llm.parts.drafting is None:
            matrix = dataclasses.replace(matrix, speculation=("off",))
        if not self.llm.parts.reuse.enabled:
            matrix = dataclasses.replace(matrix, hits=(False,))
        slots = self.llm.parts.sizes.slots
        return dataclasses.replace(matrix, batches=[n for n in matrix.batches if n <= slots])

    def run(
        self,
        cells: Sequence[Cell],
        of: int | None = None,
        progress: Callable[[Cell, int, int], object] = lambda cell, number, count: None,
    ) -> Report:
        """Try the cells; `progress` gets each cell, its number from 1, and their count."""
        report = Report(len(cells) if of is None else of)
        # All before any cell: a run alone writes pages that an engine of a cell may resume from.
        for member in {member for cell in cells for member in self._members(cell)}:
            self._reference(member)
        ordered = sorted(cells, key=lambda cell: tuple(map(str, cell.engine)))
        for _, group in itertools.groupby(ordered, key=lambda cell: cell.engine):
            some = list(group)
            with self._engine(some[0]) as llm:
                for cell in some:
                    report.cells += 1
                    progress(cell, report.cells, len(cells))
                    self._try(llm, cell, report)
        if report.failures:  # the plainest composition that fails is explained
            report.failures.sort(
                key=lambda f: (f.alone is not None, f.cell.hit, f.cell.speculation, f.cell.batch)
            )
            if report.failures[0].alone is None:
                report.failures[0] = self._explained(report.failures[0])
        return report

    def _try(self, llm: LLM, cell: Cell, report: Report) -> None:
        """The composition, and where a back end keeps steps as graphs once more without
        log-probabilities: steps with them are none. Then ids alone are compared."""
        failed = len(report.failures)
        self._compare(llm, cell, report, scored=True)
        if len(report.failures) == failed and llm.parts.runner.graphs is not None:
            self._compare(llm, cell, report, scored=False)

    def _compare(self, llm: LLM, cell: Cell, report: Report, scored: bool) -> None:
        members = self._members(cell)
        results = self._generate(llm, members, scored)
        for member, result in zip(members, results, strict=True):
            if scored:
                report.requests += 1
                report.resumed += result.usage.cached_tokens > 0
                report.accepted += (result.speculation or {}).get("accepted", 0)
            alone = self._reference(member)
            if isinstance(alone, str):
                report.failures.append(Failure(cell, member, 0, "answer", alone=alone))
                return
            bits = _bits(result)
            found = _differs(alone, bits) if scored else _differs(_ids(alone), _ids(bits))
            if found is not None:
                report.failures.append(Failure(cell, member, *found))
                return

    def _members(self, cell: Cell) -> list[int]:
        """Which subjects run, in which order; those of a larger batch repeat."""
        names = list(range(len(self.subjects)))
        if cell.order == "reversed":
            names.reverse()
        elif cell.order == "shuffled":
            random.Random(str(cell)).shuffle(names)
        return [names[at % len(names)] for at in range(cell.batch)]

    def _generate(self, llm: LLM, members: Sequence[int], scored: bool = True) -> list[Completion]:
        asked = [self.subjects[member] for member in members]
        params = [s.params if scored else dataclasses.replace(s.params, logprobs=None)
                  for s in asked]  # fmt: skip
        return llm.generate([list(s.tokens) for s in asked], params)

    def _reference(self, member: int) -> tuple[object, ...] | str:
        """The bits of a subject alone: cold, whole, without speculation; the code of its error."""
        if member not in self._alone:
            with self._engine(Cell(1)) as llm:
                [result] = self._generate(llm, [member])
            self._alone[member] = _bits(result) if result.error is None else result.error.code
        return self._alone[member]

    def _engine(self, cell: Cell) -> LLM:
        """An engine for cells of this kind, on the same runner."""
        parts = self.llm.parts
        sizes, drafting, reuse = parts.sizes, parts.drafting, Reuse(enabled=False)
        if cell.budget is not None:
            sizes = dataclasses.replace(sizes, max_rows=cell.budget)
        sizes = dataclasses.replace(sizes, chunk=cell.chunk or sizes.max_rows)
        if cell.hit:
            reuse = dataclasses.replace(parts.reuse, enabled=True)
        if cell.speculation == "off":
            drafting = None
        else:
            drafting = dataclasses.replace(drafting, varlen=cell.speculation == "varlen")
        llm = LLM.from_parts(
            dataclasses.replace(
                parts, sizes=sizes, drafting=drafting, reuse=reuse, tiers=(), durable=None,
                keep_times=lambda: None, warnings=(),
            )
        )  # fmt: skip
        if cell.hit:  # what the cell's prompts resume from
            self._generate(llm, range(len(self.subjects)))
        return llm

    def _explained(self, failure: Failure) -> Failure:
        """The failure with the first op call that differs from the request's run alone."""
        ops, names = self.llm.parts.runner.ops, self._weight_names()
        with Watch(ops, names) as alone, self._engine(Cell(1)) as llm:
            self._generate(llm, [failure.prompt])
        # What the cell's prompts resume from is watched too.
        with Watch(ops, names, alone.record) as together, self._engine(failure.cell) as llm:
            self._generate(llm, self._members(failure.cell))
        return dataclasses.replace(failure, difference=together.difference, sought=True)

    def _weight_names(self) -> dict[int, str]:
        """id of every weight handle and tensor of the models -> its path."""
        found: dict[int, str] = {}
        runner = self.llm.parts.runner
        for prefix, model in (("", runner.model), ("draft.", runner.draft)):
            for name, value in vars(model).items() if model is not None else ():
                _name(value, prefix + name, found)
        return found


def _bits(result: Completion) -> tuple[object, ...]:
    """What must not change of an answer, token by token."""
    if result.error is not None:
        return (("error", result.error.code),)
    values = (
        (array("d", (entry.logprob, *(v for _, v in entry.top))).tobytes(), entry.top)
        for entry in result.logprobs or ()
    )
    if result.logprobs is None:
        return tuple((token, None) for token in result.token_ids)
    return tuple(zip(result.token_ids, values, strict=True))


def _ids(bits: Sequence[Any]) -> list[tuple[object, ...]]:
    """The same without log-probabilities."""
    return [(entry[0],) for entry in bits]


def _differs(one: Sequence[object], other: Sequence[object]) -> tuple[int, str] | None:
    """The first token at which two answers differ, and in what."""
    for at, (a, b) in enumerate(itertools.zip_longest(one, other)):
        if a != b:
            ids = a is None or b is None or a[0] != b[0]
            return at, "ids" if ids else "log-probabilities"
    return None


def _name(value: object, path: str, found: dict[int, str]) -> None:
    if isinstance(value, list | tuple):
        for at, item in enumerate(value):
            _name(item, f"{path}.{at}", found)
    elif isinstance(value, ModelConfig | Ops | torch.dtype | bool | int | float | str | None):
        return
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith("deepinfer.model."):
        for held in dataclasses.fields(value):
            _name(getattr(value, held.name), f"{path}.{held.name}", found)
    else:
        found.setdefault(id(value), path)
