"""Reference ops on what attention remembers: pooling, index scores, selection, sparse attention.

Comes in: rows, and packed records with slot lists. Goes out: rows, scores, or index lists. Source:
model spec §3.6-3.8; key order and blocking of 64: serving semantics §6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.device import sync
from deepinfer.ops.torch import blocked
from deepinfer.quant import codec
from deepinfer.quant.records import RecordFormat

KEY_BLOCK = 64
# Keys times queries, and probabilities times keys, are exact sums in float64: a key is an integer
# of 22 bits times a power of two. 512 (64) products with 22 (25) bits beside it stay below 2^53.
_KEY_BITS = 22
_WEIGHT_BITS = 25
# Gathered float64 keys held at once (bytes): small enough to stay in a processor's cache; on an
# accelerator, where every call costs some microseconds, as much as is easily spared.
_LIMIT = 8 << 20
_DEVICE_LIMIT = 2 << 30
# Index scores held at once: rows x entries; on an accelerator, where calls are dear, more.
_SCORES = 1 << 18
_DEVICE_SCORES = 1 << 25


def store(x: torch.Tensor, fmt: RecordFormat, target: torch.Tensor, places: torch.Tensor) -> None:
    """Records of rows x [N, width] go to ``places`` int64 [N] of ``target`` [slots, bytes]."""
    target[places] = fmt.encode(x)


def extend(
    x: torch.Tensor,
    fmt: RecordFormat,
    ring: torch.Tensor,
    past: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Records uint8 [P + N, bytes]: those at ``past`` int64 [P] of ``ring``, then those of x
    [N, width].

    Afterwards some new ones are stored: ``kept`` (rows, places), both int64 [M], in the ring;
    ``copies`` (target, rows, places) likewise elsewhere.
    """
    new = fmt.encode(x)
    # Old records are loaded before new ones are stored: their places overlap.
    records = torch.cat((ring[past], new))
    if kept is not None:
        rows, places = kept
        ring[places] = new[rows]
    if copies is not None:
        target, rows, places = copies
        target[places] = new[rows]
    return records


