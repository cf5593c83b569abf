"""The cpu back end, op by op: the reference within each spec's tolerance, and rows that stay alone.

The cases are those of the torch back end; each runs at every level of this processor, with one
thread, two and three, which must give the same bits.
"""

from __future__ import annotations

import pytest

from deepinfer.ops import registry
from deepinfer.ops.cpu.library import LEVELS
from tests.ops import test_torch as cases
from tests.ops.compare import compare
from tests.ops.native import levels, library

HELD = sorted(op for op in registry.fixed_order("cpu", "cpu") if op in cases.CASES)


@pytest.fixture(params=LEVELS)
def native(request, monkeypatch):
    """The cases on compiled ops at a level."""
    ops = registry.build("cpu", libraries={"cpu": library(request.param)})
    monkeypatch.setattr(cases, "OPS", ops)
    return request.param


def outputs(op, count):
    rows, run = cases.CASES[op](cases.ROWS)
    return cases.outputs(run, [r[:count] for r in rows])


@pytest.mark.parametrize("op", HELD)
def test_parity(op, monkeypatch):
    reference = outputs(op, cases.ROWS)
    tolerance = registry.SPECS[op].tolerance
    for level in levels():
        found = []
        for threads in (1, 2, 3):  # all tables share the threads: the last number set counts
            ops = registry.build("cpu", libraries={"cpu": library(level, threads)})
            monkeypatch.setattr(cases, "OPS", ops)
            found.append(outputs(op, cases.ROWS))
        for a, b in zip(found[0], reference, strict=True):
            assert compare(a, b, tolerance) is None, level
        for more in found[1:]:
            assert all(cases.same_bits(a, b) for a, b in zip(found[0], more, strict=True)), level


@pytest.mark.parametrize("op", HELD)
def test_row_bits(op, native):
    assert cases.row_bit_failures(cases.CASES[op]) == []


@pytest.mark.parametrize("op", HELD)
def test_empty_batch(op, native):
    cases.test_empty_batch(op)


def test_every_op_is_declared():
    """What the cpu back end holds it promises to keep in a fixed order."""
    held = {name for name, spec in registry.SPECS.items() if registry.implementation(spec, "cpu")}
    assert held == set(registry.fixed_order("cpu", "cpu"))


@pytest.mark.parametrize("op", [o for o in ("rmsnorm", "hc_mix") if o in HELD])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales(op, scale, native):
    cases.test_extreme_scales_stay_finite_and_in_their_row(op, scale)
