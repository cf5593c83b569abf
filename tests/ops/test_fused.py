"""Fused sequences: the bits of the ops that they stand for, at every level, in any company."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deepinfer.ops import fused, registry
from deepinfer.ops.cpu import fused as kernels
from deepinfer.quant import codec
from tests.ops.native import SIDES, library, ops
from tests.ops.test_torch import normal, same_bits
from tests.planted import NAME, plant

BF16 = torch.bfloat16
H, C, HEADS, D, LATENT, EXPERTS, INNER, GROUPS = 128, 4, 4, 64, 96, 10, 64, 2


@pytest.fixture(params=SIDES, ids=lambda side: f"{side[0]}-{side[1]}")
def table(request):
    return ops(*request.param)


def matrix(table, *shape, kind="fp8", seed=1, dtype=BF16):
    values = normal(*shape, seed=seed, scale=shape[-1] ** -0.5, dtype=dtype)
    if kind is None:
        return table.prepare(values)
    return table.prepare(codec.pack(values, kind, (1, 32) if kind == "fp4" else (32, 32)))


def rotary(table, rows):
    return table.rope_table(torch.arange(rows) * 7, 1.0 / 10 ** torch.arange(0, 2, 0.125))


def calls(table, rows, dtype=BF16, kind="fp8"):
    """(sequence, its arguments) for `rows` rows."""
    x = normal(rows, H, dtype=dtype)
    streams, pre = (
        normal(rows, C, H, seed=2, dtype=dtype),
        normal(rows, C, seed=3).float().sigmoid(),
    )
    norm = normal(H, seed=4)
    fn = matrix(table, C * (2 + C), C * H, kind=None, seed=5, dtype=torch.float32)
    scale, base = normal(3, seed=6).float(), normal(C * (2 + C), seed=7).float()
    experts = [
        matrix(table, EXPERTS, *s, kind=kind and "fp4", seed=8)
        for s in 2 * [(INNER, H)] + [(H, INNER)]
    ]
    shared = [matrix(table, *s, kind=kind, seed=9) for s in 2 * [(INNER, H)] + [(H, INNER)]]
    gate, bias = matrix(table, EXPERTS, H, kind=None, seed=10), normal(EXPERTS, seed=11).float()
    turn = rotary(table, rows)
    yield "hc_enter", (streams, pre, norm, 1e-6, fn, scale, base, 20, 1e-6)
    yield "qkv", (
        x, matrix(table, LATENT, H, kind=kind), normal(LATENT, seed=12).float(),
        matrix(table, HEADS * D, LATENT, kind=kind), matrix(table, D, H, kind=kind),
        normal(D, seed=13), 1e-6, HEADS, turn,
    )  # fmt: skip
    yield "attention_output", (
        normal(rows, HEADS, D, seed=14, dtype=dtype), turn,
        matrix(table, GROUPS * 64, HEADS * D // GROUPS, kind=kind),
        matrix(table, H, GROUPS * 64, kind=kind), GROUPS,
    )  # fmt: skip
    yield "ffn", (x, gate, bias, 1.5, 3, 2.5, tuple(experts), tuple(shared), 7.0)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("rows", [0, 1, 3, 300])  # the last: work for all threads
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", ["fp8", None])
def test_bits(table, rows, dtype, kind):
    """float32 rows are composed: that is tried too."""
    apart = fused.composed(table)
    for name, arguments in calls(table, rows, dtype, kind):
        got, want = getattr(table, name)(*arguments), apart[name](*arguments)
        for a, b in zip(outputs(got), outputs(want), strict=True):
            assert a.shape == b.shape and same_bits(a, b), name


@pytest.mark.parametrize("kind", ["fp8", None])
def test_kernels_hold_what_models_have(kind):
    held = library()
    for name, arguments in calls(registry.build("cpu", libraries={"cpu": held}), 3, kind=kind):
        getattr(kernels, name)(held, composed=None)(*arguments)  # TypeError where it is asked


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_hard_inputs(table, value):
    """What is not finite reaches the same places; no input is written to."""
    apart = fused.composed(table)
    for name, arguments in calls(table, 3):
        arguments[0][1].view(-1)[5] = value
        before = arguments[0].clone()
        got, want = getattr(table, name)(*arguments), apart[name](*arguments)
        for a, b in zip(outputs(got), outputs(want), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
        assert same_bits(arguments[0], before), name


def test_taken_only_with_all_their_parts(monkeypatch):
    """One op of another back end, and what holds it is made of single calls again."""
    libraries = {"cpu": library()}

    def taken(table):
        return {name for name in fused.NAMES if not isinstance(getattr(table, name), partial)}

    assert taken(registry.build("cpu", libraries=libraries)) == set(fused.NAMES)
    assert not taken(registry.build("cpu"))
    plant(monkeypatch, "linear", lambda x, weight: x.new_zeros(len(x), 7))
    mixed = registry.build("cpu", [f"linear={NAME}"], libraries=libraries)
    assert taken(mixed) == {"hc_enter", "ffn"}
    arguments = dict(calls(mixed, 2))["attention_output"]
    assert mixed.attention_output(*arguments).shape == (2, 7)
