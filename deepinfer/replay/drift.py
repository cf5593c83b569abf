"""How far a truncated prefill moves the answer: logits of the same forced tokens, side by side.

Comes in: an idle runner, prompts, and what to keep of them. Goes out: `Drift`. Both sides run the
same step plans but for their replay plan, so what differs is the truncation alone. It must not know
settings, text or how a token would be drawn. Source: serving semantics §2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.core.step import Chunk, StepPlan
from deepinfer.replay.plan import ReplayPlan, ReplayRule

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Drift:
    """Rows of logits compared: the largest |difference| of a logit, the mean over rows of
    KL(full || cut) in nats, and the share of rows with the same most likely token."""

    rows: int
    max_abs_dlogit: float
    kl: float
    top1_agreement: float


def compare(full: torch.Tensor, cut: torch.Tensor) -> Drift:
    """Drift of logits `cut` [N, V] from `full` [N, V], N > 0; ties go to the lower id."""
    p, q = (x.double().log_softmax(-1) for x in (full, cut))
    return Drift(
        rows=len(full),
        max_abs_dlogit=float((full.double() - cut.double()).abs().max()),
        kl=float((p.exp() * (p - q)).sum(-1).mean()),
        top1_agreement=float((full.argmax(-1) == cut.argmax(-1)).double().mean()),
    )


def joined(parts: Sequence[Drift]) -> Drift:
    """The drift over the rows of all parts."""
    rows = sum(part.rows for part in parts)
    return Drift(
        rows=rows,
        max_abs_dlogit=max(part.max_abs_dlogit for part in parts),
        kl=sum(part.kl * part.rows for part in parts) / rows,
        top1_agreement=sum(part.top1_agreement * part.rows for part in parts) / rows,
    )


def drift(
    runner: Any, sizes: Any, prompts: Sequence[Ids], keeps: Sequence[int], tokens: int = 64
) -> dict[int, Drift]:
    """Drift by keep, over the next `tokens` tokens that the uncut engine would choose greedily.

    runner, sizes: `Parts.runner` and `Parts.sizes` of an engine that serves nobody: its memory is
    overwritten, prefix pages too. A prompt and `tokens` more must fit in it.
    """
    trial = Trial(runner, sizes)
    found: dict[int, list[Drift]] = {keep: [] for keep in keeps}
    for group in trial.groups(prompts, tokens):
        answers, full = trial.greedy(group, tokens)
        for keep in keeps:
            cut = trial.forced(group, answers, keep)
            found[keep] += [compare(a, b) for a, b in zip(full, cut, strict=True)]
    return {keep: joined(parts) for keep, parts in found.items()}


class Trial:
    """Runs prompts and forced answers on an idle runner, several side by side. keep None: uncut."""

    def __init__(self, runner: Any, sizes: Any) -> None:
        self._runner, self._sizes = runner, sizes

    def groups(self, prompts: Sequence[Ids], tokens: int) -> list[list[Ids]]:
        """Prompts, in order, in groups that fit into memory with `tokens` tokens behind each."""
        groups: list[list[Ids]] = []
        free_slots = free_pages = 0
        for prompt in prompts:
            pages = self._pages(len(prompt) + tokens)
            if not free_slots or pages > free_pages:
                groups.append([])
                free_slots, free_pages = self._sizes.slots, self._sizes.pages
            groups[-1].append(prompt)
            free_slots, free_pages = free_slots - 1, free_pages - pages
        return groups

    def greedy(
        self, prompts: Sequence[Ids], tokens: int, keep: int | None = None
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """The most likely next `tokens` tokens of each prompt of a group, and the logits [tokens,
        V] that chose them."""
        plans, tables = self._plans(prompts, keep), self._tables(prompts, tokens)
        self._prefill(prompts, plans, tables)
        last = [[prompt[-1]] for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        steps = []
        for at in range(tokens):
            starts = [len(prompt) - 1 + at for prompt in prompts]
            steps.append(self._step(last, starts, plans, tables, logits=1))
            last = [[token] for token in steps[-1].argmax(-1).tolist()]
            for answer, ids in zip(answers, last, strict=True):
                answer += ids
        return answers, list(torch.stack(steps, 1))

    def forced(
        self, prompts: Sequence[Ids], answers: Sequence[Ids], keep: int | None = None
    ) -> list[torch.Tensor]:
        """Logits [len(answer), V] of the rows that would have to choose each token of the answers
        of a group."""
        most = max(map(len, answers))
        plans, tables = self._plans(prompts, keep), self._tables(prompts, most)
        self._prefill(prompts, plans, tables)
        ids = [[p[-1], *a[:-1]] for p, a in zip(prompts, answers, strict=True)]
        starts = [len(prompt) - 1 for prompt in prompts]
        logits = self._step(ids, starts, plans, tables, logits=None)
        return list(logits.split([len(answer) for answer in answers]))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._sizes.page_tokens)

    def _tables(self, prompts: Sequence[Ids], tokens: int) -> list[range]:
        """Pages of each prompt and `tokens` more."""
        tables, first = [], 0
        for prompt in prompts:
            tables.append(range(first, first + self._pages(len(prompt) + tokens)))
            first = tables[-1].stop
        return tables

    def _plans(self, prompts: Sequence[Ids], keep: int | None) -> list[ReplayPlan]:
        rule = ReplayRule.of(self._runner.config, "compact", "full" if keep is None else keep)
        return [rule.plan(len(prompt)) for prompt in prompts]

    def _prefill(
        self, prompts: Sequence[Ids], plans: Sequence[ReplayPlan], tables: Sequence[range]
    ) -> None:
        """All but the last row of each prompt."""
        size = max(self._sizes.max_rows // len(prompts), 1)
        for at in range(0, max(map(len, prompts)) - 1, size):
            rows = [prompt[at : min(at + size, len(prompt) - 1)] for prompt in prompts]
            self._step(rows, [at] * len(rows), plans, tables, logits=0)

    def _step(
        self,
        rows: Sequence[Ids],
        starts: Sequence[int],
        plans: Sequence[ReplayPlan],
        tables: Sequence[range],
        logits: int | None,
    ) -> torch.Tensor:
        """One step of the prompts that have rows; logits: of how many of them, None: of all."""
        chunks = []
        for slot, (ids, start, plan, table) in enumerate(
            zip(rows, starts, plans, tables, strict=True)
        ):
            if ids:
                pages = tuple(table[: self._pages(start + len(ids))])
                wanted = len(ids) if logits is None else logits
                chunks.append(Chunk(slot, start, tuple(ids), pages, wanted, replay=plan))
        return self._runner.forward(StepPlan(tuple(chunks)))
