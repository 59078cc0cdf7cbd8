"""How a KV block, or a piece of a state or an encoder output, is stored outside the process, and
how a reader knows that it is intact.

    header, 128 bytes │ payload: K and V of all layers, or a piece
    magic · version · namespace · block hash · layout · length · xxh3(payload) · xxh3(header)

Namespace and block hash are the whole key, in full. Everything is checked on every read: flipped
bits, a truncated file and an object of another key are all a miss.

The namespace is everything outside the block hash that decides a block's bytes. The block hash
covers tokens, media and scope; a media key covers the processor's fingerprint, which is a field of
the namespace all the same, for a family whose text depends on it.

A state beside keys and values is found under the hash of the block that it comes after; its
pieces, as large as KV blocks, under digests of hash and number. What its bytes are is in the
namespace of its model, which has no other with states of another kind.

An encoder output is found under its item's key, which covers scope, media bytes and options; its
pieces under digests of key, rows and number. The rest is in the namespace.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import xxhash
from blake3 import blake3

from lookonce.types.kv import KVLayout, OutputLayout, StatePieces

Buffer: TypeAlias = bytes | bytearray | memoryview
MAGIC = b"LOKV"
VERSION = 1
_BODY = struct.Struct("<4sHxx32s32s32sQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = 128


assert _BODY.size + _CHECK.size == HEADER_BYTES


class ObjectLayout(Protocol):
    """What a payload is: `KVLayout` or `OutputLayout`."""

    @property
    def block_bytes(self) -> int: ...

    def describe(self) -> bytes:
        """32 bytes."""


class ObjectFormat:
    """Objects of one namespace and layout."""

    __slots__ = ("_layout", "namespace", "object_bytes", "option", "payload_bytes")

    def __init__(
        self, namespace: bytes, layout: ObjectLayout, *, option: str = "--kv-tier"
    ) -> None:
        if len(namespace) != 32:
            raise ValueError("a namespace is a full 32-byte digest")
        self.option = option
        """What errors about the tiers name."""
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
    states: bytes = b"",
) -> bytes:
    """32 bytes; `rope` is what the model's config says about positions, `states` what the bytes of
    its states are, if it keeps any. Raises `ValueError` without a weights digest: nothing would
    tell two models apart."""
    if not weights_digest:
        raise ValueError("external KV needs a digest of the model's weights")
    positions = json.dumps(rope, sort_keys=True, default=str).encode()
    model = (weights_digest.encode(), layout.describe(), positions, adapter.encode())
    kept = (STATE_VERSION.to_bytes(4, "little"), states) if states else ()
    return _namespace(
        b"lookonce.kv-namespace", LAYOUT_VERSION, *model, processor_fingerprint, *kept
    )


STATE_VERSION = 1
"""Of the pieces of a state: raised when they are made differently."""


def state_piece_keys(block_hash: bytes, pieces: StatePieces) -> list[bytes]:
    """The 32-byte key of each piece of the state after a block."""
    return [state_piece_key(block_hash, number) for number in range(pieces.num_pieces)]


def state_piece_key(block_hash: bytes, number: int) -> bytes:
    return blake3(b"lookonce.state-piece\0" + block_hash + number.to_bytes(8, "little")).digest()


OUTPUT_VERSION = 1
"""Of the pieces of an encoder output: raised when they are made differently."""


def output_namespace_digest(
    *, weights_digest: str, layout: OutputLayout, processor_fingerprint: bytes = b""
) -> bytes:
    """32 bytes: the namespace of a model's encoder outputs. Raises `ValueError` without a weights
    digest."""
    if not weights_digest:
        raise ValueError("external encoder outputs need a digest of the model's weights")
    model = (weights_digest.encode(), layout.describe())
    return _namespace(b"lookonce.encoder-namespace", OUTPUT_VERSION, *model, processor_fingerprint)


def piece_keys(output_key: bytes, num_rows: int, layout: OutputLayout) -> list[bytes]:
    """The 32-byte key of each piece of an encoder output."""
    head = b"lookonce.encoder-piece\0" + output_key + num_rows.to_bytes(8, "little")
    count = layout.num_pieces(num_rows)
    return [blake3(head + number.to_bytes(8, "little")).digest() for number in range(count)]


def _namespace(kind: bytes, version: int, *described: bytes) -> bytes:
    fields = (kind, version.to_bytes(4, "little"), *described)
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return blake3(framed).digest()
