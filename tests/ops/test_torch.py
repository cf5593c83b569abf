"""The torch back end, op by op: a row's bits depend on the row alone, and hard inputs stay right.

Row bits: every op of the registry is run on 257 rows, then on 1 to 33 of them, on strided copies,
and with all other rows NaN; each row must come out the same. An op that sums in an order chosen
by the shape is planted to show that the check can fail.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer.device import sync
from deepinfer.ops import registry
from deepinfer.ops.torch import hyper, memory, rowwise
from deepinfer.ops.torch import moe as experts
from deepinfer.quant import codec
from deepinfer.quant.records import RecordFormat

OPS = registry.build("cpu")
ROWS = 257
COUNTS = (1, 2, 3, 7, 32, 33, 257)
BF16 = torch.bfloat16


def normal(*shape, seed=0, dtype=BF16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def integers(high, *shape, seed=0, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape, kind=None, seed=1):
    values = normal(*shape, seed=seed, scale=shape[-1] ** -0.5)
    block = (1, 32) if kind == "fp4" else (32, 32)
    return OPS.prepare(values if kind is None else codec.pack(values, kind, block))


# One builder an op: n -> (arguments with one row each, function of these arguments).


def rmsnorm(n):
    w = normal(200, seed=1)
    return (normal(n, 200),), lambda x: OPS.rmsnorm(x, w, 1e-20)


def rope(n):
    x, angle = normal(n, 3, 48), normal(n, 16, dtype=torch.float32, scale=9)
    return (x, angle.cos(), angle.sin()), lambda x, c, s: OPS.rope(x, (c, s))


def rope_table(n):
    freqs = torch.logspace(0, -4, 16)
    return (integers(1 << 20, n),), lambda p: OPS.rope_table(p, freqs)


def linear(n):
    handles = [weight(70, 288, kind="fp8"), weight(70, 288, kind="fp4"), weight(70, 288)]
    return (normal(n, 288),), lambda x: [OPS.linear(x, w) for w in handles]


def linear_f32(n):
    handles = [weight(70, 37), weight(70, 1024)]
    x = normal(n, 37), normal(n, 1024, dtype=torch.float32)
    return x, lambda a, b: [OPS.linear_f32(a, handles[0]), OPS.linear_f32(b, handles[1])]


def grouped_linear(n):
    handles = weight(2 * 24, 160), weight(2 * 48, 160, kind="fp8")
    return (normal(n, 2, 160),), lambda x: [OPS.grouped_linear(x, w) for w in handles]


def hc_mix(n):
    fn = weight(24, 4 * 80)
    scale, base = torch.tensor([0.5, 0.7, 1.1]), normal(24, dtype=torch.float32, seed=2)
    return (normal(n, 4, 80),), lambda s: OPS.hc_mix(s, fn, scale, base, 20, 1e-6, 1e-20)


def hc_collapse(n):
    return (normal(n, 4, 33), normal(n, 4, dtype=torch.float32, seed=1)), OPS.hc_collapse


def hc_norm(n):
    w = normal(33, seed=2)
    rows = normal(n, 4, 33), normal(n, 4, dtype=torch.float32, seed=1)
    return rows, lambda s, pre: OPS.hc_norm(s, pre, w, 1e-20)


def hc_expand(n):
    rows = (
        normal(n, 33), normal(n, 4, 33, seed=1),
        normal(n, 4, dtype=torch.float32, seed=2), normal(n, 4, 4, dtype=torch.float32, seed=3),
    )  # fmt: skip
    return rows, OPS.hc_expand


FORMATS = [RecordFormat(kind, 96, BF16) for kind in ("window", "entry", "index", "plain")]


def store(n):
    def run(x):
        found = [torch.zeros((len(x), fmt.nbytes), dtype=torch.uint8) for fmt in FORMATS]
        for fmt, target in zip(FORMATS, found, strict=True):
            OPS.store(x, fmt, target, torch.arange(len(x)).flip(0))
        return [target.flip(0) for target in found]

    return (normal(n, 96),), run


def extend(n):
    def run(x):
        found, every = [], torch.arange(len(x))
        for fmt in FORMATS:
            ring = torch.arange(9 * fmt.nbytes).to(torch.uint8).view(9, -1)
            past, copy = torch.tensor([8, 2, 2]), torch.zeros((len(x), fmt.nbytes)).byte()
            want = ring[past]
            last = every[-5:]
            out = OPS.extend(x, fmt, ring, past, (last, last % 9), (copy, every.flip(0), every))
            assert torch.equal(out[:3], want)
            assert torch.equal(out[3:][last], ring[last % 9])
            assert torch.equal(OPS.extend(x, fmt, ring, past)[3:], out[3:])
            found += [out[3:], copy.flip(0)]
        return found

    return (normal(n, 96),), run


def pool(n):
    v, z = (normal(n, 2, 50, dtype=torch.float32, seed=s) for s in (1, 2))
    return (v, z), OPS.pool


def quantise_index(n):
    return (normal(n, 4, 64),), OPS.quantise_index


def index_scores(n):
    k = normal(1, 45, 64, seed=1)
    own = normal(n, 45, 64, seed=3)

    def run(q, weights, own):
        shared = OPS.index_scores(q[None], k, weights[None])[0]
        return shared, OPS.index_scores(q[:, None], own, weights[:, None])

    return (normal(n, 4, 64), normal(n, 4, seed=2), own), run


def select(n):
    scores = normal(n, 100).mul(2).round() / 2
    return (scores, integers(101, n)), lambda s, v: OPS.select(s, v, 16)


def candidate_blocks(n):
    scores = normal(n, 100).mul(2).round() / 2
    return (scores, integers(101, n)), lambda s, v: OPS.candidate_blocks(s, v, 4, 8)


def choose(n):
    fmt = RecordFormat("index", 64, BF16)
    records, shared = fmt.encode(normal(200, 64, seed=1)), integers(200, 1, 100, seed=2)
    q = OPS.quantise_index(normal(n, 4, 64, seed=3))
    rows = q, normal(n, 4, seed=4), integers(101, n, seed=5), integers(200, n, 100, seed=6)

    def run(q, weights, visible, own):
        args = q[None], weights[None], records, fmt, shared, visible[None], [100] * len(q), 16
        best, kept = OPS.choose(*args, (4, 8))
        within, none = OPS.choose(*args, (4, 8), kept)
        assert none is None
        args = q[:, None], weights[:, None], records, fmt, own, visible[:, None], [100], 16
        return best[0], kept[0], within[0], OPS.choose(*args)[0][:, 0]

    return rows, run


def sparse_attention(n):
    window, entry = RecordFormat("window", 64, BF16), RecordFormat("entry", 64, BF16)
    windows, entries = window.encode(normal(90, 64, seed=1)), entry.encode(normal(70, 64, seed=2))
    windows[0], entries[0] = 0xFF, 0xFF  # NaN patterns that no slot names
    rows = (
        normal(n, 3, 64), integers(90, n, 33, seed=3, low=1) * integers(2, n, 33, seed=4),
        integers(70, n, 16, seed=5, low=1) * integers(2, n, 16, seed=6),
    )  # fmt: skip
    rows = (rows[0], *(torch.where(slots > 0, slots, -1) for slots in rows[1:]))
    sink = normal(3, dtype=torch.float32, seed=7)

    def run(q, w, e):
        alone = OPS.sparse_attention(q, windows, w, window, None, None, None, sink)
        return alone, OPS.sparse_attention(q, windows, w, window, entries, e, entry, sink)

    return rows, run


def router(n):
    bias = normal(13, dtype=torch.float32, seed=1, scale=0.1)
    return (normal(n, 13, dtype=torch.float32),), lambda x: OPS.router(x, bias, 3, 1.5)


def moe(n):
    experts = tuple(weight(6, *s, kind="fp4", seed=s[0]) for s in ((32, 64), (32, 64), (64, 32)))
    shared = tuple(weight(*s, kind="fp8", seed=s[0]) for s in ((32, 64), (32, 64), (64, 32)))
    scores = normal(n, 6, dtype=torch.float32, seed=1)
    ids = scores.argsort(-1)[:, :3]
    weights = scores.softmax(-1).gather(-1, ids)
    return (normal(n, 64), ids, weights), lambda x, i, w: OPS.moe(x, i, w, experts, shared, 10.0)


def engram_rows(n):
    multipliers = integers(1 << 40, 4, seed=1)
    primes = torch.tensor([[101, 103], [107, 109], [113, 127]])
    return (integers(1000, n, 4),), lambda g: OPS.engram_rows(g, multipliers, primes)


def engram_lookup(n):
    table = codec.pack(normal(500, 32, seed=1), "fp8", (1, 32))
    return (integers(500, n, 6),), lambda rows: OPS.engram_lookup(table, rows, BF16)


def engram_gate(n):
    q, k = normal(4, 40, seed=1), normal(4, 40, seed=2)
    rows = normal(n, 4, 40, seed=3), normal(n, 5 * 40, seed=4)
    return rows, lambda s, kv: OPS.engram_gate(s, kv, q, k, 1e-20)


def draw(n):
    logits = normal(n, 5001, dtype=torch.float32, scale=3).round()  # ties: the first counts
    scores = logits.to(torch.float64)
    scores[:, 11::13], scores[5:7] = float("-inf"), float("-inf")
    logits[3::5, 4500], logits[4::5, 4999] = float("nan"), float("-inf")
    allowed = integers(256, n, 628, seed=3).to(torch.uint8)
    allowed[2::5] = 0  # but for bits behind the last id
    allowed[2::5, -1] = 254
    streams, warm = integers(1 << 62, n, low=-(1 << 62)), integers(3, n, seed=2) / 2.0
    return (logits, scores, allowed, streams, warm.double()), lambda x, y, bits, *noise: (
        OPS.draw(x), OPS.draw(x, bits), OPS.draw(x, None, *noise), OPS.draw(x, bits, *noise),
        OPS.draw(y), OPS.draw(y, None, *noise), OPS.draw(x, bits, *noise, noise[0] >> 40),
    )  # fmt: skip


CASES = {
    f.__name__: f
    for f in (
        rmsnorm, rope, rope_table, linear, linear_f32, grouped_linear, hc_mix, hc_collapse,
        hc_norm, hc_expand, store, extend, pool, quantise_index, index_scores, select,
        candidate_blocks,
        choose, sparse_attention, router, moe, engram_rows, engram_lookup, engram_gate, draw,
    )
}  # fmt: skip


def outputs(run, rows):
    out = run(*rows)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


def row_bit_failures(build):
    """What changes a row's bits: numbers of rows, "strided", "NaN beside"; empty = nothing."""
    rows, run = build(ROWS)
    whole = outputs(run, rows)
    found = []

    def check(what, part, given):
        got = outputs(run, given)
        if not all(same_bits(a, b[part]) for a, b in zip(got, whole, strict=True)):
            found.append(what)

    for count in COUNTS:
        for start in {0, min(5, ROWS - count), ROWS - count}:
            part = slice(start, start + count)
            check(count, part, [r[part] for r in rows])
    check("strided", slice(None), [torch.stack((r, r), -1)[..., 0] for r in rows])
    check("every other", slice(None, None, 2), [r[::2] for r in rows])
    if any(r.is_floating_point() for r in rows):
        kept = 200
        alone = [r.clone() for r in rows]
        for r in alone:
            if r.is_floating_point():
                r[:kept], r[kept + 1 :] = torch.nan, torch.nan
        got = outputs(run, alone)
        if not all(same_bits(a[kept], b[kept]) for a, b in zip(got, whole, strict=True)):
            found.append("NaN beside")
    return found


