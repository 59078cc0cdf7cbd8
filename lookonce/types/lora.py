"""What every process knows about a LoRA adapter that is served beside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3

Install = Callable[[], None]
"""Lets the runner use what was made; called by the step thread, between two steps."""


class LoRAIdentity(msgspec.Struct, frozen=True, array_like=True):
    """The contents of an adapter. Two folders with equal contents are one adapter, and another
    folder under an old name is another one: caches are keyed by this and never by the name."""

    digest: bytes
    """32 bytes over all matrices and their scales, the root of KV block hashes."""
    encoder_digest: bytes = b""
    """32 bytes over those that change encoder outputs; empty: the adapter changes none, and encoder
    outputs are shared with requests without it."""


_ADAPTED = b"lookonce.adapted-item.1\0"


def adapted_item_key(encoder_digest: bytes, key: bytes) -> bytes:
    """The key of an item's encoder output with an adapter that changes it, 32 bytes; `key` is that
    without one."""
    return blake3(_ADAPTED + encoder_digest + key).digest()


class LoRAInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter by the name under which requests ask for it."""

    name: str
    identity: LoRAIdentity
    rank: int
    """The largest of its matrices."""
    path: str = ""
    """Of its folder; no client is told."""


class ReadAdapter(NamedTuple):
    """An adapter that was read, and how the runner comes to use it."""

    identity: LoRAIdentity
    rank: int
    install: Install
