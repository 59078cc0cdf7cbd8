"""Snapshots of states: no slot is lost or used twice, and what is pinned stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lookonce.core.state_snapshots import SnapshotPlanner, StateSnapshots
from tests.support.core.builders import GREEDY, Limits, key, model_info, request, text
from tests.support.core.engine import Engine

HASHES = [key(name) for name in "abcdef"]
SLOT_BYTES = 10


class StateSnapshotsMachine(RuleBasedStateMachine):
    """Beside a list of (hash, slot) in the order in which they would go."""

    @initialize(num_slots=st.integers(0, 4))
    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.snapshots = StateSnapshots(num_slots, SLOT_BYTES)
        self.held: list[tuple[bytes, int]] = []
        self.reserved: list[int] = []
        self.pins: list[tuple[bytes, int]] = []

    def slot_of(self, block_hash: bytes) -> int | None:
        return dict(self.held).get(block_hash)

    def pinned_slots(self) -> set[int]:
        return {slot for _, slot in self.pins}

    @rule()
    def reserve(self) -> None:
        free = self.num_slots - len(
            {*self.reserved, *dict(self.held).values(), *self.pinned_slots()}
        )
        oldest = next((one for one in self.held if one[1] not in self.pinned_slots()), None)
        slot = self.snapshots.reserve()
        if free:
            assert slot not in self.reserved
            assert slot not in dict(self.held).values()
            assert slot not in self.pinned_slots()
        elif oldest is None:
            assert slot is None
        else:
            assert slot == oldest[1]
            self.held.remove(oldest)
        if slot is not None:
            self.reserved.append(slot)

    @precondition(lambda self: self.reserved)
    @rule(
        block_hash=st.sampled_from(HASHES),
        first_to_go=st.booleans(),
        loaded=st.booleans(),
    )
    def register(self, block_hash: bytes, first_to_go: bool, loaded: bool) -> None:
        slot, taken = self.reserved.pop(), self.snapshots.num_taken
        new = self.slot_of(block_hash) is None
        kept = self.snapshots.register(slot, block_hash, first_to_go=first_to_go, loaded=loaded)
        assert kept == new
        assert self.snapshots.num_taken == taken + (new and not loaded)
        if new:
            self.held.insert(0 if first_to_go else len(self.held), (block_hash, slot))

    @precondition(lambda self: self.reserved)
    @rule()
    def release(self) -> None:
        self.snapshots.release(self.reserved.pop(0))

    @rule(block_hash=st.sampled_from(HASHES))
    def drop(self, block_hash: bytes) -> None:
        self.snapshots.drop(block_hash)
        slot = self.slot_of(block_hash)
        if slot is not None and slot not in self.pinned_slots():
            self.held.remove((block_hash, slot))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        assert self.snapshots.pin(one[0]) == one[1]
        self.held.remove(one)
        self.held.append(one)
        self.pins.append(one)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Copied to a tier: pinned, and as old as it was."""
        one = data.draw(st.sampled_from(self.held))
        hits = self.snapshots.num_hits
        assert self.snapshots.keep(one[0]) == one[1]
        assert self.snapshots.num_hits == hits
        self.pins.append(one)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Of a snapshot that may have been forgotten, and its hash registered anew, meanwhile."""
        one = data.draw(st.sampled_from(self.pins))
        self.pins.remove(one)
        self.snapshots.unpin(*one)

    @rule()
    def clear(self) -> None:
        self.snapshots.clear()
        self.held.clear()

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=5))
    def longest(self, hashes: list[bytes]) -> None:
        held = dict(self.held)
        known = [count for count, one in enumerate(hashes, 1) if one in held]
        assert self.snapshots.longest(hashes) == max(known, default=0)

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "snapshots"):
            return
        self.snapshots.check_integrity()
        used = {*self.reserved, *dict(self.held).values(), *self.pinned_slots()}
        assert self.snapshots.used_bytes == len(used) * SLOT_BYTES
        assert all(self.snapshots.holds(one) == (one in dict(self.held)) for one in HASHES)

    def teardown(self) -> None:
        for one in self.pins:
            self.snapshots.unpin(*one)
        for slot in self.reserved:
            self.snapshots.release(slot)
        self.snapshots.clear()
        assert self.snapshots.used_bytes == 0


TestStateSnapshotsMachine = StateSnapshotsMachine.TestCase
TestStateSnapshotsMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)


# --- which snapshots a scheduler takes ----------------------------------------------------------


def engine(**over: int) -> Engine:
    return Engine(Limits(model=model_info(state_bytes=SLOT_BYTES), **{"num_snapshots": 8, **over}))


def cached(engine: Engine, name: str, tokens: list[int]) -> int:
    """Cached tokens of a request that is computed alone."""
    engine.add(request(name, tokens))
    engine.run()
    found = engine.reuse_stats[name].prefix_cached_tokens
    assert found is not None
    return found


def test_the_same_prompt_again_begins_at_its_last_whole_block():
    one = engine()
    assert cached(one, "a", text(30)) == 0
    assert cached(one, "b", text(30)) == 28


def test_a_prompt_that_goes_on_begins_where_the_first_answer_was_last_known():
    """An answer of 8 tokens leaves 37 computed ones: nine blocks of 4."""
    one = engine()
    cached(one, "a", text(30))
    answer = one.tokens["a", 0]
    assert len(answer) == GREEDY.max_tokens
    assert cached(one, "b", [*text(30), *answer, 7, 7]) == 36


def test_where_prompts_part_a_snapshot_is_taken_for_the_third():
    one = engine()
    shared = text(16)
    assert cached(one, "a", [*shared, *text(20, seed=1)]) == 0
    assert cached(one, "b", [*shared, *text(20, seed=2)]) == 0  # no state is known there yet
    assert cached(one, "c", [*shared, *text(20, seed=3)]) == 16


def test_without_room_nothing_is_reused_and_nothing_fails():
    one = engine(num_snapshots=0)
    assert [cached(one, name, text(30)) for name in "ab"] == [0, 0]
    one.assert_all_free()


@pytest.mark.parametrize("resets", [0, 1])
def test_samples_of_one_request_begin_with_the_snapshot_of_their_prompt(resets):
    one = engine()
    sampling = GREEDY.__class__(max_tokens=6, n=3, ignore_eos=True)
    one.add(request("a", text(30), sampling=sampling))
    one.step()
    for _ in range(resets):
        one.scheduler.reset_prefix_cache()
    one.run()
    begun = one.scheduler.stats()["state_cache_hits_total"]
    assert begun == (0 if resets else 2)
    one.scheduler.reset_prefix_cache()
    assert one.scheduler.stats()["state_cache_bytes"] == 0


def test_a_load_takes_no_slot_that_a_step_copies():
    """A step's sequence begins with the only snapshot; what is loaded meanwhile goes elsewhere."""
    snapshots = StateSnapshots(1, 10)
    planner = SnapshotPlanner(snapshots, 4)
    slot = snapshots.reserve()
    snapshots.register(slot, b"a")
    sequence = SimpleNamespace(pinned_snapshot=(b"a", snapshots.pin(b"a")))
    assert planner.announce(sequence) == slot
    assert snapshots.reserve(at_once=True) is None
    planner.note_done()
    assert snapshots.reserve(at_once=True) == slot
    snapshots.check_integrity()
