"""Compiles grammars beside the engine's loop: worker threads, a time limit, a cache.

`Structured` records come in by `ask`; a `Pending` goes out at once and has a grammar or an error
some time later. It must not know requests, steps or tokens of an answer.

The library gives the interpreter free while it builds, and nothing can interrupt it: a worker that
is late is left to itself, the library's own limits end it, and another one takes its place. One
that comes back from native code into an interpreter that is gone takes the process down (SIGSEGV):
whoever leaves waits for it (`Compiler.close`), or leaves without Python's clean-up (`at_work`).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.core.request import Structured
from deepinfer.errors import DeepinferError, InternalError, UsageError
from deepinfer.structured import grammar
from deepinfer.structured.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from deepinfer.tokenizer.tokenizer import Tokenizer

WORKERS = 2
_PATIENCE = 2.0  # seconds for workers to come back, at the end
_CACHED = 256  # grammars; one of ordinary size takes some hundred KiB


@dataclass(eq=False)
class Pending:
    """A grammar that is asked for. `askers`: who wants it; `began`: when a worker took it up;
    `ended`: it is there, or `problem` says why not."""

    structured: Structured
    askers: int = 0
    began: float | None = None
    ended: bool = False
    problem: DeepinferError | None = None
    _matcher: LLMatcher | None = field(default=None, repr=False)
    _eos_ids: tuple[int, ...] = ()

    def begin(self, after: Sequence[int]) -> Constraint:
        """The constraint of one answer; it holds behind the ids `after`."""
        assert self._matcher is not None
        return Constraint(self._matcher, self._eos_ids, tuple(after))


Make = Callable[[Structured, "LLTokenizer"], "LLMatcher"]


class Compiler:
    """Compiles for one model; equal sources are compiled once.

    timeout: seconds for each, from the moment at which a worker takes it up. make: what compiles.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        timeout: float,
        make: Make = grammar.compiled,
    ) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._timeout, self._make = timeout, make
        self._tokens: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Pending] = OrderedDict()
        self._waiting: deque[Pending] = deque()
        self._busy: list[Pending] = []
        self._workers: list[threading.Thread] = []  # the late ones too
        self._news = threading.Condition()

    def ask(self, structured: Structured) -> Pending:
        """The grammar of this kind and source, from the cache or some time later."""
        key = _key(structured)
        with self._news:
            found = self._cache.pop(key, None)
            if found is None:
                found = Pending(structured, _eos_ids=self._eos_ids)
                self._waiting.append(found)
            found.askers += 1
            self._cache[key] = found
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
            self._tend()
        return found

    def leave(self, pending: Pending) -> None:
        """One who asked has gone: what waits for a worker and has no other asker is dropped."""
        with self._news:
            pending.askers -= 1
            if pending.askers == 0 and pending in self._waiting:
                self._waiting.remove(pending)
                self._forget(pending)

    def close(self, seconds: float = _PATIENCE) -> None:
        """Drop what waits, and give workers this time to come back. Twice is harmless."""
        end = time.monotonic() + seconds
        with self._news:
            for one in self._waiting:
                self._forget(one)
            self._waiting.clear()
            workers = list(self._workers)
        for worker in workers:
            worker.join(max(end - time.monotonic(), 0))

    def tend(self) -> None:
        """Give up what is late, and let workers take up what waits."""
        with self._news:
            self._tend()

    def wait(self, pending: Iterable[Pending], seconds: float) -> None:
        """Until one of them has ended, or for so long."""
        some, end = list(pending), time.monotonic() + seconds
        with self._news:
            while not any(one.ended for one in some) and time.monotonic() < end:
                self._news.wait(0.05)
                self._tend()

    def _tend(self) -> None:
        now = time.monotonic()
        for one in list(self._busy):
            if one.began is not None and now - one.began > self._timeout:
                self._end(one, None, _late(one.structured, self._timeout))
        while self._waiting and len(self._busy) < WORKERS:
            one = self._waiting.popleft()
            one.began = now
            self._busy.append(one)
            # A daemon: what no longer matters does not keep the process.
            worker = threading.Thread(
                target=self._work, args=(one,), name="deepinfer-grammar", daemon=True
            )
            worker.start()
            self._workers = [worker, *(other for other in self._workers if other.is_alive())]
            _with_workers.add(self)

    def _work(self, one: Pending) -> None:
        matcher, problem = None, None
        try:
            matcher = self._make(one.structured, self._vocabulary())
        except DeepinferError as known:
            problem = known
        except BaseException as unknown:  # the library panics where it is wrong itself
            problem = InternalError("grammar-failed", "a grammar could not be compiled",
                                    [f"{type(unknown).__name__}: {unknown}"[:200]])  # fmt: skip
        with self._news:
            self._end(one, matcher, problem)
            self._tend()

    def _end(self, one: Pending, matcher: LLMatcher | None, problem: DeepinferError | None) -> None:
        if one.ended:  # it was given up
            return
        self._busy.remove(one)
        one._matcher, one.problem, one.ended = matcher, problem, True
        self._news.notify_all()

    def _forget(self, one: Pending) -> None:
        key = _key(one.structured)
        if self._cache.get(key) is one:
            del self._cache[key]

    def _vocabulary(self) -> LLTokenizer:
        with self._reading:
            if self._tokens is None:
                self._tokens = grammar.vocabulary(self._tokenizer, self._vocab, self._eos_ids)
            return self._tokens


_with_workers: weakref.WeakSet[Compiler] = weakref.WeakSet()


def at_work() -> bool:
    """Whether workers are in native code, or about to be, wherever in this process."""
    return any(worker.is_alive() for one in list(_with_workers) for worker in one._workers)


@atexit.register
def _close_all() -> None:
    end = time.monotonic() + _PATIENCE
    for one in list(_with_workers):
        one.close(max(end - time.monotonic(), 0))


def _key(structured: Structured) -> tuple[str, str]:
    return structured.kind, structured.source


def _late(structured: Structured, timeout: float) -> UsageError:
    return UsageError(
        "grammar-timeout",
        f"the {grammar.NAMES[structured.kind]} was not compiled in {timeout:g} s",
        [f"{len(structured.source):,} characters"],
        "make it simpler, or raise DEEPINFER_XGRAMMAR_TIMEOUT",
    )
