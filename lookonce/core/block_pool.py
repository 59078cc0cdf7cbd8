"""Paged KV blocks: reference counts, and a free list that still remembers what its blocks hold.

    referenced ──release──▶ free, hash kept ──────try_allocate──▶ referenced, hash forgotten
        ▲                        │
        └──try_allocate(reuse)───┘        (a prefix hit: the block's K/V are still there)

Free blocks leave in least-recently-used order; those without a hash leave first, and of one
sequence the tail leaves before the head, because a head without its tail is still useful.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out block ids `[0, num_blocks)` of `block_size` tokens each."""

    __slots__ = ("_by_hash", "_free", "_hashes", "_references", "block_size", "generation")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty")
        self.block_size = block_size
        self.generation = 0
        """Counts resets: K/V computed under an earlier one must not be registered any more."""
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks nobody references; some still hold a remembered prefix."""
        return len(self._free)

    @property
    def num_remembered(self) -> int:
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest prefix of `hashes`. Changes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are on the free list."""
        return sum(1 for block in blocks if not self._references[block])

    def try_allocate(
        self, count: int, reuse: Sequence[int] = (), *, reserve: int = 0
    ) -> list[int] | None:
        """Reference `reuse` once more and `count` blocks taken from the free list.

        Answers `reuse` followed by the new blocks, or None, with nothing changed, when fewer than
        `reserve` blocks would stay free.
        """
        references = self._references
        if len(self._free) < count + reserve + (self.count_free(reuse) if reuse else 0):
            return None
        for block in reuse:
            if not references[block]:
                del self._free[block]
            references[block] += 1
        taken = list(reuse)
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference of each block back; the blocks of a sequence in order."""
        references = self._references
        for block in reversed(blocks):
            if not references[block]:
                raise ValueError(f"block {block} is released but nobody holds it")
            references[block] -= 1
            if not references[block]:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Remember that a referenced block holds the prefix `block_hash`.

        The first one stays: False where another block, or another hash, is remembered already.
        """
        if block_hash in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def reset(self) -> None:
        """Forget every remembered prefix; referenced blocks stay with whoever uses them."""
        self.generation += 1
        self._by_hash.clear()
        self._hashes = [None] * len(self._references)

    def check_integrity(self, users: Iterable[Sequence[int]] | None = None) -> None:
        """Raise `RuntimeError` where the sums disagree. `users`: block tables of all sequences."""
        for block, count in enumerate(self._references):
            if (count == 0) != (block in self._free):
                raise RuntimeError(f"block {block} has {count} references and is misfiled")
        for block_hash, block in self._by_hash.items():
            if self._hashes[block] != block_hash:
                raise RuntimeError(f"block {block} does not hold the hash that names it")
        if len(self._by_hash) != sum(h is not None for h in self._hashes):
            raise RuntimeError("a block has a hash that nothing finds")
        if users is not None:
            counts = [0] * len(self._references)
            for table in users:
                for block in table:
                    counts[block] += 1
            if counts != self._references:
                raise RuntimeError("block references differ from the block tables in use")

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
