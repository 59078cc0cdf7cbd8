"""Which network addresses media may be fetched from, and a backend that connects to no other.

A host name is resolved once, every address is checked, and the connection is made to a checked
address, never to the name again. So DNS cannot give another address after the check (rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
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


async def lookup_addresses(host: str, port: int) -> list[str]:
    """Addresses by the system resolver, in a thread."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections only to addresses that `rule` allows."""

    def __init__(
        self, rule: AddressRule = is_public, resolver: AddressLookup = lookup_addresses
    ) -> None:
        self._rule = rule
        self._resolver = resolver
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
