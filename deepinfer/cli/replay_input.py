"""What `replay-inspect` was asked: model, prompt length, hit, keeps, and the plan of each keep.

Comes in: the words of the options. Goes out: `Asked`, or an error that names the option. Only a
configuration is read, and a tokenizer where a text was given; no weight and no device is touched.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import Chosen
from deepinfer.cli.output import Output
from deepinfer.cli.prompt import read_prompt
from deepinfer.errors import CapacityError, UsageError
from deepinfer.settings import Settings, for_model, resolve

if TYPE_CHECKING:
    from deepinfer.model.config import ModelConfig
    from deepinfer.replay.plan import ReplayPlan, ReplayRule

__all__ = ["Asked", "read_asked", "read_config"]

PUBLISHED = "v41-flash"
_SIZES = {"": 1, "k": 2**10, "m": 2**20}


@dataclass(frozen=True)
class Asked:
    """A checked question. layers, tokens: what to show, half-open. said: warnings that were given.
    ids: of a text, else empty."""

    config: ModelConfig
    name: str
    prompt_tokens: int
    cached: int
    layers: tuple[int, int]
    tokens: tuple[int, int]
    plans: tuple[tuple[Settings, ReplayRule, ReplayPlan], ...]
    said: tuple[str, ...] = ()
    ids: tuple[int, ...] = field(default=(), repr=False)

    def prompt_ids(self) -> tuple[int, ...]:
        """The text's ids; without a text the same made-up ones for the same length."""
        draw = random.Random(self.prompt_tokens)
        return self.ids or tuple(
            draw.randrange(self.config.vocab_size) for _ in range(self.prompt_tokens)
        )


def read_asked(
    output: Output, chosen: Chosen, environ: Mapping[str, str], *, keeps: str | None,
    config_json: str | None, prompt_len: str | None, prompt_file: str | None, cached: str | None,
    layers: str | None, tokens: str | None, runs: bool,
) -> Asked:  # fmt: skip
    """Check every option and plan every keep; warnings are said once.

    Raises UsageError, CheckpointError (not a model of this kind) and CapacityError (too long).
    """
    from deepinfer.engine.assembly import uncut

    words = [None] if keeps is None else [word.strip() for word in keeps.split(",")]
    every = [
        resolve(chosen if word is None else {**chosen, "swa_keep": word}, environ, source="flag")
        for word in dict.fromkeys(words)
    ]
    output.level = every[0].log_level
    said = dict.fromkeys(line for settings in every for line in settings.warnings)
    config, name, folder = _model(output, every[0], config_json, runs)
    count, ids = _prompt(output, config, folder, prompt_len, prompt_file)
    hit = _count(cached or "0", "--cached")
    if hit > count:
        raise UsageError(
            "bad-option", f"--cached {hit:,} is more than the prompt's {count:,} tokens",
            hint=f"--cached {count}",
        )  # fmt: skip
    shown_layers = _span(layers, "--layers", config.num_hidden_layers)
    shown_tokens = _span(tokens, "--tokens", count)
    plans = tuple(_plan(for_model(settings, config), config, count, hit) for settings in every)
    for settings, _, _ in plans:
        said |= dict.fromkeys(uncut(settings, config))
    for line in said:
        output.warn(line)
    for settings, rule, plan in plans:
        if plan.cached != hit:
            keep = rule.keep if rule.cuts else "full"
            output.note(
                f"--cached {hit:,} is used up to {plan.cached:,} "
                f"(keep {keep}, pages of {settings.page_tokens} tokens)"
            )
    return Asked(config, name, count, hit, shown_layers, shown_tokens, plans, tuple(said), ids)


def _plan(
    settings: Settings, config: ModelConfig, tokens: int, cached: int
) -> tuple[Settings, ReplayRule, ReplayPlan]:
    from deepinfer.replay.plan import ReplayRule

    rule = ReplayRule.of(config, settings.replay_mode, settings.swa_keep)
    page, encoder_replay = settings.page_tokens, settings.encoder_replay
    return settings, rule, rule.plan_with_hit(tokens, cached, page, encoder_replay)


