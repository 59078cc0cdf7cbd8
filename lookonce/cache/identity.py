"""The identity of a media item: MediaHash (what), scope (for whom), key (both); and client uuids.

Every digest is 32 bytes, over length-framed fields, and nothing truncates it: two inputs share a
digest only if every field is equal. A MediaHash does not depend on how the bytes arrived.

    MediaHash = H("media", version, modality, fingerprint, decode options, processor options,
                  kind, what kind needs, bytes)
    scope     = H("scope", tenant [, cache_salt])
    key       = H("key", scope, MediaHash)

A uuid is a client's name for an item, bound to the MediaHash that first came with it. The MediaHash
alone decides the content: a uuid only lets a client refer, without sending them again, to bytes
that are still held somewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
from blake3 import blake3

from lookonce.errors import ConflictError
from lookonce.types.media import UuidBinding
from lookonce.types.tenant_lru import TenantLRU

HashAlgorithm = Literal["blake3", "sha256"]
DIGEST_BYTES = 32
SCHEMA_VERSION = b"1"
_NO_OPTIONS = b"\x80"
"""The canonical form of no options (an empty msgpack map)."""
_ORIENTATION_TAG = 0x0112
_encoder = msgspec.msgpack.Encoder(order="deterministic")


def media_hash(
    data: Any,
    *,
    modality: str,
    fingerprint: bytes = b"",
    decode_options: Mapping[str, object] | None = None,
    processor_options: Mapping[str, object] | None = None,
    algorithm: HashAlgorithm = "blake3",
) -> bytes:
    """The 32-byte MediaHash of one media item.

    `data` is the encoded media as it came (any bytes-like object), or a decoded PIL image or NumPy
    array. `fingerprint` identifies the processor (class, config, model revision, image backend).
    Options are compared by value; None equals no options. Raises `TypeError` for any other `data`
    or for options that have no canonical form, `ValueError` for an unknown algorithm.
    """
    kind, payload = _encoded(data) if _is_bytes_like(data) else _in_memory(data)
    head = frame(
        b"media",
        SCHEMA_VERSION,
        modality.encode(),
        fingerprint,
        _canonical(decode_options),
        _canonical(processor_options),
        *kind,
    )
    return _digest(algorithm, head + _length(payload), payload)


def external_hash(name: bytes, *, modality: str) -> bytes:
    """The MediaHash of an item whose hash its client chose: a kind of its own.

    It can equal no real MediaHash, so such a client reaches only what it injected itself.
    """
    return blake3(frame(b"external", SCHEMA_VERSION, modality.encode(), name)).digest()


def scope_digest(tenant: str, cache_salt: str | None) -> bytes:
    """The digest of tenant and salt, 32 bytes. A salt narrows the tenant, never replaces it.

    Without a salt it is cached by tenant: tenants are few.
    """
    if cache_salt is None:
        return _tenant_scope(tenant)
    return blake3(frame(b"scope", tenant.encode(), cache_salt.encode())).digest()


@lru_cache(maxsize=1024)
def _tenant_scope(tenant: str) -> bytes:
    return blake3(frame(b"scope", tenant.encode())).digest()


def item_key(scope: bytes, media_hash: bytes) -> bytes:
    """The key every tier uses. Raises `ValueError` unless both digests are whole."""
    if len(scope) != DIGEST_BYTES or len(media_hash) != DIGEST_BYTES:
        raise ValueError(f"a scope and a MediaHash have {DIGEST_BYTES} bytes each")
    return blake3(frame(b"key", scope, media_hash)).digest()


def frame(*fields: bytes) -> bytes:
    """The fields, each behind its length (8 bytes), so that no two lists of fields coincide."""
    return b"".join([part for field in fields for part in (_length(field), field)])


def _length(field: bytes | memoryview) -> bytes:
    return (field.nbytes if isinstance(field, memoryview) else len(field)).to_bytes(8, "little")


def _digest(algorithm: HashAlgorithm, head: bytes, payload: bytes | memoryview) -> bytes:
    if algorithm == "blake3":
        return blake3(head).update(payload).digest()
    if algorithm == "sha256":
        state = hashlib.sha256(head)
        state.update(payload)
        return state.digest()
    raise ValueError(f"hash algorithm {algorithm!r} is not blake3 or sha256")


def _canonical(options: Mapping[str, object] | None) -> bytes:
    return _encoder.encode(dict(options)) if options else _NO_OPTIONS


def _is_bytes_like(data: object) -> bool:
    return isinstance(data, bytes | bytearray | memoryview)


def _encoded(data: bytes | bytearray | memoryview) -> tuple[list[bytes], bytes | memoryview]:
    view = memoryview(data)
    return [b"encoded"], view if view.c_contiguous else view.tobytes()


def _in_memory(data: Any) -> tuple[list[bytes], bytes | memoryview]:
    if hasattr(data, "getpalette") and hasattr(data, "mode"):
        return _image(data)
    if hasattr(data, "dtype") and hasattr(data, "shape") and hasattr(data, "tobytes"):
        return _array(data)
    raise TypeError(f"media is bytes, a PIL image or a NumPy array, not {type(data).__name__}")


def _image(image: Any) -> tuple[list[bytes], bytes | memoryview]:
    """Pixels mean nothing without size, mode, palette, transparency and orientation."""
    pixels = image.tobytes()
    palette = image.getpalette(None)
    described = {
        "size": list(image.size),
        "mode": image.mode,
        "palette": None if palette is None else [image.palette.mode, bytes(palette)],
        "transparency": image.info.get("transparency"),
        "orientation": image.getexif().get(_ORIENTATION_TAG, 1),
    }
    return [b"image", _encoder.encode(described)], pixels


def _array(array: Any) -> tuple[list[bytes], bytes | memoryview]:
    dtype = array.dtype
    if dtype.hasobject:
        raise TypeError("an array of Python objects has no bytes to hash")
    described = {"dtype": [dtype.name, dtype.str], "shape": list(array.shape)}
    return [b"array", _encoder.encode(described)], array.tobytes()


MAX_BINDINGS = 65_536


class UuidBindings:
    """(scope, uuid) → MediaHash, `max_bindings` of all tenants together, shared between them as
    `TenantLRU` does."""

    def __init__(self, max_bindings: int = MAX_BINDINGS) -> None:
        self._bound: dict[bytes, UuidBinding] = {}
        self._names = TenantLRU[bytes, None](max_bindings)
        """Of each tenant, those that are bound in its scopes."""
        self._fresh: dict[bytes, None] = {}
        """Names that were bound here since the last `take_fresh`."""

    def __len__(self) -> int:
        return len(self._bound)

    def bind(
        self, scope: bytes, uuid: str, digest: bytes, *, tenant: str, param: str | None = None
    ) -> None:
        """Bind, or confirm; `scope` is one of `tenant`. Raises `ConflictError` (409) when other
        bytes came with it first."""
        asked = UuidBinding(name_digest(scope, uuid), digest, tenant)
        if self.claim(asked).digest != digest:
            raise ConflictError("this uuid is bound to other media", param=param)

    def resolve(self, scope: bytes, uuid: str) -> bytes | None:
        """The MediaHash bound to a uuid, if it is still remembered."""
        bound = self._bound.get(name_digest(scope, uuid))
        if bound is None:
            return None
        self._names.get(bound.tenant, bound.name)
        return bound.digest

    def peek(self, scope: bytes, uuid: str) -> bytes | None:
        """What `resolve` would answer, without counting as a use."""
        bound = self._bound.get(name_digest(scope, uuid))
        return None if bound is None else bound.digest

    def claim(self, asked: UuidBinding) -> UuidBinding:
        """Bind a name that is not bound yet; what it is bound to."""
        bound = self._bound.get(asked.name)
        if bound is None:
            self._fresh[asked.name] = None
            bound = asked
        self._put(bound)
        return bound

    def learn(self, announced: UuidBinding) -> None:
        """Take over a binding that the engine announced; it replaces one made here."""
        self._fresh.pop(announced.name, None)
        self._put(announced)

    def bindings(self) -> tuple[UuidBinding, ...]:
        """All that are remembered."""
        return tuple(self._bound.values())

    def take_fresh(self) -> tuple[UuidBinding, ...]:
        """What was bound here since the last call, and is still remembered."""
        fresh = tuple(self._bound[name] for name in self._fresh)
        self._fresh.clear()
        return fresh

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the rule that is broken. O(n)."""
        self._names.check_integrity()
        rules = {
            "each is listed once, for its tenant": {
                (bound.tenant, name) for name, bound in self._bound.items()
            }
            == set(self._names)
            and len(self._names) == len(self._bound),
            "what is fresh is bound": self._fresh.keys() <= self._bound.keys(),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise AssertionError(broken)

    def _put(self, binding: UuidBinding) -> None:
        before = self._bound.get(binding.name)
        if before is not None and before.tenant != binding.tenant:
            self._names.remove(before.tenant, before.name)
        self._bound[binding.name] = binding
        for _, name in self._names.put(binding.tenant, binding.name, None):
            del self._bound[name]
            self._fresh.pop(name, None)


def name_digest(scope: bytes, uuid: str) -> bytes:
    """32 bytes for a uuid in a scope: what travels between processes instead of the uuid."""
    return blake3(frame(b"uuid", scope, uuid.encode())).digest()
