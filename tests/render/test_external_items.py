"""Bytes of clients become arrays or are refused; nothing is allocated for what they only claim."""

from __future__ import annotations

import math
import tracemalloc

import msgspec
import numpy as np
import pybase64
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import BadRequestError
from lookonce.render.families.arrays import CHECKED_AT_ONCE, check_finite
from lookonce.render.families.registry import load_family
from lookonce.render.media.external_items import (
    arrays_of,
    decode_kwargs,
    encode_kwargs,
    item_from_arrays,
)
from lookonce.types.media import ITEM_SIZE, Array, Expansion, ProcessedItem

EXPANSION = Expansion(((7, 2),), 7)
UNHURRIED = settings(deadline=None, max_examples=60)


def packed(value: object) -> str:
    return pybase64.b64encode(msgspec.msgpack.encode(value)).decode()


def wire(dtype: str = "float32", shape: object = (2, 3), data: object = bytes(24)) -> object:
    return {"pixel_values": {"dtype": dtype, "shape": shape, "data": data}}


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("float64", np.float64(1.7e308).tobytes(), np.float64("nan").tobytes()),
        ("float32", np.float32(-3.4e38).tobytes(), np.float32("-inf").tobytes()),
        ("float16", np.float16(65504).tobytes(), np.float16("inf").tobytes()),
        ("bfloat16", b"\x7f\x7f", b"\xc0\x7f"),
        ("int64", b"\xff" * 8, None),
    ],
)
def test_only_numbers_are_taken_for_numbers(dtype, good, bad):
    check_finite({"x": Array(dtype, (3,), good * 3)})
    if bad is not None:
        with pytest.raises(BadRequestError, match="'x' has values that are NaN or infinite"):
            check_finite({"x": Array(dtype, (3,), good + bad + good)})
    many = CHECKED_AT_ONCE + 1  # the last one is looked at by itself
    with pytest.raises(BadRequestError):
        check_finite({"x": Array("float16", (many,), bytes(2 * many - 2) + b"\x00\x7c")})


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@UNHURRIED
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(
    st.sampled_from(sorted(ITEM_SIZE)), shapes, st.randoms()), max_size=5))  # fmt: skip
def test_arrays_survive_the_way_there(described):
    arrays = {
        name: Array(dtype, shape, draw.randbytes(math.prod(shape) * ITEM_SIZE[dtype]))
        for name, (dtype, shape, draw) in described.items()
    }
    decoded = decode_kwargs(encode_kwargs(ProcessedItem("image", arrays, EXPANSION)))
    assert {n: (a.dtype, tuple(a.shape), bytes(a.data)) for n, a in decoded.items()} == {
        n: (a.dtype, a.shape, bytes(a.data)) for n, a in arrays.items()
    }


@UNHURRIED
@given(st.binary(max_size=300))
def test_any_bytes_are_arrays_or_refused(data):
    try:
        arrays = decode_kwargs(pybase64.b64encode(data).decode())
    except BadRequestError:
        return
    for array in arrays.values():
        assert array.nbytes == math.prod(array.shape) * ITEM_SIZE[array.dtype]


@UNHURRIED
@given(st.text(max_size=60))
def test_any_text_is_base64_or_refused(text):
    with pytest.raises(BadRequestError):
        decode_kwargs(text + "!")


@UNHURRIED
@given(st.data())
def test_a_damaged_item_is_refused_or_says_what_its_bytes_hold(data):
    """One byte changed, some cut off, or some added: never more array than bytes."""
    item = ProcessedItem("image", {"a": Array("int64", (2, 2), bytes(range(32)))}, EXPANSION)
    raw = bytearray(pybase64.b64decode(encode_kwargs(item)))
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(("change", "cut", "add"))):
        case "change":
            raw[at] = data.draw(st.integers(0, 255))
        case "cut":
            del raw[at:]
        case "add":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    try:
        arrays = decode_kwargs(pybase64.b64encode(bytes(raw)).decode())
    except BadRequestError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(raw)


