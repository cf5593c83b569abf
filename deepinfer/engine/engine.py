"""The engine's public face, `LLM`, and its loop: plan, launch, land, settle.

Prompts and sampling parameters come in, completions go out, in order. The one room that knows the
others; it must not know how a plan is run, how a token is drawn or who may run next.

A step is planned and launched while the one before it runs; then that one lands: its tokens reach
their answers. Only after that the scheduler hears of it (settle), so each plan rests on the step
before the last. Without overlap a step lands as soon as it is launched, and the scheduler hears of
it as late, hence plans and tokens are the same.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.core.request import Completion, FinishReason, SamplingParams, TokenLogprob
from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import Chunk, Likelihoods, Outcome, TokenDelta
from deepinfer.engine.answer import Answer
from deepinfer.engine.assembly import Parts, assemble
from deepinfer.engine.device import Device, Flight, Told
from deepinfer.engine.flow import Flow
from deepinfer.engine.intake import Asked, Intake
from deepinfer.engine.live import Drawing
from deepinfer.engine.log import Entry, TokenLog
from deepinfer.errors import DeepinferError, InternalError, UsageError
from deepinfer.kvcache import BlockAllocator, PrefixCache
from deepinfer.kvcache.tiers import Key
from deepinfer.sampling import sampler
from deepinfer.sampling.logits import reach
from deepinfer.scheduler.policy import Policy, Step
from deepinfer.settings import Settings, resolve
from deepinfer.speculative.planner import Planner
from deepinfer.speculative.trace import TraceStep
from deepinfer.structured.compiler import Compiler, Pending

if TYPE_CHECKING:
    from deepinfer.replay.meter import Measured

Prompt = str | Sequence[int]

_GRAMMAR_WAIT = 0.2  # seconds; then whoever drives the steps may see that it is to stop


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` or `stream`: its answers in order, deltas not fetched yet, how many run."""

    streams: bool = False
    answers: list[Answer] = field(default_factory=list)
    deltas: deque[TokenDelta] = field(default_factory=deque)
    open: int = 0


@dataclass(slots=True)
class _Landed:
    """What the scheduler must hear of a step: its outcome, who goes on (by place), and how far the
    state of which sequences is in memory for good: (sequence, its preemptions then, tokens)."""

    step: Step
    outcome: Outcome
    going_on: list[tuple[int, Generation]] = field(default_factory=list)
    advanced: list[tuple[Generation, int, int]] = field(default_factory=list)
    broken: list[Generation] = field(default_factory=list)


