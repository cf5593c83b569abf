"""What a caller asks for and what comes back: SamplingParams, Request, Completion.

Pure records that travel between the command line, the engine and the sampler; every value is
checked where it enters, so the rooms behind need no second look. Nothing here knows text, pages or
tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar

from deepinfer.errors import DeepinferError, UsageError

SEED_LIMIT = 1 << 64
# Below it, logits divided by the temperature would be infinite: the limit, arg-max, is meant.
COLDEST = 1e-300
_SHOWN = 80  # characters of a refused value in a message


class FinishReason(StrEnum):
    """Why a completion ended.

    stop: end-of-sequence, a stop id or a stop string. length: max_tokens or the context limit.
    error: see `Completion.error`. abort: the caller closed the stream.
    """

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


def _refuse(field: str, got: object, accepted: str) -> UsageError:
    return UsageError(
        "bad-sampling-parameter",
        f"{field}={_shown(got)} is not accepted",
        facts=[f"accepted: {accepted}"],
        hint=f"SamplingParams({field}=…) with {accepted}",
    )


def _shown(got: object) -> str:
    try:
        text = repr(got)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return f"a {type(got).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _whole(field: str, got: object, low: int, high: int | None = None) -> int:
    """`got` as int if it is a whole number in [low, high], else UsageError."""
    accepted = f"a whole number >= {low}" + (f" and < {high}" if high is not None else "")
    # bool is an int in Python; numpy integers have __index__ but are no int
    if isinstance(got, bool) or not hasattr(got, "__index__"):
        raise _refuse(field, got, accepted)
    try:
        value = got.__index__()
    except TypeError:  # an array, or a number in one that is not whole
        raise _refuse(field, got, accepted) from None
    if value < low or (high is not None and value >= high):
        raise _refuse(field, got, accepted)
    return value


def _real(field: str, got: object, low: float, high: float, *, low_open: bool = False) -> float:
    """`got` as float if it is finite and in [low, high] (or (low, high]), else UsageError."""
    accepted = f"a number {'>' if low_open else '>='} {low:g}"
    if low == -math.inf:
        accepted = "a finite number"
    if high != math.inf:
        accepted += f" and <= {high:g}"
    if isinstance(got, bool):
        raise _refuse(field, got, accepted)
    try:
        value = float(got)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _refuse(field, got, accepted) from None
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        raise _refuse(field, got, accepted)
    return value


def _strings(field: str, got: object) -> tuple[str, ...]:
    values = (got,) if isinstance(got, str) else got
    accepted = "a non-empty string, or a list of them"
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise _refuse(field, got, accepted)
    values = tuple(values)
    if not all(isinstance(value, str) and value for value in values):
        raise _refuse(field, got, accepted)
    return values


def _ids(field: str, got: object) -> tuple[int, ...]:
    if got is None:
        return ()
    if isinstance(got, str) or not isinstance(got, Iterable):
        raise _refuse(field, got, "a list of token ids")
    return tuple(_whole(field, value, 0) for value in got)


def _bias(got: object) -> dict[int, float] | None:
    if got is None:
        return None
    accepted = "a mapping of token id to a finite number, or -inf to forbid the token"
    if not isinstance(got, Mapping):
        raise _refuse("logit_bias", got, accepted)
    checked = {}
    for token, value in got.items():
        if value != -math.inf:
            value = _real("logit_bias", value, -math.inf, math.inf)
        checked[_whole("logit_bias", token, 0)] = float(value)
    return checked


@dataclass(frozen=True, slots=True)
class Structured:
    """What an answer must look like.

    kind: one of `KINDS`; source: the text of the schema, expression or grammar. after: ids whose
    appearance in the answer, one behind the other, starts the constraint (the end of thinking);
    (): it holds from the first token on.

    Raises UsageError for a value of the wrong type. Whether the source can be used is known when it
    is compiled.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("json_schema", "regex", "lark", "gbnf")

    kind: str
    source: str
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise _refuse("structured.kind", self.kind, " | ".join(self.KINDS))
        if not isinstance(self.source, str):
            raise _refuse("structured.source", self.source, "the text of a schema or grammar")
        object.__setattr__(self, "after", _ids("structured.after", self.after))

    @classmethod
    def of(cls, got: object) -> Structured:
        """A mapping of a kind to its source, `{"regex": "[a-z]+"}`, perhaps with `after`; a JSON
        schema may be given as the value itself. Raises UsageError for anything else."""
        if isinstance(got, cls):
            return got
        accepted = "a Structured, or a mapping of one kind of " + ", ".join(cls.KINDS)
        if not isinstance(got, Mapping) or set(got) - {*cls.KINDS, "after"}:
            raise _refuse("structured", got, accepted)
        kinds = [kind for kind in cls.KINDS if kind in got]
        if len(kinds) != 1:
            raise _refuse("structured", got, accepted)
        [kind] = kinds
        source = got[kind]
        if kind == "json_schema" and not isinstance(source, str):
            try:
                source = json.dumps(source, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as problem:
                raise _refuse("structured", got, f"a JSON schema; {problem}") from None
        return cls(kind, source, got.get("after", ()))


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens are chosen and when to stop (serving semantics §5).

    max_tokens: most tokens to generate; 0 gives an empty completion with finish reason "length".
    temperature: 0 is argmax, the lowest id on ties; so is what is below 1e-300.
    top_k: 0 is off. top_p in (0, 1]. min_p in [0, 1].
    n: samples per prompt.
    seed: 0 <= seed < 2^64; with several prompts or samples each sequence gets its own seed derived
    from it
        (`deepinfer.sampling.rng.derive_seed`). seq_seed: used as given; one, or a list of n.
        Neither: random.
    stop: strings; the text ends before the first one, its tokens stay in `token_ids`.
    stop_token_ids: ids that end the completion like end-of-sequence, ignore_eos or not; the text
    ends before.
    min_tokens: end-of-sequence and stop ids cannot be chosen, and stop strings do not count, before
    that many.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of prompt and generated
    tokens, > 0.
    logit_bias: token id -> number added to its logit (-inf forbids it).
    logprobs: None, or how many alternatives to report beside the chosen token (0: the chosen one
    alone).
        Values are of the model's own distribution: log-softmax of the logits before bias, penalties
        and temperature. prompt_logprobs: the same for the prompt; the first token has none.
    structured: what the answer must look like (`Structured`), or a mapping of one kind to its
    source, `{"json_schema": {...}}`.

    Raises UsageError naming the field, what was got and what is accepted.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    seq_seed: int | tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        checked = {
            "max_tokens": _whole("max_tokens", self.max_tokens, 0),
            "temperature": _real("temperature", self.temperature, 0, math.inf),
            "top_k": _whole("top_k", self.top_k, 0),
            "top_p": _real("top_p", self.top_p, 0, 1, low_open=True),
            "min_p": _real("min_p", self.min_p, 0, 1),
            "n": _whole("n", self.n, 1),
            "seed": None if self.seed is None else _whole("seed", self.seed, 0, SEED_LIMIT),
            "seq_seed": self._checked_seq_seed(),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2, 2),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, 0, math.inf, low_open=True
            ),
            "logit_bias": _bias(self.logit_bias),
        }
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            checked[name] = None if value is None else _whole(name, value, 0)
        if self.temperature < COLDEST:
            checked["temperature"] = 0.0
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.structured is not None:
            object.__setattr__(self, "structured", Structured.of(self.structured))
            if self.ignore_eos:
                raise _refuse("ignore_eos", True, "False: with `structured` the grammar ends it")

    def _checked_seq_seed(self) -> int | tuple[int, ...] | None:
        got = self.seq_seed
        if got is None:
            return None
        if self.seed is not None:
            raise _refuse("seq_seed", got, f"no seq_seed beside seed={self.seed}: give one of them")
        if isinstance(got, (list, tuple)):
            seeds = tuple(_whole("seq_seed", value, 0, SEED_LIMIT) for value in got)
            if len(seeds) != self.n:
                raise _refuse("seq_seed", got, f"one seed per sample, {self.n}")
            return seeds
        if self.n > 1:
            raise _refuse(
                "seq_seed", got, f"a list of n={self.n} seeds; one seed gives equal samples"
            )
        return _whole("seq_seed", got, 0, SEED_LIMIT)

    @property
    def penalised(self) -> bool:
        """Does the choice depend on which tokens came before?"""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: a prompt, one sample of it.

    index: which prompt of the call; sample: which of its n. max_new: most tokens to generate, the
    context limit included. seed: of this sequence, already derived.
    """

    index: int
    sample: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_new: int

    @property
    def end(self) -> int:
        """Most tokens it ever has, prompt included."""
        return len(self.prompt_ids) + self.max_new

    @property
    def need(self) -> int:
        """Most tokens it ever keeps in memory: the last generated token is never run."""
        return len(self.prompt_ids) + max(self.max_new - 1, 0)


class Record:
    """A record that scripts may read by attribute or, like its JSON, by key."""

    __slots__ = ()

    def __getitem__(self, name: str) -> object:
        if name not in {field.name for field in fields(self)}:  # type: ignore[arg-type]
            raise KeyError(name)
        return getattr(self, name)

    def as_json(self) -> dict[str, object]:
        """Every field that has a value: what is missing is absent."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Problem(Record):
    """Why one request failed while its neighbours went on; JSON keeps code and message."""

    code: str
    message: str
    facts: tuple[str, ...] = ()
    hint: str = ""
    exit_status: int = 70

    @classmethod
    def of(cls, error: DeepinferError) -> Problem:
        return cls(error.code, error.message, error.facts, error.hint, error.exit_status)

    def raised(self) -> DeepinferError:
        """The error again, to be raised."""
        error = DeepinferError(self.code, self.message, self.facts, self.hint)
        error.exit_status = self.exit_status
        return error

    def as_json(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message}


