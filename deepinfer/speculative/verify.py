"""Which drafts stand: greedy, coupled and rejection verification (serving semantics §4).

Rows of logits and the drafts they judge come in, what stands of each request goes out, in tensors
of sizes that the host knows, without its waiting for a device; drafts are drawn here too, since
acceptance is exact only for the distribution they were drawn from. It must not know the drafter's
network, text, stop rules or steps; the noise is `sampling.rng`'s.

Every draw is a function of (seed, absolute position, purpose), and a row's bits depend on that row
alone. What one request needs is looked at up to the row that decides: a broken row (not finite, or
everything forbidden) behind a rejected draft is what plain decoding would never have computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from deepinfer.sampling import rng, sampler
from deepinfer.sampling.logits import Rows, weights

_FINE = 1 << 52  # weight of 1.0 in a residual; exact in float64
_Number = TypeVar("_Number", int, torch.Tensor)


@dataclass(frozen=True)
class Judged:
    """What one step decided for R requests, in columns.

    accepted int64 [R]: how many drafts stand. tokens int64 [R, most]: these, then one token of the
    target's own, the correction of the first draft that fell or the bonus behind the last; the rest
    is -1. broken bool [R]: the row that would have given that token was not finite or left nothing
    to choose, and the request fails, unless one of the accepted drafts ends it (behind the end of a
    grammar nothing can be chosen, and nothing need be).
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    broken: torch.Tensor


