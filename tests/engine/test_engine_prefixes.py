"""The cache of ended sequences: the longest stored beginning is found, and its size is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.compute.prefixes import PrefixCache
from shoal.model.prefix_tree import shared_length

rows = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(kept=st.lists(rows, max_size=12), asked=rows)
def test_the_longest_stored_beginning_is_found(kept: list[tuple[int, ...]], asked: tuple[int, ...]) -> None:
    cache: PrefixCache[tuple[int, ...]] = PrefixCache(1000)
    for row in kept:
        cache.keep(row, row, 1)
    longest = max((shared_length(row, asked) for row in kept), default=0)
    found = cache.longest(asked)
    assert (0 if found is None else found[0]) == longest
    assert found is None or shared_length(found[1], asked) == longest


@given(kept=st.lists(st.tuples(rows, st.integers(1, 9)), max_size=20), most=st.integers(1, 20))
def test_what_is_kept_is_bounded_and_no_row_begins_another(kept: list[tuple[tuple[int, ...], int]], most: int) -> None:
    cache: PrefixCache[tuple[int, ...]] = PrefixCache(most)
    for row, size in kept:
        cache.keep(row, row, size)
        assert cache.size_bytes <= most
    found = {cache.longest(row) for row, _ in kept} - {None}
    stored = {value for _, value in found if value}  # type: ignore[misc]
    assert len(stored) <= len(cache)
    assert not any(one != other and other[: len(one)] == one for one in stored for other in stored)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache: PrefixCache[str] = PrefixCache(2)
    cache.keep((1,), "a", 1)
    cache.keep((2,), "b", 1)
    assert cache.longest((1, 5)) == (1, "a")
    cache.keep((3,), "c", 1)
    assert cache.longest((2,)) is None
    assert cache.longest((1,)) == (1, "a")
    cache.clear()
    assert (cache.longest((1,)), cache.size_bytes, len(cache)) == (None, 0, 0)
