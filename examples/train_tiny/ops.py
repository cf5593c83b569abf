"""The op table of training: the ops the model calls, differentiable and fast instead of bit-exact.

Comes in: what the specs of `deepinfer.ops` say, with `Stored` handles for weights. Goes out: the
same values up to bfloat16 rounding, with gradients. Matrix products run in bfloat16 with float32
masters; a quantised weight means fake-quantised inputs with straight-through gradients. Every
elementwise piece is a plain function that can be compiled. It must not know the layers' order or
where keys are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepinfer.ops import fused
from deepinfer.ops.torch import rowwise
from examples.train_tiny import fake_quant
from examples.train_tiny.hyper_project import project
from examples.train_tiny.sinkhorn import sinkhorn

Table = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Stored:
    """A trainable matrix or table as the model's weight mapping holds it.

    `master` float32 takes the gradient, `shadow` bfloat16 is what the forward pass reads.
    `quantised`: inputs are quantised too. `detached`: no gradient flows back into the input.
    """

    master: torch.Tensor
    shadow: torch.Tensor
    quantised: bool = False
    detached: bool = False

    @property
    def device(self) -> torch.device:
        return self.master.device

    @property
    def value(self) -> torch.Tensor:
        return _Shadow.apply(self.master, self.shadow)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the table, e.g. embeddings; the gradient is summed in float32."""
        return _Rows.apply(self.master, self.shadow, rows)


class _Shadow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, master, shadow):
        return shadow.view_as(shadow)

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, master, shadow, rows):
        ctx.save_for_backward(rows)
        ctx.shape = master.shape
        return shadow[rows]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        flat = grad.reshape(-1, ctx.shape[-1]).float()
        total = torch.zeros(ctx.shape, device=grad.device)
        return total.index_add_(0, rows.flatten(), flat), None, None


