"""Follows one answer through its grammar, drafts included, and says which ids may come next.

Tokens come in: those of the answer by `push`, drafts behind them by `allowed`. A bit mask for each
place goes out. It must not know steps, verification or who draws a token.

A mask is a function of the tokens before it alone. Drafts stay consumed until a token or another
draft contradicts them: the masks of drafting serve verification too, and what fell is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = np.ndarray | None
"""uint8, bit i % 8 of byte i // 8 is set if id i may come; None: all may."""


class _Place(Enum):
    """What holds behind some token: nothing yet, the grammar, or nothing may come at all."""

    FREE = 0
    HELD = 1
    DEAD = 2


class Constraint:
    """Of one answer. matcher: at the start of the grammar, copied. eos_ids: what the library allows
    where the grammar may end. after: see `Structured`."""

    def __init__(self, matcher: LLMatcher, eos_ids: Iterable[int], after: tuple[int, ...]) -> None:
        self._grammar, self._eos_ids, self._after = matcher, frozenset(eos_ids), after
        self.restart()

    def restart(self) -> None:
        """The answer has no token."""
        self._matcher = self._grammar.deep_copy()
        self._tail: tuple[int, ...] = ()  # newest ids of an answer that is free
        self._taken: list[int] = []  # what the matcher has consumed, drafts included
        self._drafts: list[int] = []
        # Behind the newest token, and behind each of the drafts.
        self._places = [_Place.FREE if self._after else _Place.HELD]
        self._masks: list[Mask | bool] = [False]  # False: not computed
        self._said = ""

    def push(self, token: int) -> None:
        """The answer got a token, for good; one that ends it need not be told."""
        if not self._drafts and self._places[0] is _Place.HELD:
            self._places[0] = _Place.HELD if self._follows(token) else _Place.DEAD
            self._masks[0] = False
            return
        if self._drafts[:1] != [token]:
            self._back_to(0)
            self._go(token)
        if self._places[0] is _Place.FREE:
            self._tail = self._tail_with([token])
        del self._drafts[0], self._places[0], self._masks[0]

    def allowed(self, drafts: Sequence[int] = ()) -> Mask:
        """What may come behind the newest token and these drafts, however they were made: behind
        one that may not stand itself, nothing."""
        same = 0
        for mine, asked in zip(self._drafts, drafts, strict=False):
            if mine != asked:
                break
            same += 1
        if same < len(drafts):
            self._back_to(same)
            for token in drafts[same:]:
                self._go(token)
        return self._mask(len(drafts))

    @property
    def complete(self) -> bool:
        """Is the answer one that the grammar accepts, as it stands?"""
        self._back_to(0)
        return self._places[0] is _Place.HELD and self._matcher.is_accepting()

    @property
    def problem(self) -> UsageError | None:
        """Why nothing may follow the newest token, where the library gave up."""
        if self._places[0] is not _Place.DEAD or not self._said:
            return None
        return UsageError(
            "grammar-too-complex",
            "the grammar became too complex to follow",
            [self._said, f"after {len(self._taken)} tokens of the answer"],
            "make it simpler: fewer alternatives that begin alike, smaller repetitions",
        )

    def _go(self, token: int) -> None:
        """One draft more."""
        place = self._places[-1]
        if place is _Place.FREE:
            self._drafts.append(token)
            behind = self._tail_with(self._drafts) == self._after
            self._reach(_Place.HELD if behind else _Place.FREE)
            return
        follows = place is _Place.HELD and self._follows(token)
        self._drafts.append(token)
        self._reach(_Place.HELD if follows else _Place.DEAD)

    def _reach(self, place: _Place) -> None:
        self._places.append(place)
        self._masks.append(False)

    def _follows(self, token: int) -> bool:
        """Take it where the grammar allows it behind all that was taken, and goes on."""
        if token < 0 or token in self._eos_ids:  # nothing comes behind the end
            return False
        if self._matcher.try_consume_tokens([token]) == 1:
            self._taken.append(token)
            return True
        if self._matcher.is_error():
            self._recover()
        return False

    def _mask(self, at: int) -> Mask:
        found = self._masks[at]
        if found is False:
            found = self._masks[at] = self._computed(at)
        return found

    def _computed(self, at: int) -> Mask:
        if self._places[at] is _Place.FREE:
            return None
        if self._places[at] is _Place.HELD:
            self._back_to(at)
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error():
                return mask
            if at and self._places[at - 1] is _Place.HELD:
                self._taken.pop()
            self._recover()
            self._places[at] = _Place.DEAD
        return self._nothing

    @cached_property
    def _nothing(self) -> np.ndarray:
        """A mask that allows no id."""
        return np.zeros_like(np.frombuffer(self._grammar.compute_bitmask(), np.uint8))

    def _back_to(self, count: int) -> None:
        """Only so many drafts."""
        if count == len(self._drafts):
            return
        held = [place is _Place.HELD for place in self._places[count:]]
        taken = sum(a and b for a, b in zip(held, held[1:], strict=False))
        if taken:
            del self._taken[-taken:]
            if not self._matcher.rollback(taken):  # some rules of Lark cannot be taken back
                self._read_again()
        del self._drafts[count:], self._places[count + 1 :], self._masks[count + 1 :]

    def _recover(self) -> None:
        """The library gives a matcher up that met a limit; that may be on a draft that falls."""
        self._said = self._matcher.get_error().splitlines()[0]
        self._read_again()

    def _read_again(self) -> None:
        self._matcher = self._grammar.deep_copy()
        self._matcher.consume_tokens(self._taken)

    def _tail_with(self, more: Sequence[int]) -> tuple[int, ...]:
        return (*self._tail, *more)[-len(self._after) :]


def leaves(mask: np.ndarray, ids: Iterable[int]) -> bool:
    """Does a mask allow anything but these ids?"""
    left = mask.copy()
    for token in ids:
        left[token >> 3] &= ~np.uint8(1 << (token & 7))
    return bool(left.any())