def pool(v: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Softmax-weighted mean over each group: v, z float32 [E, r, D] -> float32 [E, D]."""
    weight = torch.exp(z - z.amax(1, keepdim=True))
    total, norm = v[:, 0] * weight[:, 0], weight[:, 0]
    for t in range(1, v.shape[1]):
        total = total + v[:, t] * weight[:, t]
        norm = norm + weight[:, t]
    return total / norm


def quantise_index(q: torch.Tensor) -> torch.Tensor:
    """Values of the FP4 index flavour of q [..., d], in q's dtype."""
    return codec.fp4_index_values(*codec.fp4_index_groups(q)).to(q.dtype)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores [R, T, n] = sum_h w_h relu(q_h . k) of q [R, T, h, d], k [R, n, d], w [R, T, h].

    Rounded to q's dtype after the dot product, after the head weight and after the sum.
    """
    left = blocked.snap(q.flatten(1, 2))
    dots = blocked.matmul(left, blocked.snap(k).movedim(1, -1)).to(q.dtype)
    dots = dots.unflatten(1, q.shape[1:3])
    terms = dots.relu() * weights.unsqueeze(-1)
    return blocked.row_sum(terms.movedim(2, -1)).float().to(q.dtype)


def _sortable(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """int32 keys in the order of the scores (NaN as -inf); not-allowed entries below all."""
    s = torch.nan_to_num(scores.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (s + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(allowed, key, torch.iinfo(torch.int32).min)


def select(
    scores: torch.Tensor, visible: torch.Tensor, k: int, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """The k best entries of each row, ascending, -1 at the end: int64 [..., k].

    ``scores`` [..., n]; ``visible`` int64 [...]: entries 0..visible-1 count; ``allowed`` bool
    [..., n] restricts them further. Ties: lower index. Entries outside are never read.
    """
    n = scores.shape[-1]
    ok = torch.arange(n, device=scores.device) < visible.unsqueeze(-1)
    if allowed is not None:
        ok = ok & allowed
    # The index in the low bits leaves no ties, and puts the lower index first.
    key = (_sortable(scores, ok).long() << 31) - torch.arange(n, device=scores.device)
    order = key.topk(min(k, n), dim=-1, sorted=False).indices
    order = torch.where(ok.gather(-1, order), order, n).sort(-1).values
    order = torch.where(order < n, order, -1)
    return torch.nn.functional.pad(order, (0, k - order.shape[-1]), value=-1)


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, count: int, size: int
) -> torch.Tensor:
    """The ``count`` best blocks of ``size`` entries: bool [..., ceil(n / size)].

    A block's score is its best visible entry; the block of the newest visible entry always stays.
    """
    n = scores.shape[-1]
    if not n:
        return torch.zeros_like(scores, dtype=torch.bool)
    blocks = -(-n // size)
    ok = torch.arange(n, device=scores.device) < visible.unsqueeze(-1)
    key = torch.nn.functional.pad(
        _sortable(scores, ok), (0, blocks * size - n), value=torch.iinfo(torch.int32).min
    )
    best = key.unflatten(-1, (blocks, size)).amax(-1)
    newest = ((visible - 1) // size).clamp_min(0).unsqueeze(-1)
    best = best.scatter(-1, newest, torch.iinfo(torch.int32).max)
    chosen = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., :count]
    seen = -(-visible // size)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return kept & (torch.arange(blocks, device=scores.device) < seen.unsqueeze(-1))


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    records: torch.Tensor,
    fmt: RecordFormat,
    table: torch.Tensor,
    visible: torch.Tensor,
    most: Sequence[int],
    k: int,
    candidates: tuple[int, int] | None = None,
    within: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots int64 [R, T, k] of the entries with the best index scores, ascending by entry, -1 at
    the end.

    Index queries q [R, T, h, d], head weights [R, T, h]; ``records`` uint8 [slots, bytes] of index
    keys in format ``fmt``; ``table`` int64 [R, n]: the slot of each entry of a request, of which a
    row sees the first ``visible`` int64 [R, T], and in column t of T none sees more than
    ``most[t]``, ascending. ``candidates`` (count, size): the best blocks of so many entries go out
    as well, bool [R, T, ceil(n / size)], or, given as ``within``, are all that a row may choose
    from. The host never waits.
    """
    (requests, columns), n = visible.shape, table.shape[1]
    limit = _SCORES if q.device.type == "cpu" else _DEVICE_SCORES
    step = max(1, limit // max(1, table.numel()))
    kept = keys = None
    if candidates is not None and within is None:
        blocks = -(-n // candidates[1])
        kept = torch.zeros((requests, columns, blocks), dtype=torch.bool, device=q.device)
    parts = []
    for first in range(0, columns, step):
        t = slice(first, first + step)
        some = table[:, : most[t][-1]]
        rows = q[:, t], weights[:, t], records, fmt, some, visible[:, t], k
        if within is not None and some.shape[1] > candidates[0] * candidates[1]:
            parts.append(_choose_within(*rows, candidates, within[:, t]))
            continue
        if keys is None:  # once for all rows of a request
            keys = fmt.decode(records[table])
        scores = index_scores(q[:, t], keys[:, : some.shape[1]], weights[:, t])
        allowed = None
        if within is not None:
            allowed = within[:, t].repeat_interleave(candidates[1], -1)[..., : some.shape[1]]
        elif kept is not None:
            best = candidate_blocks(scores, visible[:, t], *candidates)
            kept[:, t, : best.shape[-1]] = best
        parts.append(_slots(some, select(scores, visible[:, t], k, allowed)))
    return torch.cat(parts, 1) if parts else table.new_empty((requests, 0, k)), kept


def _slots(table: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Of entries [R, T, k], -1: none, in ``table`` [R, n]."""
    if not table.shape[1]:
        return best
    flat = table.unsqueeze(1).expand(-1, best.shape[1], -1)
    return torch.where(best >= 0, flat.gather(-1, best.clamp_min(0)), -1)


def _choose_within(
    q: torch.Tensor,
    weights: torch.Tensor,
    records: torch.Tensor,
    fmt: RecordFormat,
    table: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    candidates: tuple[int, int],
    within: torch.Tensor,
) -> torch.Tensor:
    """``choose``, scoring nothing but the entries of each row's own blocks."""
    count, size = candidates
    none = within.shape[-1]
    order = torch.where(within, torch.arange(none, device=q.device), none).sort(-1).values
    entries = order[..., :count, None] * size + torch.arange(size, device=q.device)
    entries = entries.flatten(-2)  # ascending; past the end where a row has fewer blocks
    allowed = (entries < visible.unsqueeze(-1)).flatten(0, 1).unsqueeze(1)
    flat = table.unsqueeze(1).expand(-1, entries.shape[1], -1)
    slots = flat.gather(-1, entries.clamp_max(table.shape[-1] - 1))
    # Every row has keys of its own: R x T requests of one row each.
    keys = fmt.decode(records[slots.flatten(0, 1)])
    scores = index_scores(q.flatten(0, 1).unsqueeze(1), keys, weights.flatten(0, 1).unsqueeze(1))
    everything = torch.full_like(allowed[..., 0], entries.shape[-1], dtype=torch.int64)
    best = select(scores, everything, k, allowed).view(*entries.shape[:2], -1)
    return torch.where(best >= 0, slots.gather(-1, best.clamp_min(0)), -1)


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    window_format: RecordFormat,
    entries: torch.Tensor | None,
    entry_slots: torch.Tensor | None,
    entry_format: RecordFormat | None,
    sink: torch.Tensor,
) -> torch.Tensor:
    """o [N, heads, D] over window records and compressed records; key = value, one sink a head.

    ``window`` uint8 [slots, bytes], ``window_slots`` int64 [N, W] (-1: no key), likewise
    ``entries``. Columns are visited in blocks of 64, window first; softmax in float32 with a
    running maximum, probabilities rounded to q's dtype for the product. A row without a key is 0.
    The host never waits.
    """
    # Slot -1 is the last record: bytes of zero decode to a key of zeros.
    zero = torch.nn.functional.pad
    if entries is None:
        return attend(q, window_format.decode(zero(window, (0, 0, 0, 1))), window_slots, sink)
    keys = window_format.decode(window)
    step = len(q)
    if sync.waits(entry_slots):  # no more decoded entries at once than gathered keys
        step = max(1, _DEVICE_LIMIT // (8 * q.shape[-1] * max(1, entry_slots.shape[1])))
    parts = []
    for rows, near, far in zip(
        q.split(step), window_slots.split(step), entry_slots.split(step), strict=True
    ):
        used, where = _named(far.clamp_min(0))
        where = torch.where(far < 0, -1, where + keys.shape[0])
        both = torch.cat((keys, entry_format.decode(zero(entries[used], (0, 0, 0, 1)))))
        parts.append(attend(rows, both, torch.cat((near, where), 1), sink))
    return torch.cat(parts)


def _named(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [U] that hold all of ``slots`` [N, k], and where each stands in them: every slot once,
    or, where the host would wait for their number, as they are."""
    if not sync.waits(slots):
        return torch.unique(slots, return_inverse=True)
    return slots.flatten(), torch.arange(slots.numel(), device=slots.device).view_as(slots)


def attend(
    q: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """The attention core: keys [U, D], the last one zero, slots int64 [N, L] into them, -1: none;
    see ``sparse_attention``."""
    dim = q.shape[-1]
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[1] % KEY_BLOCK), value=-1)
    scale = 2 * blocked.power_below(keys.abs().amax(-1, keepdim=True).double())
    scale = torch.where(scale == 0, 1.0, scale)
    # In (-1, 1), rounded to multiples of 2^-22.
    magic = 1.5 * 2.0 ** (52 - _KEY_BITS)
    keys = keys.double().div_(scale).add_(magic).sub_(magic)
    left = blocked.fix(q.double(), min(_KEY_BITS, 53 - _KEY_BITS - (dim - 1).bit_length()))
    limit = _LIMIT if q.device.type == "cpu" else _DEVICE_LIMIT
    step = max(1, limit // (8 * dim * slots.shape[1]))
    parts = [
        _attend(rows, keys[c], scale[c].squeeze(-1), c >= 0, sink, q.dtype)
        for rows, c in zip(left.split(step), slots.split(step), strict=True)
    ]
    return torch.cat(parts)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor,
    valid: torch.Tensor,
    sink: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Fixed q [R, heads, D] over gathered keys [R, L, D] times scale [R, L]; -> ``dtype``."""
    # The factor is rounded to float32 as everywhere; the product with it once more.
    factor = scale * torch.full((), q.shape[-1] ** -0.5, device=q.device).double()
    logits = torch.matmul(q, keys.mT) * factor.unsqueeze(1)
    logits = logits.float().masked_fill(~valid.unsqueeze(1), -torch.inf)
    logits = logits.unflatten(-1, (-1, KEY_BLOCK))
    peak = logits.amax(-1).clamp_min(-1e30).cummax(-1).values
    p = torch.exp(logits - peak.unsqueeze(-1))
    # Rounded to multiples of 2^-46, so that the sum of 64 is exact.
    totals = ((p.double() + 96.0) - 96.0).sum(-1).float()
    weights = p.to(dtype).double() * scale.unflatten(-1, (-1, KEY_BLOCK)).unsqueeze(1)
    weights = blocked.fix(weights, _WEIGHT_BITS).transpose(1, 2)
    sums = torch.matmul(weights, keys.unflatten(1, (-1, KEY_BLOCK)))
    total, acc = totals[..., 0], sums[:, 0]
    for b in range(1, peak.shape[-1]):
        alpha = torch.exp(peak[..., b - 1] - peak[..., b])
        total = total * alpha + totals[..., b]
        acc = acc * alpha.unsqueeze(-1) + sums[:, b]
    total = total + torch.exp(sink - peak[..., -1])
    return (acc.float() * (1.0 / total).unsqueeze(-1)).to(dtype)
