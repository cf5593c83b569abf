"""The one sink of the command line: data on stdout, talk on stderr, one mode per run.

Comes in: text, tables, documents, errors. Goes out: bytes on the two streams, in the mode human,
plain, json or quiet. It must not know commands; model text passes through `text` untouched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from deepinfer.errors import DeepinferError

__all__ = ["Output", "counted"]

_STYLE = {"error": "1;31", "warning": "33", "hint": "36", "dim": "2"}


class Output:
    """Where everything that is printed goes.

    `json_mode` and `quiet` silence talk except warnings (json) and errors (both). `color` is auto,
    always or never; without it no meaning is lost, since colour only repeats a word. `level` is
    the setting `log_level`, once it is known.
    """

    def __init__(
        self,
        *,
        json_mode: bool = False,
        quiet: bool = False,
        color: str = "auto",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = environ or {}
        self.level = "warning"
        self.out, self.err = sys.stdout, sys.stderr
        for stream in (self.out, self.err):
            # A stream that cannot encode a character shows its escape instead of failing.
            if hasattr(stream, "reconfigure") and not _unicode(stream):
                stream.reconfigure(errors="backslashreplace")
        terminal = self.out.isatty()
        self.mode = "json" if json_mode else "quiet" if quiet else "human" if terminal else "plain"
        plain_terminal = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        self.color = color == "always" or (
            color == "auto" and self.err.isatty() and not plain_terminal
        )

    def text(self, piece: str) -> None:
        """Model text, byte for byte, delivered at once."""
        self.out.write(piece)
        self.out.flush()

    def thought(self, piece: str) -> None:
        """Reasoning of the model: dim on stderr as it comes; silent with --json and -q."""
        if self.mode in ("human", "plain"):
            self.out.flush()
            self.err.write(self._styled(piece, "dim"))
            self.err.flush()

    def data(self, line: str) -> None:
        """One line of data."""
        self.out.write(line + "\n")

    def document(self, document: Mapping[str, Any]) -> None:
        """One JSON document on one line; non-finite numbers become null."""
        ascii_only = not _unicode(self.out)
        clean = _finite(document)
        self.data(json.dumps(clean, ensure_ascii=ascii_only, allow_nan=False, default=str))

    def say(self, line: str, style: str = "") -> None:
        """Talk: status and footers. Silent with --json and -q."""
        if self.mode in ("human", "plain"):
            self._write_err(self._styled(_one_line(self._ascii(line)), style))

    def note(self, line: str, style: str = "") -> None:
        """What the user should know, such as which model runs: shown unless -q."""
        if self.mode != "quiet":
            self._write_err(self._styled(_one_line(line), style))

    def info(self, line: str) -> None:
        """What only --log-level info shows."""
        if self.level in ("info", "debug"):
            self.note(line, "dim")

    def warn(self, line: str) -> None:
        """A warning: one line, shown unless -q or --log-level error."""
        if self.mode != "quiet" and self.level != "error":
            self._write_err(self._styled("warning:", "warning") + " " + _one_line(line))

    def error(self, error: DeepinferError, **beside: Any) -> None:
        """An error: a document on stdout with --json, else what, facts and hint on stderr.

        `beside` are keys that stand beside `error` in the document.
        """
        if self.mode == "json":
            self.document({**beside, "error": error.as_json()})
            return
        lines = [self._styled("error:", "error") + " " + _one_line(error.message)]
        lines += ["  " + _one_line(fact) for fact in error.facts]
        if error.hint:
            lines += ["", self._styled("hint:", "hint") + " " + _one_line(error.hint)]
        self._write_err("\n".join(lines))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """A table: drawn on a terminal, tab-separated with a header line anywhere else."""
        if self.mode == "human":
            self._draw(headers, rows, title)
            return
        for row in [headers, *rows]:
            self.data("\t".join(_one_line(cell).replace("\t", " ") for cell in row))

    def close_line(self) -> None:
        """End an unfinished line on a terminal; a pipe gets nothing added."""
        if self.mode == "human":
            self.text("\n")

    def _draw(self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title or None, title_justify="left", highlight=False)
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_one_line(cell)) for cell in row))
        console = Console(
            file=self.out, color_system="auto" if self.color else None, highlight=False
        )
        console.print(table)

    def _write_err(self, text: str) -> None:
        self.out.flush()
        self.err.write(text + "\n")
        self.err.flush()

    def _styled(self, word: str, style: str) -> str:
        return f"\x1b[{_STYLE[style]}m{word}\x1b[0m" if style and self.color else word

    def _ascii(self, line: str) -> str:
        return line if _unicode(self.err) else line.replace(" \u00b7 ", " | ")


def _unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") in ("utf8",)


def _one_line(text: str) -> str:
    """Control characters as escapes: a name from outside must not steer the terminal."""
    return "".join(c if c.isprintable() or c == " " else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def counted(number: int, word: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")
