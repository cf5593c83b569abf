"""The engine's public face, `LLM`, and its loop: plan, run, judge, commit, draft.

Prompts and sampling parameters come in, completions go out, in order. The one room that knows the
others; it must not know how a plan is run, how a token is drawn or who may run next.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import torch

from deepinfer.core.request import Completion, FinishReason, SamplingParams, TokenLogprob
from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import TokenDelta
from deepinfer.engine.answer import Answer
from deepinfer.engine.assembly import Parts, assemble
from deepinfer.engine.intake import Asked, Intake
from deepinfer.errors import DeepinferError, InternalError, UsageError
from deepinfer.kvcache import BlockAllocator, PrefixCache
from deepinfer.kvcache.tiers import Key
from deepinfer.sampling import sampler
from deepinfer.scheduler.policy import Policy, Step
from deepinfer.settings import Settings, resolve
from deepinfer.speculative.drafter import Drafter
from deepinfer.speculative.proposal import Verdict
from deepinfer.speculative.trace import TraceStep
from deepinfer.speculative.verify import verify

if TYPE_CHECKING:
    from deepinfer.replay.meter import Measured

Prompt = str | Sequence[int]


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` or `stream`: its answers in order, deltas not fetched yet, how many run."""

    answers: list[Answer] = field(default_factory=list)
    deltas: deque[TokenDelta] = field(default_factory=deque)
    open: int = 0


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
    ) -> LLM:
        """An engine around given parts; `clock` is what times are read from, in seconds."""
        engine = cls.__new__(cls)
        engine._start(parts, on_warning, clock)
        return engine

    def _start(
        self,
        parts: Parts,
        on_warning: Callable[[str], None] | None,
        clock: Callable[[], float] = time.perf_counter,
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
        self._policy = Policy(
            self._prefix,
            slots=sizes.slots,
            max_rows=sizes.max_rows,
            chunk=sizes.chunk,
        )
        self._intake = Intake(
            parts.tokenizer,
            parts.vocab_size,
            parts.eos_ids,
            sizes.max_model_len,
            self._policy.blocks,
        )
        self._drafter = None
        if parts.drafting:
            self._drafter = Drafter(parts.runner, parts.drafting, parts.times, on_warning or _warn)
        self._running: dict[Generation, tuple[Answer, _Call]] = {}
        self._arrivals = itertools.count()
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
                call.deltas.clear()
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
        if self._drafter is None:
            raise UsageError(
                "not-drafting",
                "this engine drafts nothing, so there is nothing to trace",
                hint="a checkpoint with draft stages, and mtp above 0",
            )
        steps: list[TraceStep] = []
        first = next(self._arrivals)
        self._drafter.watch = lambda step: steps.append(replace(step, seq=step.seq - first - 1))
        try:
            return self.generate(prompts, sampling_params), steps
        finally:
            self._drafter.watch = None

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
        with self._prefix.alone():
            if cached:
                self._run_one(token_ids[:cached])
            with Meter(self.parts.runner) as meter:
                self._run_one(token_ids)
                return meter.measured(len(token_ids))

    def _run_one(self, token_ids: Sequence[int]) -> None:
        [result] = self.generate([token_ids], SamplingParams(max_tokens=1, temperature=0))
        if result.error is not None:
            raise result.error.raised()

    def close(self) -> None:
        """Drop the model and its memory. Twice is harmless; other calls then raise UsageError."""
        for answer, call in list(self._running.values()):
            self._finish(answer, call, FinishReason.ABORT)
        self._persist()
        if self.parts is not None:
            self.parts.keep_times()
        self.parts = None

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
        if self._running:
            raise UsageError(
                "engine-busy",
                f"other requests are running, {why}",
                hint="finish or close their streams first",
            )

    def _deltas(self, asked: Sequence[Asked]) -> Iterator[TokenDelta]:
        self._check_open()  # it may have been closed since `stream` was called
        call = _Call()
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
        now = self._clock()
        for one in asked:
            full = keep_rows or one.request.params.prompt_logprobs is not None
            sequence = Generation(one.request, next(self._arrivals), full)
            answer = Answer(sequence, self.parts, now, keep_rows)
            call.answers.append(answer)
            call.open += 1
            if one.problem:
                self._finish(answer, call, FinishReason.ERROR, problem=one.problem)
            elif answer.wants_nothing:
                self._finish(answer, call, FinishReason.LENGTH)
            else:
                self._running[sequence] = answer, call
                self._policy.add(sequence)

    def _withdraw(self, call: _Call) -> None:
        """End what still runs of a call, whatever became of it."""
        for answer in call.answers:
            if answer.result is None:
                self._finish(answer, call, FinishReason.ABORT)
        if self._drafter and not self._running:
            self._drafter.reset()
        self._persist()

    def _finish(
        self,
        answer: Answer,
        call: _Call,
        reason: FinishReason,
        told: tuple[tuple[int, ...], str, tuple[TokenLogprob, ...]] = ((), "", ()),
        problem: DeepinferError | None = None,
    ) -> None:
        """Give memory back, make the result, tell the caller (ids, text and log-probabilities
        of the last tokens, if any)."""
        self._policy.remove(answer.sequence)
        self._running.pop(answer.sequence, None)
        ids, text, logprobs = told
        text += answer.finish(reason, self._clock(), problem)
        call.open -= 1
        call.deltas.append(answer.delta(ids, text, logprobs))

    # one step

    def _step(self) -> None:
        try:
            running = self._policy.running
            if self._drafter:
                self._drafter.choose(running, self._policy.max_rows - len(running))
            step = self._policy.next_step(
                lambda sequence: self._running[sequence][0].wants_all_rows
            )
            if step is None:
                raise InternalError("nothing-to-run", "requests are open but none can run")
            started = self._clock()
            for sequence in step.sequences:
                answer, _ = self._running[sequence]
                answer.scheduled = started if answer.scheduled is None else answer.scheduled
            self._move(self._prefix.leaving(), self._prefix.keep)
            self._commit(step, self.parts.runner.forward(step.plan))
            if self._drafter:
                self._draft(step, started)
        except BaseException:
            # Memory is half written or half planned: whoever goes on starts afresh.
            for sequence in tuple(self._policy.running):
                self._policy.preempt(sequence)
            if self._drafter:
                self._drafter.reset()
            raise
        self._persist()

    def _draft(self, step: Step, started: float) -> None:
        """Draft for the requests of a step that go on."""
        judged = self._clock()
        self._drafter.draft(
            [
                self._running[sequence][0]
                for sequence in step.sequences
                # The last token of a prompt can be pending too.
                if sequence in self._running and sequence.pending == 1 and sequence.generated
            ]
        )
        pure = all(chunk.certain - chunk.start == 1 for chunk in step.plan.chunks)
        self._drafter.ended(step.plan.rows, judged - started, self._clock() - judged, pure)

    def _persist(self) -> None:
        """Write the pages that became complete to the durable tier, unless this is closed."""
        if self.parts is None:
            return
        self._move(self._prefix.completed(), self._prefix.persist)

    def _move(self, pages: Sequence[tuple[Key, int]], store: Callable[[Key, bytes], None]) -> None:
        """Hand the bytes of (key, page) on to `store`."""
        for kind in {key[0] for key, _ in pages}:
            group = [(key, page) for key, page in pages if key[0] == kind]
            payloads = self.parts.runner.read(kind, [page for _, page in group])
            for (key, _), payload in zip(group, payloads, strict=True):
                store(key, payload)

    def _commit(self, step: Step, logits: torch.Tensor) -> None:
        """Take a step's logits [logit rows, vocab]: judge, choose, append, tell, finish."""
        choosing: list[tuple[Generation, range]] = []
        broken: list[tuple[Generation, torch.Tensor]] = []
        complete: list[Generation] = []
        first_row = 0
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            span = range(first_row, first_row + chunk.logits)
            first_row = span.stop
            rows = logits[span.start : span.stop]
            answer, _ = self._running[sequence]
            answer.ran(chunk, rows)
            if not _take_prompt_logprobs(answer, chunk.start, rows):
                broken.append((sequence, rows))
            elif chunk.certain < len(sequence.tokens):
                self._prefix.advance(sequence, chunk.end)
            elif sequence.request.max_new:
                choosing.append((sequence, span[-1 - chunk.drafts :]))
            else:
                self._prefix.advance(sequence, chunk.end)
                complete.append(sequence)
        verdicts = self._judge(logits, choosing)
        logprobs = self._logprobs(logits, choosing, verdicts)
        now = self._clock()
        for (sequence, span), verdict in zip(choosing, verdicts, strict=True):
            if not self._deliver(sequence, verdict, logprobs.get(sequence, ()), now):
                broken.append((sequence, logits[span[verdict.accepted]]))
        for sequence in complete:
            self._finish(*self._running[sequence], FinishReason.LENGTH)
        for sequence, rows in broken:
            if not rows.isfinite().all():
                self._prefix.forget(sequence)
            problem = _numeric_error(sequence)
            self._finish(*self._running[sequence], FinishReason.ERROR, problem=problem)

    def _judge(
        self, logits: torch.Tensor, choosing: Sequence[tuple[Generation, range]]
    ) -> list[Verdict]:
        """What becomes of the drafts of each (sequence, its rows of logits), and what follows."""
        if not choosing:
            return []
        sequences = [sequence for sequence, _ in choosing]
        wanted = [row for _, span in choosing for row in span]
        rows = [
            self._running[sequence][0].row(sequence.drafts[:count])
            for sequence in sequences
            for count in range(len(sequence.drafts) + 1)
        ]
        part = logits if len(wanted) == len(logits) else logits[wanted]
        scores = self._drafter.scores(sequences) if self._drafter else None
        # Without drafts every rule chooses the same.
        rule = self.parts.drafting.verify if self.parts.drafting else "coupled"
        return verify(part, rows, [sequence.drafts for sequence in sequences], scores, rule)

    def _logprobs(
        self,
        logits: torch.Tensor,
        choosing: Sequence[tuple[Generation, range]],
        verdicts: Sequence[Verdict],
    ) -> dict[Generation, list[TokenLogprob | None]]:
        """Log-probabilities of the tokens of each sequence that wants them."""
        rows: list[int] = []
        tokens: list[int] = []
        tops: list[int] = []
        counts: dict[Generation, int] = {}
        for (sequence, span), verdict in zip(choosing, verdicts, strict=True):
            top = sequence.request.params.logprobs
            if top is not None:
                counts[sequence] = len(verdict.tokens)
                rows += span[: len(verdict.tokens)]
                tokens += verdict.tokens
                tops += [top] * len(verdict.tokens)
        if not rows:
            return {}
        found = iter(sampler.logprobs(logits[rows], tokens, tops))
        return {sequence: list(islice(found, count)) for sequence, count in counts.items()}

    def _deliver(
        self,
        sequence: Generation,
        verdict: Verdict,
        logprobs: Sequence[TokenLogprob | None],
        now: float,
    ) -> bool:
        """Append a verdict's tokens up to the end of the answer; False: its numbers are broken."""
        answer, call = self._running[sequence]
        decoding, verified = sequence.generated > 0, len(sequence.drafts)
        sequence.drafts = ()
        ids: list[int] = []
        text, reason = "", None
        for token, logprob in zip_longest(verdict.tokens, logprobs):
            more, reason = answer.take(token, logprob, now)
            ids.append(token)
            text += more
            if reason is not None:
                break
        if decoding and self._drafter:
            ended = reason is not None
            self._drafter.judged(sequence, verified, verdict, len(ids), ended, answer.counts)
        told = tuple(ids), text, tuple(logprobs[: len(ids)])
        if verdict.broken and reason is None:
            if ids:
                call.deltas.append(answer.delta(*told))
            return False
        self._prefix.advance(sequence, len(sequence.tokens) - 1)
        answer.highest = max(answer.highest, sequence.computed)
        if reason is None:
            call.deltas.append(answer.delta(*told))
        else:
            self._finish(answer, call, reason, told)
        return True


def _take_prompt_logprobs(answer: Answer, start: int, rows: torch.Tensor) -> bool:
    """Append what the rows from position `start` on say about the prompt; False: not finite."""
    if not answer.wants_prompt:
        return True
    request = answer.sequence.request
    seen = len(answer.prompt_logprobs) - 1 - start  # rows known from before a preemption
    targets = request.prompt_ids[start + 1 + seen : start + 1 + len(rows)]
    if not targets:
        return True
    tops = [request.params.prompt_logprobs] * len(targets)
    found = sampler.logprobs(rows[seen : seen + len(targets)], targets, tops)
    answer.prompt_logprobs += found
    return None not in found


def _numeric_error(sequence: Generation) -> InternalError:
    return InternalError(
        "numeric-error",
        "the model computed a logit that is not finite, or no token was left to choose",
        [f"at position {len(sequence.tokens)}; the tokens before it are kept"],
    )


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)
