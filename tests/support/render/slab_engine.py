"""The engine's owner of slabs, and one API process's pool, without a channel between them."""

from __future__ import annotations

import os

from lookonce.cache.slab_pool import SlabPool
from lookonce.cache.slabs import SlabOwner


class SlabEngine:
    """Answers whatever the pool asks for, at once."""

    def __init__(self, capacity_bytes: int) -> None:
        self.owner = SlabOwner(capacity_bytes)
        self.pool = SlabPool(self.turn)
        self.pool.open(capacity_bytes)
        self.descriptors_lost = False

    def turn(self) -> None:
        changes = self.pool.take_changes()
        if changes is None:
            return
        leases = self.owner.change("a", changes.given_back, changes.uses, changes.wanted)
        descriptors = leases.descriptors
        if self.descriptors_lost:
            for fd in descriptors:
                os.close(fd)
            descriptors = ()
        if leases.slabs:
            self.pool.leased(leases.slabs, descriptors)

    def restart(self) -> None:
        self.owner = SlabOwner(self.owner.capacity_bytes)
        self.pool.open(self.owner.capacity_bytes)