@dataclass(frozen=True, slots=True)
class TokenLogprob(Record):
    """Natural log of a token's probability, and the `top` most likely [id, logprob], best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_json(self) -> dict[str, object]:
        top = [[token, value] for token, value in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top": top}


@dataclass(frozen=True, slots=True)
class Usage(Record):
    """Token counts of one completion.

    prompt_tokens = cached_tokens (reused from memory) + computed_tokens (run here) once the prompt
    is through.
    replayed_tokens: run again to refill windows after a hit. recomputed_tokens: rows run again,
    prompt or answer, because the request had to give its memory up for a while. completion_tokens:
    ids delivered, end-of-sequence included; reasoning_tokens of them lie in the thinking block.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing(Record):
    """Milliseconds since submission: until scheduled, until the first token, until the end."""

    queue: float | None = None
    ttft: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """One answer. The fields are those of `run --json` and a promise to scripts.

    prompt_logprobs: one entry per prompt token, None for the first. seed: of this sequence; as
    `seq_seed` it gives the same answer again. batch_invariant: the promise of serving semantics §6
    was active, and every op of this engine runs on a back end that keeps it. replay: how the prompt
    was prefilled. error: None unless the finish reason is "error"; tokens made before it are kept.
    complete: the text is all that `structured` asked for; False: it was cut before; None: nothing
    was asked for.
    """

    index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing_ms: Timing
    seed: int
    batch_invariant: bool
    settings: Mapping[str, object]
    replay: str = "off"
    thinking: str = ""
    tool_calls: tuple[object, ...] = ()
    speculation: Mapping[str, object] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: Problem | None = None
    complete: bool | None = None

    def as_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "index": self.index,
            "sample": self.sample,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "thinking": self.thinking,
            "tool_calls": list(self.tool_calls),
            "finish_reason": str(self.finish_reason),
            "usage": self.usage.as_json(),
            "timing_ms": self.timing_ms.as_json(),
            "speculation": self.speculation,
            "seed": self.seed,
            "batch_invariant": self.batch_invariant,
            "replay": self.replay,
            "error": self.error.as_json() if self.error else None,
            "settings": dict(self.settings),
        }
        if self.complete is not None:
            out["complete"] = self.complete
        if self.logprobs is not None:
            out["logprobs"] = [entry.as_json() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            out["prompt_logprobs"] = [
                entry.as_json() if entry else None for entry in self.prompt_logprobs
            ]
        return out
