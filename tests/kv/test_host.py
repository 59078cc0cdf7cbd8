"""The slab's bookkeeping: nothing is lost, doubled, or reused while it is read or leased."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lookonce.kv.host import SlotEntry, SlotTable
from tests.support.kv.tiers import key

KEYS = st.integers(0, 9).map(key)
LEASE = 10.0


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = SlotTable(4, lease_seconds=LEASE, clock=lambda: self.now)
        self.reserved: list[int] = []
        self.contents: dict[int, bytes] = {}
        """Slot → key written there last."""
        self.readers: list[tuple[bytes, SlotEntry]] = []
        self.leases: dict[bytes, tuple[int, float]] = {}

    def leased(self, k: bytes) -> bool:
        count, until = self.leases.get(k, (0, 0.0))
        return count > 0 and until > self.now

    @rule()
    def reserve(self) -> None:
        protected = {k for k in map(key, range(10)) if k in self.table and self.leased(k)}
        slot = self.table.reserve()
        if slot is not None:
            assert slot not in self.reserved
            assert slot not in {entry.slot for _, entry in self.readers}
            self.reserved.append(slot)
        assert all(k in self.table for k in protected), "a lease keeps its block"

    @precondition(lambda self: self.reserved)
    @rule(k=KEYS)
    def publish(self, k: bytes) -> None:
        slot = self.reserved.pop()
        if self.table.publish(k, slot):
            self.contents[slot] = k
            self.leases.pop(k, None)

    @precondition(lambda self: self.reserved)
    @rule()
    def abandon(self) -> None:
        self.table.abandon(self.reserved.pop())

    @rule(k=KEYS)
    def pin(self, k: bytes) -> None:
        entry = self.table.pin(k)
        if entry is not None:
            assert self.contents[entry.slot] == k
            self.readers.append((k, entry))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), corrupt=st.booleans())
    def unpin(self, data: st.DataObject, corrupt: bool) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        k, entry = self.readers.pop(index)
        assert self.contents[entry.slot] == k, "a slot keeps its contents while it is read"
        if corrupt:
            self.table.remove(k, entry)
        self.table.unpin(entry)

    @rule(k=KEYS)
    def lease(self, k: bytes) -> None:
        if self.table.lease(k):
            count = self.leases.get(k, (0, 0.0))[0]
            self.leases[k] = (count + 1, self.now + LEASE)

    @rule(k=KEYS)
    def release(self, k: bytes) -> None:
        self.table.release(k)
        count, until = self.leases.get(k, (0, 0.0))
        if count:
            self.leases[k] = (count - 1, until)

    @rule()
    def time_passes(self) -> None:
        self.now += LEASE / 2

    @invariant()
    def whole(self) -> None:
        self.table.check_integrity()
        self.leases = {k: v for k, v in self.leases.items() if k in self.table}


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_leaves_first() -> None:
    table = SlotTable(2, lease_seconds=LEASE, clock=lambda: 0.0)
    for number in (1, 2):
        slot = table.reserve()
        assert slot is not None
        table.publish(key(number), slot)
    used = table.pin(key(1))
    assert used is not None
    table.unpin(used)
    table.reserve()
    assert key(1) in table
    assert key(2) not in table


def test_nothing_is_evicted_while_everything_is_leased() -> None:
    now = [0.0]
    table = SlotTable(1, lease_seconds=LEASE, clock=lambda: now[0])
    slot = table.reserve()
    assert slot is not None
    table.publish(key(1), slot)
    assert table.lease(key(1))
    assert table.reserve() is None
    now[0] = LEASE
    assert table.reserve() is not None, "a lease ends by itself"
