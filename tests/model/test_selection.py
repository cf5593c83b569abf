"""Choosing entries: few candidates, ties, infinities, and lanes that nobody may read."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops import registry
from deepinfer.quant.records import RecordFormat

OPS = registry.build("cpu")
INF, NAN = float("inf"), float("nan")
K, HEADS, DIM = 4, 3, 32
PLAIN = RecordFormat("plain", DIM, torch.float32)


def select(scores, visible, allowed=None):
    """The choice of one row, the same in every run, alone and among other rows."""
    scores = torch.tensor([[scores, [0.0] * len(scores)]])
    seen = torch.tensor([[visible, 0]])
    if allowed is not None:
        allowed = torch.tensor([[allowed, [True] * len(allowed)]])
    first = OPS.select(scores, seen, K, allowed)
    assert torch.equal(first, OPS.select(scores, seen, K, allowed))
    assert first.shape == (1, 2, K) and (first[0, 1] == -1).all()
    row = first[0, 0].tolist()
    chosen = [j for j in row if j >= 0]
    assert row == chosen + [-1] * (K - len(chosen)), "the choice, then the empty places"
    assert chosen == sorted(set(chosen)) and all(j < visible for j in chosen)
    return chosen


def attend(q, keys, chosen, sink):
    """Attention of q [heads, D] over the chosen rows of keys alone, no window."""
    empty = torch.zeros((1, PLAIN.nbytes), dtype=torch.uint8)
    slots = torch.tensor([chosen + [-1] * (K * 8 - len(chosen))])
    none = torch.full((1, 4), -1)
    return OPS.sparse_attention(
        q[None], empty, none, PLAIN, PLAIN.encode(keys), slots, PLAIN, sink
    )[0]


@pytest.mark.parametrize(
    ("scores", "visible", "expected"),
    [
        ([1.0, 2.0, 0.0, 0.0], 2, [0, 1]),  # (a)
        ([1.0, 2.0, 3.0, 4.0], 0, []),  # (b)
        ([], 0, []),
        ([0.5] * 6, 6, [0, 1, 2, 3]),  # (c)
        ([0.0, -0.0, 0.0, -0.0, -0.0], 5, [0, 1, 2, 3]),  # the two zeros are equal
        ([-INF, 1.0, -INF, 9.0, 9.0], 3, [0, 1, 2]),  # (d)
        ([-INF] * 6, 6, [0, 1, 2, 3]),
        ([-3.0, -INF, -1.0, -INF, -2.0, 7.0], 5, [0, 1, 2, 4]),
        ([1.0, 2.0, 3.0, NAN, NAN, NAN], 3, [0, 1, 2]),  # (f)
        ([5.0, 1.0, 2.0, 3.0, 4.0, NAN], 5, [0, 2, 3, 4]),
    ],
)
def test_choices(scores, visible, expected):
    """DI-07 (a), (b), (c), (d), (f)."""
    assert select(scores, visible) == expected


def test_masked_lanes_in_front():
    """DI-07 (e): the first 16 lanes masked, valid ones after: the valid lanes and no other."""
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(20, DIM, generator=generator)
    keys[:16] = NAN
    scores = torch.randn(20, generator=generator)
    scores[:16] = NAN
    chosen = select(scores.tolist(), 20, [False] * 16 + [True] * 4)
    assert chosen == [16, 17, 18, 19]
    q, sink = torch.randn(HEADS, DIM, generator=generator), torch.randn(HEADS, generator=generator)
    got = attend(q, keys, chosen, sink)
    logits = torch.cat((q @ keys[16:].T * DIM**-0.5, sink[:, None]), 1)
    dense = logits.softmax(-1)[:, :-1] @ keys[16:]
    torch.testing.assert_close(got, dense, rtol=0, atol=1e-5)
    assert torch.equal(got, attend(q, keys, chosen, sink))


def test_nothing_to_choose_adds_nothing():
    """DI-07 (b): zeros, also over storage that holds NaN."""
    keys = torch.full((5, DIM), NAN)
    out = attend(torch.ones(HEADS, DIM), keys, [], torch.zeros(HEADS))
    assert (out == 0).all()


def test_candidate_blocks_at_the_edges():
    """The newest visible block always stays; nothing visible, no block (model spec §3.7)."""
    nothing = OPS.candidate_blocks(torch.zeros(1, 3, 0), torch.zeros(1, 3, dtype=torch.int64), 2, 2)
    assert nothing.shape == (1, 3, 0) and nothing.dtype == torch.bool
    scores = torch.tensor([[[9.0, 9.0, 1.0, 1.0, 5.0, NAN, NAN, NAN]] * 4])
    visible = torch.tensor([[0, 1, 5, 4]])
    kept = OPS.candidate_blocks(scores, visible, 2, 2)[0].tolist()
    assert kept == [
        [False] * 4,
        [True, False, False, False],
        [True, False, True, False],
        [True, True, False, False],
    ]
    one = OPS.candidate_blocks(scores, visible, 1, 2)[0].tolist()
    assert [row.index(True) if any(row) else None for row in one] == [None, 0, 2, 1]
