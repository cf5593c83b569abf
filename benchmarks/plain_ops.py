"""The fastest path of torch: the ops of the reference without what makes their sums order-free.

Comes in: what the ops of `deepinfer.ops.specs` take. Goes out: the same within rounding. Products
are plain matmuls in the activations' dtype (float32 on a processor, where bf16 is slower), sums and
softmax are torch's own. Quantised inputs stay quantised: that is the model. `register` makes this
the back end `plain`, which promises no fixed order.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch.nn import functional

from deepinfer.ops import registry
from deepinfer.ops.torch.hyper import hc_split
from deepinfer.quant import Packed, codec

NAME = "plain"
_LIMIT = {"cpu": 32 << 20, "cuda": 1 << 30}  # bytes of gathered keys at once
# Up to so many bytes each (row, expert) pair takes its own copy of the matrix, without waiting.
_COPIES = {"cpu": 8 << 20, "cuda": 1 << 30}


class Weight:
    """A matrix [..., N, K] in the dtype that products run in."""

    def __init__(self, source: Packed | torch.Tensor) -> None:
        self.quantised = isinstance(source, Packed)
        values = codec.unpack(source, torch.bfloat16) if self.quantised else source
        self.exact = values  # as stored
        self.values = values.float() if values.device.type == "cpu" else values


def prepare(source: Packed | torch.Tensor, keep: bool) -> Weight:
    return Weight(source)


def _left(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if weight.quantised:
        x = codec.fp8_rounded(x)
    return x.to(weight.values.dtype)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return functional.linear(_left(x, weight), weight.values).to(x.dtype)


def linear_f32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return functional.linear(x.float(), weight.exact.float())


def grouped_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    w = weight.values.unflatten(-2, (x.shape[1], -1))
    return torch.einsum("mgk,grk->mgr", x.to(w.dtype), w).flatten(1).to(x.dtype)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def hc_mix(streams, fn, scale, base, iterations, hc_eps, norm_eps):
    u = streams.flatten(1).float()
    rms = torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    m = functional.linear(u, fn.values.float()) * rms
    return hc_split(m, scale, base, streams.shape[1], iterations, hc_eps)


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nc,nch->nh", pre, streams.float()).to(streams.dtype)


def hc_norm(streams, pre, weight, eps):
    return rmsnorm(hc_collapse(streams, pre), weight, eps)


def hc_expand(x, streams, post, comb):
    mixed = torch.baddbmm(post.unsqueeze(-1) * x.unsqueeze(1).float(), comb.mT, streams.float())
    return mixed.to(streams.dtype)


def router(logits, bias, k, scale, normalise=True):
    s = functional.softplus(logits).sqrt()
    ids = (s + bias).topk(k, dim=-1).indices
    weights = s.gather(-1, ids)
    if normalise and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def _hidden(gate, up, limit, weights=None):
    h = functional.silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)
    return h if weights is None else h * weights.unsqueeze(-1)


def moe(x, ids, weights, experts, shared, limit):
    if not x.shape[0]:
        return x
    s1, s3, s2 = shared
    w1, w3, w2 = (w.values for w in experts)
    k, quantised = ids.shape[1], experts[0].quantised
    out = linear(_hidden(linear(x, s1), linear(x, s3), limit).to(x.dtype), s2).float()
    left = (codec.fp8_rounded(x) if quantised else x).to(w1.dtype)

    def between(gate, up, weight):
        h = _hidden(gate.to(x.dtype), up.to(x.dtype), limit, weight).to(x.dtype)
        return (codec.fp8_rounded(h) if quantised else h).to(w2.dtype)

    if ids.numel() * w1[0].numel() * w1.element_size() <= _COPIES.get(x.device.type, 0):
        chosen = ids.flatten()
        rows = left.repeat_interleave(k, 0).unsqueeze(-1)
        gate, up = ((w[chosen] @ rows).squeeze(-1) for w in (w1, w3))
        h = between(gate, up, weights.flatten()).unsqueeze(-1)
        routed = (w2[chosen] @ h).squeeze(-1).unflatten(0, (-1, k)).float().sum(1)
        return (out + routed).to(x.dtype)
    for e in range(w1.shape[0]):
        rows, choice = torch.where(ids == e)
        if rows.numel():
            part = left[rows]
            h = between(part @ w1[e].T, part @ w3[e].T, weights[rows, choice])
            out.index_add_(0, rows, (h @ w2[e].T).float())
    return out.to(x.dtype)


def pool(v, z):
    return (v * z.softmax(1)).sum(1)


def index_scores(q, k, weights):
    dots = torch.einsum("rthd,rnd->rthn", q, k).relu()
    return torch.einsum("rthn,rth->rtn", dots, weights)


def sparse_attention(
    q, window, window_slots, window_format, entries, entry_slots, entry_format, sink
):
    keys, slots = window_format.decode(window), window_slots
    if entries is not None:
        used = entry_slots.clamp_min(0)
        if q.device.type == "cpu":
            used, where = torch.unique(used, return_inverse=True)
        else:  # decoded as often as named, which waits for nothing
            where = torch.arange(used.numel(), device=used.device).view_as(used)
            used = used.flatten()
        where = torch.where(entry_slots < 0, -1, where + len(keys))
        keys = torch.cat((keys, entry_format.decode(entries[used])))
        slots = torch.cat((window_slots, where), 1)
    work = torch.float32 if q.device.type == "cpu" else q.dtype
    keys = functional.pad(keys.to(work), (0, 0, 0, 1))  # slot -1 is a key of zeros
    left = q.to(work) * q.shape[-1] ** -0.5
    limit = _LIMIT.get(q.device.type, 1 << 30)
    step = max(1, limit // (keys.element_size() * q.shape[-1] * slots.shape[1]))
    parts = [
        _attend(rows, keys[c], c < 0, sink)
        for rows, c in zip(left.split(step), slots.split(step), strict=True)
    ]
    return torch.cat(parts).to(q.dtype)


def _attend(q, keys, hidden, sink):
    logits = (q @ keys.mT).float().masked_fill(hidden.unsqueeze(1), -torch.inf)
    sinks = sink.float().expand(len(q), -1).unsqueeze(-1)
    p = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return p.to(keys.dtype) @ keys


def engram_gate(streams, kv, q_weight, k_weight, eps, image=None):
    copies, hidden = streams.shape[1:]
    s = streams.float()
    keys, value = kv.float().unflatten(-1, (copies + 1, hidden)).split((copies, 1), 1)
    rho = torch.rsqrt(s.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (s * (q_weight.float() * k_weight.float()) * keys).sum(-1) * rho * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if image is not None:
        gate = gate.masked_fill(image.unsqueeze(-1), 0.0)
    return (s + gate.unsqueeze(-1) * value).to(streams.dtype), gate


def register() -> None:
    """Make `--backend all=plain` known to this process; ops that are not here stay with torch."""
    package = ModuleType(f"deepinfer.ops.{NAME}")
    package.FIXED_ORDER = {}
    sys.modules[package.__name__] = package
    for name, spec in registry.SPECS.items():
        module = sys.modules.setdefault(
            f"{package.__name__}.{spec.family}", ModuleType(f"{package.__name__}.{spec.family}")
        )
        if name in globals():
            setattr(module, name, globals()[name])
    # Before torch: what comes later is preferred where nobody chose.
    others = dict(registry.BACKENDS)
    registry.BACKENDS.clear()
    registry.BACKENDS.update({NAME: ("cpu", "cuda"), **others})
