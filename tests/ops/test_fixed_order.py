"""Which back ends promise a fixed order, and what follows from one that does not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from deepinfer.ops import registry


@pytest.fixture
def unordered(monkeypatch):
    """A back end that holds `linear` and `moe` and promises the first alone."""
    from deepinfer.ops.torch import linear, moe

    package = ModuleType("deepinfer.ops.unordered")
    package.FIXED_ORDER = {"cpu": frozenset({"linear"})}
    held = {"linear": {"linear": linear.linear}, "moe": {"moe": moe.moe}}
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for family in {spec.family for spec in registry.SPECS.values()}:
        module = ModuleType(f"{package.__name__}.{family}")
        vars(module).update(held.get(family, {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.BACKENDS, "unordered", ("cpu", "cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_promises_every_op(device):
    assert registry.fixed_order("torch", device) == set(registry.SPECS)
    assert registry.order_dependent(device) == ()


def test_nothing_is_promised_where_nothing_was_measured():
    assert registry.fixed_order("torch", "npu") == frozenset()
    assert registry.order_dependent("npu") == tuple(registry.SPECS)


def test_a_back_end_promises_what_it_names(unordered):
    choices = {choice.op: choice for choice in registry.explain("cpu")}
    assert choices["linear"].backend == choices["moe"].backend == "unordered"
    assert [op for op, choice in choices.items() if not choice.fixed_order] == ["moe"]
    assert registry.order_dependent("cpu") == ("moe",)
    assert registry.order_dependent("cpu", ["moe=torch"]) == ()
    assert registry.order_dependent("cuda") == ("linear", "moe")
