"""Which pages of a pool are free, who owns the others, and what the complete ones are called.

Page numbers go out and come in; the bytes behind them belong to `kvcache.pools`. A page whose
content is complete can be given a name, under which others find it as long as nobody needed its
place. Knows no sequence, no layer and no tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from deepinfer.errors import InternalError


class BlockAllocator:
    """A pool of `total` pages of `page_tokens` tokens each.

    A page is free, owned by one or more, or cached: without an owner but named. Free pages go out
    first, the one given back last at the front (its bytes are the most likely in a cache); then
    cached ones, least recently used first. `evicted` collects (name, page) of those, whose bytes
    are whole until the taker writes.
    """

    def __init__(self, total: int, page_tokens: int) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.evicted: list[tuple[bytes, int]] = []
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._spoilt: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.total * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked `free`. Raises InternalError if there are fewer."""
        if count > self.free:
            raise InternalError(
                "pages-exhausted",
                f"{count} pages wanted, {self.free} of {self.total} are free",
            )
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self.evicted.append((self._unname(page), page))
            self._owners[page] = 1
            pages.append(page)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """One owner less for each page; a named one without an owner stays cached.

        The last page is the first to go, since what follows a lost page cannot be found. Raises
        InternalError for a page without an owner: two would share bytes.
        """
        for page in reversed(pages):
            if not (0 <= page < self.total and self._owners[page]):
                raise InternalError("page-not-taken", f"page {page} was given back but is not out")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._spoilt.discard(page)
                if page in self._names:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def name(self, page: int, name: bytes) -> bool:
        """Let others find an owned page, whose content is complete and never changes again.

        False, and nothing happens, if another page has this content already, or this one is
        spoilt.
        """
        if name in self._pages or page in self._spoilt:
            return False
        self._names[page], self._pages[name] = name, page
        return True

    def find(self, name: bytes) -> int | None:
        """The page with this content."""
        return self._pages.get(name)

    def share(self, page: int) -> None:
        """One owner more for a named page."""
        self._owners[page] += 1
        self._cached.pop(page, None)

    def owned(self, page: int) -> bool:
        return self._owners[page] > 0

    def drop(self, name: bytes) -> None:
        """Forget a name; its page is free if nobody owns it."""
        page = self._pages.get(name)
        if page is None:
            return
        self._unname(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def spoil(self, page: int) -> None:
        """Nobody may find a page, nor give it a name, until its last owner has given it back."""
        if page in self._names:
            self.drop(self._names[page])
        if self._owners[page]:
            self._spoilt.add(page)

    def forget(self) -> None:
        """Drop every name."""
        for name in list(self._pages):
            self.drop(name)

    def _unname(self, page: int) -> bytes:
        name = self._names.pop(page)
        del self._pages[name]
        return name
