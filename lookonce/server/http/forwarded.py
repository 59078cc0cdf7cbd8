"""Who sent a request that came through a proxy, or a fleet's front-end: its `X-Forwarded-For`.

Anybody can write that header, so it is read where the connection is of a peer that is allowed to
say so (`--forwarded-allow-ips`), and from its end: each proxy appends whom it was asked by.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import Scope

FORWARDED_FOR = b"x-forwarded-for"
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
        trusted = self._trusts(client[0]) if client else self._unix or self._anybody
        sent = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
        if not trusted or not sent:
            return
        for named in reversed(b",".join(sent).decode("latin-1").split(",")):
            try:
                address = ipaddress.ip_address(named.strip())
            except ValueError:
                return
            # where proxies listen on IPv6, too: ::ffff:1.2.3.4
            address = getattr(address, "ipv4_mapped", None) or address
            scope["client"] = str(address), 0
            if not self._trusts(str(address)):
                return

    def _trusts(self, peer: str) -> bool:
        if self._anybody:
            return True
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._networks)
