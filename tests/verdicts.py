"""What verification decided, request by request on the host: what tests compare."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.speculative.verify import Judged


@dataclass(frozen=True, slots=True)
class Verdict:
    """`Judged` of one request: tokens are its accepted drafts, then the target's own token, if that
    is not broken."""

    accepted: int
    tokens: tuple[int, ...]
    broken: bool = False


def verdicts(judged: Judged) -> list[Verdict]:
    columns = (judged.accepted.tolist(), judged.tokens.tolist(), judged.broken.tolist())
    return [
        Verdict(accepted, tuple(tokens[: accepted + (not broken)]), broken)
        for accepted, tokens, broken in zip(*columns, strict=True)
    ]
