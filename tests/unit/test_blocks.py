"""The page allocator: every page has one owner, and all of them come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InternalError
from deepinfer.kvcache.blocks import BlockAllocator


def test_counts_and_capacity():
    blocks = BlockAllocator(5, 4)
    assert (blocks.free, blocks.capacity) == (5, 20)
    assert [blocks.pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    taken = blocks.take(3)
    assert len(set(taken)) == 3 and blocks.free == 2
    blocks.give_back(taken)
    assert blocks.free == 5


def test_too_many_or_foreign_pages_are_bugs():
    blocks = BlockAllocator(2, 4)
    with pytest.raises(InternalError):
        blocks.take(3)
    assert blocks.free == 2, "a refused request takes nothing"
    [page] = blocks.take(1)
    blocks.give_back([page])
    for wrong in (page, 2, -1):
        with pytest.raises(InternalError):
            blocks.give_back([wrong])


@given(st.lists(st.integers(-3, 6), max_size=60))
def test_pages_are_never_shared(moves):
    blocks, owned = BlockAllocator(12, 4), []
    for move in moves:
        if move > 0 and move <= blocks.free:
            owned.append(blocks.take(move))
        elif owned:
            blocks.give_back(owned.pop(move % len(owned)))
        out = [page for pages in owned for page in pages]
        assert len(out) == len(set(out)) and blocks.free == 12 - len(out)
