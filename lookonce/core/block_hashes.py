"""The block hash chain: which K/V a block holds, and for whom.

    root = H(version, scope)
    hash[i] = H(hash[i-1], tokens of block i as int32 bytes, every item that overlaps block i)

Scope is in every hash through the root, so two tenants never share a block. An item enters with
its full key, its place relative to the block and everything about its shape that changes what is
computed (length, rows, embed ranges within the block, grid): equal hashes mean equal K/V. Digests
are whole (32 bytes): a truncated one is a wrong answer waiting.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from lookonce.core.mm_features import Features
from lookonce.core.tokens import TokenBuffer
from lookonce.types.media import MediaFeature

_ROOT = b"lookonce.kv-block.1\0"
_PLAIN_ITEM = struct.Struct("<32sBqqq")
_SHAPED_ITEM = struct.Struct("<32sBqqqqqqq")
_RANGE = struct.Struct("<qq")
_PLAIN, _SHAPED = 0, 1


def root_hash(scope: bytes) -> bytes:
    """Parent of the first block of every prompt of one scope, 32 bytes."""
    return blake3(_ROOT + scope).digest()


def extend_chain(
    chain: list[bytes],
    root: bytes,
    tokens: TokenBuffer,
    features: Features,
    block_size: int,
    num_blocks: int,
) -> None:
    """Append hashes until `chain` covers `num_blocks` full blocks; earlier ones are not read."""
    parent = chain[-1] if chain else root
    for block in range(len(chain), num_blocks):
        start, end = block * block_size, (block + 1) * block_size
        parts = [parent, tokens.raw(start, end)]
        parts += [_describe(features[i], start, end) for i in features.overlapping(start, end)]
        parent = blake3(b"".join(parts)).digest()
        chain.append(parent)


def _describe(feature: MediaFeature, start: int, end: int) -> bytes:
    """Self-delimiting bytes of one item as the block `[start, end)` sees it."""
    base, length, rows = feature.offset - start, feature.length, feature.num_embeds
    if feature.is_embed is None and feature.grid is None:
        return _PLAIN_ITEM.pack(feature.key, _PLAIN, base, length, rows)
    ranges = [
        _RANGE.pack(base + first, base + last)
        for first, last in feature.is_embed or ()
        if base + first < end - start and base + last > 0
    ]
    grid = feature.grid or (-1, -1, -1)
    head = _SHAPED_ITEM.pack(feature.key, _SHAPED, base, length, rows, *grid, len(ranges))
    return head + b"".join(ranges)
