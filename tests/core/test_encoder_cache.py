"""The encoder cache: sums right under any history, nothing lost while held, all free at the end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lookonce.core import encoder_cache
from lookonce.core.encoder_cache import EncoderCache
from lookonce.errors import TooLargeError
from tests.support.core.builders import key

ROW = 10
KEYS = [key(name) for name in "abcdef"]
ROWS = dict(zip(KEYS, (1, 2, 2, 3, 4, 5), strict=True))
HOLDERS = st.integers(0, 3)


class EncoderCacheMachine(RuleBasedStateMachine):
    """Sequences take outputs, give them back, are preempted and aborted; the runner's view too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(8 * ROW, ROW, 6 * ROW)
        self.holds: list[tuple[int, bytes]] = []
        """One entry per hold: the same key several times for one holder is several entries."""
        self.device: set[bytes] = set()
        """What a runner that obeys keeps."""
        self.copies: set[bytes] = set()
        """What it keeps in host memory."""
        self.awaited: set[bytes] = set()
        """Prefetched, and neither used nor given up since."""

    @rule(holder=HOLDERS, wanted=st.sampled_from(KEYS), at_once=st.booleans())
    def acquire(self, holder: int, wanted: bytes, at_once: bool) -> None:
        """A hit, or an allocation and perhaps a copy brought back, then a hold."""
        self.awaited.discard(wanted)
        if wanted not in self.cache:
            before = {k for k in KEYS if k in self.cache}
            copied = wanted in self.cache.host
            at_once = at_once or copied
            allocate = self.cache.try_restore if copied else self.cache.try_allocate
            evicted = allocate(wanted, ROWS[wanted], holder if at_once else None)
            held = {k for _, k in self.holds}
            fits = sum(ROWS[k] for k in held) + ROWS[wanted] <= 8
            assert (evicted is not None) == fits
            if evicted is None:
                assert before == {k for k in KEYS if k in self.cache}
                return
            assert not held & set(evicted)
            assert before - set(evicted) == {k for k in before if k in self.cache}
            self.follow_moves()
            assert copied == (wanted in self.device)
            self.device.add(wanted)
            if at_once:
                self.holds.append((holder, wanted))
                return
        assert self.cache.try_hold(holder, wanted)
        self.holds.append((holder, wanted))

    @rule(holder=HOLDERS, wanted=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    def acquire_many(self, holder: int, wanted: list[bytes]) -> None:
        """All or nothing, and only what is nowhere yet."""
        new = len(set(wanted)) == len(wanted) and not any(map(self.cache.has_anywhere, wanted))
        fits = self.cache.held_bytes + ROW * sum(ROWS[k] for k in wanted) <= 8 * ROW
        before = {k for k in KEYS if k in self.cache}
        taken = self.cache.try_allocate_many(wanted, [ROWS[k] for k in wanted], holder)
        assert taken == (new and fits)
        if taken:
            self.follow_moves()
            self.device.update(wanted)
            self.holds += [(holder, k) for k in wanted]
        else:
            assert before == {k for k in KEYS if k in self.cache}

    @rule(wanted=st.sampled_from(KEYS))
    def prefetch(self, wanted: bytes) -> None:
        """Never at the cost of what is held or prefetched, never more than half of the cache."""
        if self.cache.has_anywhere(wanted):
            return
        kept = {k for _, k in self.holds} | (self.awaited & self.device)
        awaited = ROWS[wanted] + sum(ROWS[k] for k in self.awaited & self.device)
        fits = sum(ROWS[k] for k in kept) + ROWS[wanted] <= 8 and 2 * awaited <= 8
        assert self.cache.try_prefetch(wanted, ROWS[wanted]) == fits
        if fits:
            self.follow_moves()
            assert kept <= self.device
            self.device.add(wanted)
            self.awaited.add(wanted)

    @rule(unwanted=st.sampled_from(KEYS))
    def give_up_prefetched(self, unwanted: bytes) -> None:
        self.cache.stop_awaiting(unwanted)
        self.awaited.discard(unwanted)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder, held = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.cache.release(holder, held)

    @rule(holder=HOLDERS, share=st.integers(1, 4))
    def release_many(self, holder: int, share: int) -> None:
        """Those it has held longest, as when a chunk's end has passed them."""
        released = [hold for hold in self.holds if hold[0] == holder][:share]
        self.cache.release_many(holder, [held for _, held in released])
        for hold in released:
            self.holds.remove(hold)

    @rule(holder=HOLDERS)
    def abort_or_preempt(self, holder: int) -> None:
        self.cache.release_all(holder)
        self.holds = [hold for hold in self.holds if hold[0] != holder]
        assert self.cache.held_keys(holder) == ()

    @rule(failed=st.sampled_from(KEYS))
    def fail(self, failed: bytes) -> None:
        self.cache.remove_failed(failed)
        self.holds = [hold for hold in self.holds if hold[1] != failed]
        self.awaited.discard(failed)
        assert not self.cache.has_anywhere(failed)

    @rule(measured=st.sampled_from(KEYS), seconds=st.floats(0, 10))
    def record(self, measured: bytes, seconds: float) -> None:
        self.cache.record_cost(measured, seconds)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.awaited.clear()
        assert {k for k in KEYS if k in self.cache} == {k for _, k in self.holds}
        assert len(self.cache.host) == 0

    @invariant()
    def sums_are_right(self) -> None:
        self.cache.check_integrity()
        for holder, held in self.holds:
            assert held in self.cache
            assert holder in self.cache.holders(held)
            assert held in self.cache.held_keys(holder)
        assert self.cache.held_bytes == sum(ROW * ROWS[k] for k in {k for _, k in self.holds})

    @invariant()
    def the_runner_keeps_the_same(self) -> None:
        self.follow_moves()
        assert self.device == {k for k in KEYS if k in self.cache}
        assert self.copies == {k for k in KEYS if k in self.cache.host}
        assert self.cache.host.used_bytes == ROW * sum(ROWS[k] for k in self.copies) <= 6 * ROW

    def follow_moves(self) -> None:
        """As the runner does, in the order that a plan states."""
        moves, dropped = self.cache.host.take_moves(), self.cache.take_dropped()
        self.copies -= set(moves.dropped)
        assert set(moves.offload) <= self.device & set(dropped)
        self.copies |= set(moves.offload)
        for left in dropped:
            self.device.remove(left)
        self.awaited &= self.device
        assert set(moves.restore) <= self.copies
        self.device |= set(moves.restore)

    def teardown(self) -> None:
        for holder in range(4):
            self.cache.release_all(holder)
        assert self.cache.num_holders == self.cache.held_bytes == 0
        self.cache.clear()
        assert self.cache.used_bytes == len(self.cache) == self.cache.host.used_bytes == 0
        self.cache.check_integrity()


TestEncoderCacheMachine = EncoderCacheMachine.TestCase
TestEncoderCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class ManyAtOnceMachine(EncoderCacheMachine):
    """The same, releasing even two in one pass, and tidying the eviction order at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(encoder_cache, "MANY", 2)
        self.patch.setattr(encoder_cache, "SPARE_POSITIONS", 0)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestManyAtOnceMachine = ManyAtOnceMachine.TestCase
TestManyAtOnceMachine.settings = TestEncoderCacheMachine.settings


@pytest.fixture
def cache() -> EncoderCache:
    return EncoderCache(4 * ROW, ROW)


def put(cache: EncoderCache, name: str, rows: int = 1, cost: float | None = None) -> None:
    """Allocate, and use once."""
    cache.try_allocate(key(name), rows)
    cache.try_hold(99, key(name))
    if cost is not None:
        cache.record_cost(key(name), cost)
    cache.release(99, key(name))


class TestIndex:
    def test_a_failed_output_leaves_the_index_of_its_holder_too(self, cache: EncoderCache) -> None:
        """The classic bug: freeing returns early because the entry is gone, the index stays."""
        cache.try_allocate(key("a"), 1)
        cache.try_hold(1, key("a"))
        cache.remove_failed(key("a"))
        assert cache.num_holders == 0
        cache.release_all(1)
        cache.check_integrity()

    def test_a_key_held_twice_needs_two_releases(self, cache: EncoderCache) -> None:
        cache.try_allocate(key("a"), 4)
        cache.try_hold(1, key("a"))
        cache.try_hold(1, key("a"))
        cache.release(1, key("a"))
        assert cache.try_allocate(key("b"), 1) is None
        cache.release(1, key("a"))
        assert cache.try_allocate(key("b"), 1) == (key("a"),)

    def test_release_all_gives_back_every_hold_of_a_key(self, cache: EncoderCache) -> None:
        cache.try_allocate(key("a"), 1)
        cache.try_hold(1, key("a"))
        cache.try_hold(1, key("a"))
        cache.release_all(1)
        assert cache.held_bytes == cache.num_holders == 0

    def test_one_holder_leaving_does_not_free_what_another_holds(self, cache: EncoderCache) -> None:
        cache.try_allocate(key("a"), 4)
        cache.try_hold(1, key("a"))
        cache.try_hold(2, key("a"))
        cache.release_all(1)
        assert cache.try_allocate(key("b"), 1) is None

    def test_releasing_what_is_not_held_raises(self, cache: EncoderCache) -> None:
        put(cache, "a")
        with pytest.raises(KeyError):
            cache.release(1, key("a"))

    def test_allocating_a_key_twice_raises(self, cache: EncoderCache) -> None:
        put(cache, "a")
        with pytest.raises(ValueError, match="already"):
            cache.try_allocate(key("a"), 1)


class TestEviction:
    def test_with_equal_costs_the_least_recently_used_leaves(self, cache: EncoderCache) -> None:
        for name in "abcd":
            put(cache, name, cost=1.0)
        cache.try_hold(1, key("a"))
        cache.release(1, key("a"))
        assert cache.try_allocate(key("e"), 2) == (key("b"), key("c"))

    def test_without_recorded_costs_the_least_recently_used_leaves_too(
        self, cache: EncoderCache
    ) -> None:
        for name in "abcd":
            put(cache, name)
        assert cache.try_allocate(key("e"), 1) == (key("a"),)

    def test_an_output_that_was_costly_to_compute_stays_longer(self, cache: EncoderCache) -> None:
        put(cache, "dear", cost=5.0)
        for name in "bcd":
            put(cache, name, cost=1.0)
        evicted = []
        for name in "efg":
            evicted += cache.try_allocate(key(name), 1)
            cache.try_hold(1, key(name))
            cache.record_cost(key(name), 1.0)
            cache.release(1, key(name))
        assert evicted == [key("b"), key("c"), key("d")]

    def test_a_costly_output_is_evicted_at_last_when_it_is_not_used(
        self, cache: EncoderCache
    ) -> None:
        put(cache, "dear", cost=5.0)
        for number in range(40):
            put(cache, str(number), cost=1.0)
        assert key("dear") not in cache

    def test_cost_counts_per_byte(self) -> None:
        cache = EncoderCache(6 * ROW, ROW)
        put(cache, "large", rows=4, cost=4.0)
        put(cache, "small", rows=2, cost=3.0)
        assert cache.try_allocate(key("e"), 1) == (key("large"),)

    def test_no_more_is_evicted_than_needed(self, cache: EncoderCache) -> None:
        put(cache, "a", rows=2)
        put(cache, "b", rows=2)
        assert cache.try_allocate(key("c"), 2) == (key("a"),)

    def test_an_attempt_that_fails_evicts_nothing(self, cache: EncoderCache) -> None:
        put(cache, "a", rows=2)
        cache.try_allocate(key("b"), 2)
        cache.try_hold(1, key("b"))
        assert cache.try_allocate(key("c"), 3) is None
        assert key("a") in cache

    def test_the_eviction_order_stays_small_however_often_an_entry_is_used(
        self, cache: EncoderCache
    ) -> None:
        put(cache, "a")
        for _ in range(10_000):
            cache.try_hold(1, key("a"))
            cache.release(1, key("a"))
        assert cache.eviction_queue_length == 1
        assert cache.num_eviction_positions < 100

    @pytest.mark.parametrize(("many", "order"), [(1, "efaghb"), (1000, "efabgh")])
    def test_one_pass_over_many_gives_the_same_order_as_one_by_one_but_for_odd_ones(
        self, monkeypatch: pytest.MonkeyPatch, many: int, order: str
    ) -> None:
        """One is held twice, one by another too, one is dear: those come after the others."""
        monkeypatch.setattr(encoder_cache, "MANY", many)
        cache = EncoderCache(12 * ROW, ROW)
        names = [key(name) for name in "abcdefgh"]
        assert cache.try_allocate_many(names, [1] * 8, 1)
        cache.try_hold(1, key("b"))
        cache.try_hold(2, key("c"))
        cache.record_cost(key("d"), 64.0)
        cache.release_many(1, names[4:6])
        cache.release_all(1)
        cache.check_integrity()
        assert cache.held_keys(2) == (key("c"),)
        evicted = cache.try_allocate(key("z"), 10)
        assert evicted == tuple(map(key, order))


def test_an_item_larger_than_the_cache_is_refused_with_its_size_and_the_limit(
    cache: EncoderCache,
) -> None:
    with pytest.raises(TooLargeError, match=r"item 3 needs 50 bytes .* the limit is 40 bytes"):
        cache.refuse_oversize(5, "item 3")


def test_a_held_output_outlives_clear_and_leaves_with_its_holder(cache: EncoderCache) -> None:
    cache.try_allocate(key("a"), 1)
    cache.try_hold(1, key("a"))
    cache.clear()
    assert key("a") in cache
    assert cache.take_dropped() == ()
    cache.release(1, key("a"))
    assert cache.take_dropped() == (key("a"),)


class TestHostTier:
    def test_outputs_evicted_for_a_restored_one_do_not_displace_its_copy(self) -> None:
        cache = EncoderCache(2 * ROW, ROW, 2 * ROW)
        put(cache, "a", rows=2)
        put(cache, "b", rows=2)
        cache.host.take_moves()
        assert cache.try_restore(key("a"), 2, 1) is not None
        assert cache.host.take_moves().restore == (key("a"),)
        assert key("b") not in cache.host, "the copy of a fills the tier"

    def test_a_restore_without_room_is_cancelled(self) -> None:
        cache = EncoderCache(2 * ROW, ROW, 2 * ROW)
        put(cache, "a", rows=2)
        cache.try_allocate(key("b"), 2, 1)
        assert cache.try_restore(key("a"), 2, 2) is None
        assert cache.host.take_moves().restore == ()
        assert cache.num_holders == 1

    def test_a_copy_stays_so_that_nothing_is_copied_when_the_output_leaves_again(self) -> None:
        cache = EncoderCache(2 * ROW, ROW, 4 * ROW)
        put(cache, "a", rows=2)
        put(cache, "b", rows=2)
        cache.try_restore(key("a"), 2, 1)
        cache.release(1, key("a"))
        cache.host.take_moves()
        put(cache, "c", rows=2)
        assert cache.host.take_moves().offload == ()
        assert key("a") in cache.host

    def test_a_copy_that_could_not_be_made_is_made_the_next_time(self) -> None:
        cache = EncoderCache(2 * ROW, ROW, 4 * ROW)
        put(cache, "a", rows=2)
        put(cache, "b", rows=2)
        assert cache.host.take_moves().offload == (key("a"),)
        cache.host.lose(key("a"))
        put(cache, "a", rows=2)
        put(cache, "c", rows=2)
        assert cache.host.take_moves().offload == (key("b"), key("a"))
