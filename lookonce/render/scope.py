"""Whose prompt it is: what every key of its media begins with."""

from __future__ import annotations

from functools import lru_cache

from lookonce.cache.identity import scope_digest


def scope_of(tenant: str, cache_salt: str | None) -> bytes:
    """`scope_digest`; tenants are few and remembered, salts are the clients' and are not."""
    return _of_tenant(tenant) if cache_salt is None else scope_digest(tenant, cache_salt)


@lru_cache(maxsize=1024)
def _of_tenant(tenant: str) -> bytes:
    return scope_digest(tenant, None)
