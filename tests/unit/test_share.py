"""Shares of drafts on tensors: the schedule's numbers and its ranks, whatever the batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from deepinfer.device.sync import no_sync  # noqa: E402
from deepinfer.speculative import schedule, share  # noqa: E402

LOGITS = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 80.0, -80.0, math.nan, math.inf])
)


@st.composite
def blocks(draw):
    """Raw confidences [R, K] of a batch, how many of each may count, and temperatures."""
    requests, count = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    raw = draw(
        st.lists(
            st.lists(LOGITS, min_size=count, max_size=count),
            min_size=requests, max_size=requests,
        )
    )  # fmt: skip
    useful = draw(st.lists(st.integers(0, count), min_size=requests, max_size=requests))
    size = draw(st.sampled_from([1, count]))
    temperatures = draw(st.lists(st.floats(0.05, 20), min_size=size, max_size=size))
    return raw, useful, temperatures


def tensors(raw, useful):
    return torch.tensor(raw, dtype=torch.float32), torch.tensor(useful, dtype=torch.int64)


def known(raw, useful, temperatures):
    """Survivals as the schedule makes them of each request by itself."""
    out = []
    for some, n in zip(raw, useful, strict=True):
        chances = schedule.confidences(some, temperatures)
        out.append([*schedule.survivals(chances)[:n], *(0.0,) * (len(some) - n)])
    return out


@given(blocks())
@settings(max_examples=200, deadline=None)
def test_survivals_are_those_of_the_schedule(block):
    raw, useful, temperatures = block
    raw, useful = tensors(raw, useful)
    got = share.survivals(raw, temperatures, useful)
    wanted = known(raw.tolist(), useful.tolist(), temperatures)
    assert got.dtype == torch.float64
    for ours, theirs in zip(got.tolist(), wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=0)
        assert [x == 0 for x in ours] == [x == 0 for x in theirs]
        assert ours == sorted(ours, reverse=True), "none rises"
    for at in range(len(raw)):
        alone = share.survivals(raw[at : at + 1], temperatures, useful[at : at + 1])
        assert torch.equal(alone[0], got[at]), "neighbours show"


VALUES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@st.composite
def ranked(draw):
    requests, count = draw(st.integers(1, 7)), draw(st.integers(0, 5))
    some = st.lists(VALUES, min_size=count, max_size=count)
    values = [sorted(draw(some), reverse=True) for _ in range(requests)]
    return values, draw(st.integers(0, requests * count))


@given(ranked())
@settings(max_examples=300, deadline=None)
def test_a_split_is_the_schedules(case):
    values, extra = case
    allotted, shares = share.split(torch.tensor(values, dtype=torch.float64), extra)
    assert shares.tolist() == schedule.split(values, extra)
    assert int(allotted.sum()) == extra
    assert bool((shares <= allotted).all()) and int(allotted.max()) <= len(values[0])


@given(blocks(), st.data())
@settings(max_examples=200, deadline=None)
def test_confidences_become_shares(block, data):
    """From raw numbers to rows: what the device gives is the schedule's split of the survivals
    that it reports, and a cut the schedule's cut of them."""
    raw, useful, temperatures = block
    raw, useful = tensors(raw, useful)
    extra = data.draw(st.integers(0, raw.numel()))
    made = share.survivals(raw, temperatures, useful)
    assert share.split(made, extra)[1].tolist() == schedule.split(made.tolist(), extra)
    assert bool((share.split(made, extra)[1] <= useful).all())
    threshold = data.draw(st.floats(0.001, 1))
    assert share.cut(made, threshold).tolist() == [
        sum(value >= threshold for value in some) for some in made.tolist()
    ]


def test_ties_go_to_the_earlier_request_then_to_the_earlier_draft():
    many = torch.full((300, 5), 0.5, dtype=torch.float64)
    allotted, shares = share.split(many, 1001)
    assert shares.tolist() == [5] * 200 + [1] + [0] * 99 == allotted.tolist()
    some = torch.tensor([[0.9, 0.2], [0.9, 0.9], [1.0, 0.0]], dtype=torch.float64)
    assert [share.split(some, extra)[1].tolist() for extra in range(7)] == [
        [0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [1, 2, 1], [2, 2, 1], [2, 2, 1],
    ]  # fmt: skip


def test_rows_that_nobody_can_use_are_void():
    nothing = torch.zeros(3, 2, dtype=torch.float64)
    allotted, shares = share.split(nothing, 3)
    assert (allotted.tolist(), shares.tolist()) == ([2, 1, 0], [0, 0, 0])
    allotted, shares = share.split(nothing[:, :0], 0)
    assert (allotted.tolist(), shares.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert share.split(nothing[:0], 0)[0].tolist() == []


def test_the_host_waits_for_nothing():
    raw, useful = torch.randn(6, 5), torch.tensor([5, 0, 3, 5, 1, 2])
    with no_sync("cpu"):
        made = share.survivals(raw, (1.0, 1.1, 0.9, 1.0, 2.0), useful)
        share.split(made, 7)
        share.cut(made, 0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_the_bits_of_the_host():
    raw, useful = torch.randn(256, 5) * 4, torch.randint(0, 6, (256,))
    raw[::7] = raw[1]  # ties
    made = share.survivals(raw, (1.3,), useful)
    on_device = raw.cuda(), useful.cuda()
    with no_sync("cuda"):
        there = share.survivals(on_device[0], (1.3,), on_device[1])
        splits = [share.split(there, extra) for extra in (0, 1, 500, 1280)]
    assert torch.equal(there.cpu(), made)
    for extra, (allotted, shares) in zip((0, 1, 500, 1280), splits, strict=True):
        assert torch.equal(allotted.cpu(), share.split(made, extra)[0])
        assert torch.equal(shares.cpu(), share.split(made, extra)[1])
