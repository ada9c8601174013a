"""Who holds which page of the KV pool, and which pages hold a prefix that another request can use.

Host side only: pages are numbers here. Page 0 is never handed out; padding reads and writes go there.
A page is in one of three states: used (reference count > 0), cached (count 0, its content can still be found
by its hash) or empty. Cached pages keep their content until the space is needed: least recently freed go
first.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


def cache_root(model_id: str, cache_salt: str | None, epoch: int = 0) -> bytes:
    """The start of a hash chain. Requests share pages only when model, salt and epoch are equal."""
    return hashlib.sha256(json.dumps([model_id, cache_salt, epoch]).encode()).digest()


def page_hashes(token_ids: Sequence[int], page_size: int, root: bytes) -> list[bytes]:
    """SHA-256 of each full page of tokens, chained from `root`.

    A hash stands for all tokens up to the end of its page. `root` may be the hash of the page before: a chain
    can be continued. Cryptographic, because a collision would show one client's KV to another.
    """
    hashes = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        root = hashlib.sha256(root + array("I", token_ids[start : start + page_size]).tobytes()).digest()
        hashes.append(root)
    return hashes


class PageAllocator:
    """Reference counts, free pages and the prefix cache of a pool of `num_pages` pages (page 0 included)."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_pages >= 2, "a pool needs page 0 and one more"
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_pages
        self._empty = list(range(num_pages - 1, 0, -1))  # a stack: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, content kept; oldest first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages nobody holds whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages somebody holds (page 0 is not counted)."""
        return self.num_pages - 1 - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages of undefined content, each held once; None, and no change, when too few are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's pages, given in order.

        The last ones are evicted first: a prefix is of more use than its continuation, and without its
        beginning a page can't be found.
        """
        for page in reversed(pages):
            count = self._references[page]
            assert count > 0, f"page {page} is freed but nobody holds it"
            self._references[page] = count - 1
            if count == 1:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._empty.append(page)

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix. Nothing is held yet: `acquire` does that."""
        pages = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_free(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: acquiring them lowers `num_free` by so many."""
        return sum(self._references[page] == 0 for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages that `match_prefix` found."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def register(self, page: int, key: bytes) -> None:
        """Let others find a held page by the hash of its (full) content. The first page with a hash stays."""
        assert self._references[page] > 0, f"page {page} is registered but nobody holds it"
        if self.enable_prefix_caching and key not in self._page_of:
            assert page not in self._hash_of, f"page {page} already has another hash"
            self._page_of[key] = page
            self._hash_of[page] = key

    def reset_prefix_cache(self) -> None:
        """Forget every hash. Held pages stay held."""
        self._page_of.clear()
        self._hash_of.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def check_integrity(self, owned: Mapping[int, int]) -> None:
        """Raise AssertionError unless the books agree with each other and with `owned` (page -> holders)."""
        for page, count in enumerate(self._references):
            want = owned.get(page, 0)
            assert count == want, f"page {page} has {count} references but {want} holders"
        assert 0 not in owned, "page 0 is held"
        free = [*self._empty, *self._cached]
        assert len(set(free)) == len(free), "a page is free twice"
        assert 0 not in free, "page 0 is free"
        used = {page for page, count in enumerate(self._references) if count}
        assert used.isdisjoint(free), f"pages {sorted(used.intersection(free))} are both held and free"
        assert len(used) + len(free) == self.num_pages - 1, "a page is lost"
        assert {page: key for key, page in self._page_of.items()} == self._hash_of, "the hash tables disagree"
        assert self._hash_of.keys().isdisjoint(self._empty), "an empty page has a hash"
        assert self._hash_of.keys() >= self._cached.keys(), "a cached page has no hash"

    def _forget(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]
