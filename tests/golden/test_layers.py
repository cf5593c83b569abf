"""Every layer alone, fed with golden streams: the figures that show what logits hide."""

from __future__ import annotations

import pytest
import torch

from deepinfer.model import block as block_room
from deepinfer.ops import registry
from deepinfer.ops.torch import hyper, memory, moe, rowwise
from tests.golden import CHECKPOINTS, layers, needs_golden

pytestmark = needs_golden

KINDS = {
    "S_out", "attn_out", "compressed_kv", "engram_gate", "engram_rows", "ffn_out", "index_k",
    "index_list", "q", "router_ids", "router_weights", "window_kv",
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layer_local(name):
    """The limits of the golden README, which are those of the longer prompt."""
    measured = layers.measure(name, "medium")
    print(name, {k: f"{v:.5f}" for k, v in sorted(measured.worst.items())})
    assert KINDS - set(measured.seen) <= {"engram_gate", "engram_rows"}
    assert layers.over(name, measured.worst) == {}


def test_layer_local_of_a_short_prompt():
    """tiny-s, 5 tokens: bit for bit the golden data (float32 tensors: up to their own noise).

    Not so tiny-k: its window of 128 puts compressed keys in the third block of 64 of the key list
    (serving semantics §6), where the golden prefill of 5 tokens has everything in the first.
    """
    measured = layers.measure("tiny-s", "short")
    assert set(measured.seen) == KINDS
    for kind, figure in measured.worst.items():
        assert figure <= (1e-6 if kind in ("router_weights", "engram_gate") else 0), kind


def transposed_comb(x, streams, post, comb):
    return hyper.hc_expand(x, streams, post, comb.mT)


def no_inverse(x, table, inverse=False):
    return x if inverse else rowwise.rope(x, table)


def biased_weights(logits, bias, k, scale, normalise=True):
    ids, _ = moe.router(logits, bias, k, scale)
    s = torch.nn.functional.softplus(logits).sqrt() + bias
    w = s.gather(-1, ids)
    return ids, w / w.sum(-1, keepdim=True) * scale


def all_candidates(*args):
    *rest, within = args
    return memory.choose(*rest, None)


MISTAKES = {
    "comb transposed": {"hc_expand": transposed_comb},
    "no inverse RoPE": {"rope": no_inverse},
    "weights from the biased scores": {"router": biased_weights},
    "candidate mask ignored": {"choose": all_candidates},
    "2 Sinkhorn iterations": {
        "hc_mix": lambda s, fn, scale, base, iterations, eps, norm: hyper.hc_mix(
            s, fn, scale, base, 2, eps, norm
        )
    },
    "index queries not quantised": {"quantise_index": lambda q: q},
    "sink missing": {"sparse_attention": lambda *a: memory.sparse_attention(*a[:-1], a[-1] - 1e4)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_deliberate_mistakes_are_seen(mistake, monkeypatch):
    """The limits are tight enough: each mistake built in on purpose exceeds one of them."""
    build = registry.build

    def wrong(*args, **kwargs):
        ops = build(*args, **kwargs)
        ops.__dict__.update({**ops.apart(), **MISTAKES[mistake]})
        return ops

    monkeypatch.setattr(registry, "build", wrong)
    assert layers.over("tiny-s", layers.measure("tiny-s", "medium").worst)


def test_a_window_of_another_table_is_seen(monkeypatch):
    """Window keys and queries of compressed layers rotated with the plain table."""
    block = block_room.block

    def plain(streams, pre, w, layer, config, mem, rotary, table, ops, kept):
        table = ops.rope_table(mem.positions, rotary.plain)
        return block(streams, pre, w, layer, config, mem, rotary, table, ops, kept)

    monkeypatch.setattr(block_room, "block", plain)
    assert layers.over("tiny-s", layers.measure("tiny-s", "medium").worst)
