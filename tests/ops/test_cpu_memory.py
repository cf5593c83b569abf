"""The compiled ops on what attention remembers, against their torch reference at every level that
this processor has: at the spec's tolerance, the same bits for any number of threads and rows, and
right on hard inputs.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops import registry
from deepinfer.ops.cpu.library import LEVELS
from deepinfer.quant.records import RecordFormat
from tests.ops import native, test_torch
from tests.ops.compare import compare
from tests.ops.native import library
from tests.ops.test_torch import BF16, CASES, NEVER, ROWS, integers, normal, same_bits

FLOAT = torch.float32
REFERENCE = test_torch.OPS
OPS = (
    "store", "extend", "quantise_index", "index_scores", "select", "candidate_blocks",
    "choose", "sparse_attention",
)  # fmt: skip


@pytest.fixture(params=LEVELS)
def level(request):
    library(request.param)
    return request.param


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def ops(request, level, monkeypatch):
    """The native table, which the cases of `test_torch` run as well."""
    made = native.ops(level, request.param)
    monkeypatch.setattr(test_torch, "OPS", made)
    return made


def agree(op, got, want):
    tolerance = registry.SPECS[op].tolerance
    assert compare(got, want, tolerance) is None
    assert tolerance.metric != "exact" or same_bits(got, want)


def both(op, *args):
    """The op on native and reference, compared; the native output."""
    got, want = getattr(test_torch.OPS, op)(*args), getattr(REFERENCE, op)(*args)
    agree(op, got, want)
    return got


@pytest.mark.parametrize("op", OPS)
def test_threads_change_no_bit(level, op, monkeypatch):
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(test_torch, "OPS", native.ops(level, threads))
        rows, run = CASES[op](ROWS)
        found.append(test_torch.outputs(run, rows))
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


# records


@pytest.mark.parametrize("kind", ["window", "entry", "index", "plain"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_encoding(ops, kind, dtype):
    def check(x):
        targets = [torch.zeros((len(x), fmt.nbytes), dtype=torch.uint8) for _ in range(2)]
        for table, target in zip((test_torch.OPS, REFERENCE), targets, strict=True):
            table.store(x, fmt, target, torch.arange(len(x)))
        assert torch.equal(*targets)

    for width in (32, 64, 96, 512):
        fmt = RecordFormat(kind, width, dtype)
        steps = integers(49, 40, width, low=-24).to(dtype) / 4  # ties of FP4 and their neighbours
        x = torch.cat((normal(99, width, dtype=dtype), steps, normal(9, width, dtype=dtype) * 0))
        for scale in (1, 1e-6, 1e-30, 1e-38, 30, 1e30):
            check(x * torch.tensor(scale, dtype=dtype))
        check(torch.stack((x, x), -1)[..., 1])
        check(-x[:0])
        for at, odd in enumerate((float("inf"), NEVER, float("nan"))):
            x[at, 3:29:5] = odd
        check(x)
        other = FLOAT if dtype is BF16 else BF16
        check(x.to(other))


@pytest.mark.parametrize("kind", ["window", "entry"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_records_are_read_to_the_bit(ops, kind, dtype):
    """Attention to a single key with a sink far below is the key, whatever its code and scale."""
    fmt = RecordFormat(kind, 128, BF16)
    codes, scales = torch.arange(256).to(torch.uint8), torch.arange(247).to(torch.uint8)
    if kind == "window":
        codes[127::128] = 126  # no NaN
    else:
        scales[127] = 126
    codes = codes.view(-1, 128 if kind == "window" else 64)
    scale = scales.repeat_interleave(len(codes)).unsqueeze(1)
    more = scale.expand(-1, fmt.nbytes - codes.shape[1])
    records = torch.cat((codes.repeat(len(scales), 1), more), 1)
    slots = torch.arange(len(records)).unsqueeze(1)
    want = fmt.decode(records)
    counted = (want.abs() >= 2.0**-126) | (want == 0)
    q, sink = torch.zeros(len(records), 1, 128, dtype=dtype), torch.full((1,), -1e4)
    for part in (slice(None), slice(100, 103)):
        args = q[part], records, slots[part], fmt, None, None, None, sink
        got = test_torch.OPS.sparse_attention(*args)[:, 0].to(BF16)
        assert torch.equal(got[counted[part]], want[part][counted[part]])


# attention


def case(rows, heads, width, columns, chosen, dtype=BF16, kinds=("window", "entry"), seed=0):
    window, entry = (RecordFormat(kind, width, dtype) for kind in kinds)
    q = normal(rows, heads, width, dtype=dtype, seed=seed)
    near = window.encode(normal(rows + columns, width, dtype=dtype, seed=seed + 1))
    far = entry.encode(normal(300, width, dtype=dtype, seed=seed + 2))
    slots = torch.arange(rows).unsqueeze(1) + torch.arange(columns)
    best = integers(300, rows, chosen, seed=seed + 3)
    return q, near, slots, window, far, best, entry, normal(heads, dtype=FLOAT, seed=seed + 4)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize(
    "shape",
    [(1, 4, 128, 128, 64), (3, 1, 32, 1, 1), (9, 5, 64, 63, 65), (40, 4, 128, 128, 64),
     (2, 64, 512, 128, 130), (12, 17, 96, 64, 3)],
    ids=str,
)  # fmt: skip
def test_attention_at_many_sizes(ops, shape, dtype):
    both("sparse_attention", *case(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("width", [1, 33, 70])
def test_attention_over_plain_records_of_any_width(ops, width, dtype):
    both("sparse_attention", *case(9, 3, width, 20, 10, dtype=dtype, kinds=("plain", "plain")))
    both("sparse_attention", *case(2, 3, width, 20, 0, dtype=dtype, kinds=("plain", "plain")))


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_queries_of_another_dtype_than_the_records(ops, dtype):
    q, *rest = case(9, 4, 64, 64, 64, dtype=BF16 if dtype is FLOAT else FLOAT)
    both("sparse_attention", q.to(dtype), *rest)


def test_a_row_does_not_feel_how_its_heads_are_shared_out(ops):
    """Few rows are cut by heads, their keys decoded before; many rows are not."""
    for heads, width in ((4, 128), (64, 64)):
        q, near, slots, window, far, best, entry, sink = case(40, heads, width, 128, 64)
        op = test_torch.OPS.sparse_attention
        whole = op(q, near, slots, window, far, best, entry, sink)
        for count in (1, 2, 7, 8, 9):
            part = op(q[:count], near, slots[:count], window, far, best[:count], entry, sink)
            assert same_bits(part, whole[:count])
            own = near[slots[:count].flatten()]  # every row its own records
            places = torch.arange(slots[:count].numel()).view(count, -1)
            assert same_bits(
                op(q[:count], own, places, window, far, best[:count], entry, sink), whole[:count]
            )
        for h in range(0, heads, 13):
            some = op(q[:, h : h + 1], near, slots, window, far, best, entry, sink[h : h + 1])
            assert same_bits(some, whole[:, h : h + 1])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e4])
def test_attention_of_extreme_scales(ops, scale):
    q, near, slots, window, far, best, entry, sink = case(9, 4, 64, 64, 64)
    small = torch.tensor([1, scale, 1, -scale, 1, scale, 1, 1, scale]).view(-1, 1, 1)
    got = both(
        "sparse_attention", (q * small).to(BF16), near, slots, window, far, best, entry, sink
    )
    assert got.isfinite().all()
    plain = RecordFormat("plain", 64, FLOAT)
    keys = plain.encode(normal(90, 64, dtype=FLOAT) * 1e18)
    got = both("sparse_attention", q.float() * 1e18, keys, slots, plain, None, None, None, sink)
    assert got.isfinite().all()


def test_nothing_is_read_that_no_slot_names(ops):
    q, near, slots, window, far, best, entry, sink = case(20, 4, 64, 64, 64)
    slots[:, ::3], best[:, 1::2], best[4] = -1, -1, -1
    slots[7], best[7] = -1, -1
    want = both("sparse_attention", q, near, slots, window, far, best, entry, sink)
    assert (want[7] == 0).all()
    near, far = near.clone(), far.clone()
    near[[i for i in range(len(near)) if i not in slots]] = 0xFF
    far[[i for i in range(len(far)) if i not in best]] = 0xFF
    for op in (test_torch.OPS, REFERENCE):
        got = op.sparse_attention(q, near, slots, window, far, best, entry, sink)
        agree("sparse_attention", got, want)
    assert same_bits(
        test_torch.OPS.sparse_attention(q, near, slots, window, far, best, entry, sink), want
    )


def test_a_record_of_nan_spoils_its_rows_alone(ops):
    q, near, slots, window, far, best, entry, sink = case(20, 4, 64, 64, 64)
    far[best[3, 5]] = 0xFF
    got = both("sparse_attention", q, near, slots, window, far, best, entry, sink)
    named = (best == best[3, 5]).any(1)
    assert got[named].isnan().all() and got[~named].isfinite().all()


# pooling and index queries


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_index_queries(ops, dtype):
    x = torch.cat((normal(40, 4, 64, dtype=dtype), integers(49, 9, 4, 64, low=-24).to(dtype) / 4))
    for scale in (0, 1, 1e-30, 1e-38, 1e30):
        once = both("quantise_index", x * torch.tensor(scale, dtype=dtype))
        assert same_bits(both("quantise_index", once), once)


# choosing: DI-07


@pytest.mark.parametrize("case", test_torch.DI07)
def test_di07_selection(ops, case):
    scores, visible, allowed, want = case
    assert test_torch.chosen(scores, visible, allowed) == want


def test_di07_attention(ops):
    test_torch.test_di07_an_empty_selection_adds_nothing()
    test_torch.test_di07_masked_first_equals_dense_attention()


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("spread", ["ties", "wide", "odd"])
def test_choices(ops, dtype, spread):
    for n in (1, 2, 15, 16, 17, 100, 1000, 5000):
        scores = normal(30, n, dtype=dtype, seed=n)
        if spread == "ties":
            scores = scores.mul(2).round()
        elif spread == "wide":
            scores = scores * torch.exp2(normal(30, n, dtype=FLOAT, seed=1) * 20).to(dtype)
        else:
            odd = torch.tensor([NEVER, -NEVER, float("nan"), 0.0, -0.0, 1.0])
            scores = odd[integers(6, 30, n, seed=n)].to(dtype)
        visible = integers(n + 1, 30, seed=n)
        allowed = integers(3, 30, n, seed=n + 1) > 0
        for k in (1, 16, 64, n, n + 3):
            both("select", scores, visible, k)
            both("select", scores, visible, k, allowed)
        for size in (1, 8, 7):
            for count in (1, 4, n):
                both("candidate_blocks", scores, visible, count, size)


def test_no_entries(ops):
    none, seen = torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64)
    assert both("select", none, seen, 4).tolist() == [[-1] * 4] * 3
    assert both("candidate_blocks", none, seen, 4, 8).shape == (3, 0)
    q, weights = normal(1, 3, 2, 64), normal(1, 3, 2)
    assert both("index_scores", q, normal(1, 0, 64), weights).shape == (1, 3, 0)


# choosing from packed keys


def choices(ops, q, weights, records, fmt, table, visible, k, candidates):
    """Without blocks, with them, and among them."""
    most = [table.shape[1]] * visible.shape[1]
    args = q, weights, records, fmt, table, visible, most, k
    alone, none = ops.choose(*args)
    best, kept = ops.choose(*args, candidates)
    within, other = ops.choose(*args, candidates, kept)
    assert none is None and other is None
    return alone, best, kept, within


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 4, 64, 700), (3, 1, 4, 64, 90), (1, 40, 4, 64, 333), (2, 17, 32, 128, 50),
     (1, 1, 4, 64, 3500), (1, 20, 1, 32, 3000), (2, 3, 5, 96, 0)],
    ids=str,
)  # fmt: skip
def test_choose(ops, shape, dtype):
    requests, rows, heads, width, n = shape
    fmt = RecordFormat("index", width, dtype)
    x = normal(4000, width, dtype=dtype, seed=1)
    x[::7] = x[0]  # ties
    records = fmt.encode(x)
    records[3] = 0xFF
    table = torch.stack([torch.randperm(4000)[:n] for _ in range(requests)])
    visible = integers(n + 1, requests, rows, seed=2)
    visible[..., -1:] = n
    q = normal(requests, rows, heads, width, dtype=dtype, seed=3)
    weights = normal(requests, rows, heads, dtype=dtype, seed=4)
    for queries in (REFERENCE.quantise_index(q), q):  # FP4 holds the first ones
        for k, candidates in ((16, (4, 8)), (64, (n, 8)), (7, (3, 5)), (1, (1, 1))):
            args = queries, weights, records, fmt, table, visible, k, candidates
            got, want = choices(test_torch.OPS, *args), choices(REFERENCE, *args)
            for a, b in zip(got, want, strict=True):
                assert same_bits(a, b)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_choose_from_plain_keys(ops, dtype):
    for width in (32, 33, 7):
        fmt = RecordFormat("plain", width, dtype)
        records = fmt.encode(normal(300, width, dtype=dtype, seed=1))
        args = (
            normal(2, 9, 3, width, dtype=dtype), normal(2, 9, 3, dtype=dtype), records, fmt,
            integers(300, 2, 100), integers(101, 2, 9), 16, (4, 8),
        )  # fmt: skip
        for a, b in zip(choices(test_torch.OPS, *args), choices(REFERENCE, *args), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e20, 1e30])
def test_choose_at_extreme_scales(ops, scale):
    fmt = RecordFormat("index", 64, BF16)
    q, keys = REFERENCE.quantise_index(normal(1, 5, 4, 64, seed=2)), normal(300, 64, seed=1)
    visible = torch.tensor([[300, 299, 100, 17, 1]])
    args = fmt, torch.arange(300)[None], visible, 16, (4, 8)
    for queries, entries in ((q, keys * scale), ((q * scale), keys)):
        more = queries, normal(1, 5, 4), fmt.encode(entries), *args
        got, want = choices(test_torch.OPS, *more), choices(REFERENCE, *more)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_choose_reads_visible_keys_alone(ops):
    fmt = RecordFormat("index", 64, BF16)
    records = fmt.encode(normal(300, 64, seed=1))
    q, weights = REFERENCE.quantise_index(normal(1, 5, 4, 64, seed=2)), normal(1, 5, 4)
    visible, table = torch.tensor([[100, 99, 64, 17, 1]]), torch.arange(300)[None]
    args = fmt, table, visible, 16, (4, 8)
    want = choices(test_torch.OPS, q, weights, records, *args)
    records = records.clone()
    records[100:] = 0xFF
    got = choices(test_torch.OPS, q, weights, records, *args)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
