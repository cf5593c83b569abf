"""The step plan: which rows of which sequences run next.

A plan is the only thing the scheduler tells the runner: token ids, where they belong, and which
rows need logits. It knows no tensor, no weight and no sampling parameter, so both sides can be
tested alone; nothing here may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from deepinfer.core.request import Completion, TokenLogprob
    from deepinfer.replay.plan import ReplayPlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one sequence.

    slot: state slot (window rings, open groups, n-gram history) that the sequence owns until it
    ends.
    start: absolute position of the first row; ``start == 0`` resets the slot.
    token_ids: one id per row, at positions ``start .. start + len(token_ids) - 1``.
    pages: page table of the sequence; ``pages[i]`` holds tokens ``[i * page_tokens, (i + 1) *
    page_tokens)``
        and the table covers ``start + len(token_ids)`` tokens.
    logits: how many of the LAST rows need logits: 0, 1 or ``len(token_ids)``.
    replay: which layers run on which rows; None: every layer on every row.
    windows: (i, window page) for each page i of the sequence whose window rows are kept for reuse.
    restore: window pages that hold the rows just before ``start``, which fill the slot first;
    context: the token ids just before ``start`` that its n-grams reach back to. Both are for the
        first chunk of a sequence that does not start at 0.
    drafts: how many of the LAST tokens are guesses, which may be taken back.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    logits: int
    replay: ReplayPlan | None = None
    windows: tuple[tuple[int, int], ...] = ()
    restore: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    drafts: int = 0

    @property
    def end(self) -> int:
        """Tokens in memory once the chunk has run."""
        return self.start + len(self.token_ids)

    @property
    def certain(self) -> int:
        """Tokens in memory that no verdict can take back."""
        return self.end - self.drafts


@dataclass(frozen=True, slots=True)
class Load:
    """Put the bytes of a page that came from another tier back before the chunks run."""

    kind: str
    page: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding requests of a step: how many rows they get.

    Tokens, places and lengths of these rows are known to the device alone, so a plan that nothing
    changed is the same object step after step.

    slots: one per request. pages: pages of the longest of them. drafts: most drafts that one of
    them verifies; extra: rows for drafts in all, shared out on the device. whole: slots that verify
    all they have, `drafts` rows of `extra` each.
    """

    slots: tuple[int, ...]
    pages: int
    drafts: int = 0
    extra: int = 0
    whole: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.slots) + self.extra


@dataclass(frozen=True, slots=True)
class Growth:
    """A decoding request got a page: ``page`` holds its tokens ``[index * page_tokens, (index + 1)
    * page_tokens)``, ``window`` their window rows if they are kept for reuse."""

    slot: int
    index: int
    page: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, and what is drafted after it.

    Logits come back as ``[decoding.rows + logit rows of chunks, vocab]`` float32, rows of decoding
    requests first. grown: pages that decoding requests got since the step before. draft: how many
    tokens to draft for each request that gets a token in this step.
    """

    chunks: tuple[Chunk, ...] = ()
    loads: tuple[Load, ...] = ()
    decoding: Decoding | None = None
    grown: tuple[Growth, ...] = ()
    draft: int = 0

    @property
    def rows(self) -> int:
        rows = sum(len(chunk.token_ids) for chunk in self.chunks)
        return rows + (self.decoding.rows if self.decoding else 0)


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """What log-probabilities of n targets are made of, by the raw logits of a row each.

    finite: bool [n], is the row? highest: its highest logit, float64 [n]; totals: the sum of its
    weights (`sampling.logits.masses`), int64 [n]; chosen: the target's logit, float64 [n]. best,
    values: the most likely ids and their logits, best first, int64 and float64 [n, most].
    """

    finite: np.ndarray
    highest: np.ndarray
    totals: np.ndarray
    chosen: np.ndarray
    best: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave to each of the C requests that choose, as arrays on the host.

    tokens: int64 [C, T], the first ``counts`` int64 [C] of each row are its own. look: bool [C],
    its last token may be the last one of the answer, or its numbers are broken: ``broken`` bool
    [C], then behind those tokens none could be chosen.
    With drafts, int64 [C]: drafted, how many it had; verified, how many of them the target looked
    at; accepted, how many stand.
    ``drafts`` of this step (None: not asked for) are what was verified, ``survivals`` float64 [C,
    K] of what was drafted for the next one. likelihoods: of what requests asked for, in the places
    that `engine.device.Flight` names. seconds: of the target's pass, and of
    drafting; None: it did not run.
    """

    tokens: np.ndarray
    counts: np.ndarray
    look: np.ndarray
    broken: np.ndarray
    drafted: np.ndarray | None = None
    verified: np.ndarray | None = None
    accepted: np.ndarray | None = None
    drafts: DraftRecord | None = None
    survivals: np.ndarray | None = None
    likelihoods: Likelihoods | None = None
    seconds: tuple[float, float | None] | None = None


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """Drafts as they were made, for traces: ids int64, raw confidences and survivals [C, K], and
    how many are useful, int64 [C]."""

    ids: np.ndarray
    raw: np.ndarray
    survivals: np.ndarray
    useful: np.ndarray


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What a step added to one answer, as a stream delivers it.

    token_ids: new ids, in order; text: what they make certain (it may lag behind the ids, and the
    texts of an answer join to its result's text); logprobs: one per id if asked for. result: set
    in the last delta of the answer, which may be without ids.
    """

    index: int
    sample: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    result: Completion | None = None
