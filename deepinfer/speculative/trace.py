"""What one step did with one request's drafts, as a record that lasts.

The engine fills in a `TraceStep` per request and decoding step; a `Trace` is such records with the
texts they are about. Views, pictures, calibration and other time curves work from these alone, on
any machine. Nothing here may import torch.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One request in one decoding step (serving semantics §4.1, §8).

    step: counts all steps of the engine, on from trace to trace; seq: arrival number of request;
    pos: absolute position of the first draft. draft_ids: drafts made for this step (-1: broken).
    confidence: calibrated chance of each, raw logits beside it; survival: of it and all before it.
    useful: drafts before a broken one, up to one that ends the answer; no more are ever verified.
    budget: extra rows of the whole step, None where confidence does not decide; limit: most that
    would fit. split: how many of them this request was given; verified: how many it ran, which is
    less where pages or rows are short. accepted: drafts that stand; discarded: behind the end.
    committed: tokens delivered. target_id: the target's own token after the accepted drafts, None
    where the answer ended before it. rows, requests: of the whole step. time_ms: predicted
    milliseconds of the step with 0, 1, ... extra rows, in the first record of a step with a budget.
    ms: the step's own, measured.
    """

    step: int
    seq: int
    pos: int
    draft_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    logits: tuple[float, ...]
    survival: tuple[float, ...]
    useful: int
    budget: int | None
    limit: int
    split: int
    verified: int
    accepted: int
    discarded: int
    committed: int
    target_id: int | None
    rows: int
    requests: int
    ms: float
    time_ms: tuple[float, ...] = ()

    @property
    def judged(self) -> int:
        """Verified drafts whose fate is known: none behind the end of the answer."""
        return self.accepted if self.target_id is None else self.verified


@dataclass(frozen=True, slots=True)
class Line:
    """A step with its texts. Texts of tokens joined are the text of the tokens: a character that
    several of them make belongs to the last one, and those before it have "", as special tokens do.
    """

    step: TraceStep
    draft_text: tuple[str, ...]
    target_text: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps in the order they ran, and what they are about.

    header: the first line of the file, see `tracefile`. Its `sequences` are the requests, in the
    order of `TraceStep.seq`: prompt, prompt_tokens, text, token_ids, token_text. Its `lines` count
    the steps that were traced; without it a cut is not noticed.
    """

    header: Mapping[str, Any]
    lines: tuple[Line, ...]

    @property
    def steps(self) -> list[TraceStep]:
        return [line.step for line in self.lines]

    @property
    def sequences(self) -> Sequence[Mapping[str, Any]]:
        return self.header["sequences"]

    @property
    def cut(self) -> bool:
        """Whether steps are missing: the file ended before they were written."""
        return len(self.lines) < self.header.get("lines", 0)

    def by_sequence(self) -> list[list[Line]]:
        """The lines of each request."""
        found: dict[int, list[Line]] = defaultdict(list)
        for line in self.lines:
            found[line.step.seq].append(line)
        return [found[seq] for seq in range(len(self.sequences))]


class TokenTexts:
    """Texts of the tokens of one answer and of the drafts beside it.

    spell: the bytes of a token, as `Tokenizer.token_bytes`. token_ids: of the answer.
    """

    def __init__(self, spell: Callable[[int], bytes], token_ids: Sequence[int]) -> None:
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._before = [self._decoder.getstate()]  # what waits for the rest of a character
        self.token_text: list[str] = []
        for token in token_ids:
            self.token_text.append(self._decoder.decode(spell(token)))
            self._before.append(self._decoder.getstate())
        if token_ids:
            self.token_text[-1] += self._decoder.decode(b"", final=True)

    def branch(self, at: int, ids: Iterable[int]) -> tuple[str, ...]:
        """Texts of other tokens behind the first `at` of the answer; a broken id has none."""
        self._decoder.setstate(self._before[min(at, len(self._before) - 1)])
        texts = [self._decoder.decode(self._spell(token) if token >= 0 else b"") for token in ids]
        if texts:
            texts[-1] += self._decoder.decode(b"", final=True)
        return tuple(texts)


def lines(
    steps: Iterable[TraceStep],
    answers: Sequence[tuple[int, Sequence[int]]],
    spell: Callable[[int], bytes],
) -> tuple[tuple[Line, ...], list[list[str]]]:
    """The steps with their texts, and the text of every answer token.

    answers: by request, how many tokens its prompt has and the ids of its answer.
    """
    texts = [TokenTexts(spell, ids) for _, ids in answers]
    out = []
    for step in steps:
        (prompt_tokens, ids), text = answers[step.seq], texts[step.seq]
        at = step.pos - prompt_tokens
        # What stands has the texts of the answer; where the drafts leave it their own begin.
        same = text.token_text[at : at + step.accepted]
        other = text.branch(at + len(same), step.draft_ids[len(same) :])
        own = at + step.accepted
        target = None
        if step.target_id is not None:
            inside = own < len(ids)
            target = text.token_text[own] if inside else text.branch(own, [step.target_id])[0]
        out.append(Line(step, (*same, *other), target))
    return tuple(out), [text.token_text for text in texts]
