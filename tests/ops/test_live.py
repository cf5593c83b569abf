"""Ops on the running requests, in both back ends, against plain loops.

The hard inputs: slots out of order, requests without drafts beside some with all of them, drafts
that are none, several ids that end a request, broken rows, and requests that have reached their
end, or are beyond it.
"""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.errors import InternalError
from deepinfer.ops.cpu.library import LEVELS
from tests.ops import native
from tests.ops.test_torch import OPS as REFERENCE

SLOTS, COLUMNS = 9, 6


@pytest.fixture(params=("torch", *LEVELS))
def ops(request):
    return REFERENCE if request.param == "torch" else native.ops(request.param, 2)


def integers(draw, low, high, *shape):
    if not shape:
        return draw.randint(low, high)
    return [integers(draw, low, high, *shape[1:]) for _ in range(shape[0])]


def tensors(*lists):
    return [torch.tensor(x, dtype=torch.int64) for x in lists]


@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("seed", range(8))
def test_live_rows(ops, most, seed):
    draw = random.Random(seed)
    slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
    allotted = [draw.randint(0, most) for _ in slots]
    length, last = integers(draw, 1, 40, SLOTS), integers(draw, 0, 90, SLOTS)
    drafts = integers(draw, -1, 90, SLOTS, most)
    pages, windows = (integers(draw, 0, 99, SLOTS, COLUMNS) for _ in "pw")
    width = draw.randint(0, COLUMNS)
    starts, counts, offsets, of, positions, ids, behind, pages_of, windows_of = ops.live_rows(
        *tensors(slots, allotted, length, last),
        torch.tensor(drafts, dtype=torch.int64).view(SLOTS, most),
        *tensors(pages, windows), len(slots) + sum(allotted), width,
    )  # fmt: skip
    assert starts.tolist() == [length[s] - 1 for s in slots]
    assert counts.tolist() == [n + 1 for n in allotted]
    assert offsets.tolist() == [sum(allotted[:r]) + r for r in range(len(slots))]
    rows = [(r, t) for r, n in enumerate(allotted) for t in range(n + 1)]
    assert of.tolist() == [r for r, _ in rows] and behind.tolist() == [t for _, t in rows]
    assert positions.tolist() == [length[slots[r]] - 1 + t for r, t in rows]
    assert ids.tolist() == [
        max(0, drafts[slots[r]][t - 1]) if t else last[slots[r]] for r, t in rows
    ]
    assert pages_of.tolist() == [pages[s][:width] for s in slots]
    assert windows_of.tolist() == [windows[s][:width] for s in slots]


@pytest.mark.parametrize(
    "allotted, total, columns",
    [([2, 2], 5, 1), ([2, 2], 7, 1), ([3, 2], 7, 1), ([2, 2], 6, 2)],
    ids=["more rows", "fewer rows", "more drafts", "more pages"],
)
def test_what_does_not_fit_is_refused(allotted, total, columns):
    args = (*tensors([1, 0], allotted, [3, 3, 3], [5, 5, 5]), torch.zeros(3, 2).long())
    tables = tensors([[1]] * 3, [[1]] * 3)
    with pytest.raises(InternalError):
        native.ops(None, 1).live_rows(*args, *tables, total, columns)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_append(ops, count, seed):
    draw = random.Random(seed)
    slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
    stops = integers(draw, -1, 9, SLOTS, draw.randint(1, 3))
    accepted = [draw.randrange(count) for _ in slots]
    broken = [draw.random() < 0.3 for _ in slots]
    tokens = [
        [draw.randint(0, 9) if t < n + (not bad) else -1 for t in range(count)]
        for n, bad in zip(accepted, broken, strict=True)
    ]
    length, last = integers(draw, 5, 9, SLOTS), integers(draw, 0, 90, SLOTS)
    end = [n + draw.choice((-1, 0, 1, 2, 9)) for n in length]
    held = tensors(stops, end, length, last)
    given, at = torch.tensor(tokens), torch.tensor(slots)
    assert ops.ends(given, at, held[0]).tolist() == [
        [t >= 0 and t in stops[s] for t in own] for s, own in zip(slots, tokens, strict=True)
    ]
    counts, look = ops.append(given, torch.tensor(accepted), torch.tensor(broken), at, *held)
    for r, (s, own) in enumerate(zip(slots, tokens, strict=True)):
        taken: list[int] = []
        stopped = False
        for token in own[: accepted[r] + (not broken[r])]:
            if stopped or length[s] + len(taken) >= end[s]:
                break
            taken.append(token)
            stopped = token in stops[s]
        assert (counts[r], look[r]) == (len(taken), stopped or broken[r])
        last[s] = taken[-1] if taken else last[s]
        length[s] += len(taken)
    assert (held[2].tolist(), held[3].tolist()) == (length, last), "nothing else has changed"
