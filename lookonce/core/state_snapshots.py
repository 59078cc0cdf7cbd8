"""Snapshots of states: which ones are kept, and which a step takes.

A model with states beside keys and values can use a cached prefix only where the state after it is
known. Snapshots are kept by the hash of the KV block after which they were taken.

    free ──reserve──▶ reserved ──register──▶ held, LRU ──reserve, where none is free──▶ reserved
      ▲                   │                   │     ▲
      └──────release──────┘          pin, keep └──▶ pinned ──unpin (its sequence is announced, or
                                                             it is copied to a tier)

A snapshot is taken at the last block of a prompt that may be reused, where prompts that came before
part from this one, at the last block of each chunk, and at each block of an answer, where the next
one takes the place of the one before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from lookonce.core.request import Sequence


class PendingSnapshot(NamedTuple):
    """What a step keeps, to be registered once it has succeeded."""

    num_tokens: int
    """Of the sequence, a multiple of the block size."""
    slot: int


class StateSnapshots:
    """Assigns slots `[0, num_slots)` for snapshots of `slot_bytes` each."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_hits = 0
        """Times that a sequence began with a snapshot."""
        self.num_taken = 0
        """Snapshots that steps took."""
        self.num_evictions = 0
        """Snapshots that others took the place of."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._reserved: set[int] = set()
        self.being_copied: set[int] = set()
        """Slots that a step under way copies to its sequences before it computes anything."""
        self._forgotten: dict[int, int] = {}
        """Slots that were pinned when all were forgotten, and their pins."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the snapshots that are held, reserved or pinned."""
        return (self.num_slots - len(self._free)) * self.slot_bytes

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    def reserve(self, *, at_once: bool = False) -> int | None:
        """A slot to write to, if need be that of the snapshot used longest ago; None where all are
        pinned or reserved. `at_once`: it is written while a step runs, so none that this copies."""
        busy = self.being_copied if at_once else ()
        slot = next((each for each in reversed(self._free) if each not in busy), None)
        if slot is None:
            held = self._held.items()
            oldest = next((h for h, at in held if not self._pins[h] and at not in busy), None)
            if oldest is None:
                return None
            self.num_evictions += 1
            slot = self._held[oldest]
            self.drop(oldest)
        self._free.remove(slot)
        self._reserved.add(slot)
        return slot

    def register(
        self, slot: int, block_hash: bytes, *, first_to_go: bool = False, loaded: bool = False
    ) -> bool:
        """A reserved slot holds the state after this block, taken by a step or `loaded` from a
        tier. False, and the slot is free again, where such a state is held already."""
        self._reserved.remove(slot)
        if block_hash in self._held:
            self._free.append(slot)
            return False
        self._held[block_hash] = slot
        if first_to_go:
            self._held.move_to_end(block_hash, last=False)
        self.num_taken += not loaded
        return True

    def release(self, slot: int) -> None:
        """Give a reserved slot back: nothing was written to it."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        """Forget a snapshot, unless it is pinned."""
        if self._pins[block_hash]:
            return
        slot = self._held.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def pin(self, block_hash: bytes) -> int:
        """The slot of a held snapshot that a sequence begins with; it stays until `unpin`."""
        self._held.move_to_end(block_hash)
        self.num_hits += 1
        return self.keep(block_hash)

    def keep(self, block_hash: bytes) -> int:
        """The slot of a held snapshot that is copied to a tier; it stays until `unpin`, and is as
        old as it was."""
        self._pins[block_hash] += 1
        return self._held[block_hash]

    def unpin(self, block_hash: bytes, slot: int) -> None:
        if slot in self._forgotten:
            self._forgotten[slot] -= 1
            if not self._forgotten[slot]:
                del self._forgotten[slot]
                self._free.append(slot)
            return
        self._pins[block_hash] -= 1
        if not self._pins[block_hash]:
            del self._pins[block_hash]

    def clear(self) -> None:
        """Forget all snapshots; pinned ones are free once they are unpinned."""
        for block_hash, slot in self._held.items():
            if self._pins[block_hash]:
                self._forgotten[slot] = self._pins[block_hash]
            else:
                self._free.append(slot)
        self._held.clear()
        self._pins.clear()

    def longest(self, hashes: list[bytes]) -> int:
        """Number of leading blocks after which a state is held, the most that there are."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._held:
                return count
        return 0

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where slots are lost or counted twice."""
        slots = [*self._free, *self._held.values(), *self._reserved, *self._forgotten]
        if sorted(slots) != list(range(self.num_slots)):
            raise RuntimeError("slots of snapshots are lost or used twice")
        if any(block_hash not in self._held for block_hash in +self._pins):
            raise RuntimeError("a snapshot is pinned that is not held")


class SnapshotPlanner:
    """Which snapshots a step takes of a sequence, and what becomes of them."""

    def __init__(self, snapshots: StateSnapshots, block_size: int) -> None:
        self._snapshots = snapshots
        self._block_size = block_size
        self.on_taken: Callable[[bytes], None] | None = None
        """Is told of each snapshot of a prompt that is held from now on, for external tiers. Those
        of an answer take each other's place: `Sequence.answer_snapshot` is the newest."""

    def of_chunk(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """(tokens of the chunk, slot) for positions `[start, end)` of a prompt."""
        size, session = self._block_size, sequence.request.session
        if session is not None and session.num_dropped:
            return ()
        reusable = (len(sequence.tokens) - 1) // size * size
        points = {reusable, sequence.num_shared_blocks * size, end // size * size}
        inside = [point for point in sorted(points) if start < point <= end]
        slots = [(point, self._reserve(sequence, point)) for point in inside]
        return tuple((point - start, slot) for point, slot in slots if slot is not None)

    def of_decode(self, sequence: Sequence) -> tuple[tuple[int, int], ...]:
        """(1, slot) where a sequence's next token is the last one of a block."""
        end, session = sequence.num_computed + 1, sequence.request.session
        if end % self._block_size or (session is not None and session.num_dropped):
            return ()
        if sequence.answer_snapshot is not None:
            self._snapshots.drop(sequence.answer_snapshot)
            sequence.answer_snapshot = None
        slot = self._reserve(sequence, end)
        return () if slot is None else ((1, slot),)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> int | None:
        index, hashes = num_tokens // self._block_size - 1, sequence.block_hashes
        if index < len(hashes) and self._snapshots.holds(hashes[index]):
            return None
        slot = self._snapshots.reserve()
        if slot is not None:
            sequence.pending_snapshots.append(PendingSnapshot(num_tokens, slot))
        return slot

    def register(self, sequence: Sequence, *, outdated: bool) -> None:
        """A step has computed the sequence. `outdated`: the cache was reset since its admission."""
        size, decoding = self._block_size, sequence.num_computed > len(sequence.tokens) - 1
        for num_tokens, slot in sequence.pending_snapshots:
            index = num_tokens // size - 1
            if outdated or index >= len(sequence.block_hashes):
                self._snapshots.release(slot)
                continue
            block_hash = sequence.block_hashes[index]
            answers = num_tokens > sequence.request.num_prompt_tokens
            between = num_tokens < sequence.num_computed // size * size and not decoding
            kept = self._snapshots.register(slot, block_hash, first_to_go=between)
            if kept and answers:
                sequence.answer_snapshot = block_hash
            elif kept and self.on_taken is not None:
                self.on_taken(block_hash)
        sequence.pending_snapshots.clear()

    def release(self, sequence: Sequence) -> None:
        """The sequence gives up all that is computed."""
        for _, slot in sequence.pending_snapshots:
            self._snapshots.release(slot)
        sequence.pending_snapshots.clear()
        if sequence.pinned_snapshot is not None:
            self._snapshots.unpin(*sequence.pinned_snapshot)
            sequence.pinned_snapshot = None

    def announce(self, sequence: Sequence) -> int | None:
        """The runner is told of the snapshot that a sequence begins with; its slot."""
        if sequence.pinned_snapshot is None:
            return None
        block_hash, slot = sequence.pinned_snapshot
        self._snapshots.unpin(block_hash, slot)
        self._snapshots.being_copied.add(slot)
        sequence.pinned_snapshot = None
        return slot

    def note_done(self) -> None:
        """The step has ended: what was announced for it is copied."""
        self._snapshots.being_copied.clear()
