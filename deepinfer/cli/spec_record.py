"""Running a model for `spec-trace`: the trace, the proof that drafts changed nothing, calibration.

Comes in: what was asked. Goes out: a `Trace`, or the calibration file. The engine is loaded here
and nowhere else in this command; it must not know how a trace is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.output import Output
from deepinfer.cli.spec_input import Asked
from deepinfer.speculative import tracefile
from deepinfer.speculative.trace import Trace, lines

if TYPE_CHECKING:
    from deepinfer.core.request import Completion
    from deepinfer.speculative.acceptance import Calibration
    from deepinfer.speculative.schedule import DraftRules

__all__ = ["traced", "write_calibration"]


def traced(output: Output, asked: Asked, check: bool) -> Trace:
    """Run the prompts with drafts; check: and without, and compare the ids.

    Raises the error of the first prompt that failed. What the check found is in the header.
    """
    import deepinfer

    several = f"{len(asked.prompts):,} prompts" if len(asked.prompts) > 1 else "the prompt"
    output.say(f"tracing {several}", "dim")
    warn = _unsaid(output, asked)
    llm = deepinfer.LLM.from_settings(asked.settings, on_warning=warn)  # type: ignore[attr-defined]
    try:
        rules = llm.parts.drafting
        results, steps = llm.trace(list(asked.prompts), asked.params)
    finally:
        llm.close()
    _raise_first(results)
    header, spell = _header(asked, rules, results)
    answers = [(result.usage.prompt_tokens, result.token_ids) for result in results]
    found, texts = lines(steps, answers, spell)
    header["lines"] = len(found)
    for sequence, text in zip(header["sequences"], texts, strict=True):
        sequence["token_text"] = text
    if check:
        header |= _checked(output, asked, results, spell)
    return Trace(header, found)


def write_calibration(found: Calibration, path: Path) -> dict[str, Any]:
    """Write the temperatures where the engine looks for them; returns the document.

    Raises OSError.
    """
    from deepinfer.speculative import temperatures

    before, after = found.ece
    document = {
        "schema": temperatures.SCHEMA,
        "temperatures": list(found.temperatures),
        "samples": sum(found.counts),
        "ece": {"before": before, "after": after},
    }
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document) + "\n", encoding="utf-8")
    part.replace(path)
    return document


def _header(
    asked: Asked, rules: DraftRules, results: Sequence[Completion]
) -> tuple[dict[str, Any], Callable[[int], bytes]]:
    """The first line of the file without the texts of tokens, and what spells tokens."""
    from deepinfer.device.detect import find
    from deepinfer.report.records import document
    from deepinfer.tokenizer.tokenizer import Tokenizer

    spell: Callable[[int], bytes] = _nothing
    if (asked.folder / "tokenizer.json").is_file():
        spell = Tokenizer(asked.folder / "tokenizer.json", None).token_bytes
    params = asked.params
    speculation = {
        "mtp": rules.length,
        "varlen": rules.varlen,
        "verify": rules.verify,
        "temperatures": list(rules.temperatures),
    }
    if rules.threshold is not None:
        speculation["threshold"] = rules.threshold
    sampling = {
        name: getattr(params, name)
        for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    }
    sequences = [
        {
            "seq": seq,
            "prompt": prompt,
            "prompt_tokens": result.usage.prompt_tokens,
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": str(result.finish_reason),
            "seed": result.seed,
        }
        for seq, (prompt, result) in enumerate(zip(asked.prompts, results, strict=True))
    ]
    header = {
        **document(tracefile.SCHEMA, sys.argv[1:], results[0].settings, find()),
        "model": {"name": asked.name, "block": asked.block},
        "speculation": speculation,
        "sampling": sampling,
        "sequences": sequences,
    }
    return header, spell


def _checked(
    output: Output, asked: Asked, results: Sequence[Completion], spell: Callable[[int], bytes]
) -> dict[str, Any]:
    """`lossless`, and the first `difference` to the same prompts and seeds without drafts."""
    import deepinfer

    output.say("and again without speculation", "dim")
    params = [replace(asked.params, seed=None, seq_seed=result.seed) for result in results]
    warn = _unsaid(output, asked)
    llm = deepinfer.LLM.from_settings(asked.plain, on_warning=warn)  # type: ignore[attr-defined]
    try:
        plain = llm.generate(list(asked.prompts), params)
    finally:
        llm.close()
    _raise_first(plain)
    for seq, (result, other) in enumerate(zip(results, plain, strict=True)):
        if result.token_ids != other.token_ids:
            return {"lossless": False, "difference": _difference(seq, result, other, spell)}
    return {"lossless": True}


def _difference(
    seq: int, result: Completion, other: Completion, spell: Callable[[int], bytes]
) -> dict[str, Any]:
    """Where two answers part: the ids there, absent behind the end of the shorter one."""
    pairs = zip(result.token_ids, other.token_ids, strict=False)
    same = min(len(result.token_ids), len(other.token_ids))
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), same)
    out: dict[str, Any] = {"seq": seq, "token": at}
    for name, ids in (("with_drafts", result.token_ids), ("without", other.token_ids)):
        if at < len(ids):
            text = spell(ids[at]).decode("utf-8", "replace")
            out[name] = {"token_id": ids[at], "text": text}
    return out


def _raise_first(results: Sequence[Completion]) -> None:
    for at, result in enumerate(results):
        if result.error is not None:
            error = result.error.raised()
            if len(results) > 1:
                error.facts = (*error.facts, f"prompt {at + 1} of {len(results)}")
            raise error


def _unsaid(output: Output, asked: Asked) -> Callable[[str], None]:
    """Warnings of the engine, without those that were given when the question was read."""

    def warn(line: str) -> None:
        if line not in asked.settings.warnings:
            output.warn(line)

    return warn


def _nothing(token: int) -> bytes:
    return b""
