"""`deepinfer run`: one prompt, a conversation or a batch in, answers out.

Comes in: parsed options. Goes out: streamed text or one JSON object on stdout, talk on stderr. It
calls `deepinfer.LLM` and must not know how tokens are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from deepinfer.cli import batch as batches
from deepinfer.cli import chat as chats
from deepinfer.cli import sampling
from deepinfer.cli.loading import load, open_frontend, prepare
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
- `deepinfer run "What is 12 + 34?" --thinking on`
- `deepinfer run --batch requests.jsonl -o answers.jsonl --resume`
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


@with_settings(*SETTINGS, hidden=("mtp_varlen", "replay_mode"))
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
    messages: chats.Messages = None,
    chat: chats.Chat = False,
    system: chats.System = None,
    thinking: chats.Thinking = None,
    tools: chats.Tools = None,
    batch: batches.Batch = None,
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
    hide_thinking: chats.HideThinking = False,
    out: batches.Out = None,
    resume: batches.Resume = False,
    overwrite: batches.Overwrite = False,
    skip_invalid: batches.SkipInvalid = False,
    fail_fast: batches.FailFast = False,
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
    from deepinfer.core.request import SamplingParams

    typed = sampling.chosen(
        stop, seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        min_p=min_p, logprobs=logprobs, structured=sampling.structured(schema, regex, grammar),
    )  # fmt: skip
    chats.check_thinking(thinking)
    files = batches.Files(batch or "", out, resume, overwrite, skip_invalid, fail_fast)
    if batch is None:
        _no_batch_words(files)
    else:
        given = {"argument": prompt, "-p": prompt_text, "-f": prompt_file,
                 "--messages": messages, "--system": system, "--tools": tools}  # fmt: skip
        _alone("--batch", given)
        if settings.model_dir is None:
            output.note("using the embedded model; -m DIR runs another", "dim")
        SamplingParams(**typed)  # refuses here what it would refuse for each line
        seed = typed.pop("seq_seed", None)  # of a batch each request gets its own from it
        return batches.run(output, settings, _setup(thinking, typed), files, seed, dry_run)
    if messages is not None:
        _alone("--messages", {"argument": prompt, "-p": prompt_text, "-f": prompt_file})
    text = read_prompt(prompt, prompt_text, prompt_file if messages is None else messages,
                       output.note)  # fmt: skip
    talk = None
    if chat or system is not None or thinking or tools is not None or messages is not None:
        body = chats.body_of(text, messages is not None, system, tools)
        if not {"max_tokens", "max_completion_tokens"} & set(body):
            body["max_tokens"] = sampling.DEFAULT_TOKENS
        frontend, _ = open_frontend(settings, _setup(thinking, typed))
        talk = frontend, prepare(frontend, "chat", body)
    params = talk[1].params if talk else SamplingParams(**typed)
    if settings.model_dir is None:
        output.note("using the embedded model; -m DIR runs another", "dim")
    if dry_run:
        from deepinfer.cli.plan import print_plan

        [ids] = talk[0].encode(talk[1]) if talk else [text]
        return print_plan(output, settings, ids, params)

    def start(llm: Any) -> Iterable[Any]:
        return chats.pieces(llm, *talk) if talk else llm.stream(text, params)

    result = _generate(output, settings, start, hide_thinking)
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
        sampled = {"sampling": talk[1].sampled} if talk else {}
        output.document({**head, **result.as_json(), **sampled})
    elif stats or (output.mode == "human" and output.err.isatty()):
        output.say(footer(result), "dim")
    return 0


def _setup(thinking: str | None, typed: dict[str, Any]) -> Any:
    from deepinfer.protocol.convert import Setup

    return Setup(thinking or "off", forced=thinking is not None, sampling=typed)


def _alone(option: str, given: dict[str, str | None]) -> None:
    other = next((name for name, value in given.items() if value is not None), None)
    if other is not None:
        raise UsageError(
            "prompt-source", f"the prompt was given twice ({other} and {option})",
            hint="deepinfer run --help",
        )  # fmt: skip


def _no_batch_words(files: batches.Files) -> None:
    words = {"-o": files.out is not None, "--resume": files.resume,
             "--overwrite": files.overwrite, "--skip-invalid": files.skip_invalid,
             "--fail-fast": files.fail_fast}  # fmt: skip
    for word, given in words.items():
        if given:
            raise UsageError(
                "bad-usage", f"{word} needs --batch", hint="deepinfer run --batch FILE -o FILE"
            )


def _generate(
    output: Output, settings: Settings, start: Callable[[Any], Iterable[Any]], hide_thinking: bool
) -> Any:
    """The finished result; its text is on stdout already, unless the mode is JSON."""
    made, result, ended, thought = [], None, True, False
    llm = load(output, settings)
    try:
        for event in start(llm):
            made.append(event)
            thinking = "" if hide_thinking else getattr(event, "thinking", "")
            if thinking:
                output.thought(thinking)
                thought = True
            if event.text and thought:
                output.thought("\n")
                thought = False
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
    if thought:
        output.thought("\n")
    if not ended:
        output.close_line()
    if result is None:
        raise InternalError("stream-without-result", "the engine ended without a result")
    if output.mode != "json":
        if result.tool_calls and not ended and output.mode != "human":
            output.data("")
        for call in result.tool_calls:
            # A line of JSON a call: what a script hands to the function.
            output.data(json.dumps(call["function"], ensure_ascii=False))
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
