"""API keys: who is asking, and what they may do."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.types import Scope

from lookonce.config import ApiKey, ServerConfig
from lookonce.errors import ForbiddenError, UnauthorizedError


@dataclass(frozen=True, slots=True)
class Principal:
    """Whose request it is; the tenant is the root of everything that is cached for it."""

    tenant: str = ""
    inject: bool = False
    admin: bool = False

    def require_admin(self) -> None:
        if not self.admin:
            raise ForbiddenError("this route needs an admin key")


class KeyRing:
    """The keys a server accepts. Without keys everybody is the same tenant and may administer."""

    def __init__(self, keys: tuple[ApiKey, ...], *, allow_injection: bool = False) -> None:
        self._keys = [(_digest(key.key), _principal(key)) for key in keys]
        self._anyone = Principal(inject=allow_injection, admin=True)

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing:
        return cls(config.api_keys, allow_injection=config.allow_injection)

    def principal(self, scope: Scope) -> Principal:
        """Who sent a request; raises `UnauthorizedError`."""
        if not self._keys:
            return self._anyone
        scheme, _, key = header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("an API key is needed: Authorization: Bearer KEY")
        return self._find(key.strip())

    def _find(self, key: str) -> Principal:
        """Compares with every key, each in constant time, so that timing tells nothing."""
        asked, found = _digest(key), None
        for digest, principal in self._keys:
            if hmac.compare_digest(asked, digest):
                found = principal
        if found is None:
            raise UnauthorizedError("this API key is not known here")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _principal(key: ApiKey) -> Principal:
    # A key without a tenant shares the tenant of a server without keys.
    return Principal(tenant=key.tenant, inject=key.inject, admin=key.admin)


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case; empty where there is none."""
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return ""
