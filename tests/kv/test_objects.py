"""An object is read as what was stored under that very key, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.kv.objects import HEADER_BYTES, ObjectFormat, namespace_digest
from lookonce.types.kv import KVLayout
from tests.support.kv.tiers import LAYOUT, NAMESPACE, OBJECTS, SIZE, key, payload


def test_what_was_stored_is_intact() -> None:
    header = OBJECTS.header(key(1), payload(1))
    assert len(header) == HEADER_BYTES
    assert OBJECTS.intact(key(1), header, payload(1))


@given(st.integers(0, (HEADER_BYTES + SIZE) * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    stored = bytearray(OBJECTS.header(key(1), payload(1)) + bytes(payload(1)))
    stored[bit // 8] ^= 1 << bit % 8
    assert not OBJECTS.intact(key(1), stored[:HEADER_BYTES], stored[HEADER_BYTES:])


@given(st.integers(0, HEADER_BYTES + SIZE - 1))
def test_any_truncation_is_found(length: int) -> None:
    stored = (OBJECTS.header(key(1), payload(1)) + bytes(payload(1)))[:length]
    assert not OBJECTS.intact(key(1), stored[:HEADER_BYTES], stored[HEADER_BYTES:])


def test_another_key_namespace_or_layout_is_another_object() -> None:
    header = OBJECTS.header(key(1), payload(1))
    assert not OBJECTS.intact(key(2), header, payload(1))
    assert not ObjectFormat(bytes(32), LAYOUT).intact(key(1), header, payload(1))
    turned = KVLayout(num_layers=2, block_size=4, num_kv_heads=8, head_dim=2, dtype="float32")
    assert turned.block_bytes == LAYOUT.block_bytes
    assert not ObjectFormat(NAMESPACE, turned).intact(key(1), header, payload(1))


def test_every_field_of_the_namespace_counts() -> None:
    base = {"weights_digest": "ab", "layout": LAYOUT, "rope": {"theta": 1e4}}
    half = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float16")
    variants = [
        {},
        {"weights_digest": "ac"},
        {"layout": half},
        {"rope": {"theta": 1e5}},
        {"adapter": "x"},
        {"processor_fingerprint": b"x"},
        {"weights_digest": "a", "adapter": "b"},
    ]
    digests = {namespace_digest(**{**base, **variant}) for variant in variants}  # type: ignore[arg-type]
    assert len(digests) == len(variants)


def test_a_model_without_a_digest_gets_no_namespace() -> None:
    with pytest.raises(ValueError, match="weights"):
        namespace_digest(weights_digest="", layout=LAYOUT, rope={})
