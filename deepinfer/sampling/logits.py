"""From raw logits to the distribution that is drawn from, and its exact float64 arithmetic.

Rows come in with a `Row` each and leave processed: bias, penalties, temperature, top-k, top-p,
min-p, in this order. It must not know which request a row belongs to, nor draw anything.

A row's bits depend on that row alone, on any device: everything is elementwise IEEE float64,
comparison, stable sort or a sum of integers, none of which cares how many rows stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.core.request import SamplingParams

_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 33 bits: n * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(12, -1, -1))
_HEAD = 256  # tokens looked at first for a nucleus
FIXED_ONE = 1 << 44  # 1.0 as an integer weight; 2^18 of them still fit in 63 bits


@dataclass(frozen=True, slots=True)
class Row:
    """What processing and drawing need to know about one row.

    seed, position: name its noise; position is that of the token to be chosen. forbidden: ids that
    cannot be chosen now. seen: ids of the prompt; counts: how often each id was generated (both
    only for penalties). attempt: how often its request lost its memory before;
    drafts of rejection sampling are others then.
    """

    params: SamplingParams
    seed: int
    position: int
    forbidden: tuple[int, ...] = ()
    seen: Collection[int] = ()
    counts: Mapping[int, int] = field(default_factory=dict)
    attempt: int = 0

    @property
    def plain(self) -> bool:
        """Greedy on the logits as they are?"""
        params = self.params
        return (
            params.temperature == 0
            and not params.logit_bias
            and not params.penalised
            and not self.forbidden
        )


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for float64 x <= 0, relative error below 1e-14, by single IEEE operations."""
    x = x.clamp(min=-700.0)
    n = torch.floor(x * _LOG2E + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    total = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total = total * r + term
    return total * ((n.to(torch.int64) + 1023) << 52).view(torch.float64)


def weights(x: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """exp(x - highest) as int64 multiples of 2^-44: integers add up to the same sum in any order.

    x [rows, n], highest [rows, 1], float64. What is below 2^-44 of the most likely token counts as
    0.
    """
    return (exp(x - highest) * FIXED_ONE).to(torch.int64)


def log_normaliser(x: torch.Tensor) -> list[float]:
    """log(sum(exp(x))) of each row of x [rows, vocab], float64; error below vocab * 2^-44."""
    highest = x.amax(dim=-1, keepdim=True)
    totals = weights(x, highest).sum(dim=-1).tolist()
    return [
        top + math.log(total / FIXED_ONE)
        for top, total in zip(highest[:, 0].tolist(), totals, strict=True)
    ]


def process(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The processed logits, float64 [rows, vocab]: what cannot be drawn is -inf.

    logits: [rows, vocab], finite. A greedy row (temperature 0) is not scaled or cut: its arg-max is
    the same. The distribution drawn from is softmax of a processed row.
    """
    x = logits.to(torch.float64)
    if x is logits:
        x = x.clone()
    for at, row in enumerate(rows):
        _shift(x[at], row)
    sampled = [at for at, row in enumerate(rows) if row.params.temperature > 0]
    if not sampled:
        return x
    chosen = [rows[at].params for at in sampled]
    part = x[sampled] / _column([params.temperature for params in chosen], x)
    x[sampled] = _cut(part, chosen)
    return x


def _shift(x: torch.Tensor, row: Row) -> None:
    """Bias, penalties and forbidden ids of one row [vocab], in place."""
    params = row.params
    if params.logit_bias:
        ids = list(params.logit_bias)
        x[ids] += _like(list(params.logit_bias.values()), x)
    if params.repetition_penalty != 1:
        ids = sorted({*row.seen, *row.counts})
        old = x[ids]
        x[ids] = torch.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        ids = list(row.counts)
        counts = _like([float(count) for count in row.counts.values()], x)
        x[ids] -= counts * params.frequency_penalty
        x[ids] -= params.presence_penalty
    if row.forbidden:
        x[list(row.forbidden)] = -math.inf


def _cut(x: torch.Tensor, chosen: Sequence[SamplingParams]) -> torch.Tensor:
    """Top-k, top-p and min-p on scaled rows [rows, vocab]: what falls off becomes -inf."""
    cut = [at for at, params in enumerate(chosen) if params.top_k or params.top_p < 1]
    if cut:
        x[cut] = _top(x[cut], [chosen[at] for at in cut])
    if any(params.min_p > 0 for params in chosen):
        floor = [math.log(params.min_p) if params.min_p > 0 else -math.inf for params in chosen]
        x = x.masked_fill(x < x.amax(dim=-1, keepdim=True) + _column(floor, x), -math.inf)
    return x


def _top(x: torch.Tensor, chosen: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the k most likely, of these the fewest whose mass reaches top_p; low ids win ties."""
    vocab = x.shape[-1]
    limits = [min(params.top_k or vocab, vocab) for params in chosen]
    head = min(vocab, max(_HEAD, *(limit for limit in limits if limit < vocab), 1))
    values = x.topk(head, dim=-1).values  # descending; equal values need no order among themselves
    lengths = _lengths(x, values, limits, [params.top_p for params in chosen])
    if (lengths > head).any():  # a nucleus wider than the head: the same rule on the whole row
        values = x.topk(vocab, dim=-1).values
        lengths = _lengths(x, values, limits, [params.top_p for params in chosen])
    last = values.gather(-1, lengths - 1)
    above, level = x > last, x == last
    room = lengths - above.sum(dim=-1, keepdim=True)
    return x.masked_fill(~(above | (level & (level.cumsum(dim=-1) <= room))), -math.inf)


def _lengths(
    x: torch.Tensor, values: torch.Tensor, limits: Sequence[int], shares: Sequence[float]
) -> torch.Tensor:
    """How many of each row's most likely tokens stay, int64 [rows, 1].

    values [rows, head]: the largest of x [rows, vocab], descending. A result above head says that
    the head was too short to tell.
    """
    head = values.shape[-1]
    limit = torch.tensor(limits, device=x.device)[:, None]
    if min(shares) == 1:
        return limit
    inside = torch.arange(head, device=x.device) < limit
    mass = weights(values, values[:, :1]) * inside
    whole = weights(x, values[:, :1]).sum(dim=-1, keepdim=True)
    total = torch.where(limit < x.shape[-1], mass.sum(dim=-1, keepdim=True), whole)
    before = mass.cumsum(dim=-1) - mass
    wanted = total.to(x.dtype) * _column(list(shares), x)
    reached = (before.to(x.dtype) < wanted).sum(dim=-1, keepdim=True)
    # all of the head and still not there
    short = (mass.sum(dim=-1, keepdim=True).to(x.dtype) < wanted) & (head < limit)
    nucleus = torch.where(short, head + 1, reached)
    # top_p = 1 keeps the tail, also where its mass rounds to nothing
    all_of_it = _column(list(shares), x) == 1
    return torch.where(all_of_it, limit, torch.minimum(nucleus, limit)).clamp(min=1)


def _like(values: list[float], x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device)


def _column(values: list[float], x: torch.Tensor) -> torch.Tensor:
    return _like(values, x)[:, None]
