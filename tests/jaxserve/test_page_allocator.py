"""The page allocator against a model that is slow and plain: one list of free pages, one dict of holders."""

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.page_allocator import PageAllocator, cache_root, page_hashes

NUM_PAGES = 9


class AllocatorMachine(RuleBasedStateMachine):
    """Holders are lists of pages, as requests hold them; the model knows only what was asked and answered."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, page_size=4)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # page -> the hash by which it can be found
        self.cached_order: list[int] = []  # unheld pages with content, the next to be evicted first
        self.next_hash = 0

    def held(self) -> list[int]:
        return [page for pages in self.holders for page in pages]

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        free = set(range(1, NUM_PAGES)) - set(self.held())
        empty = free - set(self.cached_order)
        pages = self.allocator.allocate(count)
        if count > len(free):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        evicted = self.cached_order[: max(0, count - len(empty))]
        assert set(pages) <= empty | set(evicted)
        assert set(evicted) <= set(pages)
        self.cached_order = self.cached_order[len(evicted) :]
        for page in evicted:
            del self.content[page]
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.free(pages)
        held = self.held()
        self.cached_order += [page for page in reversed(pages) if page in self.content and page not in held]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), known=st.booleans())
    def register(self, data: st.DataObject, known: bool) -> None:
        pages = self.holders[data.draw(st.integers(0, len(self.holders) - 1))]
        if known and self.content:  # another page has this content already: that one stays
            key = data.draw(st.sampled_from(sorted(self.content.values())))
        else:
            self.next_hash += 1
            key = self.next_hash.to_bytes(4, "big")
        for page in pages:
            if page not in self.content:
                self.allocator.register(page, key)
                if key not in self.content.values():
                    self.content[page] = key
                break

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.content.values())), unique=True, min_size=1))
        page_of = {key: page for page, key in self.content.items()}
        pages = self.allocator.match_prefix([*keys, b"unknown", keys[0]])
        assert pages == [page_of[key] for key in keys]
        assert self.allocator.count_free(pages) == len(set(pages) - set(self.held()))
        self.allocator.acquire(pages)
        self.holders.append(pages)
        self.cached_order = [page for page in self.cached_order if page not in pages]

    @rule()
    def reset(self) -> None:
        self.allocator.reset_prefix_cache()
        self.content.clear()
        self.cached_order.clear()

    @invariant()
    def books_agree(self) -> None:
        held = self.held()
        self.allocator.check_integrity({page: held.count(page) for page in held})
        assert self.allocator.num_used == len(set(held))
        assert self.allocator.num_cached == len(self.cached_order)
        assert self.allocator.num_free == NUM_PAGES - 1 - len(set(held))


TestAllocatorAgainstModel = AllocatorMachine.TestCase
TestAllocatorAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_sequence_is_evicted_from_its_end():
    allocator = PageAllocator(num_pages=4, page_size=2)
    pages = allocator.allocate(3)
    keys = page_hashes([1, 2, 3, 4, 5, 6], 2, b"")
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    allocator.free(pages)
    assert allocator.allocate(1) == [pages[2]]
    assert allocator.match_prefix(keys) == pages[:2]


def test_pages_without_content_go_before_cached_ones():
    allocator = PageAllocator(num_pages=4, page_size=2)
    kept, plain = allocator.allocate(1), allocator.allocate(1)
    allocator.register(kept[0], b"key")
    allocator.free(kept)
    allocator.free(plain)
    allocator.allocate(2)
    assert allocator.match_prefix([b"key"]) == kept


def test_without_a_prefix_cache_nothing_is_found():
    allocator = PageAllocator(num_pages=4, page_size=2, enable_prefix_caching=False)
    pages = allocator.allocate(1)
    allocator.register(pages[0], b"key")
    assert allocator.match_prefix([b"key"]) == []
    allocator.free(pages)
    assert allocator.num_cached == 0


def test_a_page_nobody_holds_is_neither_freed_nor_registered():
    allocator = PageAllocator(num_pages=4, page_size=2)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        allocator.free(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        allocator.register(pages[0], b"key")


def test_check_integrity_names_the_leaked_page():
    allocator = PageAllocator(num_pages=4, page_size=2)
    (page,) = allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"page {page} has 1 references but 0 holders"):
        allocator.check_integrity({})


def test_page_hashes_are_a_sha256_chain_of_full_pages():
    root = cache_root("model", None)
    first = hashlib.sha256(root + b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\x03\0\0\0\x04\0\0\0").digest()
    assert page_hashes([1, 2, 3, 4, 5], 2, root) == [first, second]
    assert page_hashes([3, 4], 2, first) == [second]
    assert page_hashes([1], 2, root) == []


def test_roots_differ_by_model_salt_and_epoch():
    roots = [cache_root("m", None), cache_root("m", ""), cache_root("m", "a"), cache_root("ma", None)]
    roots.append(cache_root("m", None, epoch=1))
    assert len(set(roots)) == len(roots)
