"""The fetch cache keeps what HTTP lets it keep, within its bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.render.media.fetch_cache import ENTRY_OVERHEAD, FetchCache

KEY = (b"scope", "http://example.com/a")


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(capacity: int = 100_000) -> tuple[FetchCache, Time]:
    time = Time()
    return FetchCache(capacity, time), time


def is_fresh(cache: FetchCache) -> bool | None:
    """None when nothing is held."""
    entry = cache.lookup(KEY)
    return None if entry is None else cache.is_fresh(entry)


@pytest.mark.parametrize(
    ("headers", "fresh"),
    [
        ({}, None),
        ({"cache-control": "max-age=10"}, True),
        ({"cache-control": "public, Max-Age=10"}, True),
        ({"cache-control": 'max-age="10"'}, True),
        ({"cache-control": "max-age=10", "age": "10"}, None),
        ({"cache-control": "max-age=10", "age": "9"}, True),
        ({"cache-control": "max-age=0", "etag": '"a"'}, False),
        ({"cache-control": "max-age=-5", "etag": '"a"'}, False),
        ({"cache-control": "max-age=soon", "etag": '"a"'}, False),
        ({"cache-control": "no-cache, max-age=10", "etag": '"a"'}, False),
        ({"cache-control": "no-store, max-age=10", "etag": '"a"'}, None),
        ({"cache-control": "max-age=10", "vary": "*"}, None),
        ({"cache-control": "max-age=10", "vary": "Accept, *"}, None),
        ({"cache-control": "max-age=10", "vary": "Accept, Host"}, True),
        ({"cache-control": "max-age=0, max-age=10", "etag": '"a"'}, False),
        ({"cache-control": "max-age=10", "age": "10, 0", "etag": '"a"'}, False),
        ({"etag": '"a"'}, False),
        ({"last-modified": "yesterday"}, False),
    ],
)
def test_what_headers_mean(headers: dict[str, str], fresh: bool | None) -> None:
    cache, _ = make()
    cache.store(KEY, b"body", headers)
    assert is_fresh(cache) is fresh


def test_freshness_ends_and_a_confirmation_renews_it() -> None:
    cache, time = make()
    cache.store(KEY, b"body", {"cache-control": "max-age=10", "etag": '"a"'})
    time.now += 10
    assert is_fresh(cache) is False
    cache.refresh(KEY, {"cache-control": "max-age=5"})
    assert is_fresh(cache) is True
    time.now += 5
    assert is_fresh(cache) is False


@pytest.mark.parametrize(
    ("confirmation", "fresh", "asked_with"),
    [
        ({}, True, '"a"'),
        ({"cache-control": "max-age=20"}, True, '"a"'),
        ({"cache-control": "no-cache"}, False, '"a"'),
        ({"age": "10"}, False, '"a"'),
        ({"etag": '"a"', "last-modified": "today"}, True, '"a"'),
        ({"etag": 'W/"a"'}, True, 'W/"a"'),
        ({"cache-control": "no-store"}, None, None),
        ({"etag": '"a"', "cache-control": "no-store"}, None, None),
        ({"vary": "*"}, None, None),
        ({"etag": '"b"'}, None, None),
    ],
)
def test_a_confirmation_changes_what_it_mentions_and_leaves_the_rest(
    confirmation: dict[str, str], fresh: bool | None, asked_with: str | None
) -> None:
    cache, time = make()
    said = {"cache-control": "max-age=10", "age": "5", "etag": '"a"', "last-modified": "once"}
    cache.store(KEY, b"body", said)
    time.now += 5
    cache.refresh(KEY, confirmation)
    assert is_fresh(cache) is fresh
    held = cache.lookup(KEY)
    if held is not None:
        assert dict(held.conditional_headers()) == {
            "If-None-Match": str(asked_with).encode(),
            "If-Modified-Since": confirmation.get("last-modified", "once").encode(),
        }


def test_a_long_url_and_long_headers_are_charged() -> None:
    long = (b"", "http://example.com/" + 5000 * "a")
    for key, etag in ((long, "x"), (KEY, 5000 * "x")):
        cache, _ = make(capacity=5000)
        cache.store(key, b"body", {"etag": etag})
        assert len(cache) == 0


def test_freshness_lasts_a_day_at_most() -> None:
    cache, time = make()
    cache.store(KEY, b"body", {"cache-control": "max-age=9999999999"})
    time.now += 24 * 3600
    assert is_fresh(cache) is False


def test_a_new_answer_that_may_not_be_kept_removes_the_old_one() -> None:
    cache, _ = make()
    cache.store(KEY, b"body", {"cache-control": "max-age=10"})
    cache.store(KEY, b"body", {"cache-control": "no-store"})
    assert is_fresh(cache) is None
    assert cache.num_bytes == 0


def test_the_least_recently_used_body_goes_first() -> None:
    cache, _ = make(capacity=3 * (ENTRY_OVERHEAD + 100))
    keys = [(b"", f"http://example.com/{number}") for number in range(4)]
    for key in keys[:3]:
        cache.store(key, bytes(10), {"etag": "x"})
    cache.lookup(keys[0])
    cache.store(keys[3], bytes(10), {"etag": "x"})
    assert [cache.lookup(key) is not None for key in keys] == [True, False, True, True]


def test_a_body_larger_than_the_cache_is_not_kept() -> None:
    cache, _ = make(capacity=2000)
    cache.store(KEY, bytes(1990), {"etag": "x"})
    assert len(cache) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 3000),
            st.sampled_from(["keep", "confirm", "refuse", "drop"]),
        ),
        max_size=60,
    )
)
def test_the_byte_account_is_always_exact(steps: list[tuple[int, int, str]]) -> None:
    cache, _ = make(capacity=8000)
    for number, size, what in steps:
        key = (b"", str(number))
        if what == "keep":
            cache.store(key, bytes(size), {"etag": "x"})
        elif what == "confirm":
            cache.refresh(key, {"last-modified": size * "x"})
        elif what == "refuse":
            cache.refresh(key, {"cache-control": "no-store"})
        else:
            cache.remove(key)
        cache.check_integrity()
