"""The index knows exactly who holds what, in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.fleet.index import DigestIndex, short

KEYS = st.one_of(
    st.integers(1, 40),  # of one part, with equal last bits
    st.integers(1, 12).map(lambda n: n << 6 | 63),  # all at the end of a small table
    st.integers(1, 2**64 - 1),
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([0, 1, 63, 64, 130]), st.lists(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from([0, 1, 63, 64, 130]), st.lists(KEYS)),
        st.tuples(st.just("drop"), st.sampled_from([0, 1, 63, 64, 130]), st.just([])),
    ),
    max_size=60,
)


@given(CHANGES)
@settings(max_examples=150)
def test_it_holds_what_a_dict_would(changes: list[tuple[str, int, list[int]]]) -> None:
    index, model = DigestIndex(), dict[int, set[int]]()
    for what, engine, keys in changes:
        held = model.setdefault(engine, set())
        match what:
            case "add":
                index.add(engine, keys)
                held.update(keys)
            case "remove":
                index.remove(engine, keys)
                held.difference_update(keys)
            case _:
                index.drop(engine)
                held.clear()
        index.check_integrity()
        for number, expected in model.items():
            assert index.held(number) == expected
    for key in {key for held in model.values() for key in held} | {7, 2**63}:
        assert index.holders(key) == sum(1 << e for e, held in model.items() if key in held)


@given(st.lists(st.tuples(st.integers(0, 2), KEYS), max_size=300))
@settings(max_examples=50)
def test_a_full_index_forgets_and_never_invents(added: list[tuple[int, int]]) -> None:
    index, model = DigestIndex(max_entries=64 * 3), set[tuple[int, int]]()
    for engine, key in added:
        index.add(engine, [key])
        model.add((engine, key))
        assert index.holders(key) >> engine & 1
        index.check_integrity()
    for engine in range(3):
        assert all((engine, key) in model for key in index.held(engine))
    distinct = len({key for _, key in added})
    assert len(index) <= distinct
    assert (len(index) == distinct) == (index.num_forgotten == 0)


def test_an_entry_takes_at_most_64_bytes() -> None:
    random_ = random.Random(1)
    index = DigestIndex()
    for size in (100_000, 137_000, 190_000):
        index.add(3, (random_.getrandbits(64) or 1 for _ in range(size - len(index))))
        assert index.num_bytes / len(index) <= 64
    index.drop(3)
    assert len(index) == 0
    assert index.num_bytes == 64 * 16 * 16


def test_hashes_of_peers_may_be_numbers() -> None:
    assert short(b"\0" * 32) == 1
    assert short(5) == short((5).to_bytes(32, "little")) == 5
    assert short(-1) == 2**64 - 1
