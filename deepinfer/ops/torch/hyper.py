"""Reference hyper-connections (single-pass mHC): mixes, collapse and expansion of the streams.

Comes in: streams [tokens, copies, hidden]. Goes out: float32 mixes, or rows. Source: model spec
§3.2, §3.3. All coefficients are float32, also when the streams are bf16.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch import blocked
from deepinfer.ops.torch.linear import Weight
from deepinfer.ops.torch.rowwise import inverse_rms, rmsnorm, sigmoid


def hc_mix(
    streams: torch.Tensor,
    fn: Weight,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [N, C], post [N, C], comb [N, C, C] of streams [N, C, H]; fn [C (2 + C), C H]."""
    u = streams.flatten(1).float()
    m = blocked.matmul(blocked.snap(u), fn.columns()) * inverse_rms(u, norm_eps).unsqueeze(-1)
    return hc_split(m, scale, base, streams.shape[1], iterations, hc_eps)


def hc_split(
    m: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    copies: int,
    iterations: int,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixes [N, C (2 + C)] -> pre, post, comb (Sinkhorn: columns, then rows and columns)."""
    c = copies
    # A tensor: a Python number would be converted anew at each of the many additions.
    eps = torch.full((), hc_eps, device=m.device)
    pre = sigmoid(m[:, :c] * scale[0] + base[:c]) + eps
    post = 2 * sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    a = (m[:, 2 * c :] * scale[2] + base[2 * c :]).unflatten(-1, (c, c))
    a = torch.exp(a - a.amax(-1, keepdim=True))
    a = a / sum(a.split(1, -1)[1:], a[..., :1]) + eps
    # Views of ``a``, which changes in place. Sums run from the first copy to the last.
    columns, rows = a.unbind(-1), a.unbind(-2)
    a.div_((sum(rows[1:], rows[0]) + eps).unsqueeze(-2))
    for _ in range(iterations - 1):
        a.div_((sum(columns[1:], columns[0]) + eps).unsqueeze(-1))
        a.div_((sum(rows[1:], rows[0]) + eps).unsqueeze(-2))
    return pre, post, a


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """x [N, H] = sum_k pre[k] S[k], in the streams' dtype."""
    terms = (pre.unsqueeze(-1) * streams).unbind(1)
    return sum(terms[1:], terms[0]).to(streams.dtype)


def hc_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm [N, H] of what `hc_collapse` gives."""
    return rmsnorm(hc_collapse(streams, pre), weight, eps)


def hc_expand(
    x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """S'[j] = post[j] x + sum_i comb[i][j] S[i]: the *first* index of comb is summed."""
    total = comb[:, 0, :, None] * streams[:, :1]
    for i in range(1, streams.shape[1]):
        total = total + comb[:, i, :, None] * streams[:, i : i + 1]
    return (post.unsqueeze(-1) * x.unsqueeze(1) + total).to(streams.dtype)
