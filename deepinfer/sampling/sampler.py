"""From logits to token ids: arg-max or Gumbel-max, and log-probabilities.

Rows of logits and their `Rows` come in, a token id per row goes out, or -1 where the numbers are
broken. It must not know requests, text or steps; the noise is `sampling.rng`'s.

The drawn token is ``argmax_v(x_v + g(seed, position, v))`` over the processed logits x: exactly
softmax(x) distributed, and the same for every drafter and every batch (serving semantics §4,
coupled verification). Choosing never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from deepinfer.core.request import TokenLogprob
from deepinfer.core.step import Likelihoods
from deepinfer.ops.torch.sampling import finite, rows_at_once
from deepinfer.sampling import rng
from deepinfer.sampling.logits import Rows, log_normaliser, masses, process


def sample(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """One id per row of float32 logits [rows, vocab], int64 [rows]; -1 if the row is not finite, or
    nothing is left to choose."""
    if not (rows.changed or rows.drawn):
        return rows.draw(logits, rows.allowed)
    if not (rows.changed or rows.widest or rows.floored):
        return rows.draw(logits, rows.allowed, rows.seed, rows.temperature, rows.position)
    ids = torch.empty_like(rows.position)
    for block in blocks(logits):
        some = rows.at(block)
        x, fine = scores(logits[block], some)
        ids[block] = choose(x, some).masked_fill(~fine, -1)
    return ids


def blocks(logits: torch.Tensor, count: int | None = None) -> list[slice]:
    """So many rows of logits, or all [rows, vocab], in parts that bound float64 temporaries."""
    count, size = len(logits) if count is None else count, rows_at_once(logits)
    return [slice(first, first + size) for first in range(0, count, size)]


def scores(logits: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed logits float64 [rows, vocab], and which rows can be chosen from, bool [rows].

    The others, not finite or with everything forbidden, are 0.
    """
    fine = finite(logits)
    x = process(logits.masked_fill(~fine[:, None], 0.0), rows)
    fine = fine & (x.amax(dim=-1) > float("-inf"))
    return x.masked_fill(~fine[:, None], 0.0), fine


def choose(x: torch.Tensor, rows: Rows, purpose: int | torch.Tensor = rng.TARGET) -> torch.Tensor:
    """Ids int64 [rows] from `scores` x [rows, vocab], with the noise of that purpose."""
    if rows.drawn:
        return rows.draw(x, None, rows.keys(purpose), rows.warm.to(x.dtype))
    return x.argmax(dim=-1)


def likelihoods(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, most: int
) -> dict[str, torch.Tensor]:
    """`core.step.Likelihoods` of these rows of float32 logits [_, vocab], before any processing.

    rows, targets: int64 [n]; most: how many of the most likely ids, as far as there are. Ties among
    them: lower id first. Nobody waits for the device.
    """
    most = min(most, logits.shape[-1])
    found = []
    for block in blocks(logits, len(rows)):
        some = logits[rows[block]]
        fine = finite(some)
        some = torch.nan_to_num(some)
        x = some.to(torch.float64)
        highest, totals = masses(x)
        chosen = x.gather(-1, targets[block, None])[:, 0]
        ids = _ranked(some, most)
        found.append((fine, highest, totals, chosen, ids, x.gather(-1, ids)))
    names = [field.name for field in fields(Likelihoods)]
    return dict(zip(names, map(torch.cat, zip(*found, strict=True)), strict=True))


def logprobs(
    held: Likelihoods, first: int, targets: Sequence[int], top: int
) -> list[TokenLogprob | None]:
    """Log-probability of each target and the `top` most likely ids, from the rows `first` on.

    None where a row is not finite.
    """
    part = slice(first, first + len(targets))
    columns = [getattr(held, field.name)[part] for field in fields(held)]
    columns[4:] = [column[:, :top] for column in columns[4:]]
    out: list[TokenLogprob | None] = []
    for target, fine, highest, total, chosen, ids, values in zip(
        targets, *(column.tolist() for column in columns), strict=True
    ):
        norm = log_normaliser(highest, total)
        best = tuple((token, value - norm) for token, value in zip(ids, values, strict=True))
        out.append(TokenLogprob(target, chosen - norm, best) if fine else None)
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
