"""Which network addresses media may be fetched from, and a backend that connects to no other.

A host name is resolved once, every address is checked, and the connection is made to a checked
address, never to the name again. So DNS cannot give another address after the check (rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import TypeAlias

import httpcore

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressLookup: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Host and port → addresses as text; raises `OSError` when there is none."""
AddressRule: TypeAlias = Callable[[IPAddress], bool]
"""Whether connections to an address are allowed."""

# Ranges that some version of `ipaddress` counts as global. IPv4: protocol assignments, the 6to4
# relay, shared and benchmark space, a cloud's metadata service. IPv6: those that carry an IPv4
# address (mapped, compatible, NAT64, 6to4, Teredo), documentation, segment routing, site-local.
_REFUSED = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24", "192.88.99.0/24", "100.64.0.0/10", "198.18.0.0/15", "168.63.129.16/32",
        "::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/23",
        "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10",
    )
)  # fmt: skip


class AddressRefusedError(OSError):
    """Every address of the host is private, reserved or otherwise not public."""


def is_any(address: IPAddress) -> bool:
    """The rule of servers that may fetch from their own network."""
    return True


def is_public(address: IPAddress) -> bool:
    """The rule of all other servers: globally routable unicast that carries no other address."""
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        return False
    if any(address in network for network in _REFUSED):
        return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address.is_loopback
        or address.is_link_local
    )


fetching_for: ContextVar[str] = ContextVar("fetching_for", default="")
"""The tenant that a connection is opened for."""
MAX_LOOKUPS = 16
"""Names that are looked up at a time for one tenant."""


class TenantSlots:
    """Work side by side, of which no tenant has more than `each`. Belongs to one event loop."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> None:
        if self._taken[tenant] < self._each:
            self._taken[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn  # who releases a slot hands it on
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant)
            else:
                queue.remove(turn)
            raise

    def release(self, tenant: str) -> None:
        queue = self._waiting.get(tenant) or deque()
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting.pop(tenant, None)
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]


class AddressLookups:
    """Looks names up by the system's resolver, each in a thread of its own.

    A name whose servers do not answer holds its thread for up to a minute, though nobody waits any
    more. So it counts as its tenant's until then, and takes no thread from anybody else.
    """

    def __init__(self) -> None:
        self._slots = TenantSlots(MAX_LOOKUPS)

    async def __call__(self, host: str, port: int) -> list[str]:
        tenant = fetching_for.get()
        await self._slots.acquire(tenant)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def report(found: list[str], error: Exception | None) -> None:
            self._slots.release(tenant)
            if answer.done():
                return
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)

        def look_up() -> None:
            found: list[str] = []
            problem: Exception | None = None
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except (OSError, ValueError, OverflowError) as error:  # UnicodeError is a ValueError
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(report, found, problem)

        try:
            threading.Thread(target=look_up, name="name lookup", daemon=True).start()
        except RuntimeError as error:
            self._slots.release(tenant)
            raise OSError("no thread for looking a name up") from error
        return await answer


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections only to addresses that `rule` allows."""

    def __init__(
        self, rule: AddressRule = is_public, resolver: AddressLookup | None = None
    ) -> None:
        """Without `resolver` names are looked up as this machine does."""
        self._rule = rule
        self._resolver = AddressLookups() if resolver is None else resolver
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `AddressRefusedError`, or `OSError`/`httpcore.ConnectError` when none answers."""
        failure: Exception = httpcore.ConnectError("the host has no address")
        for address in await self._allowed(host, port):
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _allowed(self, host: str, port: int) -> list[str]:
        addresses = await self._resolver(host, port)
        allowed = [text for text in addresses if self._rule(ipaddress.ip_address(text))]
        if addresses and not allowed:
            raise AddressRefusedError("no allowed address")
        return allowed

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefusedError("unix sockets are not fetched from")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
