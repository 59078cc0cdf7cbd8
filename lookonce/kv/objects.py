"""How one KV block is stored outside the process, and how a reader knows that it is intact.

    header, 128 bytes │ payload: K and V of all layers
    magic · version · namespace · block hash · layout · length · xxh3(payload) · xxh3(header)

Namespace and block hash are the whole key, in full. Everything is checked on every read: memory
that decayed, a truncated file and a key that names another object are all a miss.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import xxhash

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
