"""Prefix reuse: what of a prompt's state is there already, and what of a request's is kept.

Token ids come in; pages to share, pages to fill from other tiers and a replay plan go out. State
is addressed by content: page i of a prompt is named by a hash chain over its tokens up to and
including that page, so equal prefixes meet whoever computed them, and only complete pages have a
name. Source: serving semantics §3. It must not know tensors, layers or files.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from deepinfer.core.sequence import Sequence
from deepinfer.core.step import Load
from deepinfer.kvcache.blocks import BlockAllocator
from deepinfer.kvcache.tiers import Key
from deepinfer.replay.plan import ReplayPlan, ReplayRule

ENTRIES, WINDOWS = "entries", "windows"


class Tier(Protocol):
    """A place for bytes of pages behind the device's memory."""

    def contains(self, key: Key) -> bool: ...
    def get(self, key: Key) -> bytes | None: ...
    def put(self, key: Key, payload: bytes) -> None: ...
    def drop(self, key: Key) -> None: ...


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which state is kept and found again.

    identity: of the checkpoint and of how numbers are computed; other identities never meet.
    context: tokens before a row that its n-grams reach back to. replay: let a hit without window
    rows refill them by an approximate encoder replay.
    """

    enabled: bool = True
    identity: bytes = b""
    context: int = 0
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """The known prefix of a sequence: for each of its pages of entries, and for the window pages
    before the resume point, a device page (shared already) or the bytes from another tier."""

    plan: ReplayPlan
    entries: list[int | bytes]
    windows: list[int | bytes]


class PrefixCache:
    """State of finished and running requests, shared by content.

    entries, windows: the device's pages of compressed state and of window rows. tiers: where else
    pages may be, faster first; what the device loses moves to the first. durable: the one of them
    that gets everything complete, if any. One thread.
    """

    def __init__(
        self,
        rule: ReplayRule,
        entries: BlockAllocator,
        windows: BlockAllocator,
        reuse: Reuse,
        tiers: Items[Tier] = (),
        durable: Tier | None = None,
    ) -> None:
        self.rule, self.entries, self.windows, self.reuse = rule, entries, windows, reuse
        self.tiers, self.durable = tuple(tiers), durable
        self._pools = {ENTRIES: entries, WINDOWS: windows}
        self._size = entries.page_tokens
        self._halo = -(-rule.window // self._size)
        self._kept = rule.window_pages(self._size)
        self._complete: list[tuple[Key, int]] = []
        self._leaving: set[Key] = set()

    # a request comes

    def find(self, sequence: Sequence, reserve: int = 0) -> Hit | None:
        """The longest known prefix; its device pages are shared from now on (see `undo`).

        None, and nothing is shared or read, if there is no room for the rest of its tokens beside
        `reserve` pages.
        """
        self._extend_names(sequence)
        while True:
            count, refill = self._longest(sequence)
            if not self._fits(sequence, count, reserve):
                return None
            plan = self.rule.plan(
                sequence.prompt_tokens,
                cached=count * self._size, refill=refill, full=sequence.full,
            )  # fmt: skip
            hit = Hit(plan, [], [])
            first = count if refill else max(count - self._halo, 0)
            try:
                for name in sequence.names[:count]:
                    hit.entries.append(self._state(ENTRIES, name))
                for name in sequence.names[first:count]:
                    hit.windows.append(self._state(WINDOWS, name))
            except BaseException:
                self.undo(hit)
                raise
            # A file may be damaged, or another process may have removed it: look once more.
            if None not in (*hit.entries, *hit.windows):
                return hit
            self.undo(hit)

    def undo(self, hit: Hit) -> None:
        """Give back what `find` shared."""
        for pool, states in ((self.entries, hit.entries), (self.windows, hit.windows)):
            pool.give_back([state for state in states if isinstance(state, int)])

    def adopt(self, sequence: Sequence, hit: Hit) -> list[Load]:
        """Make a hit the sequence's own and take pages for the rest of its tokens.

        Returns what must be loaded before its first rows run.
        """
        loads: list[Load] = []
        for kind, states, pages in (
            (ENTRIES, hit.entries, sequence.pages),
            (WINDOWS, hit.windows, sequence.restore),
        ):
            for state in states:
                if isinstance(state, bytes):
                    [page] = self._pools[kind].take(1)
                    loads.append(Load(kind, page, state))
                else:
                    page = state
                pages.append(page)
        more = self.entries.pages_for(len(sequence.tokens)) - len(sequence.pages)
        sequence.pages += self.entries.take(max(more, 0))
        sequence.replay = hit.plan
        sequence.computed = hit.plan.first
        return loads

    def _fits(self, sequence: Sequence, count: int, reserve: int) -> bool:
        """Is there room for a sequence that resumes behind `count` pages?"""
        pages = [self.entries.find(name) for name in sequence.names[:count]]
        here = [page for page in pages if page is not None]
        idle = sum(not self.entries.owned(page) for page in here)  # free, but about to be shared
        need = self.entries.pages_for(len(sequence.tokens)) - len(here)
        return need + reserve <= self.entries.free - idle

    def _longest(self, sequence: Sequence) -> tuple[int, int]:
        """Pages to resume behind, and rows to replay there because their windows are missing."""
        names = sequence.names
        if sequence.full or not self.reuse.enabled:
            return 0, 0
        most = min(self.rule.latest_resume(sequence.prompt_tokens) // self._size, len(names))
        known = 0
        while known < most and self._known(ENTRIES, names[known]):
            known += 1
        exact = known
        while exact and not self._restorable(names[max(exact - self._halo, 0) : exact]):
            exact -= 1
        refill = min(self.rule.window, known * self._size)
        if self.reuse.replay and (known - exact) * self._size > refill:
            return known, refill
        return exact, 0

    def _restorable(self, names: list[bytes]) -> bool:
        """Are the window rows of these pages there, and is there room to hold them all?"""
        pages = [self.windows.find(name) for name in names]
        taken = sum(page is None or not self.windows.owned(page) for page in pages)
        return taken <= self.windows.free and all(self._known(WINDOWS, name) for name in names)

    def _known(self, kind: str, name: bytes) -> bool:
        if self._pools[kind].find(name) is not None:
            return True
        return any(tier.contains((kind, name)) for tier in self.tiers)

    def _state(self, kind: str, name: bytes) -> int | bytes | None:
        page = self._pools[kind].find(name)
        if page is not None:
            self._pools[kind].share(page)
            return page
        for at, tier in enumerate(self.tiers):
            payload = tier.get((kind, name))
            if payload is not None:
                for faster in self.tiers[:at]:
                    faster.put((kind, name), payload)
                return payload
        return None

    def _extend_names(self, sequence: Sequence) -> None:
        names, size = sequence.names, self._size
        for i in range(len(names), len(sequence.tokens) // size):
            before = names[-1] if names else self.reuse.identity
            page = array("I", sequence.tokens[i * size : (i + 1) * size])
            names.append(hashlib.blake2b(before + page.tobytes(), digest_size=32).digest())

    # a request runs

    def windows_of(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """(i, window page) for the pages of rows [start, end) whose window rows are to be kept.

        Kept are the last pages before the end of the prompt, and every page of an answer until
        enough later ones are complete. Where no page is left, nothing is kept.
        """
        size = self._size
        if not self.reuse.enabled or sequence.replay.refill:
            return ()
        held = []
        first = max(sequence.prompt_tokens // size - self._kept, start // size)
        for i in range(first, -(-end // size)):
            if i not in sequence.windows:
                names = sequence.names
                known = i < len(names) and self.windows.find(names[i]) is not None
                if start > i * size or known or not self.windows.free:
                    continue
                [sequence.windows[i]] = self.windows.take(1)
            held.append((i, sequence.windows[i]))
        return tuple(held)

    def advance(self, sequence: Sequence, end: int) -> None:
        """The state of all tokens before `end` is in memory: let others find its whole pages."""
        self._return_windows(sequence)
        if not self.reuse.enabled:
            return
        self._extend_names(sequence)
        complete, names, answer = end // self._size, sequence.names, self._answer(sequence)
        if sequence.replay.refill:  # what follows a replay is approximate and never shared
            complete = min(complete, sequence.replay.cached // self._size)
        for i in range(sequence.named, complete):
            self._name(ENTRIES, sequence.pages[i], names[i])
        sequence.named = max(sequence.named, complete)
        for i in sorted(i for i in sequence.windows if i < complete):
            page = sequence.windows.pop(i)
            own = self._name(WINDOWS, page, names[i], durable=i < answer)
            self.windows.give_back([page])
            if own and i >= answer:
                sequence.answered.append(i)
                if len(sequence.answered) > self._kept:
                    self.windows.drop(names[sequence.answered.pop(0)])

    def _return_windows(self, sequence: Sequence) -> None:
        """The pages that a resume read have done their work; loaded ones get their name."""
        if not sequence.restore:
            return
        last = sequence.replay.cached // self._size
        for name, page in zip(
            sequence.names[last - len(sequence.restore) : last], sequence.restore, strict=True
        ):
            self.windows.name(page, name)
        self.windows.give_back(sequence.restore)
        sequence.restore = []

    def _name(self, kind: str, page: int, name: bytes, durable: bool = True) -> bool:
        """Let others find a page; False if another one has the name, or its numbers are bad."""
        if not self._pools[kind].name(page, name):
            return False
        if durable and self.durable is not None:
            self._complete.append(((kind, name), page))
        return True

    def _answer(self, sequence: Sequence) -> int:
        """The page in which the prompt ends."""
        return sequence.prompt_tokens // self._size

    def forget(self, sequence: Sequence) -> None:
        """Nobody else may find what a sequence computed or read: its numbers are not finite.

        Those who share pages of it cannot bring them back; whoever computes them anew can.
        """
        for page in sequence.pages:
            self.entries.spoil(page)
        for page in (*sequence.restore, *sequence.windows.values()):
            self.windows.spoil(page)
        for name in sequence.names:
            for kind, pool in self._pools.items():
                page = pool.find(name)
                if page is not None:
                    pool.spoil(page)
                self._leaving.discard((kind, name))
                for tier in self.tiers:
                    tier.drop((kind, name))
        sequence.named = 0

    def release(self, sequence: Sequence) -> None:
        """Take everything back from a sequence; what is complete can still be found."""
        if self.durable is not None:
            last = sequence.named
            for i in range(max(self._answer(sequence), last - self._kept), last):
                page = self.windows.find(sequence.names[i])
                if page is not None:
                    self._complete.append(((WINDOWS, sequence.names[i]), page))
        self.windows.give_back(sequence.restore)
        self.windows.give_back([sequence.windows[i] for i in sorted(sequence.windows)])
        self.entries.give_back(sequence.pages)
        sequence.pages, sequence.restore, sequence.windows, sequence.answered = [], [], {}, []
        sequence.computed = sequence.named = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a while, know nothing computed before, and keep nothing beyond the device."""
        tiers, durable = self.tiers, self.durable
        self.tiers, self.durable = (), None
        self.entries.forget()
        self.windows.forget()
        try:
            yield
        finally:
            self.tiers, self.durable = tiers, durable

    # pages move between tiers

    def leaving(self) -> list[tuple[Key, int]]:
        """(key, page) of the pages whose bytes are about to be overwritten and are kept nowhere
        else; to be read before the step runs, and handed to `keep` when they are there."""
        lost = []
        for kind, pool in self._pools.items():
            for name, page in pool.evicted:
                if self.tiers and not any(tier.contains((kind, name)) for tier in self.tiers):
                    lost.append(((kind, name), page))
            pool.evicted.clear()
        self._leaving.update(key for key, _ in lost)
        return lost

    def keep(self, key: Key, payload: bytes) -> None:
        """Store a page that leaves the device, unless it was forgotten on its way."""
        if key in self._leaving and self.tiers:
            self.tiers[0].put(key, payload)
        self._leaving.discard(key)

    def completed(self) -> list[tuple[Key, int]]:
        """(key, page) of the pages completed since the last call that the durable tier lacks; to
        be read and handed to `persist` before the next step is planned."""
        found, self._complete = self._complete, []
        return [
            (key, page)
            for key, page in found
            # A page given back may have been taken and written again since.
            if self._pools[key[0]].find(key[1]) == page and not self.durable.contains(key)
        ]

    def persist(self, key: Key, payload: bytes) -> None:
        """Store a page for good."""
        self.durable.put(key, payload)
