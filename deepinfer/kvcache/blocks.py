"""Which pages of the compressed-KV pool are free, and who gave one back.

Page numbers go out and come in; the bytes behind them belong to `kvcache.pools`. Knows no sequence,
no layer and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.errors import InternalError


class BlockAllocator:
    """A pool of `total` pages of `page_tokens` tokens each.

    The page given back last goes out first: its bytes are the ones most likely in a cache.
    """

    def __init__(self, total: int, page_tokens: int) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self._free = list(range(total - 1, -1, -1))
        self._out = bytearray(total)

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.total * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked `free`. Raises InternalError if there are fewer."""
        if count > len(self._free):
            raise InternalError(
                "pages-exhausted",
                f"{count} pages wanted, {len(self._free)} of {self.total} are free",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._out[page] = 1
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages. Raises InternalError for one not out: two owners would share bytes."""
        for page in pages:
            if not (0 <= page < self.total and self._out[page]):
                raise InternalError("page-not-taken", f"page {page} was given back but is not out")
            self._out[page] = 0
            self._free.append(page)
