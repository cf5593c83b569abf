"""Ops on places, in both back ends, against plain loops over positions.

The hard inputs: rows from position 0 on, rings that wrap, ends of pages and groups, sequences
without rows, with one and with many, rows that see from a later position on, and void ones.
"""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.kvcache.live import Spans
from deepinfer.ops.cpu.library import LEVELS
from tests.ops import native
from tests.ops.test_torch import OPS as REFERENCE

PAGE, PAD = 8, 77
FIRST = (0, 1, 7, 8, 15, 16, 23, 40)  # around the ends of pages, groups and rings


@pytest.fixture(params=("torch", *LEVELS))
def ops(request):
    return REFERENCE if request.param == "torch" else native.ops(request.param, 2)


class Rows:
    """Some sequences with rows from any position on, those that stay, and their pages."""

    def __init__(self, seed: int, most: int):
        draw = random.Random(seed)
        count = draw.randint(1, 5)
        self.slots = draw.sample(range(9), count)
        self.starts = [draw.choice(FIRST) + draw.randint(0, 1) for _ in range(count)]
        self.counts = [draw.choice((0, 1, 1, draw.randint(1, most))) for _ in range(count)]
        self.counts[draw.randrange(count)] = draw.randint(1, most)
        self.of = [s for s, n in enumerate(self.counts) for _ in range(n)]
        self.positions = [
            p for start, n in zip(self.starts, self.counts, strict=True)
            for p in range(start, start + n)
        ]  # fmt: skip
        self.number = {one: at for at, one in enumerate(zip(self.of, self.positions, strict=True))}
        kept = {
            s: self.starts[s] + draw.randint(0, n) for s, n in enumerate(self.counts)
        }  # from a position of each sequence on
        self.kept = [(s, p) for s, p in zip(self.of, self.positions, strict=True) if p >= kept[s]]
        names = draw.sample(range(90), 9 * count)
        self.pages = [names[9 * s : 9 * s + 9] for s in range(count)]
        self.draw, self.spans = draw, Spans.over(*integers(self.starts, self.counts), len(self.of))

    @property
    def stay(self):
        return integers([s for s, _ in self.kept], [p for _, p in self.kept])

    def kept_places(self, ring):
        return [self.slots[s] * ring + p % ring for s, p in self.kept]


def integers(*lists):
    return tuple(torch.tensor(x, dtype=torch.int64) for x in lists)


def cases(most=6):
    return [Rows(seed, most) for seed in range(60)]


def strided(x):
    """The same values, two places apart."""
    return torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("width, more", [(4, 0), (4, 5), (1, 2), (16, 5)])
def test_window_places(ops, width, more):
    ring = width + more
    for rows in cases(9):
        sees = [rows.draw.choice((0, 0, start, max(0, start - 2))) for start in rows.starts]
        slots, from_ = integers(rows.slots, sees)
        spans = tuple(map(strided, rows.spans.all))
        past, columns, numbers, places = ops.window_places(
            spans, rows.stay, strided(slots), strided(from_), width, ring
        )
        held = [
            (s, p) for s, start in enumerate(rows.starts) for p in range(start - width + 1, start)
        ]
        assert past.tolist() == [rows.slots[s] * ring + p % ring if p >= 0 else 0 for s, p in held]
        held += zip(rows.of, rows.positions, strict=True)
        for s, p, own in zip(rows.of, rows.positions, columns.tolist(), strict=True):
            want = [(s, at) for at in range(max(p - width + 1, sees[s]), p + 1)]
            assert [held[i] for i in own if i >= 0] == want
            assert own[len(want) :] == [-1] * (width - len(want))
        assert numbers.tolist() == [rows.number[one] for one in rows.kept]
        assert places.tolist() == rows.kept_places(ring)


