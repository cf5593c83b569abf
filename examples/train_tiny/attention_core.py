"""The attention core of training: a window and a masked list of entries, over whole sequences.

Comes in: queries [B, T, h, D], one key = value row per position and per entry. Goes out: attention
with sinks and each head's log-sum. Two forms of one meaning: plain torch with banded windows, and
the fused kernel of torch's flex attention on a GPU. It must not know layers or quantisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from deepinfer.model.config import ModelConfig

BLOCK = 128  # rows and keys of a block of the fused kernel's mask


def window_start(length: int, window: int, device) -> torch.Tensor:
    """First position of every row's window: int64 [T]."""
    return (torch.arange(length, device=device) - (window - 1)).clamp_min(0)


def cut(window: torch.Tensor, barriers: torch.Tensor) -> torch.Tensor:
    """First position each row may see, int64 [..., T]: its window's, or the last barrier before.

    window int64 [T], barriers int64 [..., K]; a barrier at s hides positions before s from rows
    from s on.
    """
    rows = torch.arange(window.shape[0], device=window.device)
    passed = barriers.unsqueeze(-1) <= rows
    cuts = torch.where(passed, barriers.unsqueeze(-1), 0).amax(-2)
    return torch.maximum(window, cuts)


def visible(length: int, ratio: int, device) -> torch.Tensor:
    """bool [1, T, J]: entry j is visible to row p iff j < floor((p + 1) / ratio)."""
    rows = (torch.arange(length, device=device) + 1) // ratio
    return (torch.arange(length // ratio, device=device) < rows.unsqueeze(-1)).unsqueeze(0)


def index_scores(q, keys, weights, seen) -> torch.Tensor:
    """sum_h w_h relu(q_h . k) float32 [B, T, J], -inf where not visible."""
    total = torch.zeros((), device=q.device)
    for h in range(q.shape[2]):
        dots = torch.bmm(q[:, :, h], keys.mT).float()
        total = total + dots.relu() * weights[:, :, h, None].float()
    return total.masked_fill(~seen, -torch.inf)


def choose(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool: the k best scores of each row [..., J], ties of the last included, -inf never."""
    seen = scores > -torch.inf
    if scores.shape[-1] <= k:
        return seen
    if scores.is_cuda and scores.shape[-1] & (scores.shape[-1] - 1) == 0:
        from examples.train_tiny import select_kernel

        return select_kernel.choose(scores, k)
    return seen & (scores >= torch.topk(scores, k, dim=-1).values[..., -1:])


def candidate_entries(
    scores: torch.Tensor, seen: torch.Tensor, blocks: int, size: int
) -> torch.Tensor:
    """bool [B, T, J]: entries of the best blocks; the newest visible one always stays."""
    rest = -scores.shape[-1] % size
    best = F.pad(scores, (0, rest), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    if best.shape[-1] <= blocks:
        return torch.ones_like(scores, dtype=torch.bool)
    newest = ((seen.sum(-1, keepdim=True) - 1) // size).clamp_min(0)
    best = best.scatter(-1, newest.expand(*best.shape[:-1], 1), torch.inf)
    kept = choose(best, blocks)
    return kept.repeat_interleave(size, -1)[..., : scores.shape[-1]]


def make(
    config: ModelConfig, length: int, ratio: int, device, piece: Callable, fused: bool
) -> Callable:
    """core(q, kv, lower, entries, chosen, sink) -> (o [B, T, h, D], lse [B, T, h]).

    kv [B, T, D], lower int64 [B, T], entries [B, J, D] and chosen bool [B, T, J] (None at ratio
    0), sink float32 [h]. `lse` counts the sink.
    """
    window = config.sliding_window
    entries = length // ratio if ratio else 0
    if fused and length % BLOCK == 0 and entries % BLOCK == 0:
        return _fused(length, entries, ratio, window, device, piece)
    return make_plain(config, piece)


def make_plain(config: ModelConfig, piece: Callable) -> Callable:
    """The plain core, the meaning of the fused one."""
    banded, window = piece(_banded), config.sliding_window
    return lambda q, kv, lower, e, chosen, sink: banded(q, kv, lower, e, chosen, sink, window)


def _banded(q, kv, lower, entries, chosen, sink, window: int):
    batch, length, heads, dim = q.shape
    rest = -length % window
    blocks = (length + rest) // window
    queries = F.pad(q, (0, 0, 0, 0, 0, rest)).unflatten(1, (blocks, window))
    # Keys of the block before and of its own: positions (b - 1) window .. (b + 1) window - 1.
    padded = F.pad(kv, (0, 0, window, rest)).unflatten(1, (blocks + 1, window))
    keys = torch.cat((padded[:, :-1], padded[:, 1:]), 2)
    logits = torch.einsum("bnqhd,bnkd->bnqhk", queries, keys).float() * dim**-0.5
    start = torch.arange(blocks, device=q.device).unsqueeze(-1) * window
    key = start - window + torch.arange(2 * window, device=q.device)
    row = start + torch.arange(window, device=q.device)
    low = F.pad(lower, (0, rest)).unflatten(1, (blocks, window)).unsqueeze(-1)
    mask = (key.unsqueeze(1) <= row.unsqueeze(-1)) & (key.unsqueeze(1) >= low)
    logits = logits.masked_fill(~mask.unsqueeze(3), -torch.inf)
    logits = logits.flatten(1, 2)[:, :length]
    if entries is not None:
        more = torch.einsum("bthd,bjd->bthj", q, entries).float() * dim**-0.5
        logits = torch.cat((logits, more.masked_fill(~chosen.unsqueeze(2), -torch.inf)), -1)
    lse = torch.logaddexp(torch.logsumexp(logits, -1), sink)
    p = (logits - lse.unsqueeze(-1)).exp().to(q.dtype)
    near = F.pad(p[..., : 2 * window], (0, 0, 0, 0, 0, rest)).unflatten(1, (blocks, window))
    o = torch.einsum("bnqhk,bnkd->bnqhd", near, keys).flatten(1, 2)[:, :length]
    if entries is not None:
        o = o + torch.einsum("bthj,bjd->bthd", p[..., 2 * window :], entries)
    return o, lse


def _fused(length: int, entries: int, ratio: int, window: int, device, piece: Callable):
    """Flex attention over [window keys ; entries] with a block mask that depends on T alone."""
    template = _block_mask(length, entries, ratio, window, device)

    def attend(q, kv, lower, e, chosen, sink):
        def mask(b, h, row, key):
            near = (key <= row) & (key >= lower[b, row])
            if chosen is None:
                return near
            listed = chosen[b, row, (key - length).clamp_min(0)]
            return torch.where(key < length, near, listed)

        keys = (kv if e is None else torch.cat((kv, e), 1)).unsqueeze(1)
        blocks = BlockMask(
            seq_lengths=template.seq_lengths,
            kv_num_blocks=template.kv_num_blocks,
            kv_indices=template.kv_indices,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=template.q_num_blocks,
            q_indices=template.q_indices,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=template.BLOCK_SIZE,
            mask_mod=mask,
        )
        o, more = flex_attention(
            q.transpose(1, 2), keys, keys, block_mask=blocks, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        # A sink is a key without a value: it only takes its share of the probability.
        o, lse = o.transpose(1, 2), more.lse.transpose(1, 2)
        share = torch.sigmoid(lse - sink)
        return (o.float() * share.unsqueeze(-1)).to(q.dtype), torch.logaddexp(lse, sink)

    return piece(attend)


def _block_mask(length: int, entries: int, ratio: int, window: int, device) -> BlockMask:
    """Which blocks of keys a block of rows can reach at all."""
    rows, near = length // BLOCK, length // BLOCK
    total = near + entries // BLOCK
    reach = torch.zeros(rows, total, dtype=torch.bool)
    for i in range(rows):
        first = max(0, i * BLOCK - window + 1) // BLOCK
        reach[i, first : i + 1] = True
        if ratio:
            seen = (i + 1) * BLOCK // ratio  # entries visible to the block's last row
            reach[i, near : near + -(-seen // BLOCK)] = True
    counts = reach.sum(-1).int()
    order = torch.argsort((~reach).int(), dim=-1, stable=True).int()
    return BlockMask.from_kv_blocks(
        counts.view(1, 1, -1).to(device),
        order.view(1, 1, rows, -1).contiguous().to(device),
        BLOCK_SIZE=BLOCK,
        seq_lengths=(length, length + entries),
    )
