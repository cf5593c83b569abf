"""The device half of a step: rows, model, verification and drafting, without waiting for any of it.

A `Step` comes in, a `Flight` goes out, whose `Outcome` is there once the device got so far. Shapes
follow from the plan alone and values stay in tensors, so that steps can be queued one behind the
other (and, with fixed shapes, captured as a graph). It must not know text, stop strings or the
scheduler's reasons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import Decoding, DraftRecord, Likelihoods, Outcome, StepPlan
from deepinfer.device.transfer import receive, send
from deepinfer.engine.assembly import Parts
from deepinfer.engine.live import Drawing, Live
from deepinfer.kvcache.live import LiveRows
from deepinfer.sampling import sampler
from deepinfer.sampling.logits import Row, Rows
from deepinfer.scheduler.policy import Step
from deepinfer.speculative import share
from deepinfer.speculative.drafter import Drafted, draft
from deepinfer.speculative.verify import verify


class Told(Protocol):
    """A request whose rows only the host can make, behind its newest token and these drafts.

    shifted: more than a grammar changes its logits.
    """

    shifted: bool

    def row(self, drafts: Sequence[int]) -> Row | None:
        """What changes its logits; None: nothing does."""

    def allowed(self, drafts: Sequence[int]) -> np.ndarray | None:
        """Bits of the ids that its grammar allows; None: all."""


@dataclass(slots=True)
class Flight:
    """A step on its way.

    step: what runs, without what was left out of the plan. slots: of the requests that choose.
    logits: as the runner gave them; chosen: the rows of them that choose; first: for each request
    the one of these that gives its first token. scored, prompts: where the likelihoods of a request
    that chooses and of a chunk's prompt begin, by place and by number of the chunk.
    """

    step: Step
    slots: torch.Tensor
    logits: torch.Tensor
    chosen: torch.Tensor
    first: torch.Tensor
    marks: list[object]
    done: object = None
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    scored: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)


class Clock:
    """Times of points in the device's work, and waiting for the last of them."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock

    def mark(self) -> object:
        if self._device.type == "cpu":
            return self._clock()
        event = getattr(torch, self._device.type).Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: object) -> None:
        """Until the device has passed a mark."""
        if self._device.type != "cpu":
            mark.synchronize()

    def between(self, marks: Sequence[object]) -> tuple[float, float | None]:
        """Seconds from the first mark to the second and from there to the third, if there is."""
        spans = [self._span(*pair) for pair in pairwise(marks)]
        return spans[0], spans[1] if len(spans) > 1 else None

    def _span(self, first: object, last: object) -> float:
        return last - first if self._device.type == "cpu" else first.elapsed_time(last) / 1e3


_NONE = torch.zeros(0, dtype=torch.int64)
_NOBODY = {"tokens": _NONE[:, None], "counts": _NONE, "look": _NONE > 0, "broken": _NONE > 0,
           "drafted": _NONE, "verified": _NONE, "accepted": _NONE}  # fmt: skip


