"""Which KV may be shared at all: everything outside the block chain that decides a block's bytes.

The chain covers tokens, media and scope (its root). A media key covers the processor's fingerprint,
so a block with media in its prefix is bound to the processor without naming it here again; it is a
field all the same, for a family whose text depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from blake3 import blake3

from lookonce.types.kv import KVLayout

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
