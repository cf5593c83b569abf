"""The answer to a text completion in its vendor's shape: /v1/completions.

Completions of the engine come in, one document goes out. There is no prompt format and nothing to
parse; how tokens were made is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.core.request import Completion, TokenLogprob
from deepinfer.protocol.convert import Prepared
from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["document"]


def document(
    tokenizer: Tokenizer | None, prepared: Prepared, results: Sequence[Completion], identity: str,
    created: int,
) -> dict[str, Any]:  # fmt: skip
    """One choice per result, prompts first; the usage of a prompt counts once."""
    prompts = sum(result.usage.prompt_tokens for result in results if result.sample == 0)
    cached = sum(result.usage.cached_tokens for result in results if result.sample == 0)
    written = sum(result.usage.completion_tokens for result in results)
    return {
        "id": identity,
        "object": "text_completion",
        "created": created,
        "model": prepared.model,
        "choices": [
            {
                "index": index,
                "text": result.text,
                "logprobs": _logprobs(tokenizer, result.logprobs),
                "finish_reason": str(result.finish_reason),
            }
            for index, result in enumerate(results)
        ],
        "usage": {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def _logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob] | None
) -> dict[str, Any] | None:
    if entries is None:
        return None

    def name(token: int) -> str:
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])

    tokens = [name(entry.token_id) for entry in entries]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {name(token): value for token, value in reversed(entry.top)} for entry in entries
        ],
        "text_offset": offsets[:-1],
    }
