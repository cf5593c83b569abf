"""Reference ops on what attention remembers: pooling, index scores, selection, sparse attention.

Comes in: rows, and packed records with slot lists. Goes out: rows, scores, or index lists. Source:
model spec §3.6-3.8; key order and blocking of 64: serving semantics §6.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch import blocked
from deepinfer.ops.torch.rowwise import row_sum
from deepinfer.quant import codec
from deepinfer.quant.records import RecordFormat

KEY_BLOCK = 64
# Keys are added in this many interleaved lanes, the lanes pairwise at the end.
_LANES = 8
_ROWS = 64


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
    terms = (dots.relu() * weights.unsqueeze(-1)).float()
    return row_sum(terms.movedim(2, -1)).to(q.dtype)


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
    order = torch.sort(_sortable(scores, ok), dim=-1, descending=True, stable=True).indices[..., :k]
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
    """
    out = torch.empty_like(q)
    for i in range(0, q.shape[0], _ROWS):
        rows = slice(i, i + _ROWS)
        keys, valid = _gather(window, window_slots[rows], window_format)
        if entries is not None:
            more, more_valid = _gather(entries, entry_slots[rows], entry_format)
            keys, valid = torch.cat((keys, more), 1), torch.cat((valid, more_valid), 1)
        out[rows] = attend(q[rows], keys, valid, sink)
    return out


def _gather(pool: torch.Tensor, slots: torch.Tensor, fmt: RecordFormat):
    """Decoded records [N, columns, D] (0 where there is none) and their mask."""
    valid = slots >= 0
    unique, where = torch.unique(slots.clamp_min(0), return_inverse=True)
    keys = fmt.decode(pool[unique])[where]
    return keys.masked_fill(~valid.unsqueeze(-1), 0), valid


def attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """The attention core on gathered keys [N, L, D] with mask [N, L]; see ``sparse_attention``."""
    n, heads, dim = q.shape
    pad = -keys.shape[1] % KEY_BLOCK
    keys = torch.nn.functional.pad(keys, (0, 0, 0, pad))
    valid = torch.nn.functional.pad(valid, (0, pad))
    left = blocked.snap(q)
    peak = torch.full((n, heads), -1e30, device=q.device)
    total = torch.zeros((n, heads), dtype=torch.float64, device=q.device)
    acc = torch.zeros((n, heads, dim), dtype=torch.float64, device=q.device)
    for start in range(0, keys.shape[1], KEY_BLOCK):
        k = keys[:, start : start + KEY_BLOCK]
        mask = valid[:, None, start : start + KEY_BLOCK]
        # Decoded records are integers of at most 24 bits within a block of 32: no snap needed.
        right = blocked.split(k) if k.dtype == torch.bfloat16 else blocked.snap(k)
        logits = blocked.matmul(left, right.movedim(1, -1)) * dim**-0.5
        logits = logits.masked_fill(~mask, -torch.inf)
        new_peak = torch.maximum(peak, logits.amax(-1))
        p = torch.exp(logits - new_peak.unsqueeze(-1))
        alpha = torch.exp(peak - new_peak)
        total = total * alpha + row_sum(p.double())
        acc = acc * alpha.unsqueeze(-1) + _weighted_sum(p.to(q.dtype), k)
        peak = new_peak
    total = total + torch.exp(sink - peak)
    return (acc / total.unsqueeze(-1)).float().to(q.dtype)


def _weighted_sum(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j p[N, heads, j] v[N, j, D]: eight lanes of keys in float64, added pairwise."""
    p, v = p.double(), v.double()
    acc = p[:, :, :_LANES, None] * v[:, None, :_LANES]
    for j in range(_LANES, v.shape[1], _LANES):
        acc = acc + p[:, :, j : j + _LANES, None] * v[:, None, j : j + _LANES]
    return row_sum(acc.movedim(2, -1))
