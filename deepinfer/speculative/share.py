"""The tensor half of `schedule`: survivals of drafts, and who gets the rows that the host granted.

Raw confidences come in as the drafter leaves them on the device; how many drafts of each request
are verified goes out, without the host's waiting for either. It must not know ids, rules or how
many rows are worth their time: that is `schedule.budget`.

Bits do not depend on the device or on the batch, and the order of survivals is that of
`schedule.split`: both rank the same numbers alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from deepinfer.sampling.logits import exp
from deepinfer.speculative.schedule import CLAMP


def survivals(
    raw: torch.Tensor, temperatures: Sequence[float], useful: torch.Tensor
) -> torch.Tensor:
    """For each draft the chance that it and all before it stand, float64 [R, K].

    raw: float32 [R, K], logits of the confidence head. temperatures: one per draft, or one for all.
    useful: int64 [R], drafts of a request that may count; those behind them are 0. What is not a
    number counts as 0 (`schedule.confidences`, `schedule.survivals`).
    """
    count = raw.shape[1]
    if len(temperatures) == 1:
        temperatures = tuple(temperatures) * count
    # Not by a plain number: devices may multiply by its inverse.
    x = raw.to(torch.float64) / _row(tuple(temperatures), raw.device)
    chances = (1 / (1 + exp(-x.clamp(-CLAMP, CLAMP)))).masked_fill(x.isnan(), 0.0)
    so_far = [chances[:, 0]] if count else []
    for at in range(1, count):  # one by one: a product of many may be taken in any order
        so_far.append(so_far[-1] * chances[:, at])
    out = torch.stack(so_far, 1) if count else chances
    return out.masked_fill(torch.arange(count, device=raw.device) >= useful[:, None], 0.0)


@functools.lru_cache(maxsize=8)
def _row(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """float64 [n], made without the host's waiting."""
    whole = [torch.full((1,), value, dtype=torch.float64, device=device) for value in values]
    return torch.cat(whole) if whole else torch.empty(0, dtype=torch.float64, device=device)


def split(survivals: torch.Tensor, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give `extra` rows to the drafts of highest survival: rows and verified drafts by request.

    survivals: float64 [R, K], no row rising; extra <= R * K. Both int64 [R]: the rows allotted,
    `extra` in all, and how many of them have a draft to verify, which is `schedule.split`; the
    others are void, since a survival of 0 is never chosen.
    """
    requests, count = survivals.shape
    values, order = survivals.flatten().sort(descending=True, stable=True)
    order = order[: max(0, extra)].div(max(1, count), rounding_mode="floor")
    allotted = order.new_zeros(requests).scatter_add_(0, order, torch.ones_like(order))
    chosen = (values[: max(0, extra)] > 0).to(torch.int64)
    return allotted, order.new_zeros(requests).scatter_add_(0, order, chosen)


def cut(survivals: torch.Tensor, threshold: float) -> torch.Tensor:
    """How many drafts of each request have a survival of at least `threshold`, int64 [R]."""
    return (survivals >= threshold).sum(dim=-1)
