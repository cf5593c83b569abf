"""The block of tool calls that a model writes: read, and written again in its plainest form.

The text of a block comes in, its control token as a mark; calls with their arguments go out, and
the text that is no call, so that nothing is lost. It must not know requests or shapes of answers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Argument", "Call", "Markup"]


@dataclass(frozen=True, slots=True)
class Argument:
    """text: as the model wrote it. typed: JSON by the model's word; valid: and it is JSON. whole:
    False where the answer was cut in it."""

    name: str
    text: str
    typed: bool
    valid: bool = True
    whole: bool = True

    @property
    def value(self) -> object:
        """A text that should have been JSON and is not stays a text."""
        return json.loads(self.text) if self.typed and self.valid else self.text


@dataclass(frozen=True, slots=True)
class Call:
    """A call; whole: False where the answer was cut in it, its last argument perhaps too."""

    name: str
    arguments: tuple[Argument, ...]
    whole: bool = True

    @property
    def values(self) -> dict[str, object]:
        return {argument.name: argument.value for argument in self.arguments}


class Markup:
    """The markup of tool calls around a control token that is written as `mark`."""

    def __init__(self, mark: str) -> None:
        token = re.escape(mark)
        self.open, self.close = f"<{mark} calls>", f"</{mark} calls>"
        self._invoke = re.compile(rf'\s*<{token} invoke name="([^"\n]*)">')
        begin = rf'\s*<{token} parameter name="([^"\n]*)" string="(true|false)">'
        value = rf"((?:(?!{token}).)*?)"
        self._parameter = re.compile(rf"{begin}{value}</{token} parameter>", re.DOTALL)
        # A closing tag that was cut is no text of the value.
        self._half = re.compile(rf"{begin}{value}(?:<|</|</{token}[^<>]*)?\Z", re.DOTALL)
        self._end = re.compile(rf"\s*</{token} invoke>")
        self._tag = re.compile(rf"\s*(?:</?{token}[^<>]*>?\s*|</?)?\Z")
        self._mark = mark

    def read(self, block: str, cut: bool) -> tuple[list[Call], str]:
        """Calls of a block, and what in it is no call.

        block: what follows `open`, up to `close` or the end of the answer. cut: it ends where the
        answer was cut, so its last call may be half.
        """
        calls, at = [], 0
        while header := self._invoke.match(block, at):
            arguments, inner = self._arguments(block, header.end())
            if end := self._end.match(block, inner):
                calls.append(Call(header[1], tuple(arguments)))
                at = end.end()
                continue
            half = self._half.match(block, inner) if cut else None
            if half:
                arguments.append(_argument(half, whole=False))
            elif not (cut and self._tag.match(block, inner)):
                break
            return [*calls, Call(header[1], tuple(arguments), whole=False)], ""
        rest = block[at:].removesuffix(self.close)
        if not rest.strip() or ((cut or calls) and self._tag.match(rest)):
            rest = ""  # markup without anything in it
        return calls, rest

    def _arguments(self, block: str, at: int) -> tuple[list[Argument], int]:
        arguments = []
        while found := self._parameter.match(block, at):
            arguments.append(_argument(found))
            at = found.end()
        return arguments, at

    def write(self, calls: Sequence[Call]) -> str:
        """The block of `calls`, the way the model was taught to write it."""
        return "".join(self._written(calls)) if calls else ""

    def _written(self, calls: Sequence[Call]) -> Iterator[str]:
        mark = self._mark
        yield f"\n\n{self.open}\n"
        for call in calls:
            yield f'<{mark} invoke name="{call.name}">\n'
            for argument in call.arguments:
                typed = argument.typed and (argument.valid or not argument.whole)
                string = "false" if typed else "true"
                yield f'<{mark} parameter name="{argument.name}" string="{string}">{argument.text}'
                if argument.whole:
                    yield f"</{mark} parameter>\n"
            if not call.whole:
                return
            yield f"</{mark} invoke>\n"
        yield self.close


def _argument(found: re.Match[str], whole: bool = True) -> Argument:
    name, string, text = found.groups()
    typed = string == "false"
    return Argument(name, text, typed, not typed or _is_json(text), whole)


def _is_json(text: str) -> bool:
    """A number beyond those of a double is none: it could not be written again."""
    try:
        json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> object:
    raise ValueError(word)


def _finite(digits: str) -> object:
    return value if math.isfinite(value := float(digits)) else _refuse(digits)
