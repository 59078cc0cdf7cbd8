"""How one KV block is stored outside the process, and how a reader knows that it is intact.

    header, 128 bytes │ payload: K and V of all layers
    magic · version · namespace · block hash · layout · length · xxh3(payload) · xxh3(header)

Namespace and block hash are the whole key, in full. Everything is checked on every read: flipped
bits, a truncated file and an object of another key are all a miss.

The namespace is everything outside the block hash that decides a block's bytes. The block hash
covers tokens, media and scope; a media key covers the processor's fingerprint, which is a field of
the namespace all the same, for a family whose text depends on it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TypeAlias

import xxhash
from blake3 import blake3

from lookonce.types.kv import KVLayout

Buffer: TypeAlias = bytes | bytearray | memoryview
MAGIC = b"LOKV"
VERSION = 1
_BODY = struct.Struct("<4sHxx32s32s32sQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = 128


assert _BODY.size + _CHECK.size == HEADER_BYTES


class ObjectFormat:
    """Objects of one namespace and layout."""

    __slots__ = ("_layout", "namespace", "object_bytes", "payload_bytes")

    def __init__(self, namespace: bytes, layout: KVLayout) -> None:
        if len(namespace) != 32:
            raise ValueError("a namespace is a full 32-byte digest")
        self.namespace = namespace
        self._layout = layout.describe()
        self.payload_bytes = layout.block_bytes
        self.object_bytes = HEADER_BYTES + self.payload_bytes

    def header(self, key: bytes, payload: Buffer) -> bytes:
        """The header of block `key`. Raises `ValueError` for a payload of another size."""
        if memoryview(payload).nbytes != self.payload_bytes:
            raise ValueError(f"a block takes {self.payload_bytes} bytes")
        digest = xxhash.xxh3_64_intdigest(payload)
        body = _BODY.pack(
            MAGIC, VERSION, self.namespace, key, self._layout, self.payload_bytes, digest
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    def intact(self, key: bytes, header: Buffer, payload: Buffer) -> bool:
        """Whether header and payload are whole, unchanged, and those of block `key`."""
        if memoryview(header).nbytes != HEADER_BYTES:
            return False
        if memoryview(payload).nbytes != self.payload_bytes:
            return False
        return bytes(header) == self.header(key, payload)


LAYOUT_VERSION = 1
"""Of the bytes of a block: raised when `KVPageCopier` orders them differently."""


def namespace_digest(
    *,
    weights_digest: str,
    layout: KVLayout,
    rope: Mapping[str, object],
    adapter: str = "",
    processor_fingerprint: bytes = b"",
) -> bytes:
    """32 bytes; `rope` is what the model's config says about positions. Raises `ValueError`
    without a weights digest: nothing would tell two models apart."""
    if not weights_digest:
        raise ValueError("external KV needs a digest of the model's weights")
    fields = (
        b"lookonce.kv-namespace",
        LAYOUT_VERSION.to_bytes(4, "little"),
        weights_digest.encode(),
        layout.describe(),
        json.dumps(rope, sort_keys=True, default=str).encode(),
        adapter.encode(),
        processor_fingerprint,
    )
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return blake3(framed).digest()