class LLM:
    """A model, ready to continue prompts.

    model_dir: a checkpoint folder; None: the setting, else the embedded model. settings: by their
    Python names, `deepinfer.LLM(max_num_seqs=8)`. on_warning: gets each line the user should see
    (default: `warnings.warn`). Raises UsageError, CheckpointError, CapacityError or
    EnvironmentProblem.

    One thread at a time. Use it as a context manager, or `close` it.
    """

    def __init__(
        self,
        model_dir: object = None,
        *,
        on_warning: Callable[[str], None] | None = None,
        **settings: object,
    ) -> None:
        parts = assemble(resolve({"model_dir": model_dir, **settings}), on_warning or _warn)
        self._start(parts, on_warning)

    @classmethod
    def from_settings(
        cls, settings: Settings, on_warning: Callable[[str], None] | None = None
    ) -> LLM:
        """An engine from settings that are resolved already, as the command line does it."""
        return cls.from_parts(assemble(settings, on_warning or _warn), on_warning=on_warning)

    @classmethod
    def from_parts(
        cls,
        parts: Parts,
        *,
        on_warning: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        device: Device | None = None,
    ) -> LLM:
        """An engine around given parts; `clock` is what times are read from, in seconds; `device`
        is where steps run (default: the parts' runner)."""
        engine = cls.__new__(cls)
        engine._start(parts, on_warning, clock, device)
        return engine

    def _start(
        self,
        parts: Parts,
        on_warning: Callable[[str], None] | None,
        clock: Callable[[], float] = time.perf_counter,
        device: Device | None = None,
    ) -> None:
        sizes = parts.sizes
        self.parts = parts
        self._clock = clock
        self._prefix = PrefixCache(
            parts.rule,
            BlockAllocator(sizes.pages, sizes.page_tokens),
            BlockAllocator(sizes.window_pages, sizes.page_tokens),
            parts.reuse,
            parts.tiers,
            parts.durable,
        )
        rules = parts.drafting
        self._planner = Planner(rules, parts.times, on_warning or _warn) if rules else None
        self._policy = Policy(
            self._prefix,
            slots=sizes.slots,
            max_rows=sizes.max_rows,
            chunk=sizes.chunk,
            drafts=self._planner,
        )
        self._device = device or Device(parts, clock)
        # A request is read at the end of each of its pages, at the latest.
        most = 1 + (rules.length if rules else 0)
        self._log = TokenLog(sizes.slots, sizes.page_tokens + 1, most)
        self._intake = Intake(
            parts.tokenizer,
            parts.vocab_size,
            parts.eos_ids,
            sizes.max_model_len,
            self._policy.blocks,
        )
        self._running: dict[Generation, tuple[Answer, _Call]] = {}
        self._compiler = None
        if parts.tokenizer:
            self._compiler = Compiler(
                parts.tokenizer, parts.vocab_size, parts.eos_ids, parts.grammar_timeout
            )
        self._parked: dict[Generation, tuple[Answer, _Call, Pending]] = {}  # no grammar yet
        self._arrivals = itertools.count()
        self._kinds: Counter[str] = Counter()  # of the open requests: `Answer.kinds` ...
        self._reaches: Counter[int] = Counter()  # ... and `sampling.logits.reach`
        self._note_drawing()
        self._flight: Flight | None = None  # launched, not landed
        self._landed: deque[_Landed] = deque()  # landed, not settled
        # Left the device before a step: its number, keys, bytes, and when they are there.
        self._sent: deque[tuple[int, list[Key], torch.Tensor, object]] = deque()
        self._landing = 0  # 1 while a step's tokens are in the log and not all told
        self._leaving: list[Generation] = []  # ended, the scheduler has not heard of it
        # Of these, the last step counts for nothing: it may not have landed yet.
        self._aborted: set[Generation] = set()
        self._busy = False  # not at a point where calls can go ...
        self._gone: list[_Call] = []  # ... and these calls went meanwhile
        self._named: tuple[tuple[int, ...], np.ndarray] = (), np.zeros(0, dtype=np.int64)
        for line in parts.warnings:
            (on_warning or _warn)(line)

    # what callers use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; one result per prompt and sample, prompts first.

        prompts: a text or a list of token ids, or a list of such. Text gets one BOS in front, ids
        are used as given. sampling_params: for all prompts, or a list with one per prompt. A prompt
        that cannot run gets a result with `error`; its neighbours are not harmed. Raises UsageError
        for arguments of the wrong shape, before any work.
        """
        asked = self._read(prompts, sampling_params)
        call = _Call()
        try:
            self._submit(call, asked)
            while call.open:
                self._step()
        finally:
            self._withdraw(call)
        return [answer.result for answer in call.answers]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TokenDelta]:
        """Like `generate`, token by token. The last delta of each answer carries its result.

        Closing the iterator ends what still runs and gives its memory back.
        """
        return self._deltas(self._read(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: object = None,
        response_format: Mapping[str, object] | None = None,
        thinking: str = "off",
    ) -> Completion:
        """The answer to a conversation, with `text`, `thinking` and `tool_calls` apart.

        messages, tools, tool_choice, response_format: as OpenAI's Chat Completions has them.
        thinking: off, on or max. sampling_params: of the answer (n = 1); its stop strings end the
        text, not the thinking. Raises UsageError for what cannot be honoured, CheckpointError for
        a checkpoint without the prompt format, and what the request itself ended with.
        """
        from deepinfer.engine.chat import answer

        self._check_open()
        body = {"messages": messages, "tools": tools, "tool_choice": tool_choice,
                "response_format": response_format}  # fmt: skip
        return answer(self, body, sampling_params or SamplingParams(), thinking)

    def flow(self) -> Flow:
        """Calls that come and go while others run."""
        self._check_open()
        return Flow(self)

    # what a flow drives the engine with

    def open_call(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams, follow: bool
    ) -> _Call:
        """A call as `generate` takes it, which `run_step` moves on; follow: it has deltas."""
        asked = self._read(prompts, params)
        call = _Call(streams=follow)
        self._submit(call, asked)
        return call

    def run_step(self) -> None:
        """One step of whatever runs."""
        self._check_open()
        self._step()

    def end_call(self, call: _Call) -> None:
        """End what still runs of a call."""
        self._withdraw(call)

    def trace(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> tuple[list[Completion], list[TraceStep]]:
        """`generate`, and what every step did with the drafts of every request.

        `TraceStep.seq` counts the results. Raises UsageError where nothing is drafted or other
        requests run.
        """
        self._check_idle("their steps would be in the trace too")
        if self._planner is None:
            raise UsageError(
                "not-drafting",
                "this engine drafts nothing, so there is nothing to trace",
                hint="a checkpoint with draft stages, and mtp above 0",
            )
        steps: list[TraceStep] = []
        first = next(self._arrivals)
        self._planner.watch = lambda step: steps.append(replace(step, seq=step.seq - first - 1))
        self._device.watch = True
        try:
            return self.generate(prompts, sampling_params), steps
        finally:
            self._planner.watch, self._device.watch = None, False

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] on the host: row i is about token i + 1. Truncation is off.

        Raises UsageError or CapacityError if the ids cannot run.
        """
        [asked] = self._read([token_ids], SamplingParams(max_tokens=0))
        if asked.problem:
            raise asked.problem
        call = _Call()
        try:
            self._submit(call, [asked], keep_rows=True)
            while call.open:
                self._step()
        finally:
            self._withdraw(call)
        return torch.cat(call.answers[0].kept)

    def measure(self, token_ids: Sequence[int], cached: int = 0) -> Measured:
        """What a prefill of the prompt really computes: rows, keys and FLOPs of every layer.

        cached: tokens, a multiple of the page size, that an earlier prompt leaves to resume from.
        Raises UsageError where other requests run, and what the prompt raises.
        """
        from deepinfer.replay.meter import Meter

        self._check_idle("their rows would be counted too")
        with self.fresh():
            if cached:
                self._run_one(token_ids[:cached])
            with Meter(self.parts.runner) as meter:
                self._run_one(token_ids)
                return meter.measured(len(token_ids))

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """For a while, resume from nothing that was computed before, and keep nothing for later
        runs: what is timed then was not computed before. Raises UsageError where requests run."""
        self._check_idle("they may share state")
        with self._prefix.alone():
            yield

    def _run_one(self, token_ids: Sequence[int]) -> None:
        [result] = self.generate([token_ids], SamplingParams(max_tokens=1, temperature=0))
        if result.error is not None:
            raise result.error.raised()

    def close(self) -> None:
        """Drop the model and its memory. Twice is harmless; other calls then raise UsageError."""
        with self._at_work():
            for answer, call, *_ in [*self._running.values(), *self._parked.values()]:
                self._abort(answer, call)
            if self.parts is not None:
                self._drain()
                self._persist()
                self.parts.keep_times()
            self.parts = None
        if self._compiler:
            self._compiler.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # a call comes and goes

    def _read(self, prompts: object, sampling_params: object) -> list[Asked]:
        self._check_open()
        return self._intake.read(prompts, sampling_params)

    def _check_open(self) -> None:
        if self.parts is None:
            raise UsageError("engine-closed", "this engine is closed", hint="make a new LLM")

    def _check_idle(self, why: str) -> None:
        self._check_open()
        if self._running or self._parked:
            raise UsageError(
                "engine-busy",
                f"other requests are running, {why}",
                hint="finish or close their streams first",
            )

    def _deltas(self, asked: Sequence[Asked]) -> Iterator[TokenDelta]:
        self._check_open()  # it may have been closed since `stream` was called
        call = _Call(streams=True)
        try:
            self._submit(call, asked)
            while call.open or call.deltas:
                while call.deltas:
                    yield call.deltas.popleft()
                if call.open:
                    self._step()
        finally:
            self._withdraw(call)

    def _submit(self, call: _Call, asked: Sequence[Asked], keep_rows: bool = False) -> None:
        with self._at_work():
            self._take_in(call, asked, keep_rows)

    def _take_in(self, call: _Call, asked: Sequence[Asked], keep_rows: bool) -> None:
        now = self._clock()
        for one in asked:
            full = keep_rows or one.request.params.prompt_logprobs is not None
            sequence = Generation(one.request, next(self._arrivals), full)
            answer = Answer(sequence, self.parts, now, keep_rows)
            answer.followed |= call.streams or bool(self._planner and self._planner.watch)
            call.answers.append(answer)
            call.open += 1
            if one.problem:
                self._finish(answer, call, FinishReason.ERROR, problem=one.problem)
            elif answer.wants_nothing:
                self._finish(answer, call, FinishReason.LENGTH)
            elif one.request.params.structured:
                pending = self._compiler.ask(one.request.params.structured)
                self._parked[sequence] = answer, call, pending
            else:
                self._admit(answer, call)

    def _admit(self, answer: Answer, call: _Call) -> None:
        sequence = answer.sequence
        self._running[sequence] = answer, call
        self._kinds.update(answer.kinds)
        self._reaches[reach(sequence.request.params)] += 1
        self._note_drawing()
        self._policy.add(sequence)

    def _unpark(self) -> None:
        """Those whose grammar is there run, or end for what is wrong with it."""
        if not self._parked:
            return
        self._compiler.tend()
        for answer, call, pending in list(self._parked.values()):
            if not pending.ended:
                continue
            request = answer.sequence.request
            del self._parked[answer.sequence]
            if pending.problem:
                problem = _of_request(pending.problem, request.index, request.sample)
                self._finish(answer, call, FinishReason.ERROR, problem=problem)
            else:
                answer.constraint = pending.begin(request.params.structured.after)
                self._admit(answer, call)

    def _withdraw(self, call: _Call) -> None:
        """End what still runs of a call, whatever became of it.

        The collector may close a stream, and a signal's handler too, at any point of another call's
        step: that goes when the step is over.
        """
        self._gone.append(call)
        if not self._busy:
            self._let_go()

    def _let_go(self) -> None:
        with self._at_work():
            while self._gone:
                call = self._gone.pop()
                for answer in call.answers:
                    if answer.result is None:
                        self._abort(answer, call)
            if not self._running:
                self._drain()
            self._persist()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """For a while no call goes."""
        try:
            self._busy = True
            yield
        finally:
            self._busy = False

    def _abort(self, answer: Answer, call: _Call) -> None:
        self._catch_up(answer)
        answer.constrain_again()
        self._aborted.add(answer.sequence)
        self._finish(answer, call, FinishReason.ABORT)

    def _finish(
        self,
        answer: Answer,
        call: _Call,
        reason: FinishReason,
        problem: DeepinferError | None = None,
    ) -> None:
        """Make the result and tell the caller. The memory is given back when the scheduler hears
        of it."""
        sequence = answer.sequence
        if parked := self._parked.pop(sequence, None):
            self._compiler.leave(parked[-1])
        if self._running.pop(sequence, None):
            self._kinds.subtract(answer.kinds)
            self._reaches -= Counter([reach(sequence.request.params)])  # drops what is 0
            self._note_drawing()
        if sequence.slot is None and not sequence.preemptions:  # it never ran
            self._policy.remove(sequence)
        else:
            self._leaving.append(sequence)
        answer.finish(reason, self._clock(), problem)
        call.open -= 1
        if call.streams:
            call.deltas.append(answer.delta())

    # one step

    def _step(self) -> None:
        try:
            self._busy = True
            self._plan_and_land()
            self._persist()
        finally:
            self._busy = False
        if self._gone:
            self._let_go()

    def _plan_and_land(self) -> None:
        """Plan a step and launch it, then land the one before it, or without overlap this one."""
        try:
            self._unpark()
            step = self._policy.next_step()
            self._send_off(self._prefix.leaving())
            if step is None and not (self._flight or self._landed or self._leaving):
                if self._running:
                    raise InternalError("nothing-to-run", "requests are open but none can run")
                if self._parked:
                    asked = [pending for *_, pending in self._parked.values()]
                    self._compiler.wait(asked, _GRAMMAR_WAIT)
                return
            ahead = self.parts.overlap and not self._kinds["told"]
            if not ahead or step is None:
                self._land_last()
            flight = self._launch(step) if step else None
            if flight and ahead:
                self._draft(flight)
            self._land_last()
            self._settle()
            if flight and ahead:
                self._flight = flight
            elif flight:
                self._land(flight)
                self._draft(flight)
            elif step:  # all that were in it have ended
                self._landed.append(_Landed(step, _nothing(step)))
        except BaseException:
            self._start_afresh()
            raise

    def _launch(self, step: Step) -> Flight | None:
        """Start a step, less what has ended since it was planned; None: nothing is left of it."""
        if self._leaving:
            step = self._without_ended(step)
            if step is None:
                return None
        if step.chunks:
            now = self._clock()
            for sequence, _ in step.chunks:
                answer, _ = self._running.get(sequence, (None, None))
                if answer is not None and answer.scheduled is None:
                    answer.scheduled = now
            for at in step.finishing:
                answer, _ = self._running.get(step.chunks[at][0], (None, None))
                if answer is not None:
                    answer.constrain_again()
        return self._device.judge(step, self._drawing, self._told(step))

    def _without_ended(self, step: Step) -> Step | None:
        """A step of those that go on. The others' rows may run where drafts are shared out: to
        leave them out would give their rows to other requests."""
        on = [sequence in self._running for sequence in step.decoding]
        chunks = [at for at, (sequence, _) in enumerate(step.chunks) if sequence in self._running]
        if not any(on) and not chunks:
            return None
        if self._planner and self._planner.rules.varlen:
            return step
        decoding, plan = step.plan.decoding, step.plan
        members = step.decoding
        if not any(on):
            decoding, members = None, ()
        elif not all(on):
            slots = tuple(slot for slot, alive in zip(decoding.slots, on, strict=True) if alive)
            members = tuple(s for s, alive in zip(members, on, strict=True) if alive)
            decoding = replace(decoding, slots=slots, extra=decoding.drafts * len(slots))
        finishing = [at for at in chunks if at in step.finishing]
        return Step(
            step.number,
            replace(plan, decoding=decoding, chunks=tuple(plan.chunks[at] for at in chunks)),
            members,
            tuple(step.chunks[at] for at in chunks),
            tuple(chunks.index(at) for at in finishing),
            (*members, *(step.chunks[at][0] for at in finishing)),
        )

    def _note_drawing(self) -> None:
        """How the open requests draw has changed."""
        kinds = self._kinds
        widest = max(self._reaches, default=0)
        self._drawing = Drawing(
            kinds["drawn"] > 0, widest, kinds["floored"] > 0, kinds["scored"] > 0
        )

    def _told(self, step: Step) -> dict[Generation, Told]:
        """Requests of a step whose rows only the host can make."""
        if not self._kinds["told"]:
            return {}
        return {
            sequence: self._running[sequence][0]
            for sequence in step.choosing
            if sequence in self._running and self._running[sequence][0].told
        }

    def _draft(self, flight: Flight) -> None:
        """Draft for the requests of a step that go on, if there are any."""
        step = flight.step
        if not step.plan.draft or not step.choosing:
            return
        if any(sequence in self._running for sequence in step.choosing):
            self._device.draft(flight, self._drawing, self._told(step))
            if self._landed and self._landed[-1].step is step:
                self._landed[-1].outcome = self._device.read(flight)

    def _land_last(self) -> None:
        """Land the step that is on its way; what has lost its memory is read before it is lost."""
        flight, self._flight = self._flight, None
        if flight:
            self._land(flight)
        preempted, self._policy.preempted = self._policy.preempted, []
        for sequence in preempted:
            if sequence in self._running:
                self._catch_up(self._running[sequence][0])

    def _land(self, flight: Flight) -> None:
        """Take what a step gave: its tokens go to the answers that are due."""
        step, outcome = flight.step, self._device.read(flight)
        landed, now = _Landed(step, outcome), self._clock()
        rows = step.plan.decoding.rows if step.plan.decoding else 0
        for at, (chunk, (sequence, run)) in enumerate(
            zip(step.plan.chunks, step.chunks, strict=True)
        ):
            if sequence in self._running:
                logits = flight.logits[rows : rows + chunk.logits]
                scored = flight.prompts.get(at)
                self._take_chunk(chunk, logits, scored, *self._running[sequence], run, landed)
            rows += chunk.logits
        judged: list[tuple[int, Generation, int, int, bool]] = []
        self._constrain(step, outcome)
        self._landing = 1
        for at in self._log.write(self._slots(step), outcome):
            running = self._running.get(step.choosing[at])
            if running:
                self._deliver(flight, at, *running, landed, judged, now)
        self._landing = 0
        if self._planner and self._planner.watch and judged:
            self._planner.record(step, outcome, judged)
        if self._planner and self._planner.rules.varlen:
            landed.going_on = [
                (at, sequence)
                for at, sequence in enumerate(step.choosing)
                if sequence in self._running
            ]
        self._landed.append(landed)

    def _constrain(self, step: Step, outcome: Outcome) -> None:
        """Grammars follow every token at once, those whose answers are not due too."""
        if not self._kinds["told"]:
            return
        columns = (x.tolist() for x in (outcome.tokens, outcome.counts, outcome.look))
        for sequence, tokens, count, look in zip(step.choosing, *columns, strict=True):
            answer, _ = self._running.get(sequence, (None, None))
            if answer is not None and answer.constraint:
                answer.constrain(tokens[:count], look)

    def _slots(self, step: Step) -> np.ndarray:
        """Slots of the requests that choose; those of the decoding ones are kept."""
        slots = step.plan.decoding.slots if step.plan.decoding else ()
        if self._named[0] is not slots:
            self._named = slots, np.array(slots, dtype=np.int64)
        if not step.finishing:
            return self._named[1]
        more = [step.plan.chunks[at].slot for at in step.finishing]
        return np.concatenate((self._named[1], np.array(more, dtype=np.int64)))

    def _take_chunk(
        self,
        chunk: Chunk,
        rows: torch.Tensor,
        scored: int | None,
        answer: Answer,
        call: _Call,
        run: int,
        landed: _Landed,
    ) -> None:
        """A chunk of a prompt ran; `rows` are its logits [chunk.logits, vocab], from `scored` on
        are their likelihoods."""
        sequence = answer.sequence
        answer.ran(chunk, rows)
        if scored is not None and not _take_prompt_logprobs(
            answer, chunk, landed.outcome.likelihoods, scored
        ):
            self._fail(answer, call, rows, landed)
        elif chunk.end < len(sequence.tokens):
            landed.advanced.append((sequence, run, chunk.end))
        elif sequence.request.max_new:
            answer.slot = chunk.slot
            self._log.begin(chunk.slot, len(sequence.tokens))
        else:
            landed.advanced.append((sequence, run, chunk.end))
            self._finish(answer, call, FinishReason.LENGTH)

    def _deliver(
        self,
        flight: Flight,
        at: int,
        answer: Answer,
        call: _Call,
        landed: _Landed,
        judged: list[tuple[int, Generation, int, int, bool]],
        now: float,
    ) -> None:
        """Append what an answer got up to its end; `at` is its place in the step."""
        sequence, outcome = answer.sequence, landed.outcome
        ends = outcome.look[at] or self._log.length[answer.slot] >= sequence.request.end
        if not (ends or answer.followed or answer.first is None):  # a page is complete
            self._append(answer, self._log.read(answer.slot))
            self._go_on(answer, landed)
            return
        self._append(answer, self._log.read(answer.slot, but=1))
        chosen = outcome.tokens[at, : outcome.counts[at]].tolist()
        decoding, position = sequence.generated > 0, len(sequence.tokens)
        logprobs: Sequence[TokenLogprob | None] = ()
        if at in flight.scored:
            top = sequence.request.params.logprobs
            logprobs = sampler.logprobs(outcome.likelihoods, flight.scored[at], chosen, top)
        ended = any(answer.take(*pair, now) for pair in zip_longest(chosen, logprobs))
        taken = len(sequence.tokens) - position
        if decoding and self._planner:
            drafts = outcome.drafted, outcome.verified, outcome.accepted
            answer.counts.add(*(int(column[at]) for column in drafts), taken, ended)
            judged.append((at, sequence, position, taken, ended))
        if outcome.broken[at] and not ended:
            row = flight.chosen[int(flight.first[at]) + taken]
            self._fail(answer, call, row, landed)
            return
        self._go_on(answer, landed)
        if ended:
            self._finish(answer, call, answer.ended)
        elif call.streams:
            call.deltas.append(answer.delta())

    def _go_on(self, answer: Answer, landed: _Landed) -> None:
        """All but the newest token of an answer is in memory; when must it be read again? At the
        end of a page, so that others can find it, and at its own end."""
        sequence, size = answer.sequence, self._policy.blocks.page_tokens
        computed = len(sequence.tokens) - 1
        answer.highest = max(answer.highest, computed)
        landed.advanced.append((sequence, sequence.preemptions, computed))
        next_page = computed // size * size + size + 1
        due = 0 if answer.followed else min(next_page, sequence.request.end)
        self._log.tell[answer.slot] = due

    def _catch_up(self, answer: Answer) -> None:
        """Read what an answer got so far, before its slot is another's; but not of a step that
        broke off while it landed: nobody has looked whether it ends there."""
        if answer.slot is not None:
            self._append(answer, self._log.read(answer.slot, but=self._landing))
            answer.slot = None

    def _append(self, answer: Answer, entry: Entry) -> None:
        """Steps that went by without anything to tell."""
        if not entry.tokens:
            return
        steps = entry.steps - (answer.sequence.generated == 0)  # the first token ends the prompt
        answer.append(entry.tokens)
        if self._planner:
            committed = len(entry.tokens) - entry.steps + steps
            answer.counts.add_all(steps, entry.drafted, entry.verified, entry.accepted, committed)

    def _fail(self, answer: Answer, call: _Call, rows: torch.Tensor, landed: _Landed) -> None:
        """End an answer for its numbers; what is computed from such must not be found again."""
        sequence = answer.sequence
        problem: DeepinferError = _numeric_error(sequence)
        if not rows.isfinite().all():
            landed.broken.append(sequence)
        elif answer.constraint:
            problem = answer.constraint.problem or _nothing_left(sequence)
        self._finish(answer, call, FinishReason.ERROR, problem=problem)

    def _settle(self) -> None:
        """Let the scheduler know what has landed, and take memory back from who has ended."""
        while self._landed:
            landed = self._landed.popleft()
            self._keep(landed.step.number)
            self._policy.settle(landed.step, landed.outcome.counts)
            for sequence in landed.broken:
                self._prefix.forget(sequence)
            for sequence, run, end in landed.advanced:
                here = sequence.slot is not None and sequence.preemptions == run
                if here and sequence not in self._aborted:
                    self._policy.advance(sequence, end)
            if self._planner:
                self._planner.settle(landed.step, landed.outcome, landed.going_on)
        for sequence in sorted(self._leaving, key=lambda sequence: sequence.order):
            self._policy.remove(sequence)
        self._leaving.clear()
        self._aborted.clear()

    def _drain(self) -> None:
        """Nobody is left: everything comes back."""
        self._land_last()
        self._settle()
        self._rest()

    def _start_afresh(self) -> None:
        """Memory is half written or half planned: whoever goes on is computed again, but for what
        steps that have landed left for all to find. Who is interrupted here has lost what was not
        told yet, and computes that again too."""
        self._flight = None
        try:
            for answer, call in list(self._running.values()):
                self._catch_up(answer)
                if answer.ended:  # it was told its last token, but not that it is over
                    answer.constrain_again()
                    self._finish(answer, call, answer.ended)
            self._settle()
        finally:
            self._landing = 0
            self._landed.clear()
            self._policy.drop()
            self._policy.preempted.clear()
            self._rest()

    def _rest(self) -> None:
        self._sent.clear()
        self._device.forget()
        if self._planner:
            self._planner.reset()

    def _persist(self) -> None:
        """Write the pages that became complete to the durable tier, unless this is closed."""
        if self.parts is None or self.parts.durable is None:
            return
        for kind, keys, group in _by_kind(self._prefix.completed()):
            for key, payload in zip(keys, self.parts.runner.read(kind, group), strict=True):
                self._prefix.persist(key, payload)

    def _send_off(self, pages: Sequence[tuple[Key, int]]) -> None:
        """Pages (key, page) leave for the next tier before the step planned last overwrites them:
        nobody waits, their bytes are taken when that step is settled."""
        for kind, keys, group in _by_kind(pages):
            held = self.parts.runner.fetch(kind, group)
            self._sent.append((self._policy.planned - 1, keys, held, self._device.clock.mark()))

    def _keep(self, number: int) -> None:
        """Take the bytes of pages that left before a step."""
        while self._sent and self._sent[0][0] <= number:
            _, keys, held, mark = self._sent.popleft()
            self._device.clock.wait(mark)
            for key, row in zip(keys, held.numpy(), strict=True):
                self._prefix.keep(key, row.tobytes())


