"""Paged KV blocks: reference counts, free blocks, and the prefix cache that finds blocks by hash.

    referenced ──release──▶ free, hash kept ──────try_allocate──▶ referenced, hash forgotten
        ▲                        │
        └──try_allocate(reuse)───┘        (a prefix hit: the block's K/V are still there)

Free blocks are reused in LRU order, blocks without a hash first. Of one sequence, the last block is
reused first: a prefix is still useful without its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lookonce.types.ports import BlockEvents


class BlockPool:
    """Allocates block ids `[0, num_blocks)`; each block has `block_size` tokens."""

    __slots__ = (
        "_by_hash",
        "_free",
        "_hashes",
        "_references",
        "block_size",
        "events",
        "generation",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty")
        self.block_size = block_size
        self.generation = 0
        """Number of resets. Blocks allocated in an earlier generation must not be registered."""
        self.events: BlockEvents | None = None
        """Is told of each hash that is forgotten; who registers a block tells what it holds."""
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks without references; some are still registered under a hash."""
        return len(self._free)

    @property
    def num_registered(self) -> int:
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks registered under the longest prefix of `hashes`. Changes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free."""
        references = self._references
        return sum([not references[block] for block in blocks])

    def try_allocate(
        self, count: int, reuse: Sequence[int] = (), *, reserve: int = 0
    ) -> list[int] | None:
        """Add a reference to each block of `reuse`, and allocate `count` free blocks.

        Returns `reuse` followed by the new blocks; None, with nothing changed, when fewer than
        `reserve` blocks would stay free.
        """
        references, free, hashes = self._references, self._free, self._hashes
        if len(free) < count + reserve + (self.count_free(reuse) if reuse else 0):
            return None
        for block in reuse:
            if not references[block]:
                del free[block]
            references[block] += 1
        taken = list(reuse)
        for _ in range(count):
            block, _none = free.popitem(last=False)
            if hashes[block] is not None:
                self._forget(block)
            references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block; `blocks` are in the order of the sequence."""
        references, free, hashes = self._references, self._free, self._hashes
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is released but nobody holds it")
            references[block] = left
            if not left:
                free[block] = None
                if hashes[block] is None:
                    free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Register a referenced block under the hash of its prefix.

        False, with nothing changed, where the block or the hash is registered already.
        """
        if block_hash in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def is_shared(self, block: int) -> bool:
        """Whether more than one reference holds the block."""
        return self._references[block] > 1

    def unregister(self, block: int) -> None:
        """Let no prefix find the block any more: its content is about to change."""
        self._forget(block)

    def reset(self) -> None:
        """Forget all hashes; referenced blocks stay referenced."""
        self.generation += 1
        if self.events is not None:
            self.events.cleared()
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
            if self.events is not None:
                self.events.removed(block_hash)