@pytest.mark.parametrize(
    "value",
    [
        wire(data=bytes(23)),
        wire(data=bytes(25)),
        wire(shape=(2**62, 2**62)),
        wire(shape=(2**40,), data=b""),
        wire(shape=(-2, -3)),
        wire(shape=(2, 2**63)),
        wire(shape=(1,) * 9, data=bytes(4)),
        wire(shape="23"),
        wire(dtype="object"),
        wire(dtype=">f4"),
        wire(dtype="complex64"),
        wire(data=[0] * 24),
        wire(data="x" * 24),
        {"pixel_values": [1, 2, 3]},
        {f"a{number}": {"dtype": "uint8", "shape": [1], "data": b"x"} for number in range(17)},
        [],
        None,
    ],
)
def test_what_lies_about_itself_is_refused(value):
    with pytest.raises(BadRequestError):
        decode_kwargs(packed(value))


def test_something_after_the_item_is_refused():
    with pytest.raises(BadRequestError, match="nothing after it"):
        decode_kwargs(pybase64.b64encode(msgspec.msgpack.encode(wire()) + b"\0").decode())


def test_deep_nesting_is_refused():
    with pytest.raises(BadRequestError):
        decode_kwargs(pybase64.b64encode(b"\x91" * 100_000).decode())


def test_nothing_is_allocated_for_a_huge_claim():
    """An array header of four gigabytes, and a shape of an exabyte, in a few bytes."""
    claims = [b"\x81\xa1a\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"]
    texts = [pybase64.b64encode(claim).decode() for claim in claims]
    texts.append(packed(wire(shape=(2**60,))))
    tracemalloc.start()
    try:
        for text in texts:
            with pytest.raises(BadRequestError):
                decode_kwargs(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_two_arrays_never_share_bytes():
    arrays = decode_kwargs(packed({**wire(), "other": wire()["pixel_values"]}))
    first, second = (np.frombuffer(array.data, np.uint8) for array in arrays.values())
    assert not np.shares_memory(first, second)


# --- NumPy arrays and torch tensors ------------------------------------------------------------


def test_the_caller_s_array_is_copied():
    mine = np.ones(4, np.float32)
    taken = arrays_of({"a": mine})
    mine[:] = 0
    assert np.frombuffer(taken["a"].data, "<f4").tolist() == [1, 1, 1, 1]


def test_big_endian_and_strided_arrays_are_brought_into_order():
    values = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    array = arrays_of({"a": values})["a"]
    assert (array.dtype, array.shape) == ("int32", (2, 2))
    assert np.frombuffer(array.data, "<i4").tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool"])
def test_tensors_keep_their_dtype_and_bits(dtype):
    tensor = torch.tensor([[1.5, 0.0], [3.0, 2.5]], requires_grad=dtype == "float32")
    array = arrays_of({"a": tensor.to(getattr(torch, dtype))})["a"]
    assert (array.dtype, array.shape) == (dtype, (2, 2))
    back = torch.frombuffer(bytearray(array.data), dtype=getattr(torch, dtype))
    assert back.tolist() == tensor.to(getattr(torch, dtype)).reshape(-1).tolist()


@pytest.mark.parametrize("value", [[1.0], "x", None, np.array(["a"]), np.zeros(2, np.complex64)])
def test_anything_else_is_refused(value):
    with pytest.raises(BadRequestError):
        arrays_of({"a": value})


# --- checked by the family ----------------------------------------------------------------------


def test_float32_arrays_are_cast_to_the_model_s_dtype(folder):
    family = load_family(folder("llava"), "bfloat16")
    assert family is not None
    width, height = family.largest_size("image", 10**6)
    values = np.ones((3, height, width), np.float32)
    item = item_from_arrays(family, "image", arrays_of({"pixel_values": values}))
    assert item.arrays["pixel_values"].dtype == "bfloat16"
    assert item.expansion == family.expansion_of_size("image", (9, 9), {})


@pytest.mark.parametrize("grid", [(1, 0, 0), (1, -2, -2), (2, 2, 2), (1, 3, 3), (1, 2, 2**40)])
def test_a_grid_that_does_not_fit_the_patches_is_refused(folder, grid):
    family = load_family(folder("qwen2_5_vl"), "float32")
    assert family is not None
    patches = np.zeros((4, 3 * 2 * family.images.patch**2), np.float32)
    arrays = {"pixel_values": patches, "image_grid_thw": np.array(grid, np.int64)}
    with pytest.raises(BadRequestError):
        item_from_arrays(family, "image", arrays_of(arrays))


def test_a_modality_the_model_does_not_take_is_refused(folder):
    family = load_family(folder("llava"), "float32")
    assert family is not None
    with pytest.raises(BadRequestError, match="takes no audio"):
        item_from_arrays(family, "audio", {})
