"""Which back ends promise a fixed order, and what follows from one that does not."""

from __future__ import annotations

import pytest

from deepinfer.ops import registry
from tests.planted import by_rows, plant


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_promises_every_op(device):
    assert registry.fixed_order("torch", device) == set(registry.SPECS)
    assert registry.order_dependent(device) == ()


def test_nothing_is_promised_where_nothing_was_measured():
    assert registry.fixed_order("torch", "npu") == frozenset()
    assert registry.order_dependent("npu") == tuple(registry.SPECS)


def test_a_back_end_promises_what_it_names(monkeypatch):
    backend = plant(monkeypatch, "moe", by_rows, promised=False)
    choices = {choice.op: choice for choice in registry.explain("cpu")}
    assert choices["moe"].backend == backend["moe"]
    assert [op for op, choice in choices.items() if not choice.fixed_order] == ["moe"]
    assert registry.order_dependent("cpu") == ("moe",)
    assert registry.order_dependent("cpu", ["moe=torch"]) == ()
    plant(monkeypatch, "moe", by_rows)
    assert registry.order_dependent("cpu") == ()
    assert registry.fixed_order(backend["moe"], "cuda") == frozenset()
