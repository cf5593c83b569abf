"""Matrix products of the cpu back end against the reference, on every level of this processor.

What must hold: the tolerance of the op's spec; a row's bits depend on the row alone, and on neither
the number of threads; hard inputs stay right; a handle gives back the weight it was made from.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import InternalError
from deepinfer.ops import registry
from deepinfer.ops.cpu import linear as native
from deepinfer.quant import Packed, codec
from tests.ops import test_torch as torch_tests
from tests.ops.compare import places
from tests.ops.native import SIDES, library, ops

BF16, F32 = torch.bfloat16, torch.float32
REFERENCE = registry.build("cpu")
OPS = ("linear", "linear_f32", "grouped_linear", "moe")
normal, same_bits = torch_tests.normal, torch_tests.same_bits


@pytest.fixture(params=SIDES, ids=lambda side: f"{side[0]}-{side[1]}")
def table(request):
    return ops(*request.param)


def stored(kind, *shape, seed=1, scale=None):
    values = normal(*shape, seed=seed, scale=shape[-1] ** -0.5 if scale is None else scale)
    if kind is None:
        return values
    return codec.pack(values, kind, (1, 32) if kind == "fp4" else (32, 32))


def close(got, want, share=0.01, worth=2.0**-18):
    """The spec's: one last place, on few elements. Where large terms cancel, a sum is worth
    ``worth`` of its row's largest value."""
    assert got.dtype == want.dtype and got.shape == want.shape
    far = torch.where(got.isnan() & want.isnan(), 0, (places(got) - places(want)).abs())
    cancelled = (got - want).abs() <= want.abs().amax(-1, keepdim=True) * worth
    assert ((far <= 1) | cancelled).all()
    assert (far > 0).float().mean() <= share


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
@pytest.mark.parametrize("shape", [(70, 288), (16, 32), (1, 32), (130, 1024), (33, 64)])
def test_linear(table, kind, shape):
    source = stored(kind, *shape)
    handle, wanted = table.prepare(source), REFERENCE.prepare(source)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 100):
        x = normal(rows, shape[1], seed=rows)
        close(table.linear(x, handle), REFERENCE.linear(x, wanted))


@pytest.mark.parametrize("k", [1, 31, 33, 37, 130])
def test_linear_of_odd_sizes(table, k):
    source, x = stored(None, 70, k), normal(9, k)
    close(table.linear(x, table.prepare(source)), REFERENCE.linear(x, REFERENCE.prepare(source)))


@pytest.mark.parametrize("k", [1, 37, 128, 300, 1024])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)])
def test_linear_f32(table, k, dtypes):
    x, w = normal(9, k, dtype=dtypes[0]), normal(70, k, seed=1, dtype=dtypes[1])
    for rows in (1, 2, 9):
        got = table.linear_f32(x[:rows], table.prepare(w))
        want = REFERENCE.linear_f32(x[:rows], REFERENCE.prepare(w))
        assert ((got - want).abs() <= 1e-5 * want.abs()).all()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 3e37])
def test_linear_f32_of_extremes(table, scale):
    """Alike for few rows and for many, near both ends of float32."""
    x, w = normal(9, 128) * scale, normal(70, 128, seed=1, scale=0.01)
    w[:, ::7] = 0.0
    handle = table.prepare(w)
    got, want = table.linear_f32(x, handle), REFERENCE.linear_f32(x, REFERENCE.prepare(w))
    assert ((got - want).abs() <= 1e-5 * want.abs()).all()
    assert all(same_bits(table.linear_f32(x[i : i + 1], handle), got[i : i + 1]) for i in range(9))


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
@pytest.mark.parametrize("groups, rank", [(1, 48), (2, 24), (4, 16), (3, 5)])
def test_grouped_linear(table, kind, groups, rank):
    source = stored(kind, groups * rank, 160)
    handle, wanted = table.prepare(source), REFERENCE.prepare(source)
    for rows, scale in ((1, 1.0), (3, 1e-36), (3, 1e36), (40, 1.0)):
        x = normal(rows, groups, 160, seed=rows) * scale
        x[0, 0, :64] = 0.0
        close(table.grouped_linear(x, handle), REFERENCE.grouped_linear(x, wanted))


@pytest.mark.parametrize("op", OPS)
def test_row_bits(table, op, monkeypatch):
    monkeypatch.setattr(torch_tests, "OPS", table)
    assert torch_tests.row_bit_failures(torch_tests.CASES[op]) == []


@pytest.mark.parametrize("op", OPS)
def test_any_number_of_threads_gives_the_same(op, monkeypatch):
    given = []
    for level, threads in SIDES:
        if level != "avx2":
            continue
        monkeypatch.setattr(torch_tests, "OPS", ops(level, threads))
        rows, run = torch_tests.CASES[op](torch_tests.ROWS)
        given.append(torch_tests.outputs(run, rows))
    assert all(same_bits(a, b) for a, b in zip(*given, strict=True))


