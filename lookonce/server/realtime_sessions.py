"""What the realtime sessions of one API process share: their number, their memory, their ears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lookonce.config import SessionConfig
from lookonce.errors import QueueFullError, TooLargeError
from lookonce.render.media.vad import VoiceDetectors
from lookonce.types.counts import Counts


@dataclass(slots=True)
class ByteBudget:
    """Bytes that may be held, also counted by `parent`."""

    limit: int
    parent: ByteBudget | None = None
    used: int = 0

    def take(self, nbytes: int) -> bool:
        """Whether there is room; it is taken then."""
        if self.used + nbytes > self.limit:
            return False
        if self.parent is not None and not self.parent.take(nbytes):
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        self.used -= nbytes
        if self.parent is not None:
            self.parent.give(nbytes)

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Around what holds so many bytes. Raises `TooLargeError`."""
        if not self.take(nbytes):
            raise full_error("copying the sound for the model")
        try:
            yield
        finally:
            self.give(nbytes)


def full_error(what: str) -> TooLargeError:
    return TooLargeError(
        f"{what} would make this session, or all of them, hold more than they may: delete items, "
        "or clear the sound",
        code="session_full",
    )


class RealtimeSessions:
    """Lets tenants open sessions, up to a limit for each and one for all."""

    def __init__(
        self,
        config: SessionConfig | None = None,
        counts: Counts | None = None,
        detectors: VoiceDetectors | None = None,
    ) -> None:
        """`counts` gets what is counted for metrics."""
        self.config = config or SessionConfig()
        self.budget = ByteBudget(self.config.max_total_bytes)
        self._tenants: dict[str, ByteBudget] = {}
        """Of those that have sessions."""
        self.detectors = detectors or VoiceDetectors()
        counts = counts or Counts()
        self._held: dict[str, int] = {}
        self._open = counts.count("realtime_sessions", gauge=True)
        self._opened = counts.count("realtime_sessions_total")

    def copies(self, tenant: str) -> ByteBudget:
        """For the copies of one session's sound that the model is given. The session is open."""
        return ByteBudget(self.config.max_bytes, self._tenants[tenant])

    @property
    def num_open(self) -> int:
        return sum(self._held.values())

    @contextmanager
    def opened(self, tenant: str) -> Iterator[ByteBudget]:
        """Around one session; gives its budget. Raises `QueueFullError`."""
        held = self._held.get(tenant, 0)
        self._check("--max-sessions", self.num_open, self.config.max_sessions)
        self._check("--max-tenant-sessions", held, self.config.max_tenant_sessions)
        self._held[tenant] = held + 1
        most = self.config.max_tenant_bytes or self.config.max_total_bytes
        own = self._tenants.setdefault(tenant, ByteBudget(most, self.budget))
        self._opened.add()
        self._open.set(self.num_open)
        try:
            yield ByteBudget(self.config.max_bytes, own)
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant], self._tenants[tenant]
            self._open.set(self.num_open)

    def _check(self, option: str, num_open: int, limit: int | None) -> None:
        if limit is not None and num_open >= limit:
            raise QueueFullError(
                f"{num_open} realtime sessions are open, which is the limit ({option})",
                code="too_many_sessions",
            )