class StraightThrough(torch.autograd.Function):
    """quantiser(x) forward, identity backward."""

    @staticmethod
    def forward(ctx, x, quantiser):
        return quantiser(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TrainingOps:
    """One attribute per op that the model calls, plus what a step wants to know: router loads."""

    def __init__(self, compiled: bool):
        def piece(function: Callable) -> Callable:
            if not compiled:
                return function
            return torch.compile(function, dynamic=False, fullgraph=True)

        self.piece = piece
        self.fp8 = piece(fake_quant.fp8)
        self.fp4_kv = piece(fake_quant.fp4_kv)
        self.fp4_index = piece(fake_quant.fp4_index)
        self._rmsnorm = piece(_rmsnorm)
        self._rope = piece(_rope)
        self._split = piece(_split)
        self._collapse = piece(_collapse)
        self._expand = piece(_expand)
        self._pool = piece(_pool)
        self._router = piece(_router)
        self._swiglu = piece(_swiglu)
        self._engram_gate = piece(_engram_gate)
        self._engram_rows = piece(_engram_rows)
        self._tables: dict[tuple[int, int, int], tuple] = {}
        self.loads: list[torch.Tensor] = []
        vars(self).update(fused.composed(self))

    def start(self) -> None:
        """Forgets what the last forward pass left."""
        self.loads.clear()

    # linear

    def prepare(self, source: Stored) -> Stored:
        return source

    def linear(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        return F.linear(self._input(x, weight), weight.value)

    def linear_f32(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        """Wide outputs stay bfloat16: their readers widen them again inside a fused piece."""
        if weight.shadow.shape[0] > 64:
            return F.linear(self._input(x, weight), weight.value)
        return F.linear(self._input(x, weight).float(), weight.value.float())

    def grouped_linear(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        n, groups, k = x.shape
        w = weight.value.view(groups, -1, k)
        return torch.bmm(x.transpose(0, 1), w.mT).transpose(0, 1).reshape(n, -1)

    def _input(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        if weight.detached:
            x = x.detach()
        return self.quantise(x) if weight.quantised else x

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(x, self.fp8)

    # row-wise

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rmsnorm(x, weight, eps)

    def rope_table(self, positions: torch.Tensor, freqs: torch.Tensor) -> Table:
        """Kept: the memory of a batch shape hands out the same positions every step."""
        key = (positions.data_ptr(), positions.numel(), freqs.data_ptr())
        if key not in self._tables:
            # Keeping the inputs keeps their addresses from being handed out again.
            self._tables[key] = (rowwise.rope_table(positions, freqs), positions, freqs)
        return self._tables[key][0]

    def rope(self, x: torch.Tensor, table: Table, inverse: bool = False) -> torch.Tensor:
        return self._rope(x, *table, inverse)

    # hyper-connections

    def hc_mix(self, streams, fn: Stored, scale, base, iterations, hc_eps, norm_eps):
        m = project(streams, fn.master, norm_eps)
        pre, post, logits = self._split(m, scale, base, streams.shape[1], hc_eps)
        return pre, post, sinkhorn(logits, iterations, hc_eps)

    def hc_collapse(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        return self._collapse(streams, pre)

    def hc_norm(self, streams, pre, weight, eps: float) -> torch.Tensor:
        return self.rmsnorm(self.hc_collapse(streams, pre), weight, eps)

    def hc_expand(self, x, streams, post, comb) -> torch.Tensor:
        return self._expand(x, streams, post, comb)

    # what attention remembers

    def pool(self, v: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self._pool(v, z)

    def quantise_index(self, q: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(q, self.fp4_index)

    # experts

    def router(self, logits, bias, k: int, scale: float, normalise: bool = True):
        ids, weights, load = self._router(logits, bias, k, scale, normalise)
        self.loads.append(load)
        return ids, weights

    def moe(self, x, ids, weights, experts, shared, limit: float) -> torch.Tensor:
        """Every expert for every row in three products; unchosen ones get weight 0."""
        w1, w3, w2 = (
            _stacked(e.value, s.value, i == 2)
            for i, (e, s) in enumerate(zip(experts, shared, strict=True))
        )
        count = experts[0].shadow.shape[0]
        quantised = experts[0].quantised
        x = self.quantise(x) if quantised else x
        gate, up = F.linear(x, w1), F.linear(x, w3)
        h = self._swiglu(gate, up, ids, weights, count, limit)
        return F.linear(self.quantise(h) if quantised else h, w2)

    # Engram

    def engram_rows(self, ngrams, multipliers, primes) -> torch.Tensor:
        return self._engram_rows(ngrams, multipliers, primes)

    def engram_lookup(self, table: Stored, rows: torch.Tensor, dtype) -> torch.Tensor:
        return table[rows].flatten(1)

    def engram_gate(self, streams, kv, q_weight, k_weight, eps, image=None):
        return self._engram_gate(streams, kv, q_weight, k_weight, eps), None


def _rmsnorm(x, weight, eps: float):
    x32 = x.float()
    scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.to(torch.bfloat16).float()).to(torch.bfloat16)


def _rope(x, cos, sin, inverse: bool):
    return rowwise.rope(x, (cos, sin), inverse)


def _split(m, scale, base, copies: int, eps: float):
    c = copies
    pre = torch.sigmoid(m[:, :c] * scale[0] + base[:c]) + eps
    post = 2 * torch.sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    logits = (m[:, 2 * c :] * scale[2] + base[2 * c :]).unflatten(-1, (c, c))
    return pre, post, logits.contiguous()


def _collapse(streams, pre):
    total = pre[:, 0, None] * streams[:, 0].float()
    for k in range(1, streams.shape[1]):
        total = total + pre[:, k, None] * streams[:, k].float()
    return total.to(streams.dtype)


def _expand(x, streams, post, comb):
    total = post.unsqueeze(-1) * x.float().unsqueeze(1)
    for i in range(streams.shape[1]):
        total = total + comb[:, i, :, None] * streams[:, i, None, :].float()
    return total.to(streams.dtype)


def _pool(v, z):
    return (v.float() * torch.softmax(z.float(), 1)).sum(1)


def _router(logits, bias, k: int, scale: float, normalise: bool):
    s = F.softplus(logits.float()).sqrt()
    ids = torch.topk((s + bias).detach(), k, dim=-1).indices
    weights = s.gather(-1, ids)
    if normalise and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    experts = torch.arange(logits.shape[-1], device=ids.device)
    load = (ids.unsqueeze(-1) == experts).float().sum((0, 1))
    return ids, weights * scale, load


def _swiglu(gate, up, ids, weights, count: int, limit: float):
    """[N, (count + 1) I] activations, weighted per expert; the last one is shared: weight 1."""
    experts = torch.arange(count + 1, device=ids.device)
    chosen = (ids.unsqueeze(-1) == experts).float()
    row = (weights.unsqueeze(-1) * chosen).sum(1) + (experts == count).float()
    gate = gate.float().unflatten(-1, (count + 1, -1)).clamp_max(limit)
    up = up.float().unflatten(-1, (count + 1, -1)).clamp(-limit, limit)
    return (F.silu(gate) * up * row.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def _stacked(experts, shared, inputs: bool):
    """[E, out, in] and [out, in] -> one matrix: stacked outputs, or (``inputs``) stacked inputs."""
    every = torch.cat((experts, shared.unsqueeze(0)))
    if inputs:
        return every.transpose(0, 1).reshape(every.shape[1], -1)
    return every.flatten(0, 1)


def _engram_rows(ngrams, multipliers, primes):
    offsets = torch.cumsum(primes.flatten(), 0) - primes.flatten()
    mixed = ngrams[:, 0] * multipliers[0]
    rows = []
    for s in range(1, ngrams.shape[1]):
        mixed = mixed ^ (ngrams[:, s] * multipliers[s])
        rows.append(mixed.unsqueeze(-1) % primes[s - 1])
    return torch.cat(rows, -1) + offsets


def _engram_gate(streams, kv, q_weight, k_weight, eps: float):
    copies, hidden = streams.shape[1:]
    s = streams.float()
    keys, value = kv.float().unflatten(-1, (copies + 1, hidden)).split((copies, 1), 1)
    g = q_weight.to(torch.bfloat16).float() * k_weight.to(torch.bfloat16).float()
    rho = torch.rsqrt((s * s).mean(-1) + eps) * torch.rsqrt((keys * keys).mean(-1) + eps)
    dot = (s * g * keys).sum(-1) * rho * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (s + gate.unsqueeze(-1) * value).to(streams.dtype)
