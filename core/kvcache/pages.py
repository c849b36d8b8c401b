"""Which KV pages are free and who holds them. No torch: page ids only.

Page 0 is the dummy page: padding and rejected rows write there, nobody owns it, it is never handed out.
"""

from __future__ import annotations


class PagePool:
    """A fixed number of pages of `page_size` positions each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}: at least the dummy page and one more are needed")
        self.page_size = page_size
        self.num_pages = num_pages
        # The page that came back last goes out first: memory that was never touched stays untouched.
        self._free = list(range(num_pages - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold altogether."""
        return self.num_pages - 1

    def pages_for(self, num_positions: int) -> int:
        """Pages that cover positions 0 .. num_positions - 1."""
        return -(-num_positions // self.page_size)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, or none at all when fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._held.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back. The caller knows that no launched step names them any more."""
        for page in reversed(pages):
            self._held.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Every page but the dummy is free or held, exactly once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & self._held, f"pages both free and held: {sorted(free & self._held)[:5]}"
        assert free | self._held == set(range(1, self.num_pages)), "a page is neither free nor held"
