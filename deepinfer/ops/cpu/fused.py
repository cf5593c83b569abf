"""Sequences of ops of the cpu back end as one call each. Meaning: `deepinfer.ops.fused`.

A factory takes the library and the composed sequence, which runs what the kernels do not hold:
float32 rows, and matrices that `deepinfer.ops.cpu.linear` leaves to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.ops.cpu.library import DOUBLE, FLOAT, INT, LONG, PTR, TYPES, Library
from deepinfer.ops.cpu.linear import multiplies, together
from deepinfer.ops.cpu.moe import alike
from deepinfer.ops.torch.linear import Weight

Composed = Callable[..., Any]


def hc_enter(library: Library, composed: Composed):
    call = library.op(
        "hc_enter", PTR, INT, PTR, PTR, INT, PTR, PTR, PTR, LONG, LONG, LONG, LONG, FLOAT, DOUBLE,
        PTR, PTR, PTR, PTR,
    )  # fmt: skip

    def hc_enter(
        streams: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, norm_eps: float, fn: Weight,
        scale: torch.Tensor, base: torch.Tensor, iterations: int, hc_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        w = fn.source
        rows, copies, hidden = streams.shape
        if w.dtype != torch.float32 or not rows:
            return composed(streams, pre, norm, norm_eps, fn, scale, base, iterations, hc_eps)
        streams, pre = streams.contiguous(), pre.contiguous()
        x = streams.new_empty(rows, hidden)
        some, all_pairs = torch.empty(2, rows, copies), torch.empty(rows, copies, copies)
        at = some.data_ptr()
        call(
            streams.data_ptr(), TYPES[streams.dtype], pre.data_ptr(), norm.data_ptr(),
            TYPES[norm.dtype], w.data_ptr(), scale.data_ptr(), base.data_ptr(), rows, copies,
            hidden, iterations, hc_eps, norm_eps, x.data_ptr(), at, at + 4 * rows * copies,
            all_pairs.data_ptr(),
        )  # fmt: skip
        return x, *some.unbind(), all_pairs

    return hc_enter


def qkv(library: Library, composed: Composed):
    call = library.op(
        "qkv", PTR, LONG, PTR, PTR, INT, PTR, PTR, PTR, INT, DOUBLE, LONG, PTR, PTR, LONG,
        PTR, PTR, PTR,
    )  # fmt: skip

    def qkv(
        x: torch.Tensor, wq_a: Weight, q_norm: torch.Tensor, wq_b: Weight, wkv: Weight,
        kv_norm: torch.Tensor, eps: float, heads: int, table: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        held, rows = together(library.level, wq_a, wq_b, wkv), x.shape[0]
        if x.dtype != torch.bfloat16 or not rows or not all(map(multiplies, held)):
            return composed(x, wq_a, q_norm, wq_b, wkv, kv_norm, eps, heads, table)
        x, (down, up, key) = x.contiguous(), held
        cos, sin = (part.contiguous() for part in table)
        width = key.shape[0]
        latent, kv = x.new_empty(rows, down.shape[0]), x.new_empty(rows, width)
        q = x.new_empty(rows, heads, width)
        call(
            x.data_ptr(), rows, down.address, q_norm.data_ptr(), TYPES[q_norm.dtype], up.address,
            key.address, kv_norm.data_ptr(), TYPES[kv_norm.dtype], eps, heads, cos.data_ptr(),
            sin.data_ptr(), cos.shape[1], latent.data_ptr(), q.data_ptr(), kv.data_ptr(),
        )  # fmt: skip
        return latent, q, kv

    return qkv


def attention_output(library: Library, composed: Composed):
    call = library.op(
        "attention_output", PTR, LONG, LONG, LONG, PTR, PTR, LONG, PTR, PTR, LONG, PTR
    )  # fmt: skip

    def attention_output(
        o: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], wo_a: Weight, wo_b: Weight,
        groups: int,
    ) -> torch.Tensor:  # fmt: skip
        held, (rows, heads, width) = together(library.level, wo_a, wo_b), o.shape
        if o.dtype != torch.bfloat16 or not rows or not all(map(multiplies, held)):
            return composed(o, table, wo_a, wo_b, groups)
        o, (inner, outer) = o.contiguous(), held
        cos, sin = (part.contiguous() for part in table)
        out = o.new_empty(rows, outer.shape[0])
        call(
            o.data_ptr(), rows, heads, width, cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            inner.address, outer.address, groups, out.data_ptr(),
        )  # fmt: skip
        return out

    return attention_output


def ffn(library: Library, composed: Composed):
    call = library.op(
        "ffn", PTR, LONG, PTR, PTR, FLOAT, LONG, FLOAT, PTR, PTR, PTR, PTR, PTR, PTR, DOUBLE, PTR
    )

    def ffn(
        x: torch.Tensor, gate: Weight, bias: torch.Tensor, temperature: float, k: int,
        scale: float, experts: tuple[Weight, Weight, Weight],
        shared: tuple[Weight, Weight, Weight], limit: float,
    ) -> torch.Tensor:  # fmt: skip
        held, rows = together(library.level, gate, *experts, *shared), x.shape[0]
        plain = held[0] is not None and not held[0].quantised
        if x.dtype != torch.bfloat16 or not rows or not plain or not alike(held[1:]):
            return composed(x, gate, bias, temperature, k, scale, experts, shared, limit)
        x = x.contiguous()
        out = torch.empty_like(x)
        gate_at, *matrices = (w.address for w in held)
        call(
            x.data_ptr(), rows, gate_at, bias.data_ptr(), temperature, k, scale, *matrices, limit,
            out.data_ptr(),
        )  # fmt: skip
        return out

    return ffn
