"""Sampling options, shared by every command that generates text.

Comes in: nothing. Goes out: annotated option types, and `sampling` which makes SamplingParams of
what was typed. Defaults live in SamplingParams; the texts here repeat them for readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepinfer.core.request import SamplingParams

__all__ = [
    "Logprobs",
    "MaxTokens",
    "MinP",
    "Seed",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "sampling",
]


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


def sampling(stop: list[str] | None, seed: int | None, **typed: float | None) -> SamplingParams:
    """SamplingParams of what was typed; raises UsageError. The seed of one prompt is its own."""
    from deepinfer.core.request import SamplingParams

    wanted: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
    if seed is not None:
        wanted["seq_seed"] = seed
    if stop:
        wanted["stop"] = tuple(stop)
    return SamplingParams(**wanted)
