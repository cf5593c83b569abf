"""Graphs of the cpu back end: the same bits as the function, and none of what cannot be one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.errors import InternalError
from deepinfer.ops import registry
from deepinfer.ops.cpu.library import FLOAT, INT, LONG, PTR
from tests.ops import native


@pytest.fixture(params=(1, 2))
def ops(request):
    return native.ops(native.library().level, request.param)


def kept(graphs):
    """What each key has come to, oldest first."""
    return [*graphs._kept.values()]


def launched(graphs) -> bool:
    return getattr(kept(graphs)[-1], "confirmed", False)


def rows(at, n=48):
    return torch.randn(5, n, generator=torch.Generator().manual_seed(at)).bfloat16()


@torch.inference_mode()
def test_a_graph_gives_the_bits_of_its_function(ops):
    weight, memory = rows(99)[0], torch.zeros(8, 48, dtype=torch.bfloat16)
    positions, freqs = torch.arange(5), torch.rand(7)

    def function(x, places):
        """Kernels, and of torch: views, copies, writes in place, constants and sums."""
        normed = ops.rmsnorm(x, weight, 1e-6)
        table = ops.rope_table(positions + places, freqs)
        turned = ops.rope(normed, table) * 0.3
        memory[places] = turned  # what is kept from step to step
        both = torch.cat((memory[places.flip(0)], torch.zeros_like(x)), -1)
        lowest = both.float().amin(-1, keepdim=True)
        return {"turned": turned.to(torch.float32), "sum": (both + lowest).sum(0), "of": x[1:3]}

    graphs = ops.graphs
    for step in range(8):
        x, places = rows(step), (torch.arange(5) + step) % 8
        before = memory.clone()
        want = {name: value.clone() for name, value in function(x, places).items()}
        after = memory.clone()
        memory.copy_(before)
        got = graphs.run("key", function, x, places)
        assert list(got) == list(want)
        assert all(torch.equal(got[name], want[name]) for name in want), step
        assert torch.equal(memory, after), step
        assert launched(graphs) == (step >= 3)
    held = graphs.run("key", function, rows(20), places)
    again = {name: value.clone() for name, value in held.items()}
    graphs.run("key", function, rows(21), places)
    assert all(torch.equal(held[name], again[name]) for name in held), "results are the caller's"


@torch.inference_mode()
def test_other_shapes_and_keys_are_other_graphs(ops):
    weight = rows(99)[0]

    def function(x):
        return {"y": ops.rmsnorm(x, weight, 1e-6)}

    for step in range(6):
        for count in (2, 5):
            x = rows(step)[:count]
            assert torch.equal(ops.graphs.run("a", function, x)["y"], function(x)["y"])
    assert len(kept(ops.graphs)) == 2
    for at in range(40):
        ops.graphs.run(at, function, rows(0))
    assert len(kept(ops.graphs)) == 16


def on_the_host(x):
    return {"y": x * float(x.sum())}


def of_its_length(x):
    return {"y": x[x > 0].sum(0)}


def large(x):
    return {"y": torch.zeros(9 << 20).sum() + x}


@torch.inference_mode()
@pytest.mark.parametrize("function", [on_the_host, of_its_length, large])
def test_what_cannot_be_kept_runs_as_it_is_written(ops, function):
    for step in range(6):
        x = rows(step)[0].float()
        assert torch.equal(ops.graphs.run("key", function, x)["y"], function(x)["y"])
        assert not launched(ops.graphs)


@torch.inference_mode()
def test_a_number_that_changes_from_step_to_step_is_found(ops):
    """The key fails to say it: two captures differ, and no graph is launched."""
    weight = rows(99)[0]
    for step in range(7):
        eps = 10.0 ** -((step + 1) // 2)

        def function(x, eps=eps):
            return {"y": ops.rmsnorm(x, weight, eps)}

        x = rows(step)
        assert torch.equal(ops.graphs.run("key", function, x)["y"], function(x)["y"])


@torch.inference_mode()
def test_while_ops_are_watched_nothing_is_hidden(ops):
    assert ops.graphs is not None
    with ops.replaced({"rmsnorm": None}):
        assert ops.graphs is None
    assert ops.graphs is not None


def test_arguments_travel_as_words():
    """Signs, both kinds of real numbers and nothing at all; an error names its kernel."""
    library, types = native.library(), (PTR, INT, PTR, PTR, LONG, LONG, LONG, LONG, INT, PTR)
    registry.build("cpu", libraries={"cpu": library})
    x, out = torch.tensor([[3.0, -2.0]]), torch.zeros(1, 2)
    cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
    numbers = (x.data_ptr(), 1, cos.data_ptr(), sin.data_ptr(), 1, 1, 2, 1, -1, out.data_ptr())
    rope = f"di_rope_{library.level}", types, numbers
    library.launcher([rope])()
    assert out.tolist() == [[-2.0, -3.0]]  # turned back by a quarter
    logits, weights = np.array([[0.0, 2.0, 1.0]], np.float32), np.zeros((1, 2), np.float32)
    bias, ids = np.zeros(3, np.float32), np.zeros((1, 2), np.int64)
    at = [a.ctypes.data for a in (logits, bias, ids, weights)]
    library.launcher([
        (f"di_router_{library.level}", (PTR, PTR, LONG, LONG, LONG, FLOAT, INT, PTR, PTR),
         (at[0], at[1], 1, 3, 2, 2.5, 1, at[2], at[3])),
    ])()  # fmt: skip
    assert ids.tolist() == [[1, 2]] and abs(weights.sum() - 2.5) < 1e-5
    wrong = rope[0].replace("rope", "hc_expand")
    many = (PTR, PTR, INT, PTR, PTR, LONG, LONG, LONG, PTR)
    with pytest.raises(InternalError, match=f"{wrong}: an argument is not supported"):
        library.launcher([rope, (wrong, many, (None, None, 0, None, None, 1, 99, 1, None))])()
