"""What a caller hands in, checked and turned into requests.

Prompts and sampling parameters of any accepted shape come in; one `Asked` per prompt and sample
goes out, with a problem where that one cannot run. It must not know what is running.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.core.request import Request, SamplingParams
from deepinfer.errors import CapacityError, DeepinferError, UsageError
from deepinfer.kvcache.blocks import BlockAllocator
from deepinfer.sampling import rng
from deepinfer.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and why it cannot run, if it cannot."""

    request: Request
    problem: DeepinferError | None = None


class Intake:
    """Reads calls for one model and its memory.

    tokenizer: None where only token ids are taken. max_model_len: most tokens of one sequence.
    blocks: its size alone matters, nothing is taken.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        blocks: BlockAllocator,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._eos_ids = eos_ids
        self._limit = max_model_len
        self._blocks = blocks

    def read(self, prompts: object, sampling_params: object) -> list[Asked]:
        """Raises UsageError for a call of the wrong shape; a prompt's problem stays with it."""
        prompts = _prompts(prompts)
        shared, params = _params(sampling_params, len(prompts))
        asked = []
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            ids, problem = self._ids(prompt)
            room = max(self._limit - len(ids), 0)
            problem = problem or self._problem(ids, chosen, room)
            for sample in range(chosen.n):
                request = Request(
                    index=index,
                    sample=sample,
                    prompt_ids=ids,
                    params=chosen,
                    seed=_seed(chosen, index if shared else 0, sample),
                    max_new=min(chosen.max_tokens, room),
                )
                asked.append(Asked(request, problem or self._too_big(request)))
        return asked

    def _ids(self, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], UsageError | None]:
        if not prompt:
            return (), UsageError(
                "prompt-empty",
                "the prompt is empty",
                ["at least one token is needed to continue from"],
                "for an answer to nothing, give the BOS id as a list of token ids",
            )
        if not isinstance(prompt, str):
            return prompt, self._foreign("the prompt", prompt)
        if self._tokenizer is None:
            return (), UsageError(
                "no-tokenizer",
                "this checkpoint has no tokenizer and takes token ids only",
                ["no tokenizer.json in its folder"],
                "llm.generate([[1, 2, 3]])",
            )
        try:
            return tuple(self._tokenizer.encode(prompt)), None
        except UsageError as problem:
            return (), problem

    def _foreign(self, where: str, ids: Sequence[int]) -> UsageError | None:
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab):
            return None
        bad = next(token for token in ids if not 0 <= token < self._vocab)
        return UsageError(
            "bad-token-id",
            f"{where} has token id {bad}, which the model does not have",
            [f"accepted: 0 to {self._vocab - 1}"],
        )

    def _problem(
        self, ids: Sequence[int], params: SamplingParams, room: int
    ) -> DeepinferError | None:
        """What is wrong with a prompt and its parameters for this model."""
        if len(ids) > self._limit or (room == 0 and params.max_tokens > 0):
            return CapacityError(
                "prompt-too-long",
                f"the prompt has {len(ids):,} tokens, the model takes {self._limit:,} "
                f"including {params.max_tokens:,} to generate",
                hint="shorten it, or lower --max-tokens",
            )
        if params.stop and self._tokenizer is None:
            return UsageError(
                "no-tokenizer",
                "this checkpoint has no tokenizer, so stop strings cannot be seen",
                [f"stop={list(params.stop)!r}"],
                "use stop_token_ids",
            )
        if params.structured is not None and self._tokenizer is None:
            return UsageError(
                "no-tokenizer",
                "this checkpoint has no tokenizer, so its output cannot be constrained",
                ["no tokenizer.json in its folder"],
                "leave `structured` out",
            )
        return (
            self._foreign("logit_bias", list(params.logit_bias or ()))
            or self._foreign("stop_token_ids", params.stop_token_ids)
            or (params.structured and self._foreign("structured.after", params.structured.after))
            or self._all_forbidden(params)
        )

    def _all_forbidden(self, params: SamplingParams) -> UsageError | None:
        """Is no id left for the first token?"""
        bias = params.logit_bias or {}
        banned = {token for token, value in bias.items() if value == -math.inf}
        if params.min_tokens:
            banned.update(params.stop_token_ids, () if params.ignore_eos else self._eos_ids)
        if params.max_tokens == 0 or len(banned) < self._vocab:
            return None
        return UsageError(
            "nothing-to-choose",
            f"all {self._vocab:,} token ids are forbidden",
            ["logit_bias forbids an id with -inf; min_tokens forbids what ends an answer"],
            "leave at least one id allowed",
        )

    def _too_big(self, request: Request) -> CapacityError | None:
        if self._blocks.pages_for(request.need) <= self._blocks.total:
            return None
        return CapacityError(
            "kv-too-small",
            f"the request needs {request.need:,} tokens of memory, capacity "
            f"{self._blocks.capacity:,}",
            [
                f"{len(request.prompt_ids):,} in the prompt and {request.max_new:,} to generate, "
                "the last of which is never stored"
            ],
            f"--kv-cache-tokens {request.need}, or lower --max-tokens",
        )


