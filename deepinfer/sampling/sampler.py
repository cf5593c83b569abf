"""From logits to token ids: arg-max or Gumbel-max, and log-probabilities.

Rows of logits and their `Row` come in, a token id per row goes out, or None where the numbers are
broken. It must not know requests, text or steps; the noise is `sampling.rng`'s.

The drawn token is ``argmax_v(x_v + g(seed, position, v))`` over the processed logits x: exactly
softmax(x) distributed, and the same for every drafter and every batch (serving semantics §4,
coupled verification).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.core.request import TokenLogprob
from deepinfer.sampling import rng
from deepinfer.sampling.logits import Row, log_normaliser, process

_BLOCK = 1 << 18  # elements worked on at once: float64 temporaries that stay in a cache


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
    """One id per row of float32 logits [rows, vocab]; None if not finite, or nothing is left."""
    fine = torch.isfinite(logits).all(dim=-1).tolist()
    ids: list[int | None] = [None] * len(rows)
    greedy = [at for at, row in enumerate(rows) if fine[at] and row.plain]
    if greedy:
        part = logits if len(greedy) == len(rows) else logits[greedy]
        # torch promises the first of equal maxima, hence the lowest id
        for at, token in zip(greedy, part.argmax(dim=-1).tolist(), strict=True):
            ids[at] = token
    others = [at for at, row in enumerate(rows) if fine[at] and not row.plain]
    size = max(1, _BLOCK // logits.shape[-1])
    for first in range(0, len(others), size):
        block = others[first : first + size]
        for at, token in zip(
            block, _choose(logits[block], [rows[at] for at in block]), strict=True
        ):
            ids[at] = token
    return ids


def _choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
    """Process and choose; rows are finite, not all plain."""
    x = process(logits, rows)
    drawn = [at for at, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        streams = [rng.key(rows[at].seed, rows[at].position) for at in drawn]
        x[drawn] += rng.gumbel_rows(streams, x.shape[-1], x.device)
    best, ids = x.max(dim=-1)[0].tolist(), x.argmax(dim=-1).tolist()
    return [
        token if score > float("-inf") else None for token, score in zip(ids, best, strict=True)
    ]


def logprobs(
    logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob | None]:
    """Log-probability of each row's target and its `tops` most likely ids, by the model's raw
    logits.

    logits: float32 [rows, vocab], before any processing. None where a row is not finite. Ties in
    the list: lower id first; it is as long as the vocabulary allows.
    """
    out: list[TokenLogprob | None] = []
    size = max(1, _BLOCK // logits.shape[-1])
    for first in range(0, len(targets), size):
        block = slice(first, first + size)
        out += _logprobs(logits[block], targets[block], tops[block])
    return out


def _logprobs(
    logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob | None]:
    fine = torch.isfinite(logits).all(dim=-1).tolist()
    x = torch.nan_to_num(logits).to(torch.float64)
    norms = log_normaliser(x)
    chosen = x[torch.arange(len(targets)), list(targets)].tolist()
    most = min(max(tops), x.shape[-1])
    best: list[list[tuple[int, float]]] = [[] for _ in targets]
    if most:
        ids = _ranked(torch.nan_to_num(logits), most)
        pairs = zip(ids.tolist(), x.gather(-1, ids).tolist(), strict=True)
        best = [list(zip(*pair, strict=True)) for pair in pairs]
    out: list[TokenLogprob | None] = []
    for at, target in enumerate(targets):
        if not fine[at]:
            out.append(None)
            continue
        top = tuple((token, value - norms[at]) for token, value in best[at][: tops[at]])
        out.append(TokenLogprob(target, chosen[at] - norms[at], top))
    return out


def _ranked(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of float32 [rows, vocab], best first, lower id first on ties.

    Value and id are packed into one integer, so that no two are equal and top-k has one answer.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: minus zero ties with zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab - 1, -1, -1, device=logits.device)
    packed = (ordered << 32) + ids
    return vocab - 1 - (packed.topk(count, dim=-1).values & 0xFFFFFFFF)
