"""The step plan: which rows of which sequences run next.

A plan is the only thing the scheduler tells the runner: token ids, where they belong, and which
rows need logits. It knows no tensor, no weight and no sampling parameter, so both sides can be
tested alone; nothing here may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
class StepPlan:
    """One forward pass. Logits come back in chunk order: ``[logit_rows, vocab]`` float32."""

    chunks: tuple[Chunk, ...]
    loads: tuple[Load, ...] = ()

    @property
    def rows(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def logit_rows(self) -> int:
        return sum(chunk.logits for chunk in self.chunks)


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
