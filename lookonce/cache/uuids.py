"""Names that clients give their media, bound to the content that first came with them.

A binding never decides content: the digest alone does. It only lets a client name, without
sending them again, bytes that something still holds.
"""

from __future__ import annotations

from collections import OrderedDict

from blake3 import blake3

from lookonce.cache.identity import frame
from lookonce.errors import ConflictError

MAX_BINDINGS = 65_536


class UuidBindings:
    """(scope, uuid) → MediaHash; forgets the binding used longest ago beyond `max_bindings`."""

    def __init__(self, max_bindings: int = MAX_BINDINGS) -> None:
        self._max = max_bindings
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()
        self._fresh: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def bind(self, scope: bytes, uuid: str, digest: bytes, *, param: str | None = None) -> None:
        """Bind, or confirm. Raises `ConflictError` (409) when other bytes came with it first."""
        name = name_digest(scope, uuid)
        if self.claim(name, digest) != digest:
            raise ConflictError("this uuid is bound to other media", param=param)

    def resolve(self, scope: bytes, uuid: str) -> bytes | None:
        """The MediaHash bound to a uuid, if it is still remembered."""
        name = name_digest(scope, uuid)
        digest = self._digests.get(name)
        if digest is not None:
            self._digests.move_to_end(name)
        return digest

    def peek(self, scope: bytes, uuid: str) -> bytes | None:
        """What `resolve` would answer, without counting as a use."""
        return self._digests.get(name_digest(scope, uuid))

    def claim(self, name: bytes, digest: bytes) -> bytes:
        """Bind unless bound; the digest that counts from now on."""
        bound = self._digests.get(name)
        if bound is None:
            self._fresh[name] = bound = digest
            if len(self._fresh) > self._max:
                del self._fresh[next(iter(self._fresh))]
        self._put(name, bound)
        return bound

    def learn(self, name: bytes, digest: bytes) -> None:
        """Take over a binding the engine announced; it overrules an own one."""
        self._fresh.pop(name, None)
        self._put(name, digest)

    def take_fresh(self) -> tuple[tuple[bytes, bytes], ...]:
        """`(name digest, MediaHash)` bound here since the last call."""
        fresh = tuple(self._fresh.items())
        self._fresh.clear()
        return fresh

    def _put(self, name: bytes, digest: bytes) -> None:
        self._digests[name] = digest
        self._digests.move_to_end(name)
        if len(self._digests) > self._max:
            self._digests.popitem(last=False)


def name_digest(scope: bytes, uuid: str) -> bytes:
    """32 bytes for a uuid in a scope: what travels between processes instead of the uuid."""
    return blake3(frame(b"uuid", scope, uuid.encode())).digest()
