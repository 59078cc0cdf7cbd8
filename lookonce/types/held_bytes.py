"""Bytes that requests hold while they are served: bodies and fetched media, limited by tenant.

    TenantBytes   what all requests of a process hold, and those of each tenant
    └── HeldBytes   one request's part; the rest of it is given back when the request ends

A request that would go beyond a limit is refused; those that hold something already go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from lookonce.errors import QueueFullError


class TenantBytes:
    """`limit`: bytes of all tenants. Where `is_shared()`, one tenant may hold half of them.

    For one event loop.
    """

    def __init__(self, limit: int, is_shared: Callable[[], bool] = lambda: False) -> None:
        self._limit = limit
        self._is_shared = is_shared
        self._held = Counter[str]()
        self._media: dict[tuple[str, int], int] = {}
        """(tenant, identity of the bytes) → requests that hold them: they count once."""

    @property
    def total(self) -> int:
        return self._held.total()

    def of(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def take(self, tenant: str, nbytes: int) -> None:
        """Raises `QueueFullError`."""
        own = self.of(tenant) + nbytes
        if own > (self._limit // 2 if self._is_shared() else self._limit):
            raise QueueFullError(
                f"your requests that are being served have {own} bytes together, more than they may"
            )
        if self.total + nbytes > self._limit:
            raise QueueFullError(
                "the requests that are being served have more bytes together than they may"
            )
        self._held[tenant] = own

    def give(self, tenant: str, nbytes: int) -> None:
        self._held[tenant] -= nbytes
        if not self._held[tenant]:
            del self._held[tenant]

    def take_media(self, tenant: str, data: bytes | bytearray) -> None:
        """Raises `QueueFullError`."""
        name = tenant, id(data)
        if name not in self._media:
            self.take(tenant, len(data))
        self._media[name] = self._media.get(name, 0) + 1

    def give_media(self, tenant: str, identity: int, nbytes: int) -> None:
        name = tenant, identity
        self._media[name] -= 1
        if not self._media[name]:
            del self._media[name]
            self.give(tenant, nbytes)


class HeldBytes:
    """What one request holds; a context manager around it."""

    __slots__ = ("_all", "_media", "_nbytes", "_tenant")

    def __init__(self, of_all: TenantBytes, tenant: str) -> None:
        self._all = of_all
        self._tenant = tenant
        self._nbytes = 0
        self._media: dict[int, int] | None = None
        """Identity → bytes."""

    def another(self) -> HeldBytes:
        """For work of the same tenant that may outlive the request."""
        return HeldBytes(self._all, self._tenant)

    def take(self, nbytes: int) -> None:
        """Raises `QueueFullError`."""
        self._all.take(self._tenant, nbytes)
        self._nbytes += nbytes

    def take_media(self, data: bytes | bytearray) -> None:
        """The bytes of a file, which other requests of the tenant may hold, too. They must live
        until they are given back. Raises `QueueFullError`."""
        media = self._media = {} if self._media is None else self._media
        if id(data) not in media:
            self._all.take_media(self._tenant, data)
            media[id(data)] = len(data)

    def give_media(self, data: bytes | bytearray) -> None:
        """Before the end of the request; nothing where it has ended."""
        nbytes = self._media.pop(id(data), None) if self._media else None
        if nbytes is not None:
            self._all.give_media(self._tenant, id(data), nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.give_all()

    def give_all(self) -> None:
        """Also before the end of the request."""
        if self._nbytes:
            self._all.give(self._tenant, self._nbytes)
            self._nbytes = 0
        if self._media:
            for identity, nbytes in self._media.items():
                self._all.give_media(self._tenant, identity, nbytes)
            self._media = None


current_held_bytes: ContextVar[HeldBytes | None] = ContextVar("held_bytes", default=None)
"""Of the request that is being served; None where nothing is limited."""