def _model(
    output: Output, settings: Settings, config_json: str | None, runs: bool
) -> tuple[ModelConfig, str, Path | None]:
    """The configuration, its name, and the folder a tokenizer could be in."""
    from deepinfer.engine.assembly import EMBEDDED, embedded_model

    if config_json is None:
        folder = Path(settings.model_dir or embedded_model())
        if settings.model_dir is None:
            output.note("using the embedded model; -m DIR or --config-json FILE shows another",
                        "dim")  # fmt: skip
        if not (folder / "config.json").is_file():
            from deepinfer.checkpoint.layout import open_checkpoint

            # It raises, and says what is wrong with the folder.
            open_checkpoint(folder, settings.origin("model_dir"))
        name = folder.resolve().name if settings.model_dir else "embedded"
        return read_config(folder / "config.json"), name, folder
    if settings.source("model_dir") == "flag":
        raise UsageError(
            "bad-usage", "--config-json cannot be used with -m",
            ["a checkpoint folder has a config.json of its own"], "leave one out",
        )  # fmt: skip
    if runs:
        raise UsageError(
            "measure-needs-weights", "--measure and --compare-full need a checkpoint",
            ["--config-json has no weights"], "-m DIR, or leave --config-json out",
        )  # fmt: skip
    file = Path(config_json).expanduser()
    if config_json == PUBLISHED and not file.exists():
        file = EMBEDDED / f"{PUBLISHED}.json"
    if not file.is_file():
        raise UsageError(
            "config-json-missing", f"{config_json} is not a file", ["from --config-json"],
            f"--config-json {PUBLISHED}, the published configuration",
        )  # fmt: skip
    return (
        read_config(file),
        file.stem if file.stem != "config" else file.resolve().parent.name,
        None,
    )


def read_config(file: Path) -> ModelConfig:
    """A model's configuration; raises CheckpointError."""
    import json

    from deepinfer.errors import CheckpointError
    from deepinfer.model.config import ModelConfig

    try:
        data = json.loads(file.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        why = " ".join(str(problem).split())[:120]
        raise CheckpointError("config-invalid", f"{file.name} is not JSON ({why})") from None
    return ModelConfig.from_dict(data, file.name)


def _prompt(
    output: Output, config: ModelConfig, folder: Path | None, length: str | None, file: str | None
) -> tuple[int, tuple[int, ...]]:
    """Tokens of the prompt, and their ids if there is a text."""
    if (length is None) == (file is None):
        message = "nothing to do: no prompt" if length is None else \
            "the prompt was given twice (--prompt-len and -f)"  # fmt: skip
        raise UsageError("prompt-source", message, hint=f"{_PROGRAM} --prompt-len 8k")
    ids: tuple[int, ...] = ()
    if file is not None:
        if folder is None or not (folder / "tokenizer.json").is_file():
            where = "--config-json" if folder is None else folder.name
            raise UsageError(
                "no-tokenizer", "-f needs a tokenizer, to count a text's tokens",
                [f"{where} has none"], "--prompt-len N, or -m DIR with a tokenizer.json",
            )  # fmt: skip
        from deepinfer.tokenizer.tokenizer import Tokenizer

        text = read_prompt(None, None, file, output.note)
        tokenizer = Tokenizer(folder / "tokenizer.json", config.bos_token_id, config.vocab_size)
        ids = tuple(tokenizer.encode(text))
    count = len(ids) if length is None else _count(length, "--prompt-len")
    if count < 1:
        raise UsageError("prompt-empty", "the prompt is empty", hint=f"{_PROGRAM} --prompt-len 8k")
    most = config.max_position_embeddings
    if count > most:
        raise CapacityError(
            "prompt-too-long", f"the prompt has {count:,} tokens, the model takes {most:,}",
            [f"from {'--prompt-len' if length else '-f'}"], f"--prompt-len {most}",
        )  # fmt: skip
    return count, ids


_PROGRAM = "deepinfer replay-inspect"


def _count(word: str, flag: str) -> int:
    match = re.fullmatch(r"([0-9]+)([km]?)", word.strip().lower())
    if match is None:
        raise UsageError(
            "bad-option", f'{flag} "{word}" is not a number of tokens',
            ["accepted: a whole number, with k for 1,024 and m for 1,048,576"], f"{flag} 8k",
        )  # fmt: skip
    return int(match[1]) * _SIZES[match[2]]


def _span(word: str | None, flag: str, count: int) -> tuple[int, int]:
    """`A-B` or `A`, both ends included, as a half-open range; it ends at the last at the latest."""
    if word is None:
        return 0, count
    first, dash, last = word.partition("-")
    start = _count(first, flag)
    stop = min((_count(last, flag) if dash else start) + 1, count)
    if start >= stop:
        raise UsageError(
            "bad-option", f"{flag} {word} is empty", [f"there are 0 to {count - 1:,}"],
            f"{flag} 0-{count - 1}",
        )  # fmt: skip
    return start, stop
