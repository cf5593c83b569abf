"""`deepinfer run --dry-run`: everything a run checks and the memory it would take; nothing runs.

Comes in: settings, prompt, sampling parameters. Goes out: the plan on stdout, or the error that the
real run would end with. No weight is read and no device is touched.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.errors import CapacityError, UsageError
from deepinfer.settings import Settings, for_device, for_model

if TYPE_CHECKING:
    from deepinfer.core.request import SamplingParams

__all__ = ["print_plan"]

_UNITS = ("bytes", "KiB", "MiB", "GiB")


def print_plan(output: Output, settings: Settings, text: str, params: SamplingParams) -> int:
    """Print the plan and return 0; raises what the run would raise before its first step."""
    from deepinfer.checkpoint.layout import open_checkpoint
    from deepinfer.device.detect import find, pick
    from deepinfer.engine.assembly import embedded_model, plan_sizes
    from deepinfer.kvcache.pools import bytes_per_slot, bytes_per_token
    from deepinfer.report.records import document

    folder = settings.model_dir or embedded_model()
    checkpoint = open_checkpoint(folder, settings.origin("model_dir"))
    settings = for_model(settings, checkpoint.config)
    accelerator = pick(settings.accelerator, settings.origin("accelerator"))
    settings = for_device(settings, accelerator)
    found = find()
    memory = found.cpu.free_bytes
    if accelerator != "cpu":
        memory = next((d.memory_bytes for d in found.devices if d.memory_bytes), memory)
    free = (memory or 4 << 30) - checkpoint.weight_bytes
    config = checkpoint.config
    sizes, warnings = plan_sizes(settings, config, free)
    for line in (*checkpoint.warnings, *warnings):
        output.warn(line)
    prompt = _prompt_tokens(checkpoint, text)
    _check_length(prompt, sizes.max_model_len, params)
    state = bytes_per_slot(config) + bytes_per_token(config) * (prompt + params.max_tokens)
    plan: dict[str, Any] = {
        "model": Path(folder).name if settings.model_dir else "embedded",
        "accelerator": accelerator,
        "prompt_tokens": prompt,
        "max_tokens": params.max_tokens,
        "max_model_len": sizes.max_model_len,
        "weight_bytes": checkpoint.weight_bytes,
        "state_bytes": int(state),
        "pool_bytes": int(
            sizes.slots * bytes_per_slot(config)
            + sizes.pages * sizes.page_tokens * bytes_per_token(config)
        ),
        "free_bytes": memory,
    }
    if output.mode == "json":
        head = document("deepinfer.run-plan/1", sys.argv[1:], settings.as_json(), found)
        output.document({**head, "plan": plan})
    else:
        shown = [
            (key.removesuffix("_bytes").replace("_", " "), _number(key, value))
            for key, value in plan.items()
        ]
        output.table(("plan", "value"), shown, "Plan; nothing was run")
    return 0


def _prompt_tokens(checkpoint: Any, text: str) -> int:
    from deepinfer.tokenizer.tokenizer import Tokenizer

    if checkpoint.tokenizer_file is None:
        raise UsageError(
            "no-tokenizer",
            "this checkpoint has no tokenizer and takes token ids only",
            ["no tokenizer.json in its folder"],
            "deepinfer.LLM(model_dir).generate([[1, 2, 3]])",
        )
    return len(Tokenizer(checkpoint.tokenizer_file, checkpoint.config.bos_token_id).encode(text))


def _check_length(prompt: int, limit: int, params: SamplingParams) -> None:
    if prompt > limit or (prompt == limit and params.max_tokens):
        raise CapacityError(
            "prompt-too-long",
            f"the prompt has {prompt:,} tokens, the model takes {limit:,} "
            f"including {params.max_tokens:,} to generate",
            hint="shorten it, or lower --max-tokens",
        )


def _number(key: str, value: Any) -> str:
    if key.endswith("_bytes") and value is not None:
        power = min(max(value.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{value / 1024**power:,.1f} {_UNITS[power]}"
    return f"{value:,}" if isinstance(value, int) else str(value)
