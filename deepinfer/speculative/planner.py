"""The host's half of speculation: how many drafts a step verifies, and what became of them.

Comes in: who decodes, and outcomes one step late. Goes out: `Verify` for the scheduler, counts,
trace records and learned times. It must not know ids' meaning, tensors, pages or why an answer
ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import Outcome
from deepinfer.scheduler.policy import Step, Verify, as_many
from deepinfer.speculative import schedule
from deepinfer.speculative.schedule import DraftRules
from deepinfer.speculative.timing import StepTimes
from deepinfer.speculative.trace import TraceStep

_PATIENCE = 4  # steps in vain before drafting stops ...
_PROBE = 16  # ... but for one of so many


class Planner:
    """Decides about drafts for the scheduler (`scheduler.policy.Speculates`).

    Which drafts are verified follows from older drafts and from confidences that were known before
    the draft itself was drawn, never from the draft: so rejection keeps the target's distribution
    (serving semantics §4.1). All it learns reaches it when a step is settled, so that planning
    ahead gives the same plans.
    """

    def __init__(
        self, rules: DraftRules, times: StepTimes, on_warning: Callable[[str], object]
    ) -> None:
        self.rules, self.times = rules, times
        self.watch: Callable[[TraceStep], object] | None = None
        self._on_warning = on_warning
        self._warned: set[str] = set()
        self._schedule = schedule.Schedule(times, times.knows)
        self._vain = 0  # steps in a row whose drafts cost more than they gave
        self._chosen: dict[int, tuple[int | None, int]] = {}  # step: budget and limit

    @property
    def length(self) -> int:
        return self.rules.length

    def wanted(self, number: int) -> bool:
        return self._vain < _PATIENCE or number % _PROBE == 0

    def choose(
        self, number: int, sequences: tuple[Generation, ...], most: int, spare: int
    ) -> Verify:
        """Extra rows for the schedule to share out, or the same number of drafts for each.

        Where drafts are drawn and judged by chance (rejection, a temperature above 0), requests
        with one seed share their noise: by its tokens and confidences one tells what another will
        draft and how that will be judged. They verify all they have, whatever anybody's confidence,
        and nobody's share depends on them.
        """
        if not self.rules.varlen:
            self._chosen[number] = None, spare
            return as_many(sequences, most, spare)
        whole: tuple[Generation, ...] = ()
        if self.rules.verify == "rejection":
            drawn = [s for s in sequences if s.request.params.temperature > 0]
            alike = Counter(s.request.seed for s in drawn)
            whole = tuple(s for s in drawn if alike[s.request.seed] > 1)
        most = self.length  # what was not drafted has a survival of 0
        if whole:
            most = min(most, spare // len(whole))
        apart = set(whole)
        own = {s.order: most for s in sequences if s not in apart}
        left = spare - most * len(whole)
        extra = 0
        if own:
            extra = self._schedule.budget(number, own, self.times.noise, left)
            samples = self._schedule.samples(number, own)
            alone, rows = len(own), len(own) + extra
            plain = self.times.target(alone) if self.times.knows(alone) else math.inf
            gain = schedule.gain(samples, extra)
            worth = (alone + gain) * plain > alone * self.times(rows, alone)
            self._vain = 0 if worth else self._vain + 1
        self._chosen[number] = extra, spare
        return Verify(most, extra + most * len(whole), whole)

    def settle(
        self, step: Step, outcome: Outcome, going_on: Iterable[tuple[int, Generation]]
    ) -> None:
        """Learn from a step. going_on: who drafts on, with its place in `step.choosing`."""
        self._chosen.pop(step.number, None)
        if self.rules.varlen and outcome.survivals is not None:
            rows = outcome.survivals
            drafted = {sequence.order: tuple(rows[at].tolist()) for at, sequence in going_on}
            if drafted:
                self._schedule.learn(step.number, drafted)
        if outcome.seconds and not step.chunks:
            self.times.observe(step.plan.rows, len(step.decoding), *outcome.seconds)

    def record(
        self,
        step: Step,
        outcome: Outcome,
        judged: Sequence[tuple[int, Generation, int, int, bool]],
    ) -> None:
        """Tell the watcher of a step: (place, sequence, position of its first draft, tokens
        committed, was that the end) of each request that decoded."""
        assert self.watch is not None and outcome.drafts is not None
        budget, limit = self._chosen.get(step.number, (0 if self.rules.varlen else None, 0))
        times: tuple[float, ...] = ()
        if budget is not None:
            most = sum(int(outcome.drafted[at]) for at, *_ in judged)
            times = tuple(self.times(len(judged) + k, len(judged)) * 1e3 for k in range(most + 1))
        for at, sequence, position, committed, ended in judged:
            made = int(outcome.drafted[at])
            accepted = int(outcome.accepted[at])
            verified = int(outcome.verified[at])
            ids = tuple(outcome.drafts.ids[at, :made].tolist())
            raw = tuple(outcome.drafts.raw[at, :made].tolist())
            own = accepted < committed
            self.watch(
                TraceStep(
                    step=step.number,
                    seq=sequence.order,
                    pos=position,
                    draft_ids=ids,
                    confidence=self._confidence(raw),
                    logits=raw,
                    survival=tuple(outcome.drafts.survivals[at, :made].tolist()),
                    useful=int(outcome.drafts.useful[at]),
                    budget=budget,
                    limit=limit,
                    split=verified,
                    verified=verified,
                    accepted=min(accepted, committed),
                    discarded=made - committed if ended and not own else 0,
                    committed=committed,
                    target_id=int(outcome.tokens[at, accepted]) if own else None,
                    rows=step.plan.rows,
                    requests=len(judged),
                    ms=sum(filter(None, outcome.seconds or ())) * 1e3,
                    time_ms=times,
                )
            )
            times = ()

    def _confidence(self, raw: Sequence[float]) -> tuple[float, ...]:
        temperatures = self.rules.temperatures
        if len(temperatures) > 1:
            temperatures = temperatures[: len(raw)]
        chances = schedule.confidences(raw, temperatures)
        schedule.survivals(chances, self._warn)
        return tuple(chances)

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self._on_warning(line)

    def reset(self) -> None:
        """A step broke off, or nothing runs any more."""
        self._chosen.clear()
