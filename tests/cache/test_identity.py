"""Identity: equal content has one digest, and nothing else has."""

import io

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.cache.identity import (
    UuidBindings,
    external_hash,
    frame,
    item_key,
    media_hash,
    name_digest,
    scope_digest,
)
from lookonce.errors import ConflictError, http_status
from lookonce.types.media import UuidBinding

PLAIN = {"modality": "image", "fingerprint": b"clip-1"}


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_the_container_of_the_bytes_does_not_matter():
    data = png(Image.new("RGB", (5, 4), "red"))
    hashes = {media_hash(kind, **PLAIN) for kind in (data, bytearray(data), memoryview(data))}
    assert len(hashes) == 1
    assert media_hash(memoryview(data + data)[::2], **PLAIN) == media_hash(
        (data + data)[::2], **PLAIN
    )


def test_digests_are_whole_whatever_the_algorithm():
    assert len(media_hash(b"x", modality="image")) == 32
    assert len(media_hash(b"x", modality="image", algorithm="sha256")) == 32
    assert media_hash(b"x", modality="image") != media_hash(
        b"x", modality="image", algorithm="sha256"
    )
    with pytest.raises(ValueError, match="md5"):
        media_hash(b"x", modality="image", algorithm="md5")


def test_the_digest_is_the_documented_one():
    """Clients compute it too (`lookonce.media_hash`): changing it is a new schema version."""
    fields = [b"media", b"1", b"audio", b"fp", b"\x80", b"\x81\xa1a\x01", b"encoded", b"abc"]
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert blake3(framed).digest() == media_hash(
        b"abc", modality="audio", fingerprint=b"fp", processor_options={"a": 1}
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"data": b"picturf"},
        {"data": b"picture\0"},
        {"modality": "audio"},
        {"fingerprint": b"clip-2"},
        {"decode_options": {"mode": "RGB"}},
        {"processor_options": {"mode": "RGB"}},
        {"processor_options": {"size": 1}},
        {"processor_options": {"size": 1.0}},
        {"processor_options": {"size": "1"}},
        {"processor_options": {"size": True}},
        {"processor_options": {"size": {"height": 1}}},
    ],
)
def test_every_field_counts(changed):
    fields = {"data": b"picture", "modality": "image", "fingerprint": b"clip-1"}
    assert media_hash(**fields) != media_hash(**(fields | changed))


def test_option_values_that_python_takes_for_equal_stay_apart():
    variants = [{"size": value} for value in (1, 1.0, True, "1", None, [1], b"1")]
    assert len({media_hash(b"x", processor_options=v, modality="image") for v in variants}) == 7


def test_options_compare_by_value():
    one = {"b": [1, 2], "a": {"y": 1, "x": 2}}
    same = {"a": {"x": 2, "y": 1}, "b": (1, 2)}
    assert media_hash(b"x", modality="image", processor_options=one) == media_hash(
        b"x", modality="image", processor_options=same
    )
    assert media_hash(b"x", modality="image", decode_options={}) == media_hash(
        b"x", modality="image"
    )


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_fields_cannot_be_shifted_into_one_another(one, other):
    assert (frame(*one) == frame(*other)) == (one == other)


def test_pictures_of_equal_raw_bytes_differ_by_size_mode_and_palette():
    raw = bytes(range(12))
    palette = Image.frombytes("P", (4, 3), raw)
    palette.putpalette([1, 2, 3] * 12)
    other_palette = palette.copy()
    other_palette.putpalette([3, 2, 1] * 12)
    transparent = palette.copy()
    transparent.info["transparency"] = 0
    rotated = Image.frombytes("L", (4, 3), raw)
    rotated.getexif()[0x0112] = 6
    pictures = [
        Image.frombytes("L", (4, 3), raw),
        Image.frombytes("L", (3, 4), raw),
        Image.frombytes("RGB", (2, 2), raw),
        Image.frombytes("RGB", (4, 1), raw),
        Image.frombytes("RGBA", (3, 1), raw),
        palette,
        other_palette,
        transparent,
        rotated,
    ]
    assert len({media_hash(picture, modality="image") for picture in pictures}) == len(pictures)


def test_a_decoded_picture_hashes_alike_each_time_and_unlike_its_file():
    data = png(Image.new("P", (6, 6), 3))
    loaded = [Image.open(io.BytesIO(data)) for _ in range(2)]
    assert media_hash(loaded[0], modality="image") == media_hash(loaded[1], modality="image")
    assert media_hash(loaded[0], modality="image") != media_hash(data, modality="image")


def test_arrays_of_equal_raw_bytes_differ_by_dtype_and_shape():
    base = np.arange(16, dtype=np.int32)
    arrays = [
        base,
        base.reshape(4, 4),
        base.reshape(2, 8),
        base.view(np.float32),
        base.view(np.uint8),
        base.view(">i4"),
    ]
    assert len({media_hash(array, modality="audio") for array in arrays}) == len(arrays)
    assert media_hash(base.tobytes(), modality="audio") != media_hash(base, modality="audio")


