"""Drafts for the requests that decode, and how many of them the target looks at.

Comes in: what asks for drafts after each step, and the verdicts on those before. Goes out: ids to
verify (`Sequence.drafts`), the distributions they were drawn from, measured times, trace records.
It must not know the draft network, pages, text or why an answer ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer.core.sequence import Sequence as Generation
from deepinfer.kvcache.draft import DraftRequest
from deepinfer.sampling.logits import Row
from deepinfer.speculative import schedule
from deepinfer.speculative.proposal import Counts, Proposal, Verdict
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from deepinfer.speculative.trace import TraceStep
from deepinfer.speculative.verify import propose

_PATIENCE = 4  # steps in vain before drafting stops ...
_PROBE = 16  # ... but for one of so many


class Block(Protocol):
    """The parallel pass of a drafter: `model.draft.DraftBlock`, or a scripted one in tests."""

    def slot(self, i: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...


class Drafts(Protocol):
    """What the drafter needs of a runner."""

    def draft_block(self, requests: Sequence[DraftRequest]) -> Block: ...


class Asks(Protocol):
    """A request that goes on: its sequence, the sampling row of the token behind `drafts`, and
    whether a token would end its answer."""

    @property
    def sequence(self) -> Generation: ...
    def row(self, drafts: Sequence[int]) -> Row: ...
    def ends(self, token: int) -> bool: ...


@dataclass(slots=True)
class _Held:
    """Drafts of one request until they are judged, and what became of them."""

    proposal: Proposal
    logits: tuple[float, ...]
    confidence: tuple[float, ...]
    useful: int
    index: int  # of the request among those drafted together
    split: int = 0
    verified: int = 0
    verdict: Verdict | None = None
    committed: int = 0
    ended: bool = False


class Drafter:
    """Speculation for the running requests of one engine, step by step: `choose`, then `scores`
    and `judged`, then `draft`, then `ended`."""

    def __init__(
        self,
        runner: Drafts,
        rules: DraftRules,
        times: StepTimes,
        on_warning: Callable[[str], object],
    ) -> None:
        self.rules, self.times = rules, times
        self.watch: Callable[[TraceStep], object] | None = None
        self._runner, self._on_warning = runner, on_warning
        self._warned: set[str] = set()
        self._schedule = schedule.Schedule(times, times.knows)
        self._step = 0
        self._budget: int | None = None
        self._limit = 0
        self._vain = 0  # steps in a row whose drafts cost more than they gave
        self._held: dict[Generation, _Held] = {}
        self._judged: dict[Generation, _Held] = {}
        self._scores: list[torch.Tensor | None] = []

    def choose(self, running: Sequence[Generation], spare: int) -> None:
        """Set `drafts` of the requests for the next step; spare: extra rows that fit in it.

        Which drafts are verified follows from older drafts and from confidences that were known
        before the draft itself was drawn, never from the draft: so rejection keeps the target's
        distribution (serving semantics §4.1).
        """
        rules = self.rules
        ready: dict[Generation, _Held] = {}
        for sequence in running:
            sequence.drafts = ()
            if sequence in self._held:
                ready[sequence] = self._held[sequence]
        self._budget, self._limit = (0 if rules.varlen else None), spare
        if rules.varlen and ready:
            shares = self._scheduled(running, ready, spare)
        elif rules.threshold is not None:
            shares = [
                schedule.cut(held.proposal.survivals, rules.threshold) for held in ready.values()
            ]
        else:
            shares = [rules.length] * len(ready)
        for (sequence, held), share in zip(ready.items(), shares, strict=True):
            held.split = min(share, held.useful)
            sequence.drafts = held.proposal.drafts[: held.split]

    def _scheduled(
        self, running: Sequence[Generation], ready: Mapping[Generation, _Held], spare: int
    ) -> list[int]:
        """How many drafts of each request the schedule verifies.

        Requests with one seed share their noise: by its tokens and confidences one tells what
        another will draft and how that will be judged. They verify all they have, whatever
        anybody's confidence, and nobody's share depends on them.
        """
        alike = Counter(sequence.request.seed for sequence in running)
        own = {at: held for at, held in ready.items() if alike[at.request.seed] == 1}
        counts = {at.order: len(held.proposal.drafts) for at, held in own.items()}
        shares: dict[Generation, int] = {}
        if own:
            values = [held.proposal.survivals for held in own.values()]
            self._budget = self._schedule.budget(self._step, counts, self.times.noise, spare)
            split = schedule.split(values, self._budget)
            shares = dict(zip(own, split, strict=True))
            gain = sum(sum(some[:share]) for some, share in zip(values, split, strict=True))
            alone, rows = len(own), len(own) + sum(split)
            plain = self.times.target(alone) if self.times.knows(alone) else math.inf
            worth = (alone + gain) * plain > alone * self.times(rows, alone)
            self._vain = 0 if worth else self._vain + 1
        return [shares.get(at, held.useful) for at, held in ready.items()]

    def scores(self, sequences: Sequence[Generation]) -> torch.Tensor | None:
        """What `verify` needs of the drafts to be judged, float64 [drafts, vocab], or None."""
        rows = [
            self._scores[i][self._held[sequence].index]
            for sequence in sequences
            for i in range(len(sequence.drafts))
            if self._scores[i] is not None
        ]
        return torch.stack(rows) if rows else None

    def judged(
        self,
        sequence: Generation,
        verified: int,
        verdict: Verdict,
        committed: int,
        ended: bool,
        counts: Counts,
    ) -> None:
        """A decoding request got its verdict on so many drafts, and so many tokens of it; ended: it
        is complete."""
        held = self._held.get(sequence)
        drafted = len(held.proposal.drafts) if held else 0
        counts.add(drafted, verified, verdict, committed, ended)
        if held is None:
            held = _Held(Proposal(len(sequence.tokens) - committed, (), ()), (), (), 0, 0)
        held.verified, held.verdict = verified, verdict
        held.committed, held.ended = committed, ended
        self._judged[sequence] = held

    def draft(self, asking: Sequence[Asks]) -> None:
        """Draft for these requests, each of whose newest token is not in memory yet."""
        self._held, self._scores = {}, []
        asking = [one for one in asking if one.sequence.missing > 1]
        vain = self._vain >= _PATIENCE and self._step % _PROBE
        if not asking or vain:
            return
        sequences = [one.sequence for one in asking]
        block = self._runner.draft_block([_request(sequence) for sequence in sequences])
        lengths = [min(self.rules.length, sequence.missing - 1) for sequence in sequences]
        ids: list[list[int]] = [[] for _ in asking]
        raw: list[list[float]] = [[] for _ in asking]
        before = [sequence.tokens[-1] for sequence in sequences]
        for i in range(max(lengths)):
            logits, confidence = block.slot(i, before)
            rows = [one.row(drafts) for one, drafts in zip(asking, ids, strict=True)]
            chosen, scores = propose(logits, rows, i, self.rules.verify)
            self._scores.append(scores)
            before = [max(token, 0) for token in chosen]
            for at, (token, number) in enumerate(zip(chosen, confidence.tolist(), strict=True)):
                ids[at].append(token)
                raw[at].append(number)
        for at, one in enumerate(asking):
            n = lengths[at]
            self._held[one.sequence] = self._hold(one, ids[at][:n], raw[at][:n], at)
        self._schedule.learn(
            self._step,
            {at.order: held.proposal.survivals for at, held in self._held.items()},
        )

    def ended(self, rows: int, target: float, rest: float, pure: bool) -> None:
        """A step is over. rows: it ran, `target` seconds until the verdicts were known, `rest`
        for drafting; pure: nothing but decoding requests."""
        requests = len(self._judged)
        if self.watch:
            self._tell(rows, requests, (target + rest) * 1e3)
        if pure and requests:
            self.times.observe(rows, requests, target, rest if self._held else None)
        self._judged = {}
        self._step += 1

    def reset(self) -> None:
        """What was drafted is void: a step broke off, or nothing runs any more."""
        self._held, self._judged, self._scores = {}, {}, []

    def _hold(self, one: Asks, ids: list[int], raw: list[float], index: int) -> _Held:
        useful = len(ids)
        for at, token in enumerate(ids):
            if token < 0 or one.ends(token):
                useful = at + (token >= 0)
                break
        temperatures = self.rules.temperatures
        if len(temperatures) > 1:
            temperatures = temperatures[: len(raw)]
        confidence = schedule.confidences(raw, temperatures)
        survivals = schedule.survivals(confidence, self._warn)
        # Nothing behind the end is worth a row.
        survivals = survivals[:useful] + (0.0,) * (len(ids) - useful)
        position = len(one.sequence.tokens)
        proposal = Proposal(position, tuple(ids), survivals)
        return _Held(proposal, tuple(raw), tuple(confidence), useful, index)

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self._on_warning(line)

    def _tell(self, rows: int, requests: int, ms: float) -> None:
        times: tuple[float, ...] = ()
        if self._budget is not None:
            most = sum(len(held.proposal.drafts) for held in self._judged.values())
            times = tuple(self.times(requests + k, requests) * 1e3 for k in range(most + 1))
        for sequence, held in self._judged.items():
            verdict, proposal = held.verdict, held.proposal
            own = verdict.accepted < held.committed
            behind = held.ended and not own
            step = TraceStep(
                step=self._step,
                seq=sequence.order,
                pos=proposal.position,
                draft_ids=proposal.drafts,
                confidence=held.confidence,
                logits=held.logits,
                survival=proposal.survivals,
                useful=held.useful,
                budget=self._budget,
                limit=self._limit,
                split=held.split,
                verified=held.verified,
                accepted=min(verdict.accepted, held.committed),
                discarded=len(proposal.drafts) - held.committed if behind else 0,
                committed=held.committed,
                target_id=verdict.tokens[-1] if own else None,
                rows=rows,
                requests=requests,
                ms=ms,
                time_ms=times,
            )
            self.watch(step)
            times = ()


def _request(sequence: Generation) -> DraftRequest:
    plan = sequence.replay
    return DraftRequest(
        slot=sequence.slot,
        anchor=sequence.tokens[-1],
        last=len(sequence.tokens) - 2,
        # What the last layer ran: a resume restores the windows of the backbone alone.
        first=plan.rows_from(plan.layers - 1),
    )
