import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fp4pipe.runtime.engine.pages import Pages

PAGE = 2
NUM_PAGES = 9


def filled(pages: Pages, tokens: list[int]):
    lease = pages.lease(tokens, len(tokens))
    assert pages.grow(lease, len(tokens))
    pages.commit(lease, tokens, len(tokens))
    return lease


def test_a_prefix_is_shared_in_full_pages_while_it_is_in_use() -> None:
    pages = Pages(8, PAGE)
    first = filled(pages, [1, 2, 3, 4, 5])
    second = filled(pages, [1, 2, 3, 4, 6])
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert pages.used == 4
    pages.check([first, second])


def test_a_prefix_outlives_its_request_until_the_pages_are_needed() -> None:
    pages = Pages(4, PAGE)
    lease = filled(pages, [1, 2, 3, 4])
    kept = list(lease.pages)
    pages.release(lease)
    assert (pages.num_free, pages.num_idle) == (2, 2)
    assert pages.lease([1, 2, 3, 4, 5], 4).pages == kept
    pages = Pages(4, PAGE)
    pages.release(filled(pages, [1, 2, 3, 4]))
    other = filled(pages, [9, 9, 9, 9, 9, 9, 9])
    assert pages.lease([1, 2, 3, 4], 4).pages == []
    assert len(other.pages) == 4


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head() -> None:
    pages = Pages(4, PAGE)
    pages.release(filled(pages, [1, 1, 2, 2]))
    pages.release(filled(pages, [3, 3, 4, 4]))
    pages.release(pages.lease([1, 1, 2, 2], 4))  # used again: now the younger
    pages.grow(pages.lease([], 0), PAGE)
    assert len(pages.lease([1, 1, 2, 2], 4).pages) == 2
    assert len(pages.lease([3, 3, 4, 4], 4).pages) == 1


def test_the_match_is_limited() -> None:
    pages = Pages(4, PAGE)
    pages.release(filled(pages, [1, 2, 3, 4]))
    assert len(pages.lease([1, 2, 3, 4], 3).pages) == 1
    assert pages.lease([1, 2, 3, 4], 1).pages == []


def test_growth_that_does_not_fit_changes_nothing() -> None:
    pages = Pages(3, PAGE)
    lease = pages.lease([1], 1)
    assert pages.grow(lease, 2)
    assert not pages.grow(lease, 8)
    assert len(lease.pages) == 1
    assert pages.available == 2
    pages.check([lease])


def test_without_prefix_cache_nothing_is_kept() -> None:
    pages = Pages(4, PAGE, prefix_cache=False)
    pages.release(filled(pages, [1, 2, 3, 4]))
    assert (pages.num_free, pages.num_idle) == (4, 0)
    assert pages.lease([1, 2, 3, 4], 4).pages == []


def test_flush_spares_what_is_in_use() -> None:
    pages = Pages(8, PAGE)
    used = filled(pages, [1, 2])
    pages.release(filled(pages, [3, 4, 5, 6]))
    assert pages.flush() == 2
    assert pages.num_idle == 0
    pages.check([used])


def test_check_sees_a_lost_page() -> None:
    pages = Pages(4, PAGE)
    pages.grow(pages.lease([], 0), 2)
    with pytest.raises(AssertionError, match="lost"):
        pages.check()


class PagesMachine(RuleBasedStateMachine):
    """Any order of leasing, growing, committing, releasing and flushing keeps every page accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(NUM_PAGES, PAGE)
        self.leases: list = []
        self.holds: dict[int, tuple[int, ...]] = {}  # what each page's content is, by the requests that wrote it

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def lease(self, tokens: list[int]) -> None:
        lease = self.pages.lease(tokens, len(tokens) - 1)
        for index, page in enumerate(lease.pages):
            assert self.holds[page] == tuple(tokens[: (index + 1) * PAGE])
        self.leases.append((lease, tokens, len(lease.pages) * PAGE))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, tokens, computed = self.leases[index]
        end = min(len(tokens), computed + count)
        available = self.pages.available
        grew = self.pages.grow(lease, end)
        assert grew == (self.pages.pages_for(end) - len(lease.pages) <= 0 or available < 0)
        if not grew:
            return
        for position in range(computed, end):
            self.holds[lease.pages[position // PAGE]] = tuple(tokens[: position + 1])
        self.pages.commit(lease, tokens, end)
        self.leases[index] = (lease, tokens, end)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.pages.release(lease)

    @rule()
    def flush(self) -> None:
        self.pages.flush()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pages.check(lease for lease, _, _ in self.leases)
        if not self.leases:
            assert self.pages.available == NUM_PAGES

    @invariant()
    def every_lease_still_holds_its_own_tokens(self) -> None:
        for lease, tokens, computed in self.leases:
            for index in range(computed // PAGE):
                assert self.holds[lease.pages[index]] == tuple(tokens[: (index + 1) * PAGE])


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