def test_the_memory_layout_of_an_array_does_not_matter():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert media_hash(array.T, modality="image") == media_hash(array.T.copy(), modality="image")
    assert media_hash(array.T, modality="image") != media_hash(array, modality="image")


@pytest.mark.parametrize("data", ["text", 7, None, np.array([{}], dtype=object)])
def test_what_has_no_bytes_is_refused(data):
    with pytest.raises(TypeError):
        media_hash(data, modality="image")


def test_a_salt_narrows_the_tenant_and_never_replaces_it():
    scopes = [
        scope_digest("", None),
        scope_digest("", ""),
        scope_digest("a", None),
        scope_digest("a", ""),
        scope_digest("a", "s"),
        scope_digest("b", "s"),
        scope_digest("as", None),
        scope_digest("", "s"),
    ]
    assert len(set(scopes)) == len(scopes)
    assert all(len(scope) == 32 for scope in scopes)


def test_a_key_joins_two_whole_digests():
    what, mine, yours = media_hash(b"x", modality="image"), scope_digest("a", None), bytes(32)
    assert len(item_key(mine, what)) == 32
    assert item_key(mine, what) != item_key(yours, what)
    assert item_key(mine, what) != item_key(what, mine)
    with pytest.raises(ValueError, match="32 bytes"):
        item_key(mine, what[:16])


def test_a_hash_a_client_chose_reaches_no_real_one():
    real = media_hash(b"x", modality="image")
    assert external_hash(real, modality="image") != real
    assert external_hash(b"a", modality="image") != external_hash(b"a", modality="audio")


MINE, YOURS = b"m" * 32, b"y" * 32


CAT, DOG = b"c" * 32, b"d" * 32


def test_the_first_digest_counts():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT, tenant="me")
    uuids.bind(MINE, "pet", CAT, tenant="me")
    assert uuids.resolve(MINE, "pet") == CAT


def test_other_bytes_are_a_conflict_that_names_the_part():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT, tenant="me")
    with pytest.raises(ConflictError) as error:
        uuids.bind(MINE, "pet", DOG, tenant="me", param="messages[0].content[1]")
    assert http_status(error.value) == 409
    assert error.value.param == "messages[0].content[1]"
    assert uuids.resolve(MINE, "pet") == CAT


def test_scopes_do_not_meet():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT, tenant="me")
    assert uuids.resolve(YOURS, "pet") is None
    uuids.bind(YOURS, "pet", DOG, tenant="you")
    assert uuids.resolve(MINE, "pet") == CAT


def test_the_binding_used_longest_ago_is_forgotten_first():
    uuids = UuidBindings(max_bindings=2)
    uuids.bind(MINE, "one", CAT, tenant="me")
    uuids.bind(MINE, "two", CAT, tenant="me")
    uuids.resolve(MINE, "one")
    uuids.bind(MINE, "three", CAT, tenant="me")
    assert len(uuids) == 2
    assert uuids.resolve(MINE, "two") is None
    assert uuids.resolve(MINE, "one") == CAT
    assert len(uuids.take_fresh()) == 2


TENANTS = ("few", "some", "flood")
BINDS = st.tuples(st.sampled_from(TENANTS), st.integers(0, 30))


@given(st.lists(BINDS, max_size=120), st.integers(3, 20), st.integers(0, 119))
def test_no_tenant_loses_bindings_of_its_equal_share(binds, most, read_at):
    """Each tenant's latest names are remembered, as many as an equal share of all."""
    uuids = UuidBindings(max_bindings=most)
    latest: dict[str, dict[str, None]] = {tenant: {} for tenant in TENANTS}
    for number, (tenant, name) in enumerate(binds):
        uuids.bind(scope_digest(tenant, None), str(name), CAT, tenant=tenant)
        latest[tenant].pop(str(name), None)
        latest[tenant][str(name)] = None
        if number == read_at:
            fresh = uuids.take_fresh()
            assert {each.name for each in fresh} <= {each.name for each in uuids.bindings()}
        uuids.check_integrity()
    for tenant, names in latest.items():
        for name in list(names)[-(most // len(TENANTS)) :]:
            assert uuids.resolve(scope_digest(tenant, None), name) == CAT, (tenant, name)


def test_salts_are_of_one_tenant():
    uuids = UuidBindings(max_bindings=4)
    uuids.bind(MINE, "pet", CAT, tenant="me")
    for number in range(10):
        uuids.bind(scope_digest("you", str(number)), "pet", CAT, tenant="you")
    assert uuids.resolve(MINE, "pet") == CAT


def test_new_bindings_are_handed_out_once():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT, tenant="me")
    uuids.bind(MINE, "pet", CAT, tenant="me")
    assert uuids.take_fresh() == (UuidBinding(name_digest(MINE, "pet"), CAT, "me"),)
    assert uuids.take_fresh() == ()


def test_what_the_engine_announces_overrules_and_is_not_news():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT, tenant="me")
    uuids.learn(UuidBinding(name_digest(MINE, "pet"), DOG, "me"))
    assert uuids.resolve(MINE, "pet") == DOG
    assert uuids.take_fresh() == ()
