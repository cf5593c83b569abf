"""The page allocator: owners, names, the order in which pages go, and all of them come back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
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


def full_house(names="abcd"):
    """All pages named and cached in order of their names."""
    blocks = BlockAllocator(len(names), 4)
    pages = blocks.take(len(names))
    for page, name in zip(pages, names, strict=True):
        assert blocks.name(page, name.encode())
        blocks.give_back([page])
    return blocks, pages


def test_a_cached_page_is_found_until_its_place_is_needed():
    blocks, pages = full_house()
    assert blocks.free == 4 and [blocks.find(n) for n in (b"a", b"d", b"e")] == [
        pages[0], pages[3], None,
    ]  # fmt: skip
    assert blocks.take(2) == pages[:2], "least recently used first"
    assert blocks.evicted == [(b"a", pages[0]), (b"b", pages[1])]
    assert blocks.find(b"a") is None and blocks.find(b"c") == pages[2]


def test_a_shared_page_stays_and_counts_as_used():
    blocks, pages = full_house()
    for _ in range(2):
        blocks.share(pages[0])
    assert blocks.free == 3 and blocks.owned(pages[0]) and not blocks.owned(pages[1])
    blocks.give_back([pages[0]])
    assert blocks.free == 3, "one owner is left"
    blocks.give_back([pages[0]])
    assert blocks.take(4) == [*pages[1:], pages[0]], "its use made it the newest"


def test_the_tail_of_a_chain_goes_first():
    blocks = BlockAllocator(4, 4)
    chain = blocks.take(4)
    for at, page in enumerate(chain):
        blocks.name(page, bytes([at]))
    blocks.give_back(chain)
    blocks.take(2)
    assert [blocks.find(bytes([at])) is not None for at in range(4)] == [True, True, False, False]


def test_one_content_has_one_page():
    blocks = BlockAllocator(3, 4)
    first, second = blocks.take(2)
    assert blocks.name(first, b"x") and not blocks.name(second, b"x")
    assert not blocks.name(first, b"x"), "a second time changes nothing"
    blocks.give_back([second])
    blocks.give_back([first])
    assert blocks.find(b"x") == first
    assert blocks.take(2) == [second, 2], "pages without a name go out before one with"
    assert blocks.evicted == []


def test_a_dropped_name_frees_its_page_once_nobody_owns_it():
    blocks, pages = full_house()
    blocks.share(pages[1])
    blocks.drop(b"a")
    blocks.drop(b"b")
    blocks.drop(b"nobody")
    assert blocks.find(b"a") is None and blocks.find(b"b") is None and blocks.free == 3
    blocks.give_back([pages[1]])
    assert blocks.take(2) == [pages[1], pages[0]], "free ones, without an eviction"
    assert blocks.evicted == []
    blocks.forget()
    assert blocks.find(b"c") is None and blocks.free == 2
    blocks.take(2)
    assert blocks.evicted == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("take give name share drop forget".split()),
                          st.integers(0, 99)), max_size=80))  # fmt: skip
def test_any_history_agrees_with_a_list(moves):
    """Against a plain model: owners as a list with repeats, names as a list in order of use."""
    total = 6
    blocks = BlockAllocator(total, 4)
    owned: list[int] = []  # once for each owner
    named: dict[str, int] = {}
    unused: list[int] = []  # cached pages, least recently used first
    for move, n in moves:
        name = str(n % 9)
        if move == "take" and blocks.free:
            [page] = blocks.take(1)
            assert page not in owned
            clean = total - len({*owned, *unused})
            if clean:
                assert page not in unused and not blocks.evicted
            else:
                assert page == unused.pop(0)
                [gone] = [key for key, at in named.items() if at == page]
                assert blocks.evicted == [(gone.encode(), page)]
                del named[gone]
                blocks.evicted.clear()
            owned.append(page)
        elif move == "give" and owned:
            page = owned.pop(n % len(owned))
            blocks.give_back([page])
            if page not in owned and page in named.values():
                unused.append(page)
        elif move == "name" and owned:
            page = owned[n % len(owned)]
            if page not in named.values():
                assert blocks.name(page, name.encode()) == (name not in named)
                named.setdefault(name, page)
        elif move == "share" and name in named:
            page = blocks.find(name.encode())
            blocks.share(page)
            owned.append(page)
            unused = [other for other in unused if other != page]
        elif move in ("drop", "forget"):
            gone = [name] if move == "drop" else list(named)
            blocks.drop(name.encode()) if move == "drop" else blocks.forget()
            for key in gone:
                page = named.pop(key, None)
                unused = [other for other in unused if other != page]
        assert blocks.free == total - len(set(owned))
        for key in map(str, range(9)):
            assert blocks.find(key.encode()) == named.get(key)
        assert all(blocks.owned(page) == (page in owned) for page in range(total))
