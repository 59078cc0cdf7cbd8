"""The directory: lookups pin, entries come and go only through the sender, expansions stay."""

import pytest

from lookonce.cache.directory import Directory
from lookonce.types.media import Expansion
from tests.support.cache_items import expansion, key


def directory(capacity=3000, listed=(), **bounds) -> Directory:
    made = Directory(capacity, **bounds)
    for number in listed:
        assert made.try_list(key(number), 1000, expansion(number + 1)) == []
    return made


def test_a_lookup_answers_and_pins():
    made = directory(listed=[0, 1, 2])
    assert made.lookup(key(0)) == expansion(1)
    assert made.try_list(key(3), 2000, expansion()) == [key(1), key(2)]
    assert made.try_list(key(4), 2001, expansion()) is None
    made.unpin(key(0))
    assert made.num_pins == 0


def test_a_lookup_without_an_answer_pins_nothing():
    made = directory()
    assert made.lookup(key(0)) is None
    assert made.num_pins == 0


def test_a_peek_neither_pins_nor_changes_recency():
    made = directory(listed=[0, 1, 2])
    assert made.peek(key(0)) == expansion(1)
    assert made.known_expansion(key(0)) == expansion(1)
    assert made.try_list(key(3), 1000, expansion()) == [key(0)]
    assert made.num_pins == 0


def test_an_expansion_outlives_its_entry():
    made = directory(listed=[0, 1, 2])
    made.try_list(key(3), 1000, expansion())
    assert made.lookup(key(0)) is None
    assert made.known_expansion(key(0)) == expansion(1)


def test_known_expansions_are_bounded_by_count():
    made = directory(max_known=2)
    for number in range(3):
        made.learn(key(number), expansion(number + 1))
    assert [made.known_expansion(key(n)) is not None for n in range(3)] == [False, True, True]


def test_known_expansions_are_bounded_by_their_runs():
    """Those of tiles or rows with tokens between them take more memory."""
    made = directory(max_known=100)
    long = Expansion(tuple((token, 1) for token in range(200)), 0)
    for number in range(10):
        made.learn(key(number), long)
    assert [made.known_expansion(key(n)) is not None for n in range(10)] == [False] * 6 + [True] * 4
    made.learn(key(6), expansion())  # has fewer runs now, and was learned last
    made.learn(key(10), Expansion(long.runs[:197], 0))
    assert [made.known_expansion(key(n)) is not None for n in range(6, 11)] == [True] * 5


def test_a_hint_answers_a_lookup_and_its_pin_survives_the_listing():
    made = directory()
    made.hint(key(5), 1000, expansion(9))
    assert made.lookup(key(5)) == expansion(9)
    assert key(5) not in made
    made.try_list(key(5), 1000, expansion(9), adopted=True)
    assert made.hinted(key(5)) is None
    assert made.try_list(key(6), 2001, expansion()) is None


def test_hints_that_cannot_be_used_are_not_kept():
    made = directory(listed=[0], max_hints=2)
    made.hint(key(0), 1000, expansion())
    made.hint(key(1), 3001, expansion())
    assert made.hinted(key(0)) is made.hinted(key(1)) is None
    for number in (2, 3, 4):
        made.hint(key(number), 1000, expansion())
    assert made.hinted(key(2)) is None


def test_a_restart_empties_it_but_pins_and_expansions_stay():
    made = directory(listed=[0])
    made.lookup(key(0))
    made.hint(key(1), 1000, expansion())
    made.restart(500)
    assert (len(made), made.nbytes, made.capacity_bytes, made.num_pins) == (0, 0, 500, 1)
    assert made.peek(key(0)) is made.peek(key(1)) is None
    assert made.known_expansion(key(0)) == expansion(1)
    made.unpin(key(0))
    made.check_integrity()


def test_a_reset_forgets_expansions_too():
    made = directory(listed=[0])
    made.learn(key(1), expansion())
    made.reset()
    assert made.known_expansion(key(0)) is made.known_expansion(key(1)) is None


def test_hits_are_parts_that_caused_no_processing():
    made = directory()
    for outcome in ("hit", "injected", "shared", "not_needed", "miss", "bypass"):
        made.count(outcome)
    assert (made.queries, made.hits) == (6, 4)


def test_switched_off_nothing_is_listed_or_counted():
    made = directory(capacity=0)
    assert made.try_list(key(0), 1000, expansion()) is None
    made.hint(key(0), 1000, expansion())
    made.count("miss")
    made.count("hit")
    assert made.lookup(key(0)) is None
    assert (made.queries, made.hits) == (0, 0)


def test_evictions_count_what_made_room_only():
    made = directory(listed=[0, 1, 2])
    made.try_list(key(3), 2000, expansion())
    made.unlist(key(2))
    made.reset()
    assert made.evictions == 2


def test_sizes_say_what_the_store_must_list():
    assert directory(listed=[0, 1]).sizes() == {key(0): 1000, key(1): 1000}


def test_an_unpin_too_many_is_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="not pinned"):
        directory(listed=[0]).unpin(key(0))
