"""Where a prompt comes from: argument, -p, -f or piped stdin, exactly one of them.

Comes in: what the user gave and stdin. Goes out: the text, unchanged, or a `UsageError`. It must
not know models or chat roles; a text prompt is continued as it stands.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError

__all__ = ["prompts_of", "read_jsonl", "read_prompt"]

_WAIT_S = 1.0
_SHOWN = 10  # bad lines of a file of prompts that are listed


def read_prompt(
    argument: str | None, option: str | None, file: str | None, say: Callable[[str], None]
) -> str:
    """The prompt text; piped stdin is appended below a positional prompt."""
    given = {"argument": argument, "-p": option, "-f": file}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(
            "prompt-source", f"the prompt was given twice ({named[0]} and {named[1]})",
            hint="deepinfer run --help",
        )  # fmt: skip
    if option is not None:
        return option
    if file is not None and file != "-":
        return _read_file(file)
    piped = argument == "-" or file == "-" or _is_piped()
    below = _read_stdin(say if argument not in (None, "-") else None) if piped else ""
    if argument is not None and argument != "-":
        return f"{argument}\n{below}" if below else argument
    if not below:
        where = "stdin is empty" if piped else "stdin is a terminal"
        if not piped and not _is_terminal():
            where = "nothing was piped in"
        raise UsageError(
            "prompt-source", f"nothing to do: no prompt, and {where}",
            hint='deepinfer run "Hello", or pipe text in',
        )  # fmt: skip
    return below


def read_jsonl(file: str, flag: str) -> tuple[str, ...]:
    """The prompts of a file of {"prompt": TEXT} lines that a flag names; - is stdin."""
    return prompts_of(_read_stdin(None) if file == "-" else _read_file(file, flag), file)


def prompts_of(whole: str, file: str) -> tuple[str, ...]:
    """The prompts of {"prompt": TEXT} lines. Raises UsageError that lists the bad ones."""
    prompts: list[str] = []
    bad: list[str] = []
    for number, line in enumerate(whole.split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(line))
            except (ValueError, RecursionError) as problem:
                bad.append(f"line {number}: {problem}")
    if bad or not prompts:
        raise UsageError(
            "prompts-invalid", f"{file} has {len(bad):,} bad lines of {len(bad) + len(prompts):,}"
            if bad else f"{file} has no prompts",
            [*bad[:_SHOWN], *([f"and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else [])],
            'one {"prompt": "TEXT"} a line',
        )  # fmt: skip
    return tuple(prompts)


def _prompt(line: str) -> str:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as bad:
        raise ValueError(f"not JSON (column {bad.colno}: {bad.msg})") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('no text under "prompt"')
    return prompt


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_piped() -> bool:
    """True for a pipe, a socket or a file; False for a terminal, /dev/null or no stdin at all."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin(say: Callable[[str], None] | None) -> str:
    if say is not None and not select.select([sys.stdin.fileno()], [], [], _WAIT_S)[0]:
        # A pipe that nobody writes to would otherwise look like a hanging model.
        say("reading stdin, to put it below the prompt; -p TEXT does not read stdin")
    return _decoded(sys.stdin.buffer.read(), "stdin")


def _read_file(name: str, flag: str = "-f") -> str:
    try:
        return _decoded(Path(name).read_bytes(), name)
    except OSError as problem:
        raise UsageError(
            "prompt-file", f"{name} cannot be read",
            [problem.strerror or str(problem), f"from {flag}"],
            hint=f"{flag} FILE, or {flag} - for stdin",
        ) from None  # fmt: skip


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise UsageError(
            "prompt-not-text", f"{name} is not UTF-8 text", [f"byte {bad.start}: {bad.reason}"],
            hint=f"iconv -t utf-8 {name}",
        ) from None  # fmt: skip
