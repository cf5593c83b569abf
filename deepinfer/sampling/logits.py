"""From raw logits to the distribution that is drawn from, and its exact float64 arithmetic.

Logits come in with `Rows`, a column per parameter, and leave processed: grammar mask, bias,
penalties, temperature, top-k, top-p, min-p, in this order. It must not know which request a row
belongs to, nor draw anything.

A row's bits depend on that row alone, on any device: everything is elementwise IEEE float64,
comparison, stable sort or a sum of integers, none of which cares how many rows stand beside it. The
host never waits for the device here, which is why it must know a few things about all rows at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepinfer.core.request import SamplingParams
from deepinfer.device.transfer import send
from deepinfer.ops.torch import sampling as reference
from deepinfer.sampling import rng

_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 33 bits: n * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(12, -1, -1))
_HEAD = 256  # tokens looked at first for a nucleus, on the host
WHOLE = 1 << 31  # a reach that no vocabulary exceeds
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
    def changes(self) -> bool:
        """Are there logits of it to change before they are scaled?"""
        return bool(self.params.logit_bias or self.params.penalised or self.forbidden)


def reach(params: SamplingParams) -> int:
    """How many of the most likely tokens tell what top-k and top-p keep; 0: they are off."""
    if params.temperature == 0 or not (params.top_k or params.top_p < 1):
        return 0
    return min(params.top_k or WHOLE, WHOLE)


def min_p_floor(params: SamplingParams) -> float:
    """min-p as a distance from the highest logit, -inf where it is off."""
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


@dataclass(frozen=True)
class Rows:
    """`Row` by `Row` in columns, one entry per row of logits, on their device.

    seed (`rng.signed`), position, top_k (0 is off; at most `WHOLE`), attempt: int64 [rows].
    temperature, top_p, floor (`min_p_floor`): float64 [rows].

    What the host knows of all of them: drawn: may any have a temperature above 0? widest: no
    `reach` is above it. floored: may any have a floor? changed: those that change logits, by row.

    allowed: bits of the ids that a grammar allows (`structured.constraint.Mask`), uint8 [rows,
    bytes], all of them in rows without one; None: no row has. draw: the op.
    """

    seed: torch.Tensor
    position: torch.Tensor
    attempt: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    drawn: bool
    widest: int
    floored: bool
    changed: Mapping[int, Row] = field(default_factory=dict)
    allowed: torch.Tensor | None = None
    draw: Callable[..., torch.Tensor] = reference.draw

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device | str) -> Rows:
        """The columns of these rows, copied to the device at once."""
        chosen = [row.params for row in rows]
        whole = _sent(
            [
                [rng.signed(row.seed) for row in rows],
                [row.position for row in rows],
                [row.attempt for row in rows],
                [min(params.top_k, WHOLE) for params in chosen],
            ],
            np.int64,
            device,
        )
        real = _sent(
            [
                [params.temperature for params in chosen],
                [params.top_p for params in chosen],
                [min_p_floor(params) for params in chosen],
            ],
            np.float64,
            device,
        )
        return cls(
            seed=whole[0],
            position=whole[1],
            attempt=whole[2],
            top_k=whole[3],
            temperature=real[0],
            top_p=real[1],
            floor=real[2],
            drawn=any(params.temperature > 0 for params in chosen),
            widest=max(map(reach, chosen), default=0),
            floored=any(params.temperature > 0 and params.min_p > 0 for params in chosen),
            changed={at: row for at, row in enumerate(rows) if row.changes},
        )

    @classmethod
    @functools.lru_cache(maxsize=8)
    def greedy(
        cls, count: int, device: torch.device, draw: Callable[..., torch.Tensor] = reference.draw
    ) -> Rows:
        """So many rows of which none is drawn: nobody asks for their seeds and positions."""
        whole = torch.zeros(count, dtype=torch.int64, device=device)
        real = whole.to(torch.float64)
        return cls(whole, whole, whole, real, whole, real, real, False, 0, False, draw=draw)

    def __len__(self) -> int:
        return len(self.seed)

    @property
    def warm(self) -> torch.Tensor:
        """Which rows are drawn from their distribution, bool [rows]; the others are arg-max."""
        return self.temperature > 0

    def keys(self, purpose: int | torch.Tensor = rng.TARGET) -> torch.Tensor:
        """The stream of each row, int64 [rows]."""
        return rng.keys(self.seed, self.position, purpose)

    def uniform(self, purpose: int) -> torch.Tensor:
        """A number in (0, 1) for each row, float64 [rows]."""
        return rng.uniform_rows(self.seed, self.position, purpose)

    def at(self, which: slice | Sequence[int] | torch.Tensor) -> Rows:
        """These rows, in this order, repeated where named twice.

        which: a slice, numbers, or int64 on the device. The host cannot read the last, so where
        rows are `changed` it raises ValueError.
        """
        changed = {}
        if self.changed:
            if isinstance(which, torch.Tensor):
                raise ValueError("rows that change logits must be named by the host")
            names = range(len(self))[which] if isinstance(which, slice) else which
            changed = {
                at: self.changed[name] for at, name in enumerate(names) if name in self.changed
            }
        if not isinstance(which, (slice, torch.Tensor)):
            which = _sent(which, np.int64, self.seed.device)
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        allowed = None if self.allowed is None else self.allowed[which]
        return replace(self, **columns, changed=changed, allowed=allowed)


_COLUMNS = ("seed", "position", "attempt", "temperature", "top_k", "top_p", "floor")


def _sent(values: Sequence[object], dtype: type, device: torch.device | str) -> torch.Tensor:
    [found] = send([np.array(values, dtype=dtype)], torch.device(device))
    return found


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for float64 x below 700, relative error below 1e-14, by single IEEE operations.

    Below -700 it is what it is there.
    """
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


