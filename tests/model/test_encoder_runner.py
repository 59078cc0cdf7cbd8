"""Items are encoded in batches, outputs are held by key, and a failing item fails alone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from lookonce.errors import RequestFailedError
from lookonce.ipc.codec import MessageEncoder, client_message_decoder
from lookonce.ipc.messages import NO_OPS, KeyedItem, SupplyMedia
from lookonce.model.device import StepReads
from lookonce.model.encoder_runner import (
    DTYPES,
    EncodeReport,
    EncoderRunner,
    item_tensors,
    to_tensor,
)
from lookonce.model.families.base import ModelFamily
from lookonce.types.media import ITEM_SIZE, Array, Expansion, ProcessedItem
from lookonce.types.step import EmbedSlice, EncodeItem, StepPlan

WIDTH = 4


class CountingFamily(ModelFamily):
    """Encodes an item of n numbers as n rows of that number; a negative one is an error."""

    modalities = ("image",)

    def __init__(self) -> None:
        self.calls: list[int] = []

    @property
    def row_width(self) -> int:
        return WIDTH

    def batch_key(self, modality, item):
        return None if item["values"][0] == 99 else modality

    def encode(self, modality, items):
        self.calls.append(len(items))
        values = torch.cat([item["values"] for item in items])
        if (values < 0).any():
            raise ValueError("negative")
        rows = values[:, None].expand(-1, WIDTH).contiguous()
        return list(rows.split([len(item["values"]) for item in items]))


@pytest.fixture
def family() -> CountingFamily:
    return CountingFamily()


@pytest.fixture
def encoder(family) -> EncoderRunner:
    return EncoderRunner(family, torch.float32, torch.device("cpu"))


def item(name: str, *values: float, rows: int | None = None) -> EncodeItem:
    data = torch.tensor(values, dtype=torch.float32).numpy().tobytes()
    expansion = Expansion(((7, len(values) if rows is None else rows),), 7)
    array = Array("float32", (len(values),), data)
    return EncodeItem(name.encode(), ProcessedItem("image", {"values": array}, expansion))


def test_items_of_one_kind_are_encoded_in_one_call(encoder, family):
    report = encoder.run([item("a", 1, 1), item("b", 2)])
    assert family.calls == [2]
    assert set(report.seconds) == {b"a", b"b"}
    rows = encoder.rows([EmbedSlice(b"b", 0, 1, 0), EmbedSlice(b"a", 1, 2, 1)])
    assert rows[:, 0].tolist() == [2, 1]


def test_items_that_must_be_alone_are(encoder, family):
    encoder.run([item("a", 99), item("b", 99), item("c", 1)])
    assert sorted(family.calls) == [1, 1, 1]


def test_a_failing_item_fails_alone(encoder):
    report = encoder.run([item("good", 1), item("bad", -1), item("fine", 2)])
    assert list(report.failed) == [b"bad"]
    assert isinstance(report.failed[b"bad"], RequestFailedError)
    assert b"good" in encoder
    assert b"fine" in encoder
    assert b"bad" not in encoder


def test_output_of_another_size_than_promised_is_a_failure(encoder):
    assert list(encoder.run([item("short", 1, 2, rows=3)]).failed) == [b"short"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_output_that_is_no_number_fails_alone(encoder, wrong):
    report = encoder.run([item("good", 1), item("bad", 1, wrong), item("fine", 2)])
    assert list(report.failed) == [b"bad"]
    assert "not finite" in report.failed[b"bad"].message
    assert b"good" in encoder
    assert b"fine" in encoder
    assert b"bad" not in encoder


def execute(encoder: EncoderRunner, step: StepPlan) -> EncodeReport:
    """The report of a step once it was waited for."""
    reads = StepReads(torch.device("cpu"))
    report = encoder.execute(step, reads)
    reads.wait()
    encoder.check(report)
    return report


def plan(**fields) -> StepPlan:
    return StepPlan(1, **fields)


def test_an_output_goes_to_the_host_and_comes_back_without_being_encoded_again(encoder, family):
    execute(encoder, plan(encode=(item("a", 1, 2),)))
    execute(encoder, plan(offload=(b"a",), dropped_outputs=(b"a",)))
    assert b"a" not in encoder
    assert encoder.num_host_bytes == 2 * WIDTH * 4
    execute(encoder, plan(restore=(b"a",)))
    assert encoder.rows([EmbedSlice(b"a", 0, 2, 0)])[:, 0].tolist() == [1, 2]
    assert family.calls == [1]


def test_one_output_may_leave_and_another_come_back_in_one_step(encoder):
    execute(encoder, plan(encode=(item("a", 1), item("b", 2))))
    execute(encoder, plan(offload=(b"a",), dropped_outputs=(b"a",)))
    report = execute(encoder, plan(offload=(b"b",), dropped_outputs=(b"b",), restore=(b"a",)))
    assert report.lost_copies == []
    assert (b"a" in encoder, b"b" in encoder) == (True, False)


def test_a_dropped_copy_is_gone(encoder):
    execute(encoder, plan(encode=(item("a", 1),)))
    execute(encoder, plan(offload=(b"a",), dropped_outputs=(b"a",)))
    execute(encoder, plan(dropped_host=(b"a",)))
    assert encoder.num_host_bytes == 0
    assert list(execute(encoder, plan(restore=(b"a",))).failed) == [b"a"]


def test_an_output_there_is_not_is_a_lost_copy_and_no_error(encoder):
    assert execute(encoder, plan(offload=(b"a",))).lost_copies == [b"a"]


def test_held_outputs_are_not_encoded_again(encoder, family):
    encoder.run([item("a", 1)])
    encoder.run([item("a", 1)])
    assert family.calls == [1]


def test_dropping_frees_exactly_the_items_own_bytes(encoder):
    encoder.run([item("a", 1, 1, 1), item("b", 2)])
    assert encoder.num_bytes == 4 * WIDTH * 4
    encoder.drop([b"a", b"never seen"])
    assert encoder.num_bytes == WIDTH * 4
    kept = encoder.rows([EmbedSlice(b"b", 0, 1, 0)])
    assert kept.untyped_storage().nbytes() == WIDTH * 4


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
