"""Reference ops on places: which rows of rings, pages and the step itself a row has to do with.

Comes in: rows of a step, numbered through, as ``Spans``, and the slots and pages of their
sequences. Goes out: int64 indices, and rows moved by them. Sizes follow from what the host knows;
nobody waits. It must not know layers or what the records mean.
"""

from __future__ import annotations

import torch

# N rows of S sequences, int64: the first position of each sequence and where it stands among the
# rows [S]; the sequence of each row, ascending, and its position [N].
Spans = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# M of these rows that stay: sequence and position of each [M].
Kept = tuple[torch.Tensor, torch.Tensor]


def _row(rows: Spans, of: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Which of the rows is at a position of a sequence; anything where none is."""
    starts, offsets, *_ = rows
    return positions + (offsets - starts)[of]


def _stay(
    rows: Spans, kept: Kept, slots: torch.Tensor, ring: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the kept rows, and their places in rings of ``ring`` positions a slot."""
    of, positions = kept
    return _row(rows, of, positions), slots[of] * ring + positions % ring


def window_places(
    rows: Spans, kept: Kept, slots: torch.Tensor, sees: torch.Tensor, width: int, ring: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows of ``width`` positions that end with each row, none before ``sees`` int64 [S].

    past [S * (width - 1)]: ring places of the positions before each sequence's rows, 0 before
    position 0. columns [N, width]: indices into [past, rows], oldest first, -1 at the end. Then
    number and ring place of each kept row. slots: int64 [S].
    """
    starts, _, of, positions = rows
    before = starts.unsqueeze(1) + torch.arange(1 - width, 0, device=of.device)
    past = torch.where(before >= 0, slots.unsqueeze(1) * ring + before % ring, 0)
    at, p = of.unsqueeze(1), positions.unsqueeze(1)
    start = starts[at]
    oldest = torch.maximum(p - width + 1, sees[at])
    key = oldest + torch.arange(width, device=of.device)
    old = (at + 1) * (width - 1) + key - start
    new = len(slots) * (width - 1) + _row(rows, at, key)
    columns = torch.where(key > p, -1, torch.where(key < start, old, new))
    return past.flatten(), columns, *_stay(rows, kept, slots, ring)


def page_places(kept: Kept, pages: torch.Tensor, size: int) -> torch.Tensor:
    """Places int64 [M] of rows in pages of ``size`` positions; ``pages`` int64 [S, P]."""
    of, positions = kept
    return pages[of, positions // size] * size + positions % size


def group_places(
    rows: Spans,
    kept: Kept,
    ends: Kept,
    slots: torch.Tensor,
    pages: torch.Tensor,
    ratio: int,
    ring: int,
    page_tokens: int,
    scratch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of ``ratio`` positions, one for each of ``ends``: its last row, or, where that ends no
    group, a row that stands for the members that are missing; the entry is for nobody then.

    closed [E, ratio]: indices into [open rows of each sequence, ``ring`` each, by position, rows];
    first [E]: position of the first member; entry [E]: its place in ``pages`` int64 [S, P], or in
    page ``scratch``. Then number and ring place of each kept row.
    """
    starts, (of, last) = rows[0], ends
    per_page, number = page_tokens // ratio, last // ratio
    member = number.unsqueeze(1) * ratio + torch.arange(ratio, device=of.device)
    member = torch.minimum(member, last.unsqueeze(1))
    at = of.unsqueeze(1)
    old = at * ring + member % max(1, ring)
    new = len(slots) * ring + _row(rows, at, member)
    closed = torch.where(member < starts[at], old, new)
    page = torch.where((last + 1) % ratio == 0, pages[of, last // page_tokens], scratch)
    entry = page * per_page + number % per_page
    return closed, number * ratio, entry, *_stay(rows, kept, slots, max(1, ring))


def group_rows(
    v: torch.Tensor,
    z: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    closed: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Members [E, r, D] of groups of v and of z, by ``closed`` of ``group_places``.

    New rows v, z float32 [N, D]; ``state`` float32 [2, slots, ring, D] of open groups, where rows
    ``kept`` (number, place) stay afterwards.
    """
    both, (rows, places) = torch.stack((v, z)), kept
    known = torch.cat((state[:, slots].flatten(1, 2), both), 1)
    state.flatten(1, 2)[:, places] = both[:, rows]
    members = known[:, closed]
    return members[0], members[1]


def entry_table(
    starts: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    pages: torch.Tensor,
    total: int,
    most: int,
    entries: int,
    ratio: int,
    page_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """R requests with up to ``most`` rows each, side by side: ``counts`` int64 [R] rows from
    position ``starts`` and row ``offsets`` on.

    places [R, most]: the number of each row, ``total`` in a cell that is void; visible [R, most]:
    entries of ``ratio`` positions that are complete there, 0 in a void cell; table [R, entries]:
    the place of each entry in ``pages`` int64 [R, P].
    """
    step, entry = (torch.arange(n, device=starts.device) for n in (most, entries))
    there = step < counts.unsqueeze(1)
    places = torch.where(there, offsets.unsqueeze(1) + step, total)
    visible = torch.where(there, (starts.unsqueeze(1) + 1 + step) // ratio, 0)
    per_page = page_tokens // ratio
    return places, visible, pages[:, entry // per_page] * per_page + entry % per_page


def ngrams(
    rows: Spans,
    kept: Kept,
    slots: torch.Tensor,
    mapped: torch.Tensor,
    history: torch.Tensor,
    depth: int,
    pad: int,
) -> torch.Tensor:
    """``mapped`` int64 [N] of each row and of the ``depth`` positions before it, newest first:
    int64 [N, depth + 1], ``pad`` before position 0.

    Older ones are in ``history`` int64 [slots, ring], by position; kept rows go there afterwards.
    """
    starts, _, of, positions = rows
    ring, at = history.shape[1], of.unsqueeze(1)
    p = positions.unsqueeze(1) - torch.arange(depth + 1, device=of.device)
    new = len(slots) * ring + _row(rows, at, p)
    source = torch.where(p < starts[at], at * ring + p % ring, new)
    pool = torch.cat((history[slots].flatten(), mapped, mapped.new_full((1,), pad)))
    found = pool[torch.where(p < 0, -1, source)]
    numbers, places = _stay(rows, kept, slots, ring)
    history.view(-1)[places] = mapped[numbers]
    return found
