"""`--kv-tier SPEC`: what is understood, and what a mistake is told."""

from __future__ import annotations

import pytest

from lookonce.errors import ConfigError
from lookonce.types.kv import TierSpec, parse_tier_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("host:4GB", TierSpec("host", capacity_bytes=4 * 10**9)),
        ("host:1.5mb", TierSpec("host", capacity_bytes=1_500_000)),
        ("disk:/a:b/c:2TB", TierSpec("disk", path="/a:b/c", capacity_bytes=2 * 10**12)),
        ("valkey://cache", TierSpec("valkey", host="cache")),
        ("redis://cache:7000/3", TierSpec("valkey", host="cache", port=7000, database=3)),
        ("valkey://[::1]:7000", TierSpec("valkey", host="::1", port=7000)),
        ("valkey://[::1]", TierSpec("valkey", host="::1")),
        ("valkey:///run/v.sock", TierSpec("valkey", path="/run/v.sock")),
        (
            "valkey://me:s:c@t@cache:1",
            TierSpec("valkey", host="cache", port=1, username="me", password="s:c@t"),
        ),
        ("valkey://:secret@cache", TierSpec("valkey", host="cache", password="secret")),
        ("lmcache://127.0.0.1:6000", TierSpec("lmcache", host="127.0.0.1", port=6000)),
        ("lmcache://localhost", TierSpec("lmcache", host="localhost", port=5555)),
    ],
)
def test_every_kind_of_tier_has_a_spelling(text: str, spec: TierSpec) -> None:
    assert parse_tier_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", "host:4", "host:-1GB", "host:0GB", "host:nanGB", "host:infGB",
        "disk:relative:1GB", "disk:/path", "disk::1GB", "valkey://", "valkey:cache",
        "valkey://cache:port", "valkey://cache/x", "valkey://cache:1:2/", "lmcache://",
        "lmcache:host:1", "lmcache://host:1/2", "memcached://host", "host:1e300GB",
        "host:99999999TB", "valkey://cache:65536", "valkey://cache:²", "valkey://cache:-1",
        "valkey://cache:1/²", f"valkey://cache/{'9' * 5000}", f"lmcache://host:{'9' * 5000}",
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="host:4GB"):
        parse_tier_spec(text)


def test_a_password_is_never_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier_spec("valkey://me:hunter2@cache:port")
    assert "hunter2" not in str(caught.value)
