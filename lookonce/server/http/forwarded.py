"""Who sent a request that came through a proxy, or a fleet's front-end: its `X-Forwarded-For`.
And which refusals of it a front-end audits itself: `X-LookOnce-Audited`.

Anybody can write that header, so it is read where the connection is of a peer that is allowed to
say so (`--forwarded-allow-ips`), and from its end: each proxy appends whom it was asked by.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

from starlette.types import Scope

from lookonce.server.audit import AUDITED_ELSEWHERE
from lookonce.server.http.headers import header

FORWARDED_FOR = b"x-forwarded-for"
AUDITED = b"x-lookonce-audited"
"""Statuses, with spaces between them, or `*` for all: a refusal with one of these may be kept back
from the client, and whoever does so audits what the client gets."""
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
UNIX, ANYBODY = "unix", "*"
"""What may be allowed beside addresses and networks: whoever reaches the server's unix socket; and
every peer."""


class ForwardedClients:
    """Puts the client that a trusted peer names in the place of the peer."""

    def __init__(self, allowed: Sequence[str] = (), *, behind_frontends: bool = False) -> None:
        """`allowed`: addresses, networks, `UNIX` and `ANYBODY`; raises `ValueError` for others.
        `behind_frontends`: these are front-ends, which send no client's `AUDITED`."""
        self._allowed = bool(allowed)
        self._behind_frontends = behind_frontends
        self._unix, self._anybody = UNIX in allowed, ANYBODY in allowed
        self._networks = [
            ipaddress.ip_network(each) for each in allowed if each not in (UNIX, ANYBODY)
        ]

    def resolve(self, scope: Scope) -> None:
        """Change `scope["client"]`, where the request came from a peer that is trusted and names an
        address, and note the refusals that it audits."""
        if not self._allowed:
            return
        client = scope.get("client")
        trusted = self._trusts(_address(client[0])) if client else self._unix or self._anybody
        if not trusted:
            return
        if self._behind_frontends and (kept_back := header(scope, AUDITED)):
            scope.setdefault("state", {})[AUDITED_ELSEWHERE] = frozenset(kept_back.split())
        sent = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
        if not sent:
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
