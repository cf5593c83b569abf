"""Hyper-connections of the cpu back end. Meaning and shapes: `deepinfer.ops.torch.hyper`."""

from __future__ import annotations

import torch

from deepinfer.ops.cpu.library import DOUBLE, FLOAT, INT, LONG, PTR, TYPES, Library
from deepinfer.ops.torch.linear import Weight


def hc_mix(library: Library):
    call = library.op(
        "hc_mix", PTR, INT, PTR, PTR, PTR, LONG, LONG, LONG, LONG, FLOAT, DOUBLE, PTR, PTR, PTR
    )

    def hc_mix(
        streams: torch.Tensor,
        fn: Weight,
        scale: torch.Tensor,
        base: torch.Tensor,
        iterations: int,
        hc_eps: float,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        streams = streams.contiguous()
        rows, copies, hidden = streams.shape
        w = fn.source
        if w.dtype != torch.float32:
            w = w.float()
        out = torch.empty(rows * copies * (2 + copies), dtype=torch.float32)
        at, size = out.data_ptr(), 4 * rows * copies
        call(
            streams.data_ptr(), TYPES[streams.dtype], w.data_ptr(), scale.data_ptr(),
            base.data_ptr(), rows, copies, copies * hidden, iterations, hc_eps, norm_eps,
            at, at + size, at + 2 * size,
        )  # fmt: skip
        pre, post, comb = out.split((rows * copies, rows * copies, rows * copies * copies))
        return (
            pre.view(rows, copies), post.view(rows, copies), comb.view(rows, copies, copies)
        )  # fmt: skip

    return hc_mix


def hc_collapse(library: Library):
    call = library.op("hc_collapse", PTR, INT, PTR, LONG, LONG, LONG, PTR)

    def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        rows, copies, hidden = streams.shape
        out = torch.empty((rows, hidden), dtype=streams.dtype)
        call(
            streams.data_ptr(), TYPES[streams.dtype], pre.data_ptr(), rows, copies, hidden,
            out.data_ptr(),
        )  # fmt: skip
        return out

    return hc_collapse


def hc_norm(library: Library):
    call = library.op("hc_norm", PTR, INT, PTR, PTR, INT, LONG, LONG, LONG, DOUBLE, PTR)

    def hc_norm(
        streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        rows, copies, hidden = streams.shape
        out = torch.empty((rows, hidden), dtype=streams.dtype)
        call(
            streams.data_ptr(), TYPES[streams.dtype], pre.data_ptr(), weight.data_ptr(),
            TYPES[weight.dtype], rows, copies, hidden, eps, out.data_ptr(),
        )  # fmt: skip
        return out

    return hc_norm


def hc_expand(library: Library):
    call = library.op("hc_expand", PTR, PTR, INT, PTR, PTR, LONG, LONG, LONG, PTR)

    def hc_expand(
        x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        x, streams = x.contiguous(), streams.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        rows, copies, hidden = streams.shape
        out = torch.empty_like(streams)
        call(
            x.data_ptr(), streams.data_ptr(), TYPES[streams.dtype], post.data_ptr(),
            comb.data_ptr(), rows, copies, hidden, out.data_ptr(),
        )  # fmt: skip
        return out

    return hc_expand
