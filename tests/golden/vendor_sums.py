"""Test only: four ops in the float32 arithmetic of the golden data's producer, torch on a CPU.

Comes in and goes out: what ``deepinfer.ops.specs`` says of each op. The formulas and the rounding
points are those of ``deepinfer.ops.torch``; only the sums differ: plain torch reductions and
matrix products in float32 where the reference ops add exactly and round once. Must not be used
outside tests: a row's bits here depend on the machine and on the rows beside it.
"""

from __future__ import annotations

import torch

from deepinfer.ops.torch.hyper import hc_collapse, hc_split
from deepinfer.ops.torch.memory import KEY_BLOCK
from deepinfer.ops.torch.rowwise import sigmoid


def inverse_rms(x, eps):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rmsnorm(x, weight, eps):
    x32 = x.float()
    return (x32 * inverse_rms(x32, eps) * weight.float()).to(x.dtype)


def hc_norm(streams, pre, weight, eps):
    return rmsnorm(hc_collapse(streams, pre), weight, eps)


def hc_mix(streams, fn, scale, base, iterations, hc_eps, norm_eps):
    u = streams.flatten(1).float()
    m = torch.nn.functional.linear(u, fn.source) * inverse_rms(u, norm_eps)
    return hc_split(m, scale, base, streams.shape[1], iterations, hc_eps)


def engram_gate(streams, kv, q_weight, k_weight, eps):
    copies, hidden = streams.shape[1:]
    s = streams.float()
    keys, value = kv.float().unflatten(-1, (copies + 1, hidden)).split((copies, 1), 1)
    g = q_weight.float() * k_weight.float()
    rho = (inverse_rms(s, eps) * inverse_rms(keys, eps)).squeeze(-1)
    dot = (s * g * keys).sum(-1) * rho * hidden**-0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (s + gate.unsqueeze(-1) * value).to(streams.dtype), gate


def sparse_attention(
    q, window, window_slots, window_format, entries, entry_slots, entry_format, sink
):
    keys, slots = window_format.decode(window), window_slots
    if entries is not None:
        used, where = torch.unique(entry_slots.clamp_min(0), return_inverse=True)
        slots = torch.cat((slots, torch.where(entry_slots < 0, -1, where + len(keys))), 1)
        keys = torch.cat((keys, entry_format.decode(entries[used])))
    keys = torch.nn.functional.pad(keys.float(), (0, 0, 0, 1))  # slot -1 is a key of zeros
    # A few rows at a time: their gathered keys stay in a cache.
    parts = zip(q.split(32), slots.split(32), strict=True)
    return torch.cat([_attend(rows, columns, keys, sink) for rows, columns in parts])


def _attend(q, slots, keys, sink):
    peak = torch.full(q.shape[:2], -1e30)
    total, acc = torch.zeros(q.shape[:2]), torch.zeros(q.shape)
    # The last block may be short: columns added to fill it would change the order of the sum.
    for block in slots.split(KEY_BLOCK, 1):
        values = keys[block]
        logits = torch.matmul(q.float(), values.mT) * q.shape[-1] ** -0.5
        logits = logits.masked_fill((block < 0).unsqueeze(1), -torch.inf)
        before, peak = peak, torch.maximum(peak, logits.amax(-1))
        p, alpha = torch.exp(logits - peak.unsqueeze(-1)), torch.exp(before - peak)
        total = total * alpha + p.sum(-1)
        acc = acc * alpha.unsqueeze(-1) + torch.matmul(p.to(q.dtype).float(), values)
    total = total + torch.exp(sink - peak)
    return (acc / total.unsqueeze(-1)).to(q.dtype)


OPS = {
    "rmsnorm": rmsnorm,
    "hc_norm": hc_norm,
    "hc_mix": hc_mix,
    "engram_gate": engram_gate,
    "sparse_attention": sparse_attention,
}
