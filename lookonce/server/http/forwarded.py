"""Who sent a request that came through a proxy, or a fleet's front-end: its `X-Forwarded-For`.

Anybody can write that header, so it is read where the connection is of a peer that is allowed to
say so (`--forwarded-allow-ips`), and from its end: each proxy appends whom it was asked by.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

from starlette.types import Scope

FORWARDED_FOR = b"x-forwarded-for"
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
UNIX, ANYBODY = "unix", "*"
"""What may be allowed beside addresses and networks: whoever reaches the server's unix socket; and
every peer."""


class ForwardedClients:
    """Puts the client that a trusted peer names in the place of the peer."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """`allowed`: addresses, networks, `UNIX` and `ANYBODY`; raises `ValueError` for others."""
        self._allowed = bool(allowed)
        self._unix, self._anybody = UNIX in allowed, ANYBODY in allowed
        self._networks = [
            ipaddress.ip_network(each) for each in allowed if each not in (UNIX, ANYBODY)
        ]

    def resolve(self, scope: Scope) -> None:
        """Change `scope["client"]`, where the request came from a peer that is trusted and names an
        address."""
        if not self._allowed:
            return
        client = scope.get("client")
        trusted = self._trusts(_address(client[0])) if client else self._unix or self._anybody
        sent = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
        if not trusted or not sent:
            return
        for named in reversed(b",".join(sent).decode("latin-1").split(",")):
            address = _address(named.strip())
            if address is None:
                return
            scope["client"] = str(address), 0
            if not self._trusts(address):
                return

    def _trusts(self, peer: Address | None) -> bool:
        if self._anybody or peer is None:
            return self._anybody
        return any(peer in network for network in self._networks)


def _address(text: str) -> Address | None:
    """None for what is none. Where servers and proxies listen on IPv6, an IPv4 address comes as
    `::ffff:1.2.3.4`."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
