"""What one external tier is to the chain: it may be slow, wrong or gone, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["missing", "corrupt", "timeout", "connection", "io"]
FAULTS: frozenset[Reason] = frozenset({"timeout", "connection", "io"})
"""Reasons that speak against the tier itself, not against one object."""


class TierError(Exception):
    """A tier could not do what was asked. Stays inside `kv`."""

    def __init__(self, reason: Reason, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    num_blocks: int
    """Leading blocks that are verified and in the buffer."""
    reason: Reason | None = None
    """Why the next one is not; None when all are."""


class KVTier(Protocol):
    """One place that holds blocks under their hashes. Called by several worker threads at once.

    A lease keeps a block from being dropped for room, where the tier can promise that, until it is
    released or some seconds have passed. Nothing else promises that a block found is still there.
    """

    @property
    def name(self) -> str: ...

    @property
    def held_bytes(self) -> int:
        """Bytes in use, as far as this process knows; 0 where somebody else counts them."""

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are held; those are leased. Raises `TierError`."""

    def release(self, keys: Sequence[bytes]) -> None:
        """Give leases back. Never raises."""

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        """Read leading blocks into `into` (payloads, one after the other) and verify each.

        What is not intact is deleted. Never raises; `into` is garbage beyond the outcome.
        """

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        """Keep blocks; how many were new. Raises `TierError`."""

    def close(self) -> None: ...
