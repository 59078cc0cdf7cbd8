"""Who sent a request that came through a proxy."""

from __future__ import annotations

from typing import Any

import pytest

from lookonce.config import Options, resolve
from lookonce.errors import ConfigError
from lookonce.server.http.forwarded import ForwardedClients


def client(allowed: tuple[str, ...], peer: str | None, *forwarded: bytes) -> tuple[str, int] | None:
    """Of a request of `peer`, None: over a unix socket, with these `X-Forwarded-For`."""
    headers = [(b"host", b"h"), *((b"x-forwarded-for", each) for each in forwarded)]
    scope: dict[str, Any] = {"headers": headers, "client": peer and (peer, 4711)}
    config = resolve(Options(forwarded_allow_ips=allowed)).server
    ForwardedClients(config.forwarded_allow_ips).resolve(scope)
    found: tuple[str, int] | None = scope["client"]
    return found


@pytest.mark.parametrize(
    ("allowed", "peer"),
    [
        ((), "10.0.0.5"),
        ((), None),
        (("10.0.0.5",), "10.0.0.6"),
        (("10.0.0.5",), None),
        (("unix",), "127.0.0.1"),
    ],
)
def test_a_peer_that_is_not_allowed_is_the_client_whatever_it_says(
    allowed: tuple[str, ...], peer: str | None
) -> None:
    assert client(allowed, peer, b"1.2.3.4") == (peer and (peer, 4711))


@pytest.mark.parametrize(
    ("allowed", "peer"),
    [
        (("10.0.0.5",), "10.0.0.5"),
        (("10.0.0.0/8", "::1"), "10.9.9.9"),
        (("::1",), "::1"),
        (("10.0.0.5",), "::ffff:10.0.0.5"),
        (("unix",), None),
    ],
)
def test_a_proxy_that_is_allowed_names_the_client(
    allowed: tuple[str, ...], peer: str | None
) -> None:
    assert client(allowed, peer, b"1.2.3.4") == ("1.2.3.4", 0)
    assert client(allowed, peer, b"9.9.9.9, 2001:db8::1") == ("2001:db8::1", 0)
    assert client(allowed, peer, b"9.9.9.9", b"1.2.3.4") == ("1.2.3.4", 0)
    assert client(allowed, peer, b"::ffff:1.2.3.4") == ("1.2.3.4", 0)


def test_what_a_client_has_written_before_is_passed_over() -> None:
    """A proxy appends whom it was asked by; of several proxies each is looked behind."""
    assert client(("10.0.0.0/8",), "10.0.0.5", b"6.6.6.6, 1.2.3.4, 10.0.0.7") == ("1.2.3.4", 0)


def test_what_is_no_address_names_nobody() -> None:
    for sent in (b"", b"unknown", b"1.2.3.4, <script>", b"1.2.3.4:80"):
        assert client(("10.0.0.5",), "10.0.0.5", sent) == ("10.0.0.5", 4711)


def test_other_things_than_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
        resolve(Options(forwarded_allow_ips=("proxy.example.org",)))