def test_page_places(ops):
    for rows in cases():
        pages = torch.tensor(rows.pages)
        want = [rows.pages[s][p // PAGE] * PAGE + p % PAGE for s, p in rows.kept]
        for table in (pages, strided(pages)):
            assert ops.page_places(rows.stay, table, PAGE).tolist() == want


@pytest.mark.parametrize("ratio, rollback", [(1, 5), (2, 0), (2, 5), (4, 1), (8, 5)])
def test_groups(ops, ratio, rollback):
    """Indices, and the rows that they move, with a second call that finds what the first left."""
    ring, scratch = (ratio - 1 + rollback if ratio > 1 else 0), 99
    for rows in cases(7):
        ends = [
            (s, p) for s, p in zip(rows.of, rows.positions, strict=True)
            if (p + 1) % ratio == 0 or rows.draw.random() < 0.5
        ]  # fmt: skip
        rows.kept = rows.kept[-max(1, ring) :] if len(rows.slots) == 1 else [
            (s, p) for s, p in rows.kept if p + max(1, ring) >= rows.starts[s] + rows.counts[s]
        ]  # fmt: skip
        slots, pages = torch.tensor(rows.slots), torch.tensor(rows.pages)
        last = integers([s for s, _ in ends], [p for _, p in ends])
        closed, first, entry, numbers, places = ops.group_places(
            rows.spans.all, rows.stay, last, slots, pages, ratio, ring, PAGE, scratch
        )
        assert first.tolist() == [p // ratio * ratio for _, p in ends]
        per = PAGE // ratio
        assert entry.tolist() == [
            (rows.pages[s][p // PAGE] if (p + 1) % ratio == 0 else scratch) * per + p // ratio % per
            for s, p in ends
        ]
        assert numbers.tolist() == [rows.number[one] for one in rows.kept]
        assert places.tolist() == rows.kept_places(max(1, ring))
        if ring:
            check_group_rows(ops, rows, ends, slots, closed, (numbers, places), ratio, ring)


def check_group_rows(ops, rows, ends, slots, closed, kept, ratio, ring):
    state = torch.randn(2, 9, ring, 5)
    before, new = state.clone(), torch.randn(2, len(rows.of), 5)
    members = ops.group_rows(*map(strided, new), state, slots, closed, kept)
    for part in range(2):
        for (s, end), got in zip(ends, members[part], strict=True):
            for t, row in enumerate(got):
                p = min(end // ratio * ratio + t, end)
                old = before[part, rows.slots[s], p % ring]
                want = new[part, rows.number[s, p]] if p >= rows.starts[s] else old
                assert torch.equal(row, want)
        for s, p in rows.kept:
            before[part, rows.slots[s], p % ring] = new[part, rows.number[s, p]]
    assert torch.equal(state, before), "nothing else has changed"


@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_entry_table(ops, ratio):
    for rows in cases():
        most, total, per = max(rows.counts) + 1, len(rows.of) + 3, PAGE // ratio
        pages, entries = torch.tensor(rows.pages), rows.draw.randint(0, 9 * per)
        spans = rows.spans
        for table in (pages, strided(pages)):
            places, visible, found = ops.entry_table(
                spans.starts, spans.offsets, spans.counts, table, total, most, entries, ratio, PAGE
            )
            assert found.tolist() == [
                [own[e // per] * per + e % per for e in range(entries)] for own in rows.pages
            ]
        for s, (start, n) in enumerate(zip(rows.starts, rows.counts, strict=True)):
            void = [total] * (most - n)
            assert places[s].tolist() == [rows.number[s, start + t] for t in range(n)] + void
            seen = [(start + 1 + t) // ratio for t in range(n)]
            assert visible[s].tolist() == seen + [0] * (most - n)


@pytest.mark.parametrize("depth, rollback", [(1, 0), (3, 0), (3, 5)])
def test_ngrams(ops, depth, rollback):
    ring = depth + rollback
    for rows in cases():
        rows.kept = [
            (s, p) for s, p in rows.kept if p + ring >= rows.starts[s] + rows.counts[s]
        ]  # fmt: skip
        history, mapped = torch.randint(0, 50, (9, ring)), torch.randint(0, 50, (len(rows.of),))
        before = history.clone()
        got = ops.ngrams(
            rows.spans.all, rows.stay, torch.tensor(rows.slots), strided(mapped), history, depth,
            PAD,
        )  # fmt: skip
        for s, p, own in zip(rows.of, rows.positions, got.tolist(), strict=True):
            for d, value in enumerate(own):
                at = p - d
                if at >= rows.starts[s]:
                    assert value == mapped[rows.number[s, at]]
                else:
                    assert value == (before[rows.slots[s], at % ring] if at >= 0 else PAD)
        for s, p in rows.kept:
            before[rows.slots[s], p % ring] = mapped[rows.number[s, p]]
        assert torch.equal(history, before), "nothing else has changed"


def test_no_rows(ops):
    rows = Spans.over(*integers([3], [0]), 0)
    none, slots, pages = integers([], []), torch.tensor([2]), torch.zeros(1, 9, dtype=torch.int64)
    past, columns, *kept = ops.window_places(rows.all, none, slots, slots, 4, 9)
    assert columns.shape == (0, 4) and len(past) == 3 and not any(map(len, kept))
    closed, *others = ops.group_places(rows.all, none, none, slots, pages, 2, 6, PAGE, 9)
    assert closed.shape == (0, 2) and not any(map(len, others))
    assert ops.ngrams(rows.all, none, slots, slots[:0], torch.zeros(9, 3).long(), 3, 0).shape == (
        0, 4,
    )  # fmt: skip
