"""Floors against the ledger's numbers, and ceilings that move."""

import pytest

from deepinfer.bench.ceilings import Floors, moved
from deepinfer.bench.savings import savings
from deepinfer.cli.replay_input import read_config
from deepinfer.engine.assembly import EMBEDDED
from deepinfer.model import cost
from deepinfer.replay.plan import ReplayRule

FLASH = read_config(EMBEDDED / "v41-flash.json")
H200 = {"copy_gb_per_s": 4300.0, "bf16_gflop_per_s": 790e3, "fp8_gflop_per_s": 1580e3}
FLOORS = Floors(FLASH, H200, "cuda")


def test_a_step_alone_is_bound_by_its_weights():
    """12.5 GB of weights and 10.1 MB of state at 4 K (performance ledger §0.6, §1.2), and what that
    figure leaves out: mHC and the projections of Engram."""
    left_out = sum(
        size
        for layer in range(FLASH.num_hidden_layers)
        for part, size in cost.weight_bytes(FLASH, layer, 1).items()
        if part in ("hyper", "engram")
    )
    expected = 12.5e9 + 10.1e6 + left_out
    assert FLOORS.decode(4096, 1, 1) * 4.3e12 == pytest.approx(expected, rel=0.01)


def test_a_long_prefill_is_bound_by_flops():
    """79.8 TFLOP of a compact prompt of 4 K (performance ledger §1.3), in FP8."""
    plan = ReplayRule.of(FLASH, "compact", 140).plan(4096)
    assert FLOORS.prefill(plan, 2) == pytest.approx(2 * 79.8e12 / 1580e12, rel=0.01)
    slower = Floors(FLASH, {k: v for k, v in H200.items() if "fp8" not in k}, "cuda")
    assert slower.rate == FLOORS.rate, "without FP8 two FP8-equivalent FLOPs are one of bf16"


def test_more_rows_and_requests_take_longer():
    alone = FLOORS.decode(4096, 1, 1)
    assert alone < FLOORS.decode(4096, 1, 6) < FLOORS.decode(4096, 8, 6)
    assert alone < FLOORS.decode(1 << 20, 1, 1) < 1.02 * alone


def test_a_cpu_multiplies_in_one_format():
    floors = Floors(FLASH, {"copy_gb_per_s": 1e9, "float32_gflop_per_s": 100.0}, "cpu")
    plan = ReplayRule.of(FLASH, "off", "full").plan(512)
    assert floors.prefill(plan, 1) == cost.total_flops(FLASH, plan, cost.PLAIN) / 100e9


def test_moved_is_of_the_ceiling_that_moved_most():
    before = {"copy_gb_per_s": 10.0, "bf16_gflop_per_s": 100.0}
    assert moved(before, dict(before)) == 0
    assert moved(before, {"copy_gb_per_s": 10.1, "bf16_gflop_per_s": 95.0}) == pytest.approx(
        0.0526, abs=1e-4
    )
    assert moved(before, None) is None and moved(None, before) is None


def test_savings_planned_and_counted():
    class Counted:
        layer_rows, total_flops = 20 * 10_000 + 20 * 140, 10**15

    rule = ReplayRule.of(FLASH, "compact", 140)
    plan = rule.plan(10_000)
    found = savings(FLASH, plan, Counted())
    assert found["prefill_saved_rows"] == {"planned": 0.493, "measured": 0.493}
    full = cost.total_flops(FLASH, rule.plan(10_000, full=True))
    assert found["prefill_saved_flops"]["measured"] == pytest.approx(1 - 10**15 / full, abs=1e-6)