def _prompts(got: object) -> list[str | tuple[int, ...]]:
    """The prompts of a call as a list of texts and tuples of ids."""
    if isinstance(got, str) or _is_ids(got):
        got = [got]
    elif not _is_list(got):
        raise _not_a_prompt("prompts", got)
    out: list[str | tuple[int, ...]] = []
    for at, prompt in enumerate(got):
        if isinstance(prompt, str):
            out.append(prompt)
            continue
        if _is_plain(prompt):
            out.append(tuple(prompt))
            continue
        if not _is_ids(prompt) and not (_is_list(prompt) and len(prompt) == 0):
            raise _not_a_prompt(f"prompts[{at}]", prompt)
        try:
            out.append(tuple(token.__index__() for token in prompt))
        except TypeError:  # an array of numbers that are not whole, or of rows
            raise _not_a_prompt(f"prompts[{at}]", prompt) from None
    return out


def _is_list(got: object) -> bool:
    """A sequence, or an array of at least one dimension: numpy's and torch's are no Sequence."""
    return isinstance(got, Sequence) or _dimensions(got) > 0


def _is_plain(got: object) -> bool:
    """A list or tuple of Python's own whole numbers; long prompts are nearly always that."""
    return isinstance(got, (list, tuple)) and set(map(type, got)) == {int}


def _is_ids(got: object) -> bool:
    """A list of whole numbers, at least one; numpy's and torch's count."""
    if _is_plain(got):
        return True
    if isinstance(got, (str, bytes)) or not hasattr(got, "__len__") or not hasattr(got, "__iter__"):
        return False
    if getattr(got, "ndim", 1) != 1:  # a single number in an array, or rows
        return False
    # An array has __index__ too, but it is a row of ids and no id.
    return len(got) > 0 and all(
        hasattr(token, "__index__") and not isinstance(token, bool) and not _dimensions(token)
        for token in got
    )


def _dimensions(got: object) -> int:
    return getattr(got, "ndim", 0)


def _not_a_prompt(where: str, got: object) -> UsageError:
    return UsageError(
        "bad-prompt",
        f"{where} is a {type(got).__name__}, not a prompt",
        ["accepted: a text, a list of token ids, or a list of such"],
        'llm.generate(["one prompt", [1, 2, 3]])',
    )


def _params(got: object, count: int) -> tuple[bool, list[SamplingParams]]:
    """One SamplingParams per prompt, and whether they all share a single one."""
    if got is None:
        got = SamplingParams()
    if isinstance(got, SamplingParams):
        return True, [got] * count
    if not isinstance(got, Sequence) or not all(isinstance(p, SamplingParams) for p in got):
        raise UsageError(
            "bad-sampling-parameter",
            f"sampling_params is {got!r:.60}",
            ["accepted: a SamplingParams, or a list with one per prompt"],
            "llm.generate(prompts, SamplingParams(max_tokens=64))",
        )
    if len(got) != count:
        raise UsageError(
            "sampling-params-count",
            f"{len(got)} sampling parameter sets for {count} prompts",
            ["accepted: one for all, or one per prompt"],
            "llm.generate(prompts, SamplingParams(max_tokens=64))",
        )
    return False, list(got)


def _seed(params: SamplingParams, prompt: int, sample: int) -> int:
    """The seed of one sequence (`rng.derive_seed` has the rule)."""
    if params.seq_seed is not None:
        return params.seq_seed[sample] if isinstance(params.seq_seed, tuple) else params.seq_seed
    if params.seed is not None:
        return rng.derive_seed(params.seed, prompt, sample)
    return rng.random_seed()
