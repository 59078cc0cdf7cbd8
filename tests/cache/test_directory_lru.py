"""ByteLRU against a plain model: same evictions, same sums, pins respected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.cache.directory import ByteLRU

CAPACITY = 100
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


def filled(*sizes: int) -> ByteLRU[int]:
    lru = ByteLRU(CAPACITY)
    for number, size in enumerate(sizes):
        assert lru.try_insert(bytes([number]), size, number) == []
    return lru


def evicted_keys(result):
    return None if result is None else [entry.key for entry in result]


def test_it_evicts_the_least_recent_and_says_what():
    lru = filled(40, 40, 20)
    lru.get(b"\0")
    (gone,) = lru.try_insert(b"new", 30, 7)
    assert (gone.key, gone.size, gone.value) == (b"\1", 40, 1)
    assert lru.nbytes == 90


def test_peeking_leaves_recency_alone():
    lru = filled(50, 50)
    assert lru.peek(b"\0") == 0
    assert evicted_keys(lru.try_insert(b"new", 10, 0)) == [b"\0"]


def test_a_pinned_entry_is_never_evicted():
    lru = filled(40, 40, 20)
    lru.pin(b"\0")
    assert evicted_keys(lru.try_insert(b"new", 60, 0)) == [b"\1", b"\2"]


def test_what_does_not_fit_beside_the_pins_changes_nothing():
    lru = filled(40, 40, 20)
    lru.pin(b"\0")
    assert lru.try_insert(b"new", 61, 0) is None
    assert list(lru) == [b"\1", b"\2", b"\0"]
    assert lru.try_insert(b"new", CAPACITY + 1, 0) is None


def test_pins_are_counted():
    lru = filled(100)
    lru.pin(b"\0")
    lru.pin(b"\0")
    lru.unpin(b"\0")
    assert lru.try_insert(b"new", 1, 0) is None
    lru.unpin(b"\0")
    assert evicted_keys(lru.try_insert(b"new", 1, 0)) == [b"\0"]
    with pytest.raises(ValueError, match="not pinned"):
        lru.unpin(b"\0")


def test_the_last_unpin_makes_an_entry_the_most_recent():
    lru = filled(50, 50)
    lru.pin(b"\0")
    lru.unpin(b"\0")
    assert evicted_keys(lru.try_insert(b"new", 50, 0)) == [b"\1"]


def test_a_pin_belongs_to_the_key_before_and_after_the_entry():
    lru = ByteLRU(CAPACITY)
    lru.pin(b"a")
    lru.try_insert(b"a", 60, 0)
    assert lru.try_insert(b"b", 60, 0) is None
    lru.clear()
    assert lru.try_insert(b"b", 60, 0) == []
    lru.unpin(b"a")
    assert lru.num_pins == 0


def test_a_present_key_is_not_inserted_again():
    lru = filled(10)
    with pytest.raises(ValueError, match="present"):
        lru.try_insert(b"\0", 10, 0)


def test_no_capacity_holds_nothing():
    lru = ByteLRU(0)
    assert lru.try_insert(b"a", 1, 0) is None
    assert len(lru) == 0


OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), KEYS, st.integers(0, 120)),
    st.tuples(st.sampled_from(["pin", "unpin", "get", "remove", "peek"]), KEYS, st.just(0)),
    st.tuples(st.just("clear"), st.just(b""), st.just(0)),
)


class Model:
    """The same rules over one list in recency order, written for clarity and not for speed."""

    def __init__(self):
        self.entries = []
        self.pins = {}

    def find(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    def insert(self, key, size):
        if self.find(key):
            return "refused"
        pinned = [entry for entry in self.entries if self.pins.get(entry[0])]
        if sum(entry[1] for entry in pinned) + size > CAPACITY:
            return None
        evicted = []
        for entry in list(self.entries):
            if sum(e[1] for e in self.entries) + size <= CAPACITY:
                break
            if entry not in pinned:
                self.entries.remove(entry)
                evicted.append(entry[0])
        self.entries.append((key, size))
        return evicted

    def touch(self, key):
        entry = self.find(key)
        if entry:
            self.entries.remove(entry)
            self.entries.append(entry)

    def unpin(self, key):
        if not self.pins.get(key):
            return "refused"
        self.pins[key] -= 1
        if not self.pins[key]:
            self.touch(key)
        return "given back"


@given(st.lists(OPERATIONS, max_size=60))
def test_it_agrees_with_the_model(operations):
    lru, model = ByteLRU(CAPACITY), Model()
    for name, key, size in operations:
        if name == "insert":
            expected = model.insert(key, size)
            if expected == "refused":
                continue
            assert evicted_keys(lru.try_insert(key, size, size)) == expected
        elif name == "pin":
            lru.pin(key)
            model.pins[key] = model.pins.get(key, 0) + 1
        elif name == "unpin":
            if model.unpin(key) == "given back":
                lru.unpin(key)
        elif name == "get":
            entry = model.find(key)
            model.touch(key)
            assert lru.get(key) == (entry[1] if entry else None)
        elif name == "peek":
            entry = model.find(key)
            assert lru.size_of(key) == (entry[1] if entry else None)
        elif name == "remove":
            entry = model.find(key)
            if entry:
                model.entries.remove(entry)
            assert lru.remove(key) == (entry[1] if entry else None)
        else:
            lru.clear()
            model.entries.clear()
        lru.check_integrity()
        assert lru.nbytes == sum(entry[1] for entry in model.entries)
        assert set(lru) == {entry[0] for entry in model.entries}
        assert lru.num_pins == sum(model.pins.values())


def test_integrity_notices_a_wrong_sum():
    lru = filled(10)
    lru.nbytes += 1
    with pytest.raises(AssertionError, match="sum"):
        lru.check_integrity()
