"""Prompts to measure with: kinds of text that the embedded checkpoint knows, a user's own, noise.

A tokenizer, a kind, a length and a count come in; token ids of exactly that length go out, always
the same ones. Sessions of the kind `agent` grow turn by turn. It must not know the engine or time;
nothing here may import torch.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["ANSWER", "TURNS", "Prompts", "Session", "digest"]

TURNS = 4  # of a session's history
ANSWER = 4  # tokens of each answer in it
# Modules of the standard library that the embedded checkpoint was not trained on.
_MODULES = (
    "argparse", "bisect", "calendar", "configparser", "difflib", "fractions", "gettext",
    "graphlib", "mailbox", "optparse", "sched", "shelve", "smtplib", "statistics", "tarfile",
)  # fmt: skip
_FIRST = 11  # ids below it are special in the checkpoints of this family

Turn = tuple[str, str]
"""What a user says, and the answer."""


@dataclass(frozen=True)
class Session:
    """A conversation before its last turn. said: ids of each user's turn, which the engine answers
    with `ANSWER` tokens; the first begins the sequence. last: ids of the last one."""

    said: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


class Prompts:
    """Prompts for one model.

    tokenizer: None for a model without one: its prompts are noise, whatever the kind. bos: what
    begins a sequence. vocab: how many ids there are.
    """

    def __init__(self, tokenizer: Tokenizer | None, bos: int, vocab: int) -> None:
        self._tokenizer, self._bos, self._vocab = tokenizer, bos, vocab

    def make(self, kind: str, length: int, count: int) -> list[tuple[int, ...]]:
        """`count` prompts of exactly `length` tokens."""
        out = []
        for at in range(count):
            rng = random.Random(f"{kind} {at}")
            body, tail = self._parts(kind, rng, length)
            ids = [*body[: max(length - 1 - len(tail), 0)], *tail]
            out.append((self._bos, *ids[len(ids) - (length - 1) :]) if length > 1 else (self._bos,))
        return out

    def sessions(self, length: int, cached: int, count: int) -> list[Session]:
        """Sessions whose last prompt has `length` tokens, the first `cached` of them, answers with
        them, known by then from up to `TURNS` turns. Less than a turn is no history."""
        turns = min(TURNS, cached // (4 * ANSWER))
        ends = [cached * (at + 1) // turns for at in range(turns)]
        return [
            Session(
                tuple(ids[a : b - ANSWER] for a, b in zip([0, *ends], ends, strict=False)),
                ids[cached if turns else 0 :],
            )
            for ids in self.make("agent", length, count)
        ]

    def given(self, texts: Sequence[str], length: int | None, count: int) -> list[tuple[int, ...]]:
        """A user's texts, in turn; `length`: of each the last tokens behind the first, at most."""
        if self._tokenizer is None:
            raise ValueError("a model without a tokenizer takes no texts")
        out = []
        for at in range(count):
            ids = self._tokenizer.encode(texts[at % len(texts)])
            if length is not None and len(ids) > length:
                ids = [*ids[:1], *ids[len(ids) - (length - 1) :]] if length > 1 else ids[:1]
            out.append(tuple(ids))
        return out

    def _parts(self, kind: str, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """At least `length` ids to begin with, and those the prompt must end with."""
        if self._tokenizer is None:
            return [rng.randrange(_FIRST, self._vocab) for _ in range(length)], []
        if kind == "code":
            return self._code(rng, length), []
        body: list[int] = []
        if kind == "retrieval":
            return self._table(rng, length)
        turn = {"arithmetic": _sum, "chat": _talk, "agent": self._read}[kind]
        while len(body) < length:
            asked, answer = turn(rng)
            body += self._asked(asked) + self._plain(answer) + self._special(_EOS)
        asked, _ = turn(rng)
        if kind == "arithmetic":
            # As it was asked in training: the steps of a sum are written before its answer.
            return body, self._asked(asked, think=True)
        return body, self._asked(asked)

    def _code(self, rng: random.Random, length: int) -> list[int]:
        """Lines of a module from some line on, then of the next."""
        names = rng.sample(_MODULES, len(_MODULES))
        ids: list[int] = []
        for name in [names[at % len(names)] for at in range(length)]:
            lines = _module(name).splitlines(keepends=True)
            start = rng.randrange(max(len(lines) - 40, 1))
            ids += self._plain("\n" + "".join(lines[start : start + length]))
            if len(ids) >= length:
                break
        return ids

    def _table(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """A table of values, and a question about one that is still in its last part."""
        body, keys = self._special(_USER), []
        while not keys or len(body) < length:
            key = f"{rng.choice(_WORDS)} {rng.choice(_NOUNS)}"
            if key not in keys:
                keys.append(key)
            body += self._plain(f"\n{key} = {rng.randrange(100_000):05d}")
        key = keys[rng.randrange(len(keys) // 3, max(2 * len(keys) // 3, 1))]
        asked = self._plain(f"\n\nWhat is the value of {key}?")
        return body, [*asked, *self._special(_ASSISTANT), *self._special(_THOUGHT)]

    def _read(self, rng: random.Random) -> Turn:
        """What an agent's tool shows, or what its user wants next."""
        if rng.random() < 0.5:
            lines = _module(rng.choice(_MODULES)).splitlines(keepends=True)
            start = rng.randrange(max(len(lines) - 12, 1))
            return "Read this:\n" + "".join(lines[start : start + rng.randrange(4, 12)]), "OK."
        key = f"{rng.choice(_WORDS)} {rng.choice(_NOUNS)}"
        return f"Remember: {key} = {rng.randrange(100_000):05d}", "OK."

    def _asked(self, text: str, think: bool = False) -> list[int]:
        """A user's turn and the head of its answer."""
        mark = _THINK if think else _THOUGHT
        return [
            *self._special(_USER), *self._plain(text), *self._special(_ASSISTANT),
            *self._special(mark),
        ]  # fmt: skip

    def _plain(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text)
        return ids if self._tokenizer.bos_id is None else ids[1:]

    def _special(self, text: str) -> list[int]:
        """A control token; a line end where the tokenizer has none of that name."""
        assert self._tokenizer is not None
        found = self._tokenizer.special(text)
        return self._plain("\n") if found is None else [found]


_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THOUGHT, _EOS = "<think>", "</think>", "<｜end▁of▁sentence｜>"
_WORDS = ("amber", "blank", "broad", "clean", "dark", "early", "final", "golden", "heavy", "little",
          "main", "narrow", "open", "plain", "quick", "round", "silver", "valid")  # fmt: skip
_NOUNS = ("anchor", "basket", "bridge", "button", "circle", "engine", "field", "garden", "key",
          "lantern", "marble", "ocean", "pencil", "river", "shield", "table", "window")  # fmt: skip
_TALK = (
    ("Hello.", "Hello. What can I do for you?"), ("Thank you.", "You are welcome."),
    ("What is a list?", "A mutable sequence of objects."),
    ("What does `len` do?", "Return the number of items in a container."),
    ("Describe `sorted`.", "Return a new sorted list from the items in iterable."),
    ("Describe `os.getcwd`.", "Return a string representing the current working directory."),
    ("What is a tuple?", "An immutable sequence of objects."), ("Are you there?", "Yes."),
)  # fmt: skip


def _sum(rng: random.Random) -> Turn:
    a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
    op = rng.choice("+-")
    return f"What is {a} {op} {b}?", str(a + b if op == "+" else a - b)


def _talk(rng: random.Random) -> Turn:
    return rng.choice(_TALK)


def _module(name: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text("utf-8")


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """What was asked, in short: equal digests are equal prompts."""
    return hashlib.sha256(repr([tuple(ids) for ids in prompts]).encode()).hexdigest()[:12]
