"""API keys: which request comes from whom, and what they may do."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Scope

from lookonce.config import ApiKey, ServerConfig, key_digest
from lookonce.errors import ForbiddenError, UnauthorizedError
from lookonce.server.http.headers import header

KEY_SUBPROTOCOL = "openai-insecure-api-key."
"""Before the API key that the client of a WebSocket offers as a subprotocol."""
MAX_WAIT_SECONDS = 3600.0
"""After which it is looked again whether a key has expired: the clock may have been set."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sent a request, and what they may do. Caches keep the tenants apart."""

    tenant: str = ""
    inject: bool = False
    admin: bool = False
    key: str = field(default="", compare=False)
    """The key's SHA-256 in hex, of which a log shows the first 8 digits; empty without keys."""

    def require_admin(self) -> None:
        if not self.admin:
            raise ForbiddenError("this route needs an admin key")


class KeyRing:
    """The API keys a server accepts. Without keys every client is the same tenant and an admin."""

    def __init__(
        self,
        keys: tuple[ApiKey, ...],
        *,
        allow_injection: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` is the Unix time, for keys that expire."""
        self._anyone = Principal(inject=allow_injection, admin=True)
        self._now = now
        self._changed = asyncio.Event()
        """Set when other keys are accepted; each set of keys has an event of its own."""
        self.replace(keys)

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing:
        return cls(config.api_keys, allow_injection=config.allow_injection)

    def replace(self, keys: tuple[ApiKey, ...]) -> None:
        """Accept these keys from now on. Requests that are running are not disturbed; sessions of
        other keys end."""
        self._keys = [(bytes.fromhex(key.digest), key, _principal(key)) for key in keys]
        self.are_of_several = len({key.tenant for key in keys}) > 1
        """Whether there are keys of more than one tenant."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_refused(self, principal: Principal) -> None:
        """Returns once the key that a principal came with is not accepted any more."""
        while (left := self._seconds_accepted(principal)) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, MAX_WAIT_SECONDS)):
                    await self._changed.wait()

    def _seconds_accepted(self, principal: Principal) -> float:
        """How long the key that a principal came with is still accepted; 0: no more."""
        if not self._keys:
            return math.inf  # everybody is served
        known = next((key for _, key, _ in self._keys if key.digest == principal.key), None)
        if known is None:
            return 0.0
        return math.inf if known.expires is None else known.expires - self._now()

    def principal(self, scope: Scope) -> Principal:
        """Of the request's key. Raises `UnauthorizedError`."""
        if not self._keys:
            return self._anyone
        given = header(scope, b"authorization")
        if not given and (key := header(scope, b"x-api-key")):
            given = f"Bearer {key}"  # as Anthropic's clients send it
        scheme, _, key = given.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return self._find(key.strip())
        for offered in scope.get("subprotocols", ()):  # browsers send no headers of ours
            if offered.startswith(KEY_SUBPROTOCOL):
                return self._find(offered.removeprefix(KEY_SUBPROTOCOL))
        raise UnauthorizedError("an API key is needed: Authorization: Bearer KEY")

    def _find(self, key: str) -> Principal:
        """Compares with every key in constant time: the time taken tells no client about a key."""
        asked, found = bytes.fromhex(key_digest(key)), None
        for digest, known, principal in self._keys:
            if hmac.compare_digest(asked, digest):
                found = known, principal
        if found is None:
            raise UnauthorizedError("this API key is not known here")
        known, principal = found
        if known.expires is not None and self._now() >= known.expires:
            raise UnauthorizedError("this API key has expired")
        return principal


def _principal(key: ApiKey) -> Principal:
    # A key without a tenant shares the tenant of a server without keys.
    return Principal(tenant=key.tenant, inject=key.inject, admin=key.admin, key=key.digest)
