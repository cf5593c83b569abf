"""One answer in the making: tokens, text, log-probabilities and times, and when it is complete.

Chosen tokens come in one by one, stream deltas and at last the completion go out. It must not know
steps, memory or its neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.core.request import (
    Completion,
    FinishReason,
    Problem,
    Timing,
    TokenLogprob,
    Usage,
)
from deepinfer.core.sequence import Sequence as Generation
from deepinfer.core.step import Chunk, TokenDelta
from deepinfer.engine.assembly import Parts
from deepinfer.errors import DeepinferError
from deepinfer.sampling.logits import Row
from deepinfer.speculative.proposal import Counts
from deepinfer.structured.constraint import Constraint, Mask, leaves
from deepinfer.tokenizer.tokenizer import StopText


@dataclass(slots=True, eq=False)
class Answer:
    """State of one request from submission to result.

    highest: tokens that were in memory at some time, the first `cached` of them from a prefix hit;
    replayed: rows run again to refill windows after it; recomputed: other rows run again.
    keep_rows: collect the logits of every row in `kept`. counts: of its drafts. constraint: what
    its grammar allows next. slot: where its tokens are found while it decodes. told: what chooses
    its tokens depends on those before; shifted: it is more than a grammar. followed: its end or
    what is told of it depends on them too, and it is looked at after every step. ended: why its
    newest token is the last one. Times are clock readings in seconds.
    """

    sequence: Generation
    parts: Parts
    submitted: float
    keep_rows: bool = False
    text: StopText = field(init=False)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    kept: list[torch.Tensor] = field(default_factory=list)
    scheduled: float | None = None
    first: float | None = None
    highest: int = 0
    cached: int = 0
    replayed: int = 0
    recomputed: int = 0
    counts: Counts = field(default_factory=Counts)
    constraint: Constraint | None = None
    slot: int | None = None
    followed: bool = False
    told: bool = False
    shifted: bool = False
    ended: FinishReason | None = None
    result: Completion | None = None
    _delivered: tuple[int, int, int] = (0, 0, 0)  # tokens, pieces of text, log-probabilities
    _late: list[int] = field(default_factory=list)  # tokens whose text was not made yet

    def __post_init__(self) -> None:
        params = self.sequence.request.params
        self.text = StopText(self.parts.tokenizer, params.stop)
        self.shifted = bool(params.penalised or params.logit_bias or params.min_tokens)
        self.told = self.shifted or params.structured is not None
        self.followed = self.shifted or bool(params.stop) or params.logprobs is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What choosing its tokens takes: "told", "drawn", "floored", "scored"."""
        params = self.sequence.request.params
        drawn = params.temperature > 0
        scored = params.logprobs is not None or params.prompt_logprobs is not None
        asked = {"told": self.told, "drawn": drawn, "floored": drawn and params.min_p > 0}
        asked["scored"] = scored
        return tuple(kind for kind, wanted in asked.items() if wanted)

    @property
    def wants_prompt(self) -> bool:
        """Are log-probabilities of prompt tokens still missing?"""
        asked = self.sequence.request.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.sequence.prompt_tokens

    @property
    def _replay(self) -> str:
        """How the prompt was prefilled, with the reason where the request itself decided."""
        asked = self.sequence.request.params.prompt_logprobs is not None
        cut = self.parts.rule.cuts and asked
        return "off (prompt_logprobs)" if cut else self.parts.rule.mode

    @property
    def wants_nothing(self) -> bool:
        """No token and no row: complete before it began."""
        return self.sequence.request.max_new == 0 and not (self.keep_rows or self.wants_prompt)

    def ran(self, chunk: Chunk, rows: torch.Tensor) -> None:
        """Count the rows of a chunk that ran; `rows` are its logits [chunk.logits, vocab]."""
        plan, start = chunk.replay, chunk.start
        if plan is not None:
            if not self.highest:
                self.highest = self.cached = plan.cached
            self.replayed += max(min(chunk.certain, plan.cached) - start, 0)
            start = min(max(start, plan.cached), chunk.certain)
        self.recomputed += min(chunk.certain, self.highest) - min(start, self.highest)
        self.highest = max(self.highest, chunk.certain)
        if self.keep_rows:
            if chunk.start == 0:
                self.kept.clear()
            self.kept.append(rows.to("cpu", torch.float32))

    def allowed(self, drafts: Sequence[int]) -> Mask:
        """What its grammar allows behind the newest token and `drafts`."""
        return self.constraint.allowed(drafts) if self.constraint else None

    def row(self, drafts: Sequence[int]) -> Row | None:
        """What the sampler must know to choose the token behind the newest one and `drafts`, where
        that is more than a grammar."""
        sequence, request = self.sequence, self.sequence.request
        params = request.params
        if not self.shifted:
            return None
        forbidden: tuple[int, ...] = ()
        if sequence.generated + len(drafts) < params.min_tokens:
            forbidden = params.stop_token_ids
            if not params.ignore_eos:
                forbidden += self.parts.eos_ids
        allowed = self.allowed(drafts) if forbidden else None
        if allowed is not None and not leaves(allowed, forbidden):
            forbidden = ()  # the grammar is over: an answer may be too short, but not go on
        counts = sequence.counts
        if drafts and params.penalised:
            counts = counts + Counter(drafts)
        return Row(
            params=params,
            seed=request.seed,
            position=len(sequence.tokens) + len(drafts),
            forbidden=forbidden,
            seen=request.prompt_ids if params.repetition_penalty != 1 else (),
            counts=counts,
            attempt=sequence.preemptions,
        )

    def ends(self, token: int) -> bool:
        """Would this token be the last one?"""
        params = self.sequence.request.params
        ended = not params.ignore_eos and token in self.parts.eos_ids
        return ended or token in params.stop_token_ids

    def constrain(self, tokens: Sequence[int], last: bool = True) -> None:
        """Its grammar follows the newest tokens, whenever they are appended; what ends the answer
        is no part of it. last: may one do that?"""
        for token in tokens:
            if last and self.ends(token):
                return
            self.constraint.push(token)

    def constrain_again(self) -> None:
        """Its grammar may have followed tokens that were lost before they were appended."""
        if self.constraint:
            self.constraint.restart()
            self.constrain(self.sequence.tokens[self.sequence.prompt_tokens :])

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens of which none ends the answer; their text is made when it is needed."""
        self.sequence.tokens += tokens
        if self.parts.tokenizer:
            self._late += tokens

    def _make_text(self) -> None:
        for token in self._late:
            self.pieces.append(self.text.push(token))
        self._late.clear()

    def take(self, token: int, logprob: TokenLogprob | None, now: float) -> bool:
        """Append a token and the text it makes certain. Is it the last one (`ended`)?"""
        sequence, params = self.sequence, self.sequence.request.params
        if self._late:
            self._make_text()
        sequence.append(token)
        if self.first is None:
            self.first = now
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.ends(token):
            self.ended = FinishReason.STOP
            return True
        may_stop = sequence.generated >= params.min_tokens
        self.pieces.append(self.text.push(token, may_stop=may_stop))
        if self.text.stopped:
            self.ended = FinishReason.STOP
        elif sequence.generated == sequence.request.max_new:
            self.ended = FinishReason.LENGTH
        return self.ended is not None

    def finish(self, reason: FinishReason, now: float, problem: DeepinferError | None) -> None:
        """Make the result, with the text that was still held back."""
        self._make_text()
        self.pieces.append(self.text.finish())
        sequence, request = self.sequence, self.sequence.request
        params = request.params
        self.result = Completion(
            index=request.index,
            sample=request.sample,
            text="".join(self.pieces),
            token_ids=tuple(sequence.tokens[sequence.prompt_tokens :]),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=sequence.prompt_tokens,
                cached_tokens=self.cached,
                replayed_tokens=self.replayed,
                computed_tokens=min(self.highest, sequence.prompt_tokens) - self.cached,
                completion_tokens=sequence.generated,
                recomputed_tokens=self.recomputed,
            ),
            timing_ms=Timing(
                self._since(self.scheduled), self._since(self.first), self._since(now)
            ),
            seed=request.seed,
            batch_invariant=self.parts.batch_invariant,
            settings=self.parts.settings,
            replay=self._replay,
            speculation=self.counts.as_json() if self.parts.drafting else None,
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(self.prompt_logprobs)
            ),
            error=Problem.of(problem) if problem else None,
            complete=self._complete,
        )

    @property
    def _complete(self) -> bool | None:
        """Is the text all that `structured` asked for?"""
        if self.sequence.request.params.structured is None:
            return None
        return self.constraint is not None and self.constraint.complete and not self.text.stopped

    def delta(self) -> TokenDelta:
        """The next stream event: all that none before had, and the result once there is one."""
        self._make_text()
        sequence, request = self.sequence, self.sequence.request
        tokens, pieces, logprobs = self._delivered
        asked = request.params.logprobs is not None
        delta = TokenDelta(
            request.index,
            request.sample,
            tuple(sequence.tokens[sequence.prompt_tokens + tokens :]),
            "".join(self.pieces[pieces:]),
            tuple(self.logprobs[logprobs:]) if asked else None,
            self.result,
        )
        self._delivered = sequence.generated, len(self.pieces), len(self.logprobs)
        return delta

    def _since(self, moment: float | None) -> float | None:
        """Milliseconds from submission to `moment`."""
        return None if moment is None else (moment - self.submitted) * 1e3
