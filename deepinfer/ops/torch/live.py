"""Reference ops on the running requests: their next rows, and the tokens that those gave.

Comes in: columns with a row per state slot, and the slots int64 [R] of requests, no two alike. Goes
out: integers per request or row, of sizes that the host knows; nobody waits. It must not know
pools, logits or how tokens are chosen.
"""

from __future__ import annotations

import torch


def live_rows(
    slots: torch.Tensor,
    allotted: torch.Tensor,
    length: torch.Tensor,
    last: torch.Tensor,
    drafts: torch.Tensor,
    pages: torch.Tensor,
    windows: torch.Tensor,
    total: int,
    columns: int,
) -> tuple[torch.Tensor, ...]:
    """The ``total`` rows of R requests: the newest token of each and ``allotted`` int64 [R] of its
    drafts, request after request.

    By slot, int64: ``length`` and ``last``, tokens of the request and the newest one, which is not
    in memory; ``drafts`` [slots, K], -1 for none; ``pages`` and ``windows`` [slots, P], of which
    ``columns`` go out. Gives starts, counts, offsets [R], of, positions [N] as `kvcache.live.Spans`
    has them; ids [N], how far each row is behind the first of its request [N]; pages, windows
    [R, columns].
    """
    starts, counts = length[slots] - 1, allotted + 1
    offsets = counts.cumsum(0) - counts
    of = torch.repeat_interleave(counts, output_size=total)
    behind = torch.arange(total, device=slots.device) - offsets[of]
    tokens = torch.cat((last[slots].unsqueeze(1), drafts[slots].clamp_min(0)), 1)
    ids = tokens[of, behind]
    tables = pages[slots, :columns], windows[slots, :columns]
    return starts, counts, offsets, of, starts[of] + behind, ids, behind, *tables


def ends(tokens: torch.Tensor, slots: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Would each of tokens int64 [R, n] end its request? bool [R, n]. ``stops`` int64 [slots, S]:
    the ids that do, -1 for none."""
    return (tokens.unsqueeze(-1) == stops[slots].unsqueeze(1)).any(-1) & (tokens >= 0)


def append(
    tokens: torch.Tensor,
    accepted: torch.Tensor,
    broken: torch.Tensor,
    slots: torch.Tensor,
    stops: torch.Tensor,
    end: torch.Tensor,
    length: torch.Tensor,
    last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the first ``accepted`` int64 [R] of each row of tokens int64 [R, n] and one more,
    which there is not where ``broken`` bool [R]; up to one that ends the request, or ``end``.

    By slot, int64: ``stops`` [slots, S] as in `ends`; ``end``, most tokens it may have; ``length``
    and ``last``, its tokens and the newest one, which change. Gives how many were appended, int64
    [R], and whether its last one ends it by itself or it is broken, bool [R].
    """
    behind = torch.arange(tokens.shape[1], device=tokens.device)
    counts = accepted + torch.where(broken, 0, 1)
    stop = ends(tokens, slots, stops) & (behind < counts.unsqueeze(1))
    first = torch.where(stop, behind + 1, tokens.shape[1] + 1).amin(1)
    before = length[slots]
    counts = torch.minimum(torch.minimum(counts, first), end[slots] - before).clamp_min(0)
    newest = tokens.gather(1, (counts - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    last[slots] = torch.where(counts > 0, newest, last[slots])
    length[slots] = before + counts
    return counts, (first <= counts) | broken
