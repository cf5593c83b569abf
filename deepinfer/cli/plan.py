"""`deepinfer run --dry-run`: everything a run checks and the memory it would take; nothing runs.

Comes in: settings, prompt, sampling parameters. Goes out: the plan on stdout, or the error that the
real run would end with, by the engine's own checks. No weight is read and no device is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.settings import Settings, for_device, for_model

if TYPE_CHECKING:
    from deepinfer.checkpoint.layout import Checkpoint
    from deepinfer.core.request import Request, SamplingParams
    from deepinfer.engine.assembly import Sizes
    from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["print_plan"]

_UNITS = ("bytes", "KiB", "MiB", "GiB")


def print_plan(
    output: Output, settings: Settings, text: str | Sequence[int], params: SamplingParams
) -> int:
    """Print the plan and return 0; raises what the run would raise before its first step."""
    from deepinfer.checkpoint.layout import open_checkpoint
    from deepinfer.device.detect import TORCH_DEVICE, find, pick
    from deepinfer.engine.assembly import (
        embedded_model,
        plan_sizes,
        plan_weights,
        slot_size,
        uncut,
    )  # fmt: skip
    from deepinfer.engine.compiled import open_compiled
    from deepinfer.kvcache.pools import bytes_per_token, bytes_per_window_page
    from deepinfer.ops import registry
    from deepinfer.replay import ReplayRule
    from deepinfer.report.records import document
    from deepinfer.tokenizer.tokenizer import Tokenizer

    folder = settings.model_dir or embedded_model()
    checkpoint = open_checkpoint(folder, settings.origin("model_dir"))
    settings = for_model(settings, checkpoint.config)
    accelerator = pick(settings.accelerator, settings.origin("accelerator"))
    device = TORCH_DEVICE[accelerator]
    # Both raise for an op, a back end or a level that is not there.
    compiled = open_compiled(settings, device)
    overrides = [f"{op}={name}" for op, name in settings.backend.items()]
    order_dependent = registry.order_dependent(device, overrides, compiled.libraries)
    settings = for_device(settings, accelerator, order_dependent)
    config = checkpoint.config
    tokenizer = None
    if checkpoint.tokenizer_file:
        tokenizer = Tokenizer(checkpoint.tokenizer_file, config.bos_token_id, config.vocab_size)
    found = find()
    memory = found.cpu.free_bytes
    if accelerator != "cpu":
        memory = next((d.memory_bytes for d in found.devices if d.memory_bytes), memory)
    packed = registry.packed(device, overrides, compiled.libraries)
    free, _ = plan_weights(checkpoint, memory or 4 << 30, settings.mtp > 0, packed)
    sizes, warnings = plan_sizes(settings, config, free)
    for line in (*checkpoint.warnings, *compiled.warnings, *warnings, *uncut(settings, config)):
        output.warn(line)
    request = _request(checkpoint, tokenizer, sizes, text, params)
    rule = ReplayRule.of(config, settings.replay_mode, settings.swa_keep)
    window_page = bytes_per_window_page(config, sizes.page_tokens, rule.stateful)
    slot_bytes = slot_size(settings, config)
    state = slot_bytes + bytes_per_token(config) * request.need
    plan: dict[str, Any] = {
        "model": Path(folder).name if settings.model_dir else "embedded",
        "accelerator": accelerator,
        "prompt_tokens": len(request.prompt_ids),
        "max_tokens": params.max_tokens,
        "max_model_len": sizes.max_model_len,
        "weight_bytes": checkpoint.weight_bytes,
        "state_bytes": int(state),
        "pool_bytes": int(
            sizes.slots * slot_bytes
            + sizes.pages * sizes.page_tokens * bytes_per_token(config)
            + sizes.window_pages * window_page
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


def _request(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    sizes: Sizes,
    text: str | Sequence[int],
    params: SamplingParams,
) -> Request:
    """What the engine would make of the prompt; raises what it would refuse it with."""
    from deepinfer.engine.intake import Intake
    from deepinfer.kvcache.blocks import BlockAllocator

    config = checkpoint.config
    blocks = BlockAllocator(sizes.pages, sizes.page_tokens)
    eos_ids = (config.eos_token_id,)
    intake = Intake(tokenizer, config.vocab_size, eos_ids, sizes.max_model_len, blocks)
    asked = intake.read(text, params)[0]
    if asked.problem:
        raise asked.problem
    return asked.request


def _number(key: str, value: Any) -> str:
    if key.endswith("_bytes") and value is not None:
        power = min(max(value.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{value / 1024**power:,.1f} {_UNITS[power]}"
    return f"{value:,}" if isinstance(value, int) else str(value)
