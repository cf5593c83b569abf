"""Which drafts stand: greedy, coupled and rejection verification (serving semantics §4).

Rows of logits and the drafts they judge come in, a `Verdict` per request goes out; drafts are drawn
here too, since acceptance is exact only for the distribution they were drawn from. It must not know
the drafter's network, text, stop rules or steps; the noise is `sampling.rng`'s.

Every draw is a function of (seed, absolute position, purpose), and a row's bits depend on that row
alone. What one request needs is looked at up to the row that decides: a broken row (not finite, or
everything forbidden) behind a rejected draft is what plain decoding would never have computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.sampling import rng, sampler
from deepinfer.sampling.logits import Row, process, weights
from deepinfer.speculative.proposal import Verdict

_BLOCK = 1 << 20  # elements of a block of requests: bounds the float64 temporaries
_FINE = 1 << 52  # weight of 1.0 in a residual; exact in float64


def propose(
    logits: torch.Tensor, rows: Sequence[Row], slot: int, rule: str
) -> tuple[list[int], torch.Tensor | None]:
    """Draft one token per request: draft `slot` (0 is the first) of its block.

    logits: float32 [requests, vocab]; `rows` name the drafted token's position. Gives the ids, -1
    for a broken row, and what `verify` needs of their distributions: the processed logits, float64
    [requests, vocab], or None where no request is verified by rejection.

    Greedy and coupled drafts are drawn exactly as the target's token of that position will be.
    Rejection needs noise of its own, and a new one each time a position is drafted: how much is
    verified may depend on confidences of earlier steps, hence on what was drafted here before.
    Positions move towards the front of the block from step to step, so the slot tells them apart,
    and the attempt where a request lost its memory and starts again.
    """
    by_rejection = [at for at, row in enumerate(rows) if _rejects(row, rule)]
    if not by_rejection:
        return [-1 if token is None else token for token in sampler.sample(logits, rows)], None
    ids = [-1] * len(rows)
    others = [at for at, row in enumerate(rows) if not _rejects(row, rule)]
    if others:
        for at, token in zip(
            others, sampler.sample(logits[others], [rows[at] for at in others]), strict=True
        ):
            ids[at] = -1 if token is None else token
    scores = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    size = max(1, _BLOCK // logits.shape[-1])
    for first in range(0, len(by_rejection), size):
        block = by_rejection[first : first + size]
        chosen = [rows[at] for at in block]
        x, fine = _scores(logits[block], chosen)
        scores[block] = x
        streams = [
            rng.key(row.seed, row.position, draft_purpose(slot, row.attempt)) for row in chosen
        ]
        for at, token, good in zip(block, _highest(x, streams), fine.tolist(), strict=True):
            ids[at] = token if good else -1
    return ids, scores


def draft_purpose(slot: int, attempt: int = 0) -> int:
    """Names the noise of a draft in rejection sampling: see `propose`."""
    return rng.DRAFT + (slot << 8) + (attempt << 16)


def verify(
    logits: torch.Tensor,
    rows: Sequence[Row],
    drafts: Sequence[Sequence[int]],
    scores: torch.Tensor | None,
    rule: str,
) -> list[Verdict]:
    """Judge the drafts of every request; different numbers of them, none included.

    drafts: per request the ids to verify, in order. logits: float32 [rows, vocab], request after
    request: a row per draft, then the one behind the last; `rows` likewise, the position of each
    being that of the token it chooses. scores: float64 [drafts, vocab], what `propose` gave for
    these drafts, request after request; None will do for greedy and coupled requests.
    rule: "rejection" or "coupled" for requests with a temperature; others are greedy. Raises
    ValueError if the rows are not as many as the drafts need.
    """
    judges, behind = _spans(drafts, 1), _spans(drafts, 0)
    needed = sum(map(len, judges))
    if not needed == len(rows) == logits.shape[0]:
        raise ValueError(f"{needed} rows needed, {len(rows)} named, {logits.shape[0]} given")

    verdicts: list[Verdict | None] = [None] * len(drafts)
    by_match = [at for at, span in enumerate(judges) if not _rejects(rows[span[0]], rule)]
    by_rejection = [at for at, span in enumerate(judges) if _rejects(rows[span[0]], rule)]
    if by_match:
        wanted = [row for at in by_match for row in judges[at]]
        part = logits if len(wanted) == len(rows) else logits[wanted]
        chosen = sampler.sample(part, [rows[at] for at in wanted])
        answers = match([drafts[at] for at in by_match], chosen)
        for at, verdict in zip(by_match, answers, strict=True):
            verdicts[at] = verdict
    limit = max(1, _BLOCK // logits.shape[-1])
    while by_rejection:
        taken = size = 0
        while taken < len(by_rejection) and (not taken or size < limit):
            size += len(judges[by_rejection[taken]])
            taken += 1
        block, by_rejection = by_rejection[:taken], by_rejection[taken:]
        wanted = [row for at in block for row in judges[at]]
        drafted = [draft for at in block for draft in behind[at]]
        answers = _reject(
            logits[wanted],
            [rows[at] for at in wanted],
            [drafts[at] for at in block],
            scores[drafted] if drafted else None,
        )
        for at, verdict in zip(block, answers, strict=True):
            verdicts[at] = verdict
    return verdicts


def match(drafts: Sequence[Sequence[int]], chosen: Sequence[int | None]) -> list[Verdict]:
    """Keep drafts while they equal what the target chooses at their place: greedy and coupled.

    chosen: the target's ids (`sampler.sample`), request after request, one per draft and one more.
    So the emitted ids are those of plain decoding, whatever was drafted.
    """
    out, at = [], 0
    for ids in drafts:
        own = chosen[at : at + len(ids) + 1]
        at += len(ids) + 1
        accepted = 0
        while accepted < len(ids) and ids[accepted] == own[accepted]:
            accepted += 1
        out.append(_verdict(ids, accepted, own[accepted]))
    return out


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
    logits: torch.Tensor,
    rows: Sequence[Row],
    drafts: Sequence[Sequence[int]],
    scores: torch.Tensor | None,
) -> list[Verdict]:
    """Rejection verification of a block of requests, laid out as in `verify`."""
    x, fine = _scores(logits, rows)
    good = fine.tolist()
    spans = _spans(drafts, 1)
    stands: list[bool] = []
    if scores is not None:
        judges = [row for span in spans for row in span[:-1]]
        ids = torch.tensor([token for some in drafts for token in some], device=x.device)
        draws = [rng.uniform(rows[row].seed, rows[row].position, rng.ACCEPT) for row in judges]
        p, q = probabilities(x[judges]), probabilities(scores)
        stands = accepts(p, q, ids, _like(draws, x)).tolist()

    accepted: list[int] = []
    last: list[int | None] = [None] * len(drafts)
    fresh: list[tuple[int, int]] = []  # (request, row)
    fallen: list[tuple[int, int, int]] = []  # (request, row, draft)
    for at, (tokens, span, behind) in enumerate(zip(drafts, spans, _spans(drafts, 0), strict=True)):
        kept = 0
        while kept < len(tokens) and good[span[kept]] and stands[behind[kept]]:
            kept += 1
        accepted.append(kept)
        if good[span[kept]]:
            if kept < len(tokens) and tokens[kept] >= 0:
                fallen.append((at, span[kept], behind[kept]))
            else:  # behind all drafts, or where nothing was drafted
                fresh.append((at, span[kept]))

    if fresh:
        streams = [rng.key(rows[row].seed, rows[row].position, rng.TARGET) for _, row in fresh]
        tokens = _highest(x[[row for _, row in fresh]], streams)
        for (at, _), token in zip(fresh, tokens, strict=True):
            last[at] = token
    if fallen:
        which = [draft for _, _, draft in fallen]
        draws = [rng.uniform(rows[r].seed, rows[r].position, rng.RESIDUAL) for _, r, _ in fallen]
        tokens = redraw(p[which], q[which], _like(draws, x)).tolist()
        for (at, _, _), token in zip(fallen, tokens, strict=True):
            last[at] = token
    return [_verdict(*one) for one in zip(drafts, accepted, last, strict=True)]


def _rejects(row: Row, rule: str) -> bool:
    return rule == "rejection" and row.params.temperature > 0


def _scores(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed logits [rows, vocab], and which rows are fine, bool [rows]; the others are 0."""
    fine = torch.isfinite(logits).all(dim=-1)
    x = process(logits.masked_fill(~fine[:, None], 0.0), rows)
    fine = fine & (x.amax(dim=-1) > float("-inf"))
    return x.masked_fill(~fine[:, None], 0.0), fine


def _highest(x: torch.Tensor, streams: Sequence[int]) -> list[int]:
    """Gumbel-max draws from softmax(x), as `sampler.sample` makes them."""
    return (x + rng.gumbel_rows(streams, x.shape[-1], x.device)).argmax(dim=-1).tolist()


def _verdict(drafts: Sequence[int], accepted: int, last: int | None) -> Verdict:
    kept = tuple(drafts[:accepted])
    return Verdict(accepted, kept if last is None else (*kept, last), last is None)


def _spans(drafts: Sequence[Sequence[int]], more: int) -> list[range]:
    """Of each request the numbers of its rows, where it has `more` of them than drafts."""
    out, at = [], 0
    for ids in drafts:
        out.append(range(at, at + len(ids) + more))
        at = out[-1].stop
    return out


def _like(values: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device)
