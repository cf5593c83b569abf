"""Sampling options, shared by every command that generates text.

Comes in: nothing. Goes out: annotated option types, and `sampling` which makes SamplingParams of
what was typed, `structured` what an answer must look like. Defaults live in SamplingParams; the
texts here repeat them for readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.errors import UsageError

if TYPE_CHECKING:
    from deepinfer.core.request import SamplingParams, Structured

__all__ = [
    "DEFAULT_TOKENS",
    "Grammar",
    "Logprobs",
    "MaxTokens",
    "MinP",
    "Regex",
    "Schema",
    "Seed",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "chosen",
    "sampling",
    "structured",
]


DEFAULT_TOKENS = 256  # as SamplingParams has it


def _option(*names: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        rich_help_panel="Sampling",
        show_default=False,
        **more,
    )


MaxTokens = Annotated[
    int | None,
    _option("-n", "--max-tokens", metavar="N", min=0, help="Most tokens to make. Default: 256."),
]
Temperature = Annotated[
    float | None,
    _option("-t", "--temperature", metavar="X", min=0.0, help="0 = greedy. Default: 1.0."),
]
TopP = Annotated[
    float | None,
    _option(
        "--top-p",
        metavar="X",
        min=0.0,
        max=1.0,
        help="Keep the likeliest tokens up to this mass. Default: 1.0.",
    ),
]
TopK = Annotated[
    int | None,
    _option("--top-k", metavar="K", min=0, help="The K likeliest only; 0 = off. Default: 0."),
]
MinP = Annotated[
    float | None,
    _option(
        "--min-p",
        metavar="X",
        min=0.0,
        max=1.0,
        hidden=True,
        help="Drop tokens below this share of the best. Default: 0.0.",
    ),
]
Seed = Annotated[
    int | None,
    _option(
        "--seed",
        metavar="N",
        min=0,
        help="Repeat an answer. Default: random.",
    ),
]
Stop = Annotated[
    list[str] | None,
    _option("--stop", metavar="TEXT", help="End before TEXT, such as [/INST]; repeatable."),
]
Logprobs = Annotated[
    int | None,
    _option(
        "--logprobs",
        metavar="K",
        min=0,
        hidden=True,
        help="Log-probabilities and K alternatives of each token (with --json).",
    ),
]

Schema = Annotated[
    str | None,
    _option(
        "--schema", metavar="JSON", hidden=True, help="Answer with JSON of this schema (or FILE)."
    ),
]
Regex = Annotated[
    str | None,
    _option("--regex", metavar="REGEX", hidden=True, help="Answer with a text it matches."),
]
Grammar = Annotated[
    str | None,
    _option("--grammar", metavar="FILE", hidden=True, help="Answer by a Lark or GBNF grammar."),
]


def structured(schema: str | None, regex: str | None, grammar: str | None) -> Structured | None:
    """What the answer must look like, if that was typed, read and checked; raises UsageError.

    A schema that begins with a brace is the schema, any other one is its file. A grammar with `::=`
    is GBNF.
    """
    given = {"--schema": schema, "--regex": regex, "--grammar": grammar}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise UsageError(
            "bad-usage", f"{named[0]} cannot be used with {named[1]}", hint="leave one out"
        )
    from deepinfer.core.request import Structured
    from deepinfer.structured.grammar import check

    if schema is not None:
        inline = schema.lstrip().startswith("{")
        made = Structured("json_schema", schema if inline else _read(schema, "--schema"))
    elif grammar is not None:
        source = _read(grammar, "--grammar")
        made = Structured("gbnf" if "::=" in source else "lark", source)
    else:
        made = Structured("regex", regex or "")
    check(made)
    return made


def _read(name: str, flag: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        hint = f"{flag} FILE" + (", or the schema itself in braces" if flag == "--schema" else "")
        raise UsageError(
            "grammar-file", f"{name} cannot be read", [why or str(problem), f"from {flag}"], hint
        ) from None


def sampling(stop: list[str] | None, seed: int | None, **typed: Any) -> SamplingParams:
    """SamplingParams of what was typed; raises UsageError."""
    from deepinfer.core.request import SamplingParams

    return SamplingParams(**chosen(stop, seed, **typed))


def chosen(stop: list[str] | None, seed: int | None, **typed: Any) -> dict[str, Any]:
    """What was typed, by its name in SamplingParams. The seed of one prompt is its own."""
    wanted: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
    if seed is not None:
        wanted["seq_seed"] = seed
    if stop:
        wanted["stop"] = tuple(stop)
    return wanted
