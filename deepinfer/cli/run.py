"""`deepinfer run`: one prompt in, text out.

Comes in: parsed options. Goes out: streamed text or one JSON object on stdout, talk on stderr. It
calls `deepinfer.LLM` and must not know how tokens are made.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Annotated, Any

import typer

from deepinfer.cli import sampling
from deepinfer.cli.options import SWITCH, Chosen, Color, Help, HelpAll, Json, Quiet, with_settings
from deepinfer.cli.output import Output
from deepinfer.cli.prompt import read_prompt
from deepinfer.errors import DeepinferError, InternalError, UsageError
from deepinfer.settings import Settings, registry, resolve

__all__ = ["EXAMPLES", "NAME", "command"]

NAME = "run"
EXAMPLES = """Examples:

- `deepinfer run "def fibonacci(n):" -n 64`
- `deepinfer run -m path/to/checkpoint -f prompt.txt -t 0 --json`
- `git diff | deepinfer run "Summary of this change:" --seed 7 -q`
"""
SETTINGS = (
    "model_dir", "max_model_len", "mtp", "mtp_varlen", "verify", "mtp_threshold", "swa_keep",
    "replay_mode", "max_rollback", "accelerator", "batch_invariant", "backend", "overlap", "dtype",
    "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "kv_cache_tokens", "page_tokens",
    "prefix_cache", "prefix_cache_dir", "prefix_cache_bytes", "encoder_replay", "build_dir",
    "cpu_level", "threads", "log_level", "config", "no_progress",
)  # fmt: skip


def _input(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Input", **more)


def _switch(name: str, help: str) -> Any:
    return typer.Option(name, metavar=SWITCH, help=help, rich_help_panel="Output", hidden=True)


@with_settings(*SETTINGS)
def command(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            rich_help_panel="Input",
            help="Text to continue; - is stdin; a pipe goes below it.",
        ),
    ] = None,
    prompt_text: Annotated[
        str | None,
        _input("-p", "--prompt", metavar="TEXT", help="Text to continue; stdin is not read."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        _input("-f", "--file", metavar="FILE", help="Read the prompt from a file; - is stdin."),
    ] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    logprobs: sampling.Logprobs = None,
    schema: sampling.Schema = None,
    regex: sampling.Regex = None,
    grammar: sampling.Grammar = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    stats: Annotated[
        bool, _switch("--stats", "Footer on stderr also when it is no terminal.")
    ] = False,
    dry_run: Annotated[
        bool, _switch("--dry-run", "Check everything, print the plan, run nothing.")
    ] = False,
    color: Color = "auto",
    help_page: Help = False,
    help_all: HelpAll = False,
    *,
    chosen: Chosen,
) -> int:
    """Continue a text with a DeepSeek-V4.1 checkpoint."""
    if json_mode and quiet:
        raise UsageError("bad-usage", "--json cannot be used with -q", hint="leave one out")
    environ = registry.environment()
    output = Output(json_mode=json_mode, quiet=quiet, color=color, environ=environ)
    settings = resolve(chosen, environ, source="flag")
    output.level = settings.log_level
    for line in settings.warnings:
        output.warn(line)
    text = read_prompt(prompt, prompt_text, prompt_file, output.note)
    params = sampling.sampling(
        stop,
        seed,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        logprobs=logprobs,
        structured=sampling.structured(schema, regex, grammar),
    )
    if settings.model_dir is None:
        output.note("using the embedded model; -m DIR runs another", "dim")
    if dry_run:
        from deepinfer.cli.plan import print_plan

        return print_plan(output, settings, text, params)
    result = _generate(output, settings, text, params)
    if result.error is not None:
        raise result.error.raised()
    if result.complete is False:
        output.warn(
            f"cut after {result.usage.completion_tokens} tokens: the text is not complete; "
            "--max-tokens N allows more"
        )
    if json_mode:
        from deepinfer.device.detect import find
        from deepinfer.report.records import document

        # The engine's settings are the effective ones, checkpoint and device considered.
        head = document("deepinfer.run/1", sys.argv[1:], result.settings, find())
        output.document({**head, **result.as_json()})
    elif stats or (output.mode == "human" and output.err.isatty()):
        output.say(footer(result), "dim")
    return 0


def _generate(output: Output, settings: Settings, text: str, params: Any) -> Any:
    """The finished result; its text is on stdout already, unless the mode is JSON."""
    import deepinfer

    def warn(line: str) -> None:
        if line not in settings.warnings:
            output.warn(line)

    made, result, ended = [], None, True
    started = time.perf_counter()
    # torch makes a million objects that stay: looking through them again and again is 0.4 s.
    gc.disable()
    try:
        llm = deepinfer.LLM.from_settings(settings, on_warning=warn)  # type: ignore[attr-defined]
    finally:
        gc.freeze()
        gc.enable()
    output.info(f"the model was ready after {time.perf_counter() - started:.1f} s")
    try:
        for event in llm.stream(text, params):
            made.append(event)
            if output.mode != "json" and event.text:
                output.text(event.text)
                ended = event.text.endswith("\n")
            result = event.result
    except BaseException as leaving:
        if not ended:
            output.close_line()
        if not isinstance(leaving, Exception):
            ids = [token for event in made for token in event.token_ids]
            stopped = f"stopped after {len(ids)} tokens"
            output.note(stopped)
            if output.mode == "json":
                text = "".join(event.text for event in made)
                why = DeepinferError("interrupted", stopped, hint="the same command starts anew")
                output.error(why, text=text, token_ids=ids)
        raise
    finally:
        llm.close()
    if not ended:
        output.close_line()
    if result is None:
        raise InternalError("stream-without-result", "the engine ended without a result")
    return result


def footer(result: Any) -> str:
    """`128 tokens · first 412 ms · 61.3 tok/s · prompt 912 (0 cached, 0 replayed) · seed 7`."""
    usage, timing = result.usage, result.timing_ms
    parts = [f"{usage.completion_tokens:,} tokens"]
    if timing.ttft is not None:
        parts.append(f"first {timing.ttft:,.0f} ms")
    if timing.total and usage.completion_tokens:
        parts.append(f"{usage.completion_tokens / timing.total * 1000:,.1f} tok/s")
    if result.speculation:
        parts.append(f"accepted {result.speculation['accepted_length']:.2f}/step")
    reused = f"{usage.cached_tokens:,} cached, {usage.replayed_tokens:,} replayed"
    parts.append(f"prompt {usage.prompt_tokens:,} ({reused})")
    parts.append(f"seed {result.seed}")
    return " \u00b7 ".join(parts)