def propose(
    logits: torch.Tensor, rows: Rows, slot: int, rule: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft one token per request: draft `slot` (0 is the first) of its block.

    logits: float32 [R, vocab]; `rows` name the drafted token's position. Gives the ids, int64 [R],
    -1 for a broken row, and what `verify` needs of their distributions: the processed logits,
    float64 [R, vocab], or None where no request is verified by rejection.

    Greedy and coupled drafts are drawn exactly as the target's token of that position will be.
    Rejection needs noise of its own, and a new one each time a position is drafted: how much is
    verified may depend on confidences of earlier steps, hence on what was drafted here before.
    Positions move towards the front of the block from step to step, so the slot tells them apart,
    and the attempt where a request lost its memory and starts again.
    """
    if not _rejects(rows, rule):
        return sampler.sample(logits, rows), None
    ids = torch.empty_like(rows.position)
    kept = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    for block in sampler.blocks(logits):
        some = rows.at(block)
        x, fine = sampler.scores(logits[block], some)
        kept[block] = x
        drawn = sampler.choose(x, some, draft_purpose(slot, some.attempt))
        ids[block] = drawn.masked_fill(~fine, -1)
    return ids, kept


def draft_purpose(slot: int, attempt: _Number = 0) -> _Number:
    """Names the noise of a draft in rejection sampling: see `propose`."""
    return (attempt << 16) + (rng.DRAFT + (slot << 8))


def verify(
    logits: torch.Tensor,
    rows: Rows,
    first: torch.Tensor,
    drafts: torch.Tensor,
    shares: torch.Tensor,
    scores: torch.Tensor | None,
    rule: str,
    most: int,
    chance: float | None = None,
) -> Judged:
    """Judge the first `shares` drafts of every request, none where it is 0.

    logits: float32 [N, vocab]; `rows` likewise, the position of each being that of the token it
    chooses. first, shares: int64 [R]; row first[r] + j follows j drafts of request r, up to j =
    shares[r] < most. Whatever other rows there are is computed and ignored. drafts: int64 [R, K];
    -1 never stands. scores: float64 [R, K, vocab], what `propose` gave for them; None will do where
    all requests with a share are greedy or coupled. rule: "rejection" or "coupled" for requests
    with a temperature; others are greedy. chance: see `DraftRules`; the same work is done, and a
    seeded draw decides. Raises ValueError if rows and logits differ in number.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows named, {logits.shape[0]} given")
    width = min(drafts.shape[1], most - 1)
    if not width:
        last = sampler.sample(logits, rows)[first]
        tokens = torch.nn.functional.pad(last[:, None], (0, most - 1), value=-1)
        return Judged(torch.zeros_like(first), tokens, last < 0)
    behind = torch.arange(most, device=logits.device)
    judged = behind[:width] < shares[:, None]
    drafts = drafts[:, :width].masked_fill(~judged, -1)
    place = first[:, None] + behind[:width]

    asked = _spread(drafts, place, judged, len(rows), -1)
    if scores is None or not _rejects(rows, rule):
        own = sampler.sample(logits, rows)
        stands = own == asked
    else:
        cells = torch.arange(scores.shape[0] * scores.shape[1], device=logits.device)
        cells = _spread(cells.view(scores.shape[:2])[:, :width], place, judged, len(rows), 0)
        flat = scores.flatten(0, 1)
        own, stands = torch.empty_like(asked), torch.empty_like(asked, dtype=torch.bool)
        for block in sampler.blocks(logits):
            own[block], stands[block] = _reject(
                logits[block], rows.at(block), asked[block], flat[cells[block]]
            )
    if chance is not None:
        stands = rows.uniform(rng.ACCEPT) < chance
    stands = (stands & (asked >= 0))[place.masked_fill(~judged, 0)] & judged
    accepted = stands.to(torch.int64).cumprod(dim=-1).sum(dim=-1)
    last = own[first + accepted]
    tokens = torch.nn.functional.pad(drafts, (0, most - width), value=-1)
    tokens = tokens.masked_fill(behind >= accepted[:, None], -1)
    tokens = tokens.scatter(-1, accepted[:, None], last[:, None])
    return Judged(accepted, tokens, last < 0)


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax of processed logits, float64 [rows, vocab].

    A row's bits depend on that row alone; what is below 2^-44 of the most likely token counts as 0.
    """
    mass = weights(scores, scores.amax(dim=-1, keepdim=True))
    return mass.to(torch.float64) / mass.sum(dim=-1, keepdim=True).to(torch.float64)


def accepts(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Whether each draft y stands by itself, with probability min(1, p(y) / q(y)); bool [n].

    p, q: float64 [n, vocab], target and draft. drafts: int64 [n]; -1 never stands. draws: float64
    [n] in (0, 1).
    """
    at = drafts.clamp(min=0)[:, None]
    return (draws * q.gather(-1, at)[:, 0] < p.gather(-1, at)[:, 0]) & (drafts >= 0)


def redraw(p: torch.Tensor, q: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token instead of a rejected draft, from max(p - q, 0) made to sum to 1; int64 [n].

    p, q: float64 [n, vocab]; draws: float64 [n] in (0, 1). In whole multiples of 2^-52, so that the
    sum is the same in any order. Where rounding leaves nothing of p - q, p itself is drawn from.
    """
    mass = ((p - q).clamp(min=0) * _FINE).to(torch.int64)
    mass = torch.where(mass.sum(dim=-1, keepdim=True) > 0, mass, (p * _FINE).to(torch.int64))
    below = mass.cumsum(dim=-1)
    total = below[:, -1:]
    picked = (draws[:, None] * total.to(torch.float64)).to(torch.int64)
    return torch.searchsorted(below, torch.minimum(picked, total - 1), right=True)[:, 0]


def _reject(
    logits: torch.Tensor, rows: Rows, drafts: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the token it gives where its draft does not stand, int64 [rows], -1 if broken,
    and whether the draft stands by itself, bool [rows].

    drafts: int64 [rows], -1 where there is none; scores: float64 [rows, vocab] of the drafts.
    """
    x, fine = sampler.scores(logits, rows)
    own = sampler.choose(x, rows)
    p, q = probabilities(x), probabilities(scores)
    stands = accepts(p, q, drafts, rows.uniform(rng.ACCEPT))
    again = redraw(p, q, rows.uniform(rng.RESIDUAL))
    own, stands = (
        torch.where(rows.warm & (drafts >= 0), again, own),
        torch.where(rows.warm, stands, own == drafts),
    )
    return own.masked_fill(~fine, -1), stands & fine


def _rejects(rows: Rows, rule: str) -> bool:
    return rule == "rejection" and rows.drawn


def _spread(
    values: torch.Tensor, place: torch.Tensor, judged: torch.Tensor, count: int, void: int
) -> torch.Tensor:
    """int64 [count]: values [R, width] at their places where `judged`, else `void`."""
    out = values.new_full((count + 1,), void)
    out.scatter_(0, place.masked_fill(~judged, count).flatten(), values.flatten())
    return out[:-1]
