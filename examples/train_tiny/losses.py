"""The two losses of the backbone: weighted cross entropy, and what teaches the indexer.

Comes in: logits and targets, or attention's and the indexer's views of some rows. Goes out: float32
scalars. It must not know the model.
"""

from __future__ import annotations

import torch


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, nll [N] without gradient): sum w nll / sum w + 1e-5 mean(w lse^2).

    logits [N, V], targets int64 [N], weights float32 [N]. The second term keeps the logits from
    drifting.
    """
    wide = logits.float()
    lse = torch.logsumexp(wide, -1)
    nll = lse - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    total = weights.sum().clamp_min(1e-6)
    loss = (weights * nll).sum() / total + 1e-5 * (weights * lse * lse).mean()
    return loss, nll.detach()


def index_loss(q, entries, lse, visible, iq, keys, weights) -> torch.Tensor:
    """KL(P || Q) of sampled rows over the visible entries, mean over rows.

    P: attention's weights summed over heads, from q [B, R, h, D], entries [B, J, D] and each
    head's log-sum over everything it attends, lse [B, R, h]. Q: softmax of the index scores from
    iq [B, R, i, d], keys [B, J, d], weights [B, R, i]. visible bool [B, R, J]. Gradients reach
    iq, keys and weights only.
    """
    with torch.no_grad():
        logits = torch.einsum("brhd,bjd->brhj", q, entries).float() * q.shape[-1] ** -0.5
        p = (logits - lse.unsqueeze(-1)).clamp_max(20.0).exp().sum(2)
        p = p.masked_fill(~visible, 0.0)
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-20)
    dots = torch.einsum("brid,bjd->brij", iq, keys).float()
    scores = (dots.relu() * weights.float().unsqueeze(-1)).sum(2)
    log_q = torch.log_softmax(scores.masked_fill(~visible, -1e30), -1)
    kl = torch.where(visible, p * (p.clamp_min(1e-20).log() - log_q), 0.0).sum(-1)
    return kl.mean()
