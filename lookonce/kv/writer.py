"""Keeps blocks in one tier, behind a queue with an end: a slow tier loses stores, nothing else."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from lookonce.kv.chain import GuardedTier

logger = logging.getLogger(__name__)


class TierWriter:
    """One thread, one tier."""

    def __init__(self, tier: GuardedTier, max_queued_bytes: int) -> None:
        self._tier = tier
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._queue: queue.SimpleQueue[tuple[Sequence[bytes], Sequence[memoryview]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"kv-store-{tier.name}", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def offer(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> bool:
        """Take blocks to be kept; nobody changes the payloads any more. False: dropped, counted."""
        nbytes = sum(payload.nbytes for payload in payloads)
        with self._lock:
            room = self._queued_bytes + nbytes <= self._max_queued_bytes
            if room:
                self._queued_bytes += nbytes
        if room:
            self._queue.put((keys, payloads))
        else:
            self._tier.count_dropped(len(keys))
        return room

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            keys, payloads = job
            try:
                self._tier.write(keys, payloads)
            except Exception:
                logger.exception("storing KV failed")
            with self._lock:
                self._queued_bytes -= sum(payload.nbytes for payload in payloads)
            del job, payloads  # the last reference to the bytes
