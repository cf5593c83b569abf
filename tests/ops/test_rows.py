"""Fingerprints of rows, and what a watch of two runs tells."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops.registry import Ops
from deepinfer.ops.rows import Watch, fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_are_of_bits_and_places(dtype):
    x = torch.randint(1, 99, (40, 6, 8)).to(dtype)
    whole = fingerprint(x)
    assert torch.equal(fingerprint(x[7:9]), whole[7:9]), "a row's own"
    assert torch.equal(fingerprint(x, 2)[:, 3], fingerprint(x[:, 3])), "rows of rows"
    padded = torch.cat((x.flatten(1), torch.zeros(40, 5, dtype=dtype)), 1)
    assert torch.equal(fingerprint(padded), whole), "zeros at the end"
    assert not torch.equal(fingerprint(x.flip(-1)), whole), "places count"
    bits = x.clone().view(torch.uint8)
    bits[..., 0] ^= 1
    assert (fingerprint(bits.view(dtype)) != whole).all(), "the last bit counts"
    few = torch.cartesian_prod(*[torch.arange(1, 18)] * 3).to(dtype)
    assert len(set(fingerprint(few).tolist())) == 17**3


def test_no_elements_and_no_rows():
    assert fingerprint(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert fingerprint(torch.zeros(0, 4)).shape == (0,)


def table(norm):
    return Ops({"rmsnorm": norm, "rope_table": lambda positions, freqs: (positions, positions)})


def watched(op, x, positions, known=None):
    weight = torch.ones(4)
    ops = table(op)
    with Watch(ops, {id(weight): "norm"}, known) as watch:
        ops.rope_table(positions, torch.ones(2))
        ops.rmsnorm(x, weight, 1e-6)
    assert ops.rmsnorm is op, "the table is as before"
    return watch


def test_the_first_row_with_equal_inputs_and_another_output_is_told():
    def op(x, weight, eps):
        return x * weight

    def wrong(x, weight, eps):
        out = op(x, weight, eps)
        out[5:] += 1e-6
        return out

    x, places = torch.rand(9, 4), torch.arange(30, 39)
    known = watched(op, x, places).record
    assert watched(op, x[3:7], places[3:7], known).difference is None
    order = torch.tensor([8, 0, 3, 1, 2, 7, 4])
    found = watched(wrong, x[order], places[order], known).difference
    assert (found.op, found.where, found.position) == ("rmsnorm", "norm", 37)
    assert str(found) == "rmsnorm (norm) on the row at position 37"
    other = watched(wrong, torch.rand(9, 4), places, known).difference
    assert other is None, "rows that nobody knows say nothing"


def test_a_watch_restores_the_table_when_a_run_raises():
    def op(x, weight, eps):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(op, torch.rand(2, 4), torch.arange(2))
    ops = table(op)
    with pytest.raises(ZeroDivisionError), Watch(ops, {}):
        ops.rmsnorm(torch.rand(2, 4), torch.ones(4), 0)
    assert ops.rmsnorm is op