def test_every_op_has_a_case():
    """Those without rows of the model have tests of their own: test_places.py, test_live.py."""
    held = {op for op, spec in registry.SPECS.items() if spec.family not in ("places", "live")}
    assert set(CASES) == held - {"prepare"}


@pytest.mark.parametrize("op", CASES)
def test_row_bits(op):
    assert row_bit_failures(CASES[op]) == []


@pytest.mark.parametrize("op", [moe, sparse_attention])
def test_ops_that_do_not_wait_give_the_same(op, monkeypatch):
    """What they do for a device whose values the host does not know, in one piece and in many."""
    rows, run = op(ROWS)
    wanted = {count: outputs(run, [r[:count] for r in rows]) for count in COUNTS}
    monkeypatch.setattr(sync, "waits", lambda x: True)
    for limit in (None, 1 << 16):
        if limit is not None:
            monkeypatch.setattr(experts, "_LIMIT", limit)
            monkeypatch.setattr(memory, "_DEVICE_LIMIT", limit)
        for count, want in wanted.items():
            with sync.no_sync("cpu"):
                got = outputs(run, [r[:count] for r in rows])
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (count, limit)


def test_a_planted_matmul_fails_the_row_bits():
    """float32 x W^T by the BLAS alone: its order of summation is chosen by the shape."""
    w = normal(70, 1024, dtype=torch.float32, seed=1)
    x = normal(ROWS, 1024, dtype=torch.float32)
    assert row_bit_failures(lambda n: ((x,), lambda x: x @ w.T))