def _by_kind(pages: Sequence[tuple[Key, int]]) -> Iterator[tuple[str, list[Key], list[int]]]:
    """(key, page), kind by kind: kind, keys, pages."""
    for kind in sorted({key[0] for key, _ in pages}):
        group = [(key, page) for key, page in pages if key[0] == kind]
        yield kind, [key for key, _ in group], [page for _, page in group]


def _nothing(step: Step) -> Outcome:
    none = np.zeros(len(step.choosing), dtype=np.int64)
    return Outcome(none[:, None], none, none > 0, none > 0)


def _take_prompt_logprobs(answer: Answer, chunk: Chunk, held: Likelihoods, first: int) -> bool:
    """Append what the rows of a chunk say about the prompt; False: they are not finite."""
    request = answer.sequence.request
    seen = len(answer.prompt_logprobs) - 1 - chunk.start  # rows known from before a preemption
    targets = request.prompt_ids[chunk.start + 1 + seen : chunk.end + 1]
    found = sampler.logprobs(held, first + seen, targets, request.params.prompt_logprobs)
    answer.prompt_logprobs += found
    return None not in found


def _numeric_error(sequence: Generation) -> InternalError:
    return InternalError(
        "numeric-error",
        "the model computed a logit that is not finite, or no token was left to choose",
        [f"at position {len(sequence.tokens)}; the tokens before it are kept"],
    )


def _nothing_left(sequence: Generation) -> UsageError:
    return UsageError(
        "nothing-to-choose",
        f"no token is left to choose at position {len(sequence.tokens)}",
        ["logit_bias forbids every id that the grammar allows there; what was made is kept"],
        "leave at least one of them allowed",
    )


def _of_request(problem: DeepinferError, index: int, sample: int) -> DeepinferError:
    """What is wrong with a grammar that others may have asked for as well, for one request."""
    facts = (*problem.facts, f"request: prompt {index}, sample {sample}")
    return type(problem)(problem.code, problem.message, facts, problem.hint)


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)