def test_large_products_are_cut_into_tasks_and_keep_their_bits():
    """More than one row block and many column blocks."""
    source, x = stored("fp8", 1040, 512), normal(200, 512)
    table = ops("avx2", 1)
    one = table.linear(x, table.prepare(source))
    table = ops("avx2", 2)
    two = table.linear(x, table.prepare(source))
    assert same_bits(one, two)
    few = torch.cat([table.linear(x[i : i + 1], table.prepare(source)) for i in (0, 100, 199)])
    assert same_bits(few, one[[0, 100, 199]])
    close(one, REFERENCE.linear(x, REFERENCE.prepare(source)))


@pytest.mark.parametrize("op", OPS)
def test_empty_batch(table, op, monkeypatch):
    monkeypatch.setattr(torch_tests, "OPS", table)
    torch_tests.test_empty_batch(op)


@pytest.mark.parametrize("op", OPS[:3])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales_stay_finite_and_in_their_row(table, op, scale, monkeypatch):
    monkeypatch.setattr(torch_tests, "OPS", table)
    torch_tests.test_extreme_scales_stay_finite_and_in_their_row(op, scale)


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-5, 1e30])
def test_extreme_scales_are_right(table, kind, scale):
    """Of the rows, and of the weight (whose scale bytes then are too far out for the kernels)."""
    x, plain = normal(5, 288), stored(kind, 70, 288)
    for rows, source in ((x * scale, plain), (x, stored(kind, 70, 288, scale=max(scale, 1e-36)))):
        got = table.linear(rows.to(BF16), table.prepare(source))
        close(got, REFERENCE.linear(rows.to(BF16), REFERENCE.prepare(source)))


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.nan])
def test_rows_of_nan_and_infinity_stay_alone(table, kind, bad):
    x, handle = normal(7, 64), table.prepare(stored(kind, 32, 64))
    plain = table.linear(x, handle)
    x[1, 3] = bad
    out = table.linear(x, handle)
    assert not out[1].isfinite().any()
    assert same_bits(out[2:], plain[2:]) and same_bits(out[:1], plain[:1])


def test_activations_are_quantised_as_the_reference_does(table):
    """A weight of ones in one place a row reads single activations back."""
    x = normal(64, 96) * torch.exp2(torch_tests.integers(60, 64, 1, low=-40).float()).to(BF16)
    x[3, 5:9] = torch.tensor([448.0, 464.0, -463.9, 2.0**-9 * 1.5])
    x[4, :32] = torch.arange(32) * 2.0**-12
    source = codec.pack(torch.eye(96), "fp8", (32, 32))
    got = table.linear(x, table.prepare(source))
    assert same_bits(got + 0.0, codec.fp8_rounded(x).to(BF16) + 0.0)