class Device:
    """The live state of the running requests and the queue of steps on it.

    watch: copy what a trace needs to the host too.
    """

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._parts, self._rules = parts, parts.drafting
        sizes = parts.sizes
        device = torch.device(getattr(parts.runner, "device", "cpu"))
        self.live = Live(
            slots=sizes.slots,
            pages=sizes.pages,
            window_pages=sizes.window_pages,
            page_tokens=sizes.page_tokens,
            max_model_len=sizes.max_model_len,
            drafts=self._rules.length if self._rules else 0,
            device=device,
            ops=parts.runner.ops,
            judged=self._rules is None or self._rules.chance is None,
        )
        self.watch = False
        self.clock = Clock(device, clock)
        self._held: Drafted | None = None  # of the step before; None: nothing was drafted
        self._order = torch.zeros(sizes.slots, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """What was drafted is void."""
        self._held = None

    @torch.inference_mode()
    def judge(
        self,
        step: Step,
        drawing: Drawing,
        told: Mapping[Generation, Told],
    ) -> Flight:
        """Run a step and choose its tokens.

        told: requests whose rows depend on more than the device knows; with any of them the host
        waits here.
        """
        live, plan = self.live, step.plan
        marks = [self.clock.mark()]
        live.grow(plan.grown)
        live.begin([self._begin(step.chunks[at][0]) for at in step.finishing])
        if plan.chunks or plan.loads or drawing.scored or self._changes(plan, told):
            flight, found = self._mixed(step, drawing, told, marks)
        else:
            found = self._decoding(plan, drawing, self._masks(step, told) if told else None)
            logits, first = found.pop("logits"), found.pop("first")
            slots = live.slots(plan.decoding.slots)
            flight = Flight(step, slots, logits, logits, first, marks)
        marks.append(self.clock.mark())
        self._copy(flight, found)
        self._held = None
        return flight

    def _mixed(
        self,
        step: Step,
        drawing: Drawing,
        told: Mapping[Generation, Told],
        marks: list[object],
    ) -> tuple[Flight, dict[str, torch.Tensor]]:
        """Any step."""
        live, plan, decoding = self.live, step.plan, step.plan.decoding
        rows, shares = self._rows(decoding)
        logits = self._parts.runner.forward(plan, rows)
        slots = live.slots(tuple([sequence.slot for sequence in step.choosing])
                           if step.finishing else decoding.slots if decoding else ())  # fmt: skip
        first, of, behind, chosen = self._choosing(step, rows, logits)
        flight = Flight(step, slots, logits, chosen, first, marks)
        columns = live.columns(slots, behind, drawing, of)
        if told:
            columns = self._judged(columns, flight, told)
        if step.finishing:
            shares = torch.cat((shares, shares.new_zeros(len(step.finishing))))
        found = _NOBODY
        if step.choosing:
            most = self._most(decoding)
            scores = self._scores(slots, most)
            found = self._verify(slots, chosen, first, columns, shares, scores, most)
        if drawing.scored:
            found |= self._score(flight, found["tokens"])
        return flight, found

    def _changes(self, plan: StepPlan, told: Mapping[Generation, Told]) -> bool:
        """Must the host tell more than masks, or of rows that the plan alone does not share out?"""
        shared = plan.decoding is not None and plan.decoding.drafts and self._rules.varlen
        return bool(told) and bool(shared or any(one.shifted for one in told.values()))

    def _masks(self, step: Step, told: Mapping[Generation, Told]) -> torch.Tensor | None:
        """`Rows.allowed` of the decoding requests."""
        live, count, choosing = self.live, step.plan.decoding.drafts, step.choosing
        drafts: list[Sequence[int]] = [()] * len(choosing)
        if count:
            drafts = live.drafts[live.slots(step.plan.decoding.slots)].tolist()
        return _bits([
            one and one.allowed(some[:behind])
            for one, some in zip(map(told.get, choosing), drafts, strict=True)
            for behind in range(1 + count)
        ], live.device)  # fmt: skip

    def _decoding(
        self, plan: StepPlan, drawing: Drawing, masks: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The step of decoding requests alone that need no more of the host than masks, their
        logits and first rows too: as a graph, where the back end keeps such."""
        live, runner, decoding = self.live, self._parts.runner, plan.decoding
        most = self._most(decoding)
        scores = self._scores(live.slots(decoding.slots), most)

        def decode(slots: torch.Tensor, *masks: torch.Tensor) -> dict[str, torch.Tensor]:
            rows, shares = self._rows(decoding, slots)
            logits = runner.forward(plan, rows)
            columns = live.columns(slots, rows.behind, drawing, rows.of)
            columns = replace(columns, allowed=masks[0]) if masks else columns
            found = self._verify(slots, logits, rows.offsets, columns, shares, scores, most)
            return {"logits": logits, "first": rows.offsets, **found}

        inputs = (live.slots(decoding.slots), *(() if masks is None else (masks,)))
        graphs = runner.graphs
        if graphs is None or scores is not None or decoding.whole:
            return decode(*inputs)
        # A graph holds addresses of this one's live state, and its rules.
        key = ("step", self, live.columns_of(decoding.pages), decoding.drafts, decoding.extra,
               drawing, self._held is None, most, live.stops, self.watch)  # fmt: skip
        return graphs.run(key, decode, *inputs)

    def _most(self, decoding: Decoding | None) -> int:
        """Drafts that one request may verify."""
        made = self._held.ids.shape[1] if self._held else 0
        return min(decoding.drafts, made) if decoding else 0

    def _verify(
        self,
        slots: torch.Tensor,
        logits: torch.Tensor,
        first: torch.Tensor,
        columns: Rows,
        shares: torch.Tensor,
        scores: torch.Tensor | None,
        most: int,
    ) -> dict[str, torch.Tensor]:
        """Choose tokens and append them. What of it the host wants to know."""
        live = self.live
        judged = verify(
            logits,
            columns,
            first,
            live.drafts[slots, :most] if most else live.drafts[: len(slots), :0],
            shares,
            scores,
            self._rules.verify if self._rules else "coupled",  # without drafts all rules agree
            most + 1,
            self._rules.chance if self._rules else None,
        )
        counts, look = live.append(slots, judged.tokens, judged.accepted, judged.broken)
        found = {"tokens": judged.tokens, "counts": counts, "look": look, "broken": judged.broken}
        if self._rules:
            made = live.made[slots] if self._held else torch.zeros_like(counts)
            found |= {"drafted": made, "verified": shares, "accepted": judged.accepted}
            if self.watch:
                found |= {
                    "ids": live.drafts[slots],
                    "raw": live.raw[slots],
                    "before": live.survivals[slots],
                    "useful": torch.minimum(live.useful[slots], made),
                }
        return found

    def _score(self, flight: Flight, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Likelihoods of the tokens [C, n] of requests that asked for them, and of prompts."""
        step, device = flight.step, self.live.device
        parts, tops, count, width = [], [0], 0, tokens.shape[1]
        for at, sequence in enumerate(step.choosing):
            if sequence.request.params.logprobs is not None:
                flight.scored[at] = len(flight.scored) * width
                tops.append(sequence.request.params.logprobs)
        if flight.scored:
            [places] = send([np.array([*flight.scored])], device)
            behind = torch.arange(width, device=device)
            # Behind the last token of one may be no row.
            rows = (flight.first[places, None] + behind).clamp_max(len(flight.chosen) - 1)
            asked = tokens[places].clamp_min(0)
            parts.append((flight.chosen, rows.flatten(), asked.flatten()))
            count = rows.numel()
        first = step.plan.decoding.rows if step.plan.decoding else 0
        for at, (chunk, (sequence, _)) in enumerate(
            zip(step.plan.chunks, step.chunks, strict=True)
        ):
            request = sequence.request
            targets = request.prompt_ids[chunk.start + 1 : chunk.end + 1]
            if request.params.prompt_logprobs is not None and chunk.logits and targets:
                rows = torch.arange(first, first + len(targets), device=device)
                [asked] = send([np.array(targets)], device)
                parts.append((flight.logits, rows, asked))
                tops.append(request.params.prompt_logprobs)
                flight.prompts[at] = count
                count += len(targets)
            first += chunk.logits
        scored = [sampler.likelihoods(*part, max(tops)) for part in parts]
        return (
            {name: torch.cat([one[name] for one in scored]) for name in scored[0]} if parts else {}
        )

    @torch.inference_mode()
    def draft(self, flight: Flight, drawing: Drawing, told: Mapping[Generation, Told]) -> None:
        """Draft for the requests that chose, for the step behind this one."""
        live, slots, count = self.live, flight.slots, flight.step.plan.draft

        def drafted(slots: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self._draft(slots, count, drawing, flight.step, told)
            return {name: x for name, x in vars(found).items() if x is not None}

        graphs = self._parts.runner.graphs
        if graphs is None or told:
            found = drafted(slots)
        else:
            found = graphs.run(("draft", self, count, drawing, live.stops), drafted, slots)
        self._held = held = Drafted(**{"scores": None, **found})
        live.drafts[slots, :count] = held.ids
        live.raw[slots, :count] = held.raw
        live.survivals[slots] = pad(held.survivals, (0, live.width - count))
        live.useful[slots] = held.useful
        self._order[slots] = torch.arange(len(slots), device=live.device)
        flight.marks.append(self.clock.mark())
        self._copy(flight, {"survivals": live.survivals[slots]} if self._rules.varlen else {})

    def _draft(
        self,
        slots: torch.Tensor,
        count: int,
        drawing: Drawing,
        step: Step,
        told: Mapping[Generation, Told],
    ) -> Drafted:
        live, rules = self.live, self._rules
        length = live.length[slots]
        made = (live.end[slots] - length - 1).clamp(0, count)
        live.made[slots] = made

        def rows(i: int, before: torch.Tensor) -> Rows:
            columns = live.columns(slots, i, drawing)
            if not told:
                return columns
            ids = before.tolist()
            return _changed(columns, [
                (at, told[sequence], ids[at])
                for at, sequence in enumerate(step.choosing)
                if sequence in told
            ])  # fmt: skip

        return draft(
            self._parts.runner.draft_block(slots, live.last[slots], length - 2, live.first[slots]),
            live.last[slots], made, count, rules, rows, lambda ids: live.ends(slots, ids),
        )  # fmt: skip

    def read(self, flight: Flight) -> Outcome:
        """What a step gave, once the device has got so far."""
        self.clock.wait(flight.done)
        held = {name: tensor.numpy() for name, tensor in flight.copies.items()}
        record = likelihoods = None
        if "ids" in held:
            record = DraftRecord(*(held.pop(name) for name in ("ids", "raw", "before", "useful")))
        if "finite" in held:
            likelihoods = Likelihoods(*(held.pop(field.name) for field in fields(Likelihoods)))
        return Outcome(
            **held, drafts=record, likelihoods=likelihoods,
            seconds=self.clock.between(flight.marks),
        )  # fmt: skip

    def _begin(self, sequence: Generation) -> tuple[Generation, tuple[int, ...], int]:
        params, plan = sequence.request.params, sequence.replay
        stops = params.stop_token_ids if params.ignore_eos else (
            *self._parts.eos_ids, *params.stop_token_ids
        )  # fmt: skip
        # A resume restores the windows of the backbone alone.
        return sequence, stops, plan.rows_from(plan.layers - 1)

    def _rows(
        self, decoding: Decoding | None, slots: torch.Tensor | None = None
    ) -> tuple[LiveRows | None, torch.Tensor]:
        """Rows of the decoding requests in their slots, and how many drafts of each are verified
        [R]."""
        live = self.live
        if decoding is None:
            return None, live.length[:0]
        slots = live.slots(decoding.slots) if slots is None else slots
        drafts, extra = decoding.drafts, decoding.extra
        none = torch.zeros_like(slots)
        if not drafts:
            return live.rows(slots, decoding.pages, none, 0, 0), none
        may = live.may_stand(slots) if self._held else none
        if not self._rules.varlen:
            allotted = torch.full_like(slots, drafts)
            shares = may
            if self._rules.threshold is not None:
                shares = share.cut(live.survivals[slots], self._rules.threshold)
        else:
            behind = torch.arange(live.width, device=live.device)
            survivals = live.survivals[slots].masked_fill(behind >= may.unsqueeze(1), 0.0)
            survivals = survivals[:, :drafts]
            if decoding.whole:
                whole = torch.isin(slots, live.slots(decoding.whole)).unsqueeze(1)
                # More than any probability: they get what they have, and void rows too.
                survivals = torch.where(whole, 2.0, survivals)
            allotted, shares = share.split(survivals, extra)
        shares = torch.minimum(shares, may).clamp_max(drafts)
        return live.rows(slots, decoding.pages, allotted, extra, drafts), shares

    def _choosing(
        self, step: Step, rows: LiveRows | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that choose: the first one of each request [C]; for each row its request and how
        far it is behind that first [rows]; their logits [rows, vocab]."""
        device, live = self.live.device, len(rows.of) if rows else 0
        at, places = live, []
        for number, chunk in enumerate(step.plan.chunks):
            at += chunk.logits
            if number in step.finishing:
                places.append(at - 1)
        several = len(places)
        if at == live + several:  # every row of logits chooses
            part = logits
        else:
            chosen = np.concatenate((np.arange(live), np.array(places, dtype=np.int64)))
            [places] = send([chosen], device)
            part = logits[places]
        if rows is not None and not several:
            return rows.offsets, rows.of, rows.behind, part
        more = torch.arange(live, live + several, device=device)
        if rows is None:
            return more, more, torch.zeros_like(more), part
        count = len(rows.slots)
        of = torch.cat((rows.of, torch.arange(count, count + several, device=device)))
        behind = torch.cat((rows.behind, torch.zeros_like(more)))
        return torch.cat((rows.offsets, more)), of, behind, part

    def _judged(self, columns: Rows, flight: Flight, told: Mapping[Generation, Told]) -> Rows:
        rows = []
        starts = flight.first.tolist()
        ends = [*starts[1:], len(columns.seed)]
        drafts = self.live.drafts[flight.slots].tolist()
        for at, sequence in enumerate(flight.step.choosing):
            if sequence in told:
                for row in range(starts[at], ends[at]):
                    rows.append((row, told[sequence], drafts[at][: row - starts[at]]))
        return _changed(columns, rows)

    def _scores(self, slots: torch.Tensor, most: int) -> torch.Tensor | None:
        if not most or self._held is None or self._held.scores is None:
            return None
        order = self._order[slots].clamp_max(len(self._held.scores) - 1)  # some have no drafts
        return self._held.scores[order, :most]

    def _copy(self, flight: Flight, found: Mapping[str, torch.Tensor]) -> None:
        """Queue copies of what was found to the host."""
        flight.copies |= {name: receive(tensor) for name, tensor in found.items()}
        flight.done = self.clock.mark()


def _changed(columns: Rows, rows: Sequence[tuple[int, Told, Sequence[int]]]) -> Rows:
    """With what requests say of these rows, behind these drafts."""
    changed: dict[int, Row] = {}
    masks: list[np.ndarray | None] = [None] * len(columns)
    for at, told, drafts in rows:
        row, masks[at] = told.row(drafts), told.allowed(drafts)
        if row is not None:
            changed[at] = row
    return replace(columns, changed=changed, allowed=_bits(masks, columns.seed.device))


def _bits(masks: Sequence[np.ndarray | None], device: torch.device) -> torch.Tensor | None:
    """`Rows.allowed` of rows with these masks; None: no row has one."""
    some = [mask for mask in masks if mask is not None]
    if not some:
        return None
    if len(some) < len(masks):
        whole = np.full_like(some[0], 0xFF)
        some = [whole if mask is None else mask for mask in masks]
    return send([np.concatenate(some).reshape(len(masks), -1)], device)[0]
