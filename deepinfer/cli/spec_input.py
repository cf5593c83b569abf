"""What `spec-trace` was asked to run: model, prompts, sampling, and whether a check can hold.

Comes in: the words of the options. Goes out: `Asked`, or an error that names the option. Only a
configuration is read; no weight and no device is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import Chosen
from deepinfer.cli.output import Output
from deepinfer.cli.prompt import prompts_of, read_prompt
from deepinfer.cli.replay_input import read_config
from deepinfer.errors import UsageError
from deepinfer.settings import Settings, for_model, resolve
from deepinfer.settings.values import Value

if TYPE_CHECKING:
    from deepinfer.core.request import SamplingParams

__all__ = ["Asked", "read_asked"]

_PROGRAM = "deepinfer spec-trace"


@dataclass(frozen=True)
class Asked:
    """A checked question. settings: as chosen, to calibrate with raw confidences; effective: with
    the checkpoint's defaults. block: drafts that the checkpoint was trained for."""

    settings: Settings
    effective: Settings
    folder: Path
    name: str
    block: int
    prompts: tuple[str, ...]
    params: SamplingParams

    @property
    def plain(self) -> Settings:
        """The same settings without speculation."""
        off = "--check"
        return self.effective.changed(
            {
                "mtp": Value(0, "flag", off),
                "mtp_varlen": Value(False, "flag", off),
                "mtp_threshold": Value(None, "flag", off),
                "mtp_temperature": Value((1.0,), "flag", off),
            }
        )


def read_asked(
    output: Output, chosen: Chosen, environ: Mapping[str, str], params: SamplingParams, *,
    prompt_text: str | None, prompt_file: str | None, check: bool, calibrate: bool,
) -> Asked:  # fmt: skip
    """Check everything that can be checked before the model is loaded; warnings are said once.

    Raises UsageError and CheckpointError.
    """
    from deepinfer.engine.assembly import embedded_model

    settings = resolve(chosen, environ, source="flag")
    if calibrate and not settings.values["mtp_temperature"].chosen:
        # Else the engine reads the file that is to be replaced, which may be a damaged one.
        raw = Value((1.0,), "flag", "--calibrate")
        settings = settings.changed({"mtp_temperature": raw})
    output.level = settings.log_level
    for line in settings.warnings:
        output.warn(line)
    prompts = _prompts(output, prompt_text, prompt_file)
    if settings.model_dir is None:
        output.note("using the embedded model; -m DIR traces another", "dim")
    folder = Path(settings.model_dir or embedded_model())
    if not (folder / "config.json").is_file():
        from deepinfer.checkpoint.layout import open_checkpoint

        # It raises, and says what is wrong with the folder.
        open_checkpoint(folder, settings.origin("model_dir"))
    config = read_config(folder / "config.json")
    effective = for_model(settings, config)
    block = config.dspark_block_size if config.num_nextn_predict_layers else 0
    if not effective.mtp:
        why = f"from {effective.origin('mtp')}" if block else "this checkpoint has no draft head"
        raise UsageError(
            "nothing-drafted", "there is nothing to trace: drafting is off", [why],
            "--mtp 5" if block else "-m DIR of a checkpoint with draft stages",
        )  # fmt: skip
    if check and params.temperature > 0 and effective.verify == "rejection":
        raise UsageError(
            "check-needs-coupled",
            f"--check cannot be used with --verify rejection at temperature {params.temperature:g}",
            [f"verify from {effective.origin('verify')}",
             "rejection sampling keeps the distribution of the answers, not their ids"],
            "--check -t 0, or --check --verify coupled",
        )  # fmt: skip
    if calibrate and effective.mtp < block:
        raise UsageError(
            "calibration-needs-block", f"--calibrate needs drafts of {block}, not {effective.mtp}",
            [f"draft length from {effective.origin('mtp')}"], f"--mtp {block}",
        )  # fmt: skip
    name = folder.resolve().name if settings.model_dir else "embedded"
    return Asked(settings, effective, folder, name, block, prompts, params)


def _prompts(output: Output, text: str | None, file: str | None) -> tuple[str, ...]:
    if (text is None) == (file is None):
        message = "nothing to do: no prompt and no trace" if text is None else \
            "the prompt was given twice (-p and -f)"  # fmt: skip
        raise UsageError(
            "prompt-source", message,
            hint=f'{_PROGRAM} -p "def fibonacci(n):", or {_PROGRAM} --from TRACE.jsonl',
        )  # fmt: skip
    whole = read_prompt(None, text, file, output.note)
    if not whole:
        raise UsageError(
            "prompt-empty", "the prompt is empty", ["from -p" if file is None else "from -f"],
            f'{_PROGRAM} -p "def fibonacci(n):"',
        )  # fmt: skip
    if file is None or not file.endswith(".jsonl"):
        return (whole,)
    return prompts_of(whole, file)