def test_every_code_is_decoded(table):
    """Each FP8 and FP4 code, at every scale that the kernels take, through a row of one."""
    fp8 = torch.arange(256, dtype=torch.uint8)
    fp8 = fp8[(fp8 & 127) != 127][:, None].repeat(1, 32)
    fp4 = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    x = torch.eye(32, dtype=BF16) * 448
    for codes, kind, block in ((fp8, "fp8", (32, 32)), (fp4, "fp4", (1, 32))):
        rows = codes.shape[0]
        scales = torch.arange(-(-rows // block[0]), dtype=torch.uint8)[:, None] % 118 + 70
        codes = codes.view(torch.float8_e4m3fn) if kind == "fp8" else codes
        source = Packed(codes, scales, block, kind)
        handle = table.prepare(source)
        assert isinstance(handle, native.PanelWeight)
        want = (codec.unpack(source, torch.float32).T * 448).to(BF16)
        assert same_bits(table.linear(x, handle) + 0.0, want + 0.0)


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
@pytest.mark.parametrize("shape", [(70, 288), (3, 40, 64), (2, 3, 16, 32)])
def test_a_handle_gives_its_weight_back(table, kind, shape):
    source = stored(kind, *shape)
    back = table.prepare(source).source
    if kind is None:
        assert same_bits(back, source)
        return
    assert (back.kind, back.block, back.shape) == (source.kind, source.block, source.shape)
    assert same_bits(back.codes, source.codes) and same_bits(back.scales, source.scales)


@pytest.mark.parametrize("kind", ["fp8", "fp4", None])
def test_handles_go_either_way(table, kind):
    """A handle of this back end in the reference op, and the other way round."""
    x, source = normal(4, 288), stored(kind, 70, 288)
    here, there = table.prepare(source), REFERENCE.prepare(source)
    assert same_bits(REFERENCE.linear(x, here), REFERENCE.linear(x, there))
    assert same_bits(table.linear(x, there), table.linear(x, here))
    assert REFERENCE.linear(x, here).shape == (4, 70)


def test_what_the_kernels_do_not_hold_goes_to_the_reference(table):
    x = normal(4, 64)
    nan = stored("fp8", 40, 64)
    nan.codes.view(torch.uint8)[7, 9] = 255
    far = stored("fp8", 40, 64)
    far.scales[0, 0] = 255
    other = codec.pack(normal(40, 64), "fp8", (1, 64))
    infinite = normal(40, 64)
    infinite[3, 5] = torch.inf
    for source in (nan, far, other, infinite, normal(40, 64, dtype=F32)):
        got = table.linear(x, table.prepare(source))
        assert same_bits(got, REFERENCE.linear(x, REFERENCE.prepare(source)))
    source = stored("fp8", 40, 64)
    wide = table.linear(x.float(), table.prepare(source))
    assert same_bits(wide, REFERENCE.linear(x.float(), REFERENCE.prepare(source)))


def test_panels_take_no_more_bytes():
    lib = library("avx2", 1)
    for kind, bytes_each in (("fp8", 1), ("fp4", 0.5), (None, 2)):
        panels = native.Panels(stored(kind, 64, 128), lib.level)
        assert panels._codes.numel() == 64 * 128 * bytes_each


def experts_of(kinds, count, hidden, inner, shared_inner):
    """Stored stacks (w1, w3, w2) and the shared expert's matrices."""

    def three(kind, inner, *lead):
        sizes = (inner, hidden), (inner, hidden), (hidden, inner)
        return [stored(kind, *lead, *size, seed=i) for i, size in enumerate(sizes)]

    return three(kinds[0], inner, count), three(kinds[1], shared_inner)


@pytest.mark.parametrize("kinds", [("fp4", "fp8"), ("fp8", "fp8"), (None, None), ("fp4", None)])
@pytest.mark.parametrize("sizes", [(6, 64, 32, 32), (16, 96, 64, 160), (3, 32, 128, 64)])
def test_moe(table, kinds, sizes):
    count, hidden = sizes[:2]
    stacks, single = experts_of(kinds, *sizes)
    for rows, choices, limit in ((1, 3, 10.0), (2, 1, 0.1), (9, 3, 0.5), (120, 2, 10.0)):
        x = normal(rows, hidden, seed=rows)
        scores = normal(rows, count, dtype=F32, seed=rows + 1)
        scores[:, 0] += 3.0 * (rows > 9)  # an expert with many rows
        ids = scores.argsort(-1, descending=True)[:, :choices]
        args = x, ids, scores.softmax(-1).gather(-1, ids)
        got, want = (
            t.moe(*args, tuple(map(t.prepare, stacks)), tuple(map(t.prepare, single)), limit)
            for t in (table, REFERENCE)
        )
        close(got, want, worth=2.0**-7)  # of bf16 terms


def test_moe_keeps_the_order_of_experts(table):
    """Choices named in any order add up in ascending id."""
    stacks, single = experts_of(("fp4", "fp8"), 8, 64, 32, 32)
    handles = [tuple(map(table.prepare, s)) for s in (stacks, single)]
    x, ids = normal(5, 64), torch.tensor([[5, 0, 7, 3]]).expand(5, 4)
    weights = normal(5, 4, dtype=F32, seed=1)
    order = torch.tensor([3, 1, 2, 0])
    one = table.moe(x, ids, weights, *handles, 10.0)
    two = table.moe(x, ids[:, order], weights[:, order], *handles, 10.0)
    assert same_bits(one, two)


def test_moe_rows_of_nan_and_extremes_stay_alone(table):
    stacks, single = experts_of(("fp4", "fp8"), 8, 64, 32, 32)
    handles = [tuple(map(table.prepare, s)) for s in (stacks, single)]
    x, ids = normal(6, 64), torch.arange(12).view(6, 2) % 8
    weights = normal(6, 2, dtype=F32, seed=1)
    plain = table.moe(x, ids, weights, *handles, 10.0)
    x[1], x[3], x[4, 2] = 0.0, x[3] * 1e30, torch.nan
    out = table.moe(x, ids, weights, *handles, 10.0)
    assert same_bits(out[[0, 2, 5]], plain[[0, 2, 5]])
    assert out[[1, 3]].isfinite().all() and out[4].isnan().all()
    assert (out[1] == 0).all()


def test_moe_refuses_an_expert_that_is_not_there(table):
    stacks, single = experts_of(("fp4", "fp8"), 8, 64, 32, 32)
    handles = [tuple(map(table.prepare, s)) for s in (stacks, single)]
    for bad in (8, -1):
        with pytest.raises(InternalError, match="moe"):
            table.moe(normal(1, 64), torch.tensor([[0, bad]]), torch.ones(1, 2), *handles, 10.0)
