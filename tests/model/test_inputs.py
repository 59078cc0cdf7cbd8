"""Arrays become tensors without copies and without writing."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from lookonce.ipc.codec import MessageEncoder, client_message_decoder
from lookonce.ipc.messages import NO_OPS, KeyedItem, SupplyMedia
from lookonce.model.inputs import DTYPES, item_tensors, to_tensor
from lookonce.types.media import ITEM_SIZE, Array, Expansion, ProcessedItem

CPU = torch.device("cpu")


def address(array: Array) -> int:
    return np.frombuffer(array.data, np.uint8).ctypes.data


@pytest.mark.parametrize("dtype", ITEM_SIZE)
def test_a_tensor_shares_read_only_memory_of_every_dtype(dtype):
    array = Array(dtype, (3, 2), bytes(6 * ITEM_SIZE[dtype]))
    tensor = to_tensor(array)
    assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[dtype], (3, 2))
    assert tensor.data_ptr() == address(array)


def test_values_survive_in_bfloat16():
    values = torch.tensor([[1.5, -2.0], [0.25, 3e4]], dtype=torch.bfloat16)
    array = Array("bfloat16", (2, 2), values.view(torch.uint8).numpy().tobytes())
    assert torch.equal(to_tensor(array), values)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", ctypes.c_float), ("int32", ctypes.c_int32), ("int64", ctypes.c_int64)],
)
def test_elements_of_another_library_in_the_machines_order_are_taken(dtype, kind):
    """ctypes names the order in the buffer's format."""
    array = Array(dtype, (3,), memoryview((kind * 3)(1, 2, 3)))
    assert to_tensor(array).tolist() == [1, 2, 3]
    swapped = memoryview((kind.__ctype_be__ * 3)(1, 2, 3))
    with pytest.raises(ValueError, match="elements"):
        Array(dtype, (3,), swapped)


def test_unaligned_memory_is_copied():
    raw = bytearray(4 * 3 + 1)
    array = Array("float32", (3,), memoryview(raw)[1:])
    tensor = to_tensor(array)
    assert tensor.tolist() == [0.0, 0.0, 0.0]
    assert tensor.data_ptr() % 4 == 0


@pytest.mark.parametrize("shape", [(0, 4), ()])
def test_empty_arrays_and_scalars_have_their_shape(shape):
    size = int(np.prod(shape))
    assert to_tensor(Array("float32", shape, bytes(4 * size))).shape == shape


def test_items_take_the_models_dtype_but_integers_stay():
    item = ProcessedItem(
        "image",
        {"pixels": Array("float32", (2,), bytes(8)), "grid": Array("int64", (3,), bytes(24))},
        Expansion(((1, 1),), 1),
    )
    tensors = item_tensors(item, dtype=torch.bfloat16, device=CPU)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "pixels": torch.bfloat16,
        "grid": torch.int64,
    }


def sound(dtype: str, frames: int = 400) -> ProcessedItem:
    """An audio item as the processor makes it: mel features and a mask."""
    arrays = {
        "input_features": Array(dtype, (128, frames), bytes(ITEM_SIZE[dtype] * 128 * frames)),
        "mask": Array("bool", (frames,), b"\1" * frames),
    }
    return ProcessedItem("audio", arrays, Expansion(((1, 100),), 1))


def received(item: ProcessedItem) -> tuple[ProcessedItem, list[bytes]]:
    """The item as it comes off the wire, and the frames it came in."""
    message = SupplyMedia(1, 1, NO_OPS, "r", (KeyedItem(b"k" * 32, item),))
    frames = [bytes(frame) for frame in MessageEncoder().encode(message)]
    (arrived,) = client_message_decoder().decode(frames).loose
    return arrived.item, frames


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sound_of_the_models_dtype_is_the_frame_it_came_in(dtype):
    item, frames = received(sound(dtype))
    tensor = item_tensors(item, dtype=DTYPES[dtype], device=CPU)["input_features"]
    starts = [np.frombuffer(frame, np.uint8).ctypes.data for frame in frames]
    assert tensor.data_ptr() in starts


def test_sound_of_another_dtype_is_converted_and_what_came_is_left_alone():
    item, frames = received(sound("float32"))
    before = [bytes(frame) for frame in frames]
    tensor = item_tensors(item, dtype=torch.bfloat16, device=CPU)["input_features"]
    tensor.add_(1)
    assert tensor.dtype == torch.bfloat16
    assert frames == before


def test_what_arrives_is_read_only():
    item, _ = received(sound("float32"))
    assert item.arrays["input_features"].data.readonly


def test_memory_with_gaps_is_no_array():
    strided = np.zeros((4, 8), np.float32)[:, ::2]
    with pytest.raises(ValueError, match="not contiguous"):
        Array("float32", (4, 4), strided.data)


NATIVE = [name for name in ITEM_SIZE if name != "bfloat16"]


@pytest.mark.parametrize("dtype", NATIVE)
def test_memory_of_its_own_dtype_is_taken_as_it_is(dtype):
    values = np.arange(6).reshape(3, 2).astype(dtype)
    assert to_tensor(Array(dtype, (3, 2), values.data)).tolist() == values.tolist()


def test_read_only_memory_stays_read_only():
    values = np.arange(4, dtype=np.float32)
    values.flags.writeable = False
    array = Array("float32", (4,), values.data)
    assert array.data.readonly
    assert to_tensor(array).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert address(array) == values.ctypes.data


@pytest.mark.parametrize("raw", ["B", "b", "c"])
def test_bytes_are_taken_for_any_dtype(raw):
    memory = np.arange(4, dtype=np.float32).view(np.uint8).data.cast(raw)
    assert to_tensor(Array("float32", (4,), memory)).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [name for name in NATIVE if ITEM_SIZE[name] > 1])
def test_memory_in_the_other_byte_order_is_refused(dtype):
    swapped = np.arange(4).astype(np.dtype(dtype).newbyteorder(">"))
    with pytest.raises(ValueError, match=f"{dtype} array of shape .* elements '>"):
        Array(dtype, (4,), swapped.data)


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("other", [name for name in NATIVE if name not in ("uint8", "int8")])
def test_memory_of_another_dtype_is_refused_though_its_size_fits(dtype, other):
    values = np.zeros(8 // ITEM_SIZE[other], other)
    if dtype != other:
        with pytest.raises(ValueError, match="got a buffer of elements"):
            Array(dtype, (8 // ITEM_SIZE[dtype],), values.data)
