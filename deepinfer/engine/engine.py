"""The engine's public face, `LLM`, and its loop: plan, run, sample, commit.

Prompts and sampling parameters come in, completions go out, in order. The one room that knows the
others; it must not know how a plan is run, how a token is drawn or who may run next.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.core.request import (
    Completion,
    FinishReason,
    Problem,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)
from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import TokenDelta
from deepinfer.engine.assembly import Parts, assemble
from deepinfer.engine.intake import Asked, Intake
from deepinfer.errors import DeepinferError, InternalError, UsageError
from deepinfer.kvcache.blocks import BlockAllocator
from deepinfer.sampling import sampler
from deepinfer.sampling.logits import Row
from deepinfer.scheduler.policy import Policy, Step
from deepinfer.settings import Settings, resolve
from deepinfer.tokenizer.tokenizer import StopText

Prompt = str | Sequence[int]


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` or `stream`: its answers in order, what is not delivered yet, how many run."""

    lives: list[_Live] = field(default_factory=list)
    events: deque[TokenDelta] = field(default_factory=deque)
    open: int = 0


@dataclass(slots=True, eq=False)
class _Live:
    """An answer in the making.

    highest: tokens that were in memory at some time; recomputed: rows run again below that.
    kept: logits of the rows, collected where `keep_rows`. Times are clock readings in seconds.
    """

    call: _Call
    sequence: Generation
    text: StopText
    submitted: float
    keep_rows: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    kept: list[torch.Tensor] = field(default_factory=list)
    scheduled: float | None = None
    first: float | None = None
    highest: int = 0
    recomputed: int = 0
    result: Completion | None = None


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
        self._start(assemble(resolve({"model_dir": model_dir, **settings})), on_warning)

    @classmethod
    def from_settings(
        cls, settings: Settings, on_warning: Callable[[str], None] | None = None
    ) -> LLM:
        """An engine from settings that are resolved already, as the command line does it."""
        return cls.from_parts(assemble(settings), on_warning=on_warning)

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
        self._policy = Policy(
            BlockAllocator(sizes.pages, sizes.page_tokens),
            slots=sizes.slots,
            max_rows=sizes.max_rows,
            chunk=sizes.chunk,
        )
        self._intake = Intake(parts, self._policy.blocks)
        self._lives: dict[Generation, _Live] = {}
        self._arrivals = itertools.count()
        self._closed = False
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
        call = _Call()
        try:
            self._submit(call, self._prepare(prompts, sampling_params))
            while call.open:
                self._step()
                call.events.clear()
        finally:
            self._withdraw(call)
        return [live.result for live in call.lives]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TokenDelta]:
        """Like `generate`, token by token. The last delta of each answer carries its result.

        Closing the iterator ends what still runs and gives its memory back.
        """
        return self._events(self._prepare(prompts, sampling_params))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] on the host: row i is about token i + 1. Truncation is off.

        Raises UsageError or CapacityError if the ids cannot run.
        """
        [asked] = self._prepare([list(token_ids)], SamplingParams(max_tokens=0, seed=0))
        if asked.problem:
            raise asked.problem
        call = _Call()
        try:
            self._submit(call, [asked], keep_rows=True)
            while call.open:
                self._step()
            return torch.cat(call.lives[0].kept)
        finally:
            self._withdraw(call)

    def close(self) -> None:
        """Drop the model and its memory. Twice is harmless; other calls then raise UsageError."""
        for live in list(self._lives.values()):
            self._finish(live, FinishReason.ABORT)
        self._closed = True
        self.parts = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # a call comes and goes

    def _prepare(self, prompts: object, sampling_params: object) -> list[Asked]:
        if self._closed:
            raise UsageError("engine-closed", "this engine is closed", hint="make a new LLM")
        return self._intake.read(prompts, sampling_params)

    def _events(self, asked: Sequence[Asked]) -> Iterator[TokenDelta]:
        call = _Call()
        try:
            self._submit(call, asked)
            while call.open or call.events:
                while call.events:
                    yield call.events.popleft()
                if call.open:
                    self._step()
        finally:
            self._withdraw(call)

    def _submit(self, call: _Call, asked: Sequence[Asked], keep_rows: bool = False) -> None:
        now = self._clock()
        for one in asked:
            sequence = Generation(one.request, next(self._arrivals))
            text = StopText(self.parts.tokenizer, one.request.params.stop)
            live = _Live(call, sequence, text, now, keep_rows)
            call.lives.append(live)
            call.open += 1
            if one.problem:
                self._finish(live, FinishReason.ERROR, one.problem)
            elif not (one.request.max_new or keep_rows or self._wants_prompt(live)):
                self._finish(live, FinishReason.LENGTH)
            else:
                self._lives[sequence] = live
                self._policy.add(sequence)

    def _withdraw(self, call: _Call) -> None:
        """End what still runs of a call, whatever became of it."""
        for live in call.lives:
            if live.result is None:
                self._finish(live, FinishReason.ABORT)

    # one step

    def _step(self) -> None:
        step = self._policy.next_step(self._wants_all_rows)
        if step is None:
            raise InternalError("nothing-to-run", "requests are open but none can run")
        now = self._clock()
        for sequence in step.sequences:
            live = self._lives[sequence]
            live.scheduled = now if live.scheduled is None else live.scheduled
        try:
            self._commit(step, self.parts.runner.forward(step.plan))
        except BaseException:
            # The memory of these sequences is half written: whoever goes on starts afresh.
            for sequence in step.sequences:
                if sequence.slot is not None:
                    self._policy.preempt(sequence)
            raise

    def _wants_all_rows(self, sequence: Generation) -> bool:
        live = self._lives[sequence]
        return live.keep_rows or self._wants_prompt(live)

    @staticmethod
    def _wants_prompt(live: _Live) -> bool:
        asked = live.sequence.request.params.prompt_logprobs is not None
        return asked and len(live.prompt_logprobs) < live.sequence.prompt_tokens

    def _commit(self, step: Step, logits: torch.Tensor) -> None:
        """Take a step's logits [logit rows, vocab]: choose, append, deliver, finish."""
        drawing: list[tuple[_Live, int]] = []
        broken: list[_Live] = []
        first_row = 0
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            live = self._lives[sequence]
            rows = logits[first_row : first_row + chunk.logits]
            first_row += chunk.logits
            live.recomputed += min(chunk.end, live.highest) - min(chunk.start, live.highest)
            live.highest = max(live.highest, chunk.end)
            if live.keep_rows:
                if chunk.start == 0:
                    live.kept.clear()
                live.kept.append(rows.to("cpu", torch.float32))
            fine = self._take_prompt_logprobs(live, chunk.start, rows)
            if not fine:
                broken.append(live)
            elif chunk.end == len(sequence.tokens):
                drawing.append((live, first_row - 1))
        finished = [live for live, _ in drawing if not live.sequence.request.max_new]
        drawing = [(live, row) for live, row in drawing if live.sequence.request.max_new]
        rows = logits[[row for _, row in drawing]] if drawing else logits[:0]
        tokens = sampler.sample(rows, [self._row(live) for live, _ in drawing]) if drawing else []
        logprobs = self._chosen_logprobs(drawing, rows, tokens)
        for chunk, sequence in zip(step.plan.chunks, step.sequences, strict=True):
            sequence.computed = chunk.end
        now = self._clock()
        for live in finished:
            self._finish(live, FinishReason.LENGTH)
        for at, ((live, _), token) in enumerate(zip(drawing, tokens, strict=True)):
            if token is None:
                broken.append(live)
            else:
                self._deliver(live, token, logprobs.get(at), now)
        for live in broken:
            self._finish(live, FinishReason.ERROR, _numeric_error(live))

    def _take_prompt_logprobs(self, live: _Live, start: int, rows: torch.Tensor) -> bool:
        """Append what the rows from position `start` on say about the prompt; False: not finite."""
        if not self._wants_prompt(live):
            return True
        params, prompt = live.sequence.request.params, live.sequence.request.prompt_ids
        skip = len(live.prompt_logprobs) - 1 - start  # rows seen before a preemption
        targets = prompt[start + 1 + skip : start + 1 + len(rows)]
        if not targets:
            return True
        tops = [params.prompt_logprobs] * len(targets)
        found = sampler.logprobs(rows[skip : skip + len(targets)], targets, tops)
        live.prompt_logprobs += found
        return None not in found

    def _row(self, live: _Live) -> Row:
        sequence, request = live.sequence, live.sequence.request
        params = request.params
        forbidden: tuple[int, ...] = ()
        if sequence.generated < params.min_tokens:
            forbidden = params.stop_token_ids
            if not params.ignore_eos:
                forbidden += self.parts.eos_ids
        return Row(
            params=params,
            seed=request.seed,
            position=len(sequence.tokens),
            forbidden=forbidden,
            seen=request.prompt_ids if params.repetition_penalty != 1 else (),
            counts=sequence.counts,
        )

    @staticmethod
    def _chosen_logprobs(
        drawing: Sequence[tuple[_Live, int]], rows: torch.Tensor, tokens: Sequence[int | None]
    ) -> dict[int, TokenLogprob]:
        """Log-probabilities of the drawn tokens, by place in `drawing`, where asked for."""
        wanted = [
            at
            for at, (live, _) in enumerate(drawing)
            if live.sequence.request.params.logprobs is not None and tokens[at] is not None
        ]
        if not wanted:
            return {}
        tops = [drawing[at][0].sequence.request.params.logprobs for at in wanted]
        found = sampler.logprobs(rows[wanted], [tokens[at] for at in wanted], tops)
        return dict(zip(wanted, found, strict=True))

    def _deliver(self, live: _Live, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Append a token, decide whether it is the last, and tell the caller."""
        sequence, params = live.sequence, live.sequence.request.params
        sequence.append(token)
        if live.first is None:
            live.first = now
        if logprob is not None:
            live.logprobs.append(logprob)
        reason, text = None, ""
        ends = not params.ignore_eos and token in self.parts.eos_ids
        if ends or token in params.stop_token_ids:
            reason = FinishReason.STOP
        else:
            text = live.text.push(token, may_stop=sequence.generated >= params.min_tokens)
            if live.text.stopped:
                reason = FinishReason.STOP
            elif sequence.generated == sequence.request.max_new:
                reason = FinishReason.LENGTH
        if reason is None:
            live.pieces.append(text)
            self._tell(live, (token,), text, logprob)
        else:
            self._finish(live, reason, token=token, text=text, logprob=logprob)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        problem: DeepinferError | None = None,
        *,
        token: int | None = None,
        text: str = "",
        logprob: TokenLogprob | None = None,
    ) -> None:
        """Give memory back, make the result, send the last delta."""
        self._policy.remove(live.sequence)
        self._lives.pop(live.sequence, None)
        text += live.text.finish()
        live.pieces.append(text)
        live.result = self._result(live, reason, problem)
        live.call.open -= 1
        self._tell(live, () if token is None else (token,), text, logprob)

    def _tell(
        self, live: _Live, ids: tuple[int, ...], text: str, logprob: TokenLogprob | None
    ) -> None:
        request = live.sequence.request
        entries = None if request.params.logprobs is None else (logprob,) if logprob else ()
        delta = TokenDelta(request.index, request.sample, ids, text, entries, live.result)
        live.call.events.append(delta)

    def _result(
        self, live: _Live, reason: FinishReason, problem: DeepinferError | None
    ) -> Completion:
        sequence, request = live.sequence, live.sequence.request
        params = request.params

        def since(moment: float | None) -> float | None:
            return None if moment is None else (moment - live.submitted) * 1e3

        return Completion(
            index=request.index,
            sample=request.sample,
            text="".join(live.pieces),
            token_ids=tuple(sequence.tokens[sequence.prompt_tokens :]),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=sequence.prompt_tokens,
                computed_tokens=min(live.highest, sequence.prompt_tokens),
                completion_tokens=sequence.generated,
                recomputed_tokens=live.recomputed,
            ),
            timing_ms=Timing(since(live.scheduled), since(live.first), since(self._clock())),
            seed=request.seed,
            batch_invariant=self.parts.batch_invariant,
            settings=self.parts.settings,
            logprobs=None if params.logprobs is None else tuple(live.logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(live.prompt_logprobs)
            ),
            error=Problem.of(problem) if problem else None,
        )


def _numeric_error(live: _Live) -> InternalError:
    return InternalError(
        "numeric-error",
        "the model computed a logit that is not finite, or no token was left to choose",
        [f"at position {len(live.sequence.tokens)}; tokens before it are kept"],
    )


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)
