"""Normalising the mixes of hyper-connections: always finite, near a float64 reference."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops import registry
from deepinfer.ops.torch import hyper

COPIES, ROUNDS, EPS = 4, 20, 1e-6
OPS = registry.build("cpu")


def normalise(logits: torch.Tensor) -> torch.Tensor:
    """comb [N, 4, 4] of logits [N, 4, 4], which get there with scale 1 and base 0."""
    mixes = torch.zeros(len(logits), COPIES * (2 + COPIES))
    mixes[:, 2 * COPIES :] = logits.flatten(1)
    base = torch.zeros(COPIES * (2 + COPIES))
    pre, post, comb = hyper.hc_split(mixes, torch.ones(3), base, COPIES, ROUNDS, EPS)
    assert pre.isfinite().all() and post.isfinite().all()
    return comb


def reference(logits: torch.Tensor) -> torch.Tensor:
    """The same rounds in float64 (model spec §3.3)."""
    a = logits.double().softmax(-1) + EPS
    a = a / (a.sum(-2, keepdim=True) + EPS)
    for _ in range(ROUNDS - 1):
        a = a / (a.sum(-1, keepdim=True) + EPS)
        a = a / (a.sum(-2, keepdim=True) + EPS)
    return a


def one_row(high: int) -> torch.Tensor:
    logits = torch.full((COPIES, COPIES), -80.0)
    logits[high] = 80.0
    return logits


def test_extremes():
    """DI-10: all 0, all -80, one row +80 and the rest -80; and further out."""
    zero, low = torch.zeros(COPIES, COPIES), torch.full((COPIES, COPIES), -80.0)
    one_column = one_row(1).T.contiguous()
    beyond = 3 * one_row(2)  # exp of 240 is no float32
    cases = torch.stack((zero, low, one_row(0), one_row(3), one_column, beyond, -beyond))
    comb = normalise(cases)
    assert comb.dtype == torch.float32 and comb.isfinite().all() and (comb >= 0).all()
    torch.testing.assert_close(comb[0], torch.full((4, 4), 0.25), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.double(), reference(cases), rtol=0, atol=1e-5)


def test_random_logits():
    """DI-10: rows and columns sum to one; within 1e-5 of float64."""
    logits = torch.randn(500, COPIES, COPIES, generator=torch.Generator().manual_seed(10))
    comb = normalise(logits)
    assert (comb >= 0).all()
    for dim in (-1, -2):
        assert (comb.sum(dim) - 1).abs().max() < 1e-2
    assert (comb.double() - reference(logits)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_coefficients_are_float32(dtype, size):
    """DI-10: also when the streams are bf16; a row of bf16 gives what its float32 values give."""
    generator = torch.Generator().manual_seed(3)
    streams = (torch.randn(9, COPIES, 32, generator=generator) * size).to(dtype)
    fn = torch.randn(COPIES * (2 + COPIES), COPIES * 32, generator=generator)
    scale, base = torch.ones(3), torch.zeros(COPIES * (2 + COPIES))
    args = (OPS.prepare(fn), scale, base, ROUNDS, EPS, 1e-20)
    got, wide = OPS.hc_mix(streams, *args), OPS.hc_mix(streams.float(), *args)
    for one, two in zip(got, wide, strict=True):
        assert one.dtype == torch.float32 and one.isfinite().all() and (one >= 0).all()
        assert torch.equal(one, two)
    assert OPS.hc_collapse(streams, got[0]).dtype == dtype
