"""Copies of encoder outputs in host memory: the second tier of the encoder cache, in LRU order.

An output that is evicted from the device is copied to the host, and restored instead of being
encoded again. The copy stays when it is restored, so a second eviction copies nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Moves(NamedTuple):
    """Keys that the runner must drop, copy to the host, or copy to the device in the next step.

    No key is in two of them, except that an offloaded key may be restored in the same step.
    """

    dropped: tuple[bytes, ...] = ()
    offload: tuple[bytes, ...] = ()
    restore: tuple[bytes, ...] = ()


NO_MOVES = Moves()


class HostOutputs:
    """Accounts for the copies; the runner keeps them under the same keys.

    Moves collect until `take_moves`; a move and its opposite cancel out.
    """

    __slots__ = (
        "_dropped",
        "_offload",
        "_restore",
        "_used_bytes",
        "capacity_bytes",
        "changed",
        "copies",
    )

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.copies: OrderedDict[bytes, int] = OrderedDict()
        """Key → bytes, least recently used first. Only this class changes it."""
        self.changed: set[bytes] | None = None
        """Takes the keys of copies that leave, where somebody asks."""
        self._used_bytes = 0
        self._offload: dict[bytes, None] = {}
        self._restore: dict[bytes, None] = {}
        self._dropped: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.copies

    def __len__(self) -> int:
        return len(self.copies)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def has_moves(self) -> bool:
        return bool(self._dropped or self._offload or self._restore)

    def keep(self, key: bytes, num_bytes: int) -> bool:
        """Copy an output that is evicted from the device; False where there is no room."""
        if not self.capacity_bytes:
            return False
        if key in self.copies:
            self._touch(key)
            return True
        if num_bytes > self.capacity_bytes or not self._make_room(num_bytes):
            return False
        self.copies[key] = num_bytes
        self._used_bytes += num_bytes
        if key in self._dropped:
            del self._dropped[key]
        else:
            self._offload[key] = None
        return True

    def restore(self, key: bytes) -> None:
        """Copy to the device in the next step; the copy stays at least until then."""
        self._touch(key)
        self._restore[key] = None

    def cancel_restore(self, key: bytes) -> None:
        """Undo `restore`: the device has no room."""
        self._restore.pop(key, None)

    def forget(self, key: bytes) -> None:
        """Drop a copy, if there is one, and the moves planned for it."""
        num_bytes = self.copies.pop(key, None)
        if num_bytes is None:
            return
        if self.changed is not None:
            self.changed.add(key)
        self._used_bytes -= num_bytes
        self._restore.pop(key, None)
        if key in self._offload:
            del self._offload[key]
        else:
            self._dropped[key] = None

    def lose(self, key: bytes) -> None:
        """Remove a copy that the runner could not make, and so need not drop."""
        self.forget(key)
        self._dropped.pop(key, None)

    def clear(self) -> None:
        """Drop every copy that is not about to be restored."""
        for key in [key for key in self.copies if key not in self._restore]:
            self.forget(key)

    def take_moves(self) -> Moves:
        """Remove and return the moves since the last call."""
        if not self.has_moves:
            return NO_MOVES
        moves = Moves(tuple(self._dropped), tuple(self._offload), tuple(self._restore))
        self._dropped.clear()
        self._offload.clear()
        self._restore.clear()
        return moves

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where bytes or moves disagree with the copies."""
        if self._used_bytes != sum(self.copies.values()):
            raise RuntimeError("host bytes differ from the copies' sum")
        if self._used_bytes > self.capacity_bytes:
            raise RuntimeError("the host tier is over its capacity")
        if not self.copies.keys() >= self._offload.keys() | self._restore.keys():
            raise RuntimeError("a copy is moved that is not accounted for")
        if self._dropped.keys() & self.copies.keys():
            raise RuntimeError("a copy is dropped and kept")

    def _touch(self, key: bytes) -> None:
        self.copies.move_to_end(key)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop the oldest copies, but none that is to be restored: those are the most recent."""
        while self._used_bytes + num_bytes > self.capacity_bytes:
            oldest = next(iter(self.copies))
            if oldest in self._restore:
                return False
            self.forget(oldest)
        return True
