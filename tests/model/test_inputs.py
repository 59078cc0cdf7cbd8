"""Arrays become tensors without copies and without writing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
