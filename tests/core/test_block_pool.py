"""The block pool: sums right under any history, and no block under a wrong hash."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lookonce.core.block_pool import BlockPool
from tests.support.core.builders import key


class BlockPoolMachine(RuleBasedStateMachine):
    """Users hold tables of blocks; a model remembers which hash each block was registered under."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 4)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """Block → what was last written there, as its hash; every new use overwrites it."""
        self.written = 0

    @rule(count=st.integers(0, 9), reserve=st.integers(0, 2))
    def allocate(self, count: int, reserve: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.try_allocate(count, reserve=reserve)
        assert (blocks is None) == (count + reserve > free)
        if blocks is None:
            assert self.pool.num_free == free
            return
        assert not set(blocks) & {b for table in self.tables for b in table}
        for block in blocks:
            self.written += 1
            self.content[block] = key(f"own {self.written}")
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """Equal content may be computed twice: both register, one is found."""
        block = data.draw(st.sampled_from([b for table in self.tables for b in table] or [0]))
        if not any(block in table for table in self.tables):
            return
        if not self.pool.holds(self.content[block]):
            self.content[block] = data.draw(st.sampled_from([self.content[block], key("same")]))
        self.pool.register(block, self.content[block])

    @rule(data=st.data(), extra=st.integers(0, 3))
    def reuse(self, data: st.DataObject, extra: int) -> None:
        wanted = data.draw(st.lists(st.sampled_from(sorted({*self.content.values(), key("no")}))))
        found = self.pool.match(wanted)
        for block, block_hash in zip(found, wanted, strict=False):
            assert self.content[block] == block_hash, "a hit answers what was written"
        if len(set(found)) < len(found):
            return
        free = self.pool.num_free - self.pool.count_free(found)
        blocks = self.pool.try_allocate(extra, found)
        assert (blocks is None) == (extra > free)
        if blocks is not None:
            assert blocks[: len(found)] == found
            for block in blocks[len(found) :]:
                self.written += 1
                self.content[block] = key(f"own {self.written}")
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert self.pool.num_registered == 0

    @invariant()
    def sums_are_right(self) -> None:
        self.pool.check_integrity(self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check_integrity([])
        assert self.pool.num_free == self.pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestReuseOrder:
    def test_blocks_without_a_hash_leave_first(self) -> None:
        pool = BlockPool(4, 4)
        blocks = pool.try_allocate(4)
        pool.register(blocks[0], key("a"))
        pool.release(blocks)
        assert pool.try_allocate(3) == [1, 2, 3]
        assert pool.holds(key("a"))

    def test_the_tail_of_a_sequence_leaves_before_its_head(self) -> None:
        pool = BlockPool(3, 4)
        blocks = pool.try_allocate(3)
        for block in blocks:
            pool.register(block, key(str(block)))
        pool.release(blocks)
        pool.try_allocate(1)
        assert [pool.holds(key(str(b))) for b in blocks] == [True, True, False]

    def test_the_least_recently_released_leaves_first(self) -> None:
        pool = BlockPool(2, 4)
        first, second = pool.try_allocate(1), pool.try_allocate(1)
        pool.register(first[0], key("first"))
        pool.register(second[0], key("second"))
        pool.release(first)
        pool.release(second)
        pool.release(pool.try_allocate(0, pool.match([key("first")])))
        pool.try_allocate(1)
        assert pool.holds(key("first"))
        assert not pool.holds(key("second"))

    def test_a_matched_block_is_never_taken_for_the_same_allocation(self) -> None:
        pool = BlockPool(2, 4)
        blocks = pool.try_allocate(1)
        pool.register(blocks[0], key("a"))
        pool.release(blocks)
        assert pool.try_allocate(2, pool.match([key("a")])) is None
        assert pool.holds(key("a"))


class TestMisuse:
    def test_releasing_a_free_block_raises(self) -> None:
        with pytest.raises(ValueError, match="nobody holds it"):
            BlockPool(2, 4).release([0])

    def test_an_empty_pool_is_refused(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            BlockPool(0, 4)

    def test_integrity_notices_a_leak(self) -> None:
        pool = BlockPool(2, 4)
        pool.try_allocate(1)
        with pytest.raises(RuntimeError, match="block tables"):
            pool.check_integrity([])
