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
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
from blake3 import blake3

from lookonce.errors import ConflictError

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
        """Bind a name that is not bound yet; the digest that it is bound to."""
        bound = self._digests.get(name)
        if bound is None:
            self._fresh[name] = bound = digest
            if len(self._fresh) > self._max:
                del self._fresh[next(iter(self._fresh))]
        self._put(name, bound)
        return bound

    def learn(self, name: bytes, digest: bytes) -> None:
        """Take over a binding that the engine announced; it replaces one made here."""
        self._fresh.pop(name, None)
        self._put(name, digest)

    def items(self) -> tuple[tuple[bytes, bytes], ...]:
        """Every `(name digest, MediaHash)`."""
        return tuple(self._digests.items())

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