@pytest.mark.parametrize("op", CASES)
def test_empty_batch(op):
    rows, run = CASES[op](ROWS)
    for full, none in zip(outputs(run, rows), outputs(run, [r[:0] for r in rows]), strict=True):
        assert none.shape == (0, *full.shape[1:]) and none.dtype == full.dtype


@pytest.mark.parametrize("op", ["rmsnorm", "linear", "linear_f32", "grouped_linear", "hc_mix"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales_stay_finite_and_in_their_row(op, scale):
    rows, run = CASES[op](5)
    plain = outputs(run, rows)
    scaled = [r * torch.tensor([1, scale, 1, 1, -scale]).view(-1, *[1] * (r.dim() - 1)).to(r.dtype)
              for r in rows]  # fmt: skip
    for a, b in zip(outputs(run, scaled), plain, strict=True):
        assert a.isfinite().all()
        assert same_bits(a[[0, 2, 3]], b[[0, 2, 3]])


@pytest.mark.parametrize("k", [1, 31, 32, 33, 127, 128, 129, 300, 1024])
@pytest.mark.parametrize("spread", [0, 20])
def test_linear_f32_against_float64(k, spread):
    """Odd inner sizes and wide magnitudes: as good as a float32 product of the whole row."""
    x, w = (normal(9, k, dtype=torch.float32, seed=s) for s in (1, 2))
    x = x * torch.exp2(normal(9, k, dtype=torch.float32, seed=3) * spread)
    got = OPS.linear_f32(x, OPS.prepare(w)).double()
    bound = x.abs().amax(-1, keepdim=True).double() * w.double().abs().sum(-1) * 2.0**-22
    assert ((got - x.double() @ w.double().T).abs() <= bound).all()


def test_rows_of_nan_and_infinity_stay_alone():
    x = normal(4, 64)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    out = OPS.linear(x, weight(32, 64, kind="fp8"))
    assert out[1].isnan().all()
    assert out[[0, 3]].isfinite().all()


def test_router_ties_go_to_the_lower_id():
    ids, weights = OPS.router(torch.zeros(3, 8), torch.zeros(8), 3, 1.5)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weights, torch.full((3, 3), 0.5))


# DI-07: index selection


def chosen(scores, visible, allowed=None, k=4):
    scores, visible = torch.tensor([scores]), torch.tensor([visible])
    allowed = None if allowed is None else torch.tensor([allowed])
    first, second = (OPS.select(scores, visible, k, allowed) for _ in range(2))
    assert torch.equal(first, second)
    return first[0].tolist()


NEVER = float("-inf")


DI07 = [
    ([3.0, 5.0, 9.0, 9.0], 2, None, [0, 1, -1, -1]),
    ([3.0, 5.0, 9.0, 9.0], 0, None, [-1, -1, -1, -1]),
    ([1.0] * 6 + [9.0], 6, None, [0, 1, 2, 3]),
    ([NEVER, 2.0, NEVER, 1.0, 9.0, 9.0], 4, None, [0, 1, 2, 3]),
    ([9.0, NEVER, 2.0, NEVER], 4, [False, True, True, True], [1, 2, 3, -1]),
    ([9.0] * 16 + [0.0, 1.0, 2.0], 19, [False] * 16 + [True] * 3, [16, 17, 18, -1]),
    ([1.0, 2.0, float("nan"), float("nan")], 2, None, [0, 1, -1, -1]),
    ([1.0, float("nan"), 2.0], 3, [True, False, True], [0, 2, -1, -1]),
    ([-0.0, 0.0, -0.0, 0.0, 0.0], 5, None, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(
    "scores, visible, allowed, want",
    DI07,
    ids=["two", "none", "ties", "minus infinity", "minus infinity beside masked", "masked first",
         "NaN in padding", "NaN masked", "signed zeros"],
)  # fmt: skip
def test_di07_selection(scores, visible, allowed, want):
    assert chosen(scores, visible, allowed) == want


def test_di07_an_empty_selection_adds_nothing():
    rows, _ = sparse_attention(5)
    fmt, entry = RecordFormat("plain", 64, BF16), RecordFormat("entry", 64, BF16)
    keys = fmt.encode(normal(90, 64, seed=1))
    entries, none = torch.full((70, entry.nbytes), 0xFF, dtype=torch.uint8), rows[2] * 0 - 1
    sink = torch.zeros(3)
    alone = OPS.sparse_attention(rows[0], keys, rows[1], fmt, None, None, None, sink)
    beside = OPS.sparse_attention(rows[0], keys, rows[1], fmt, entries, none, entry, sink)
    assert same_bits(alone, beside)
    nothing = OPS.sparse_attention(rows[0], keys, rows[1] * 0 - 1, fmt, entries, none, entry, sink)
    assert (nothing == 0).all()


def test_di07_masked_first_equals_dense_attention():
    """The first 16 lanes masked, four valid ones after them: attention over just these."""
    fmt = RecordFormat("plain", 64, torch.float32)
    q, keys = normal(1, 3, 64, dtype=torch.float32), normal(20, 64, dtype=torch.float32, seed=1)
    slots = torch.tensor([[-1] * 16 + [16, 17, 18, 19]])
    sink = normal(3, dtype=torch.float32, seed=2)
    args = fmt.encode(keys), slots * 0 - 1, fmt, fmt.encode(keys), slots, fmt
    out = OPS.sparse_attention(q, *args, sink)
    logits = torch.cat((q[0] @ keys[16:].T * 64**-0.5, sink[:, None]), 1)
    dense = logits.softmax(-1)[:, :4] @ keys[16:]
    assert torch.allclose(out[0], dense, rtol=1e-5, atol=1e-6)


# DI-10: hyper-connections


def sinkhorn64(logits, eps=1e-6):
    a = logits.double().softmax(-1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(19):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def comb_of(logits):
    m = torch.cat((torch.zeros(len(logits), 8), logits.flatten(1)), 1)
    return hyper.hc_split(m, torch.ones(3), torch.zeros(24), 4, 20, 1e-6)[2]


def test_di10_normalisation():
    one_row = torch.full((1, 4, 4), -80.0)
    one_row[:, 1] = 80.0
    corner = torch.full((1, 4, 4), -80.0)
    corner[:, 0, 0] = 80.0
    hard = torch.cat((torch.zeros(1, 4, 4), torch.full((1, 4, 4), -80.0), one_row, corner))
    comb = comb_of(hard)
    assert comb.isfinite().all() and (comb >= 0).all()
    assert (comb[:3] - 0.25).abs().max() <= 1e-5
    logits = normal(50, 4, 4, dtype=torch.float32)
    comb = comb_of(logits)
    assert (comb.sum(-1) - 1).abs().max() <= 1e-2
    assert (comb.sum(-2) - 1).abs().max() <= 1e-2
    assert (comb - sinkhorn64(logits)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_di10_coefficients_are_float32(dtype):
    rows, run = hc_mix(5)
    for a in run(rows[0].to(dtype)):
        assert a.dtype == torch.float32


def test_activation_quantiser_and_its_codes_agree():
    x = normal(40, 96) * torch.exp2(integers(60, 40, 1, low=-40).float()).to(BF16)
    assert same_bits(codec.fp8_rounded(x), codec.fp8_values(*codec.fp8_groups(x)))


def test_functions_agree_with_torch():
    x = torch.cat((normal(1001, dtype=torch.float32, scale=8), torch.tensor([-200.0, 0.0, 200.0])))
    for mine, theirs in (
        (rowwise.sigmoid, torch.sigmoid),
        (rowwise.silu, torch.nn.functional.silu),
        (rowwise.softplus, torch.nn.functional.softplus),
    ):
        assert torch.allclose(mine(x), theirs(x), rtol=2e-6, atol=1e-37)
    assert memory.KEY_BLOCK == 64