def masses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of x [rows, vocab], float64: the highest logit and the sum of `weights`."""
    highest = x.amax(dim=-1, keepdim=True)
    return highest[:, 0], weights(x, highest).sum(dim=-1)


def log_normaliser(highest: float, total: int) -> float:
    """log(sum(exp(x))) of a row from its `masses`; error below vocab * 2^-44."""
    return highest + math.log(total / FIXED_ONE)


def process(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The processed logits, float64 [rows, vocab]: what cannot be drawn is -inf.

    logits: [rows, vocab], finite. A greedy row (temperature 0) is not scaled or cut: its arg-max is
    the same. The distribution drawn from is softmax of a processed row.
    """
    if rows.allowed is not None:
        logits = reference.masked(logits, rows.allowed)
    x = logits.to(torch.float64, copy=True)
    for at, row in rows.changed.items():
        _shift(x[at], row)
    if rows.drawn:
        x /= rows.temperature.masked_fill(~rows.warm, 1.0)[:, None]
        if rows.widest:
            x = _top(x, rows)
        if rows.floored:
            low = rows.floor.masked_fill(~rows.warm, -math.inf)[:, None]
            x = x.masked_fill(x < x.amax(dim=-1, keepdim=True) + low, -math.inf)
    return x


def _shift(x: torch.Tensor, row: Row) -> None:
    """Bias, penalties and forbidden ids of one row [vocab], in place."""
    params, device = row.params, x.device
    if params.logit_bias:
        ids = _sent(list(params.logit_bias), np.int64, device)
        x[ids] += _sent(list(params.logit_bias.values()), np.float64, device)
    if params.repetition_penalty != 1:
        ids = _sent(list({*row.seen, *row.counts}), np.int64, device)
        old = x[ids]
        # Not by a plain number: devices may multiply by its inverse.
        penalty = torch.full_like(old, params.repetition_penalty)
        x[ids] = torch.where(old > 0, old / penalty, old * penalty)
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        ids = _sent(list(row.counts), np.int64, device)
        counts = _sent([float(count) for count in row.counts.values()], np.float64, device)
        x[ids] -= counts * params.frequency_penalty
        x[ids] -= params.presence_penalty
    if row.forbidden:
        x.index_fill_(0, _sent(list(row.forbidden), np.int64, device), -math.inf)


def _top(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Top-k and top-p on scaled rows [rows, vocab]: what falls off becomes -inf.

    The k most likely stay, of these the fewest whose mass reaches top_p; low ids win ties.
    """
    vocab, off = x.shape[-1], ~rows.warm
    limit = rows.top_k.clamp(max=vocab).masked_fill(off | (rows.top_k == 0), vocab)[:, None]
    share = rows.top_p.masked_fill(off, 1.0)[:, None]
    cut = (limit < vocab) | (share < 1)
    head = min(vocab, rows.widest)
    values = _largest(x, min(head, _HEAD) if _readable(x) else head)
    whole = None
    if values.shape[-1] < head:
        whole = weights(x, values[:, :1]).sum(dim=-1, keepdim=True)
    lengths = _lengths(values, limit, share, vocab, whole)
    # What lies beyond a first look is seldom asked for, but only the host can ask whether it is.
    if values.shape[-1] < head and (cut & (lengths > values.shape[-1])).any():
        values = _largest(x, head)
        lengths = _lengths(values, limit, share, vocab)
    last = values.gather(-1, lengths.clamp(max=values.shape[-1]) - 1)
    above, level = x > last, x == last
    room = lengths - above.sum(dim=-1, keepdim=True)
    stays = above | (level & (level.cumsum(dim=-1) <= room))
    return x.masked_fill(cut & ~stays, -math.inf)


def _readable(x: torch.Tensor) -> bool:
    """May the host look at it without waiting for a device?"""
    return x.device.type == "cpu"


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, descending; equal values need no order."""
    if count == x.shape[-1]:
        return x.sort(dim=-1, descending=True).values
    return x.topk(count, dim=-1).values


def _lengths(
    values: torch.Tensor,
    limit: torch.Tensor,
    share: torch.Tensor,
    vocab: int,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many of each row's most likely tokens stay, int64 [rows, 1].

    values [rows, head]: the largest of each row, descending; limit int64 [rows, 1], share float64
    [rows, 1]: top-k and top-p, vocab and 1 where they are off. whole: the weights of each row in
    sum, where the head may miss some that count. A result above head says that it was too short to
    tell.
    """
    head = values.shape[-1]
    mass = weights(values, values[:, :1]) * (torch.arange(head, device=values.device) < limit)
    found = mass.sum(dim=-1, keepdim=True)
    total = found if whole is None else torch.where(limit < vocab, found, whole)
    wanted = total.to(values.dtype) * share
    before = mass.cumsum(dim=-1) - mass
    reached = (before.to(values.dtype) < wanted).sum(dim=-1, keepdim=True)
    # All of the head and still not there, or the k-th is not in it.
    short = (head < limit) & ((found.to(values.dtype) < wanted) | (limit < vocab))
    nucleus = torch.minimum(reached.masked_fill(short, head + 1), limit)
    # top_p = 1 keeps the tail, also where its mass rounds to nothing
    return torch.where(share == 1, limit, nucleus).clamp(min=1)
