"""Sequences of ops that the model calls by one name, so that a back end may run each as one kernel.

What such a name means is written here, over the table's other ops; a back end that holds all of
them may hold the whole (module ``fused``), to the same bits. Goes out: the functions that a table
gets. Must not know layers, memories or back ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Table = tuple[torch.Tensor, torch.Tensor]


def hc_enter(
    ops: Any, streams: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, norm_eps: float,
    fn: Any, scale: torch.Tensor, base: torch.Tensor, iterations: int, hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A sublayer's input [N, H] of streams [N, C, H] and the ``pre`` [N, C] before it, and the
    sublayer's own mixes pre [N, C], post [N, C], comb [N, C, C] (model spec §3.2)."""
    mixed = ops.hc_mix(streams, fn, scale, base, iterations, hc_eps, norm_eps)
    return ops.hc_norm(streams, pre, norm, norm_eps), *mixed


def qkv(
    ops: Any, x: torch.Tensor, wq_a: Any, q_norm: torch.Tensor, wq_b: Any, wkv: Any,
    kv_norm: torch.Tensor, eps: float, heads: int, table: Table,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The query latent [N, R], rotated queries [N, heads, D] and rotated window keys [N, D], not
    yet quantised, of x [N, H] (model spec §3.5)."""
    latent = ops.rmsnorm(ops.linear(x, wq_a), q_norm, eps)
    q = ops.rope(ops.linear(latent, wq_b).unflatten(-1, (heads, len(kv_norm))), table)
    return latent, q, ops.rope(ops.rmsnorm(ops.linear(x, wkv), kv_norm, eps), table)


def attention_output(
    ops: Any, o: torch.Tensor, table: Table, wo_a: Any, wo_b: Any, groups: int
) -> torch.Tensor:
    """[N, H] of what heads attended to, o [N, heads, D]: turned back, projected by groups of heads
    and together (model spec §3.5)."""
    o = ops.rope(o, table, inverse=True)
    rows, heads, dim = o.shape
    o = o.reshape(rows, groups, heads * dim // groups)
    return ops.linear(ops.grouped_linear(o, wo_a), wo_b)


def ffn(
    ops: Any, x: torch.Tensor, gate: Any, bias: torch.Tensor, temperature: float, k: int,
    scale: float, experts: tuple[Any, Any, Any], shared: tuple[Any, Any, Any], limit: float,
) -> torch.Tensor:  # fmt: skip
    """[N, H] of x [N, H]: its k experts and the shared one (model spec §3.9)."""
    ids, weights = ops.router(ops.linear_f32(x, gate) / temperature, bias, k, scale)
    return ops.moe(x, ids, weights, experts, shared, limit)


PARTS: dict[Callable[..., Any], tuple[str, ...]] = {
    hc_enter: ("hc_mix", "hc_norm"),
    qkv: ("linear", "rmsnorm", "rope"),
    attention_output: ("rope", "grouped_linear", "linear"),
    ffn: ("linear_f32", "router", "moe"),
}
NAMES = tuple(sequence.__name__ for sequence in PARTS)


def composed(ops: Any) -> dict[str, Callable[..., Any]]:
    """Every sequence as calls of the other ops of a table, as they are when it is called."""
    return {sequence.__name__: partial(sequence, ops) for sequence in PARTS}
