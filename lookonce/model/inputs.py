"""The only place where framework-free arrays become tensors, without copying where possible."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lookonce.types.media import Array, ProcessedItem

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "int64": torch.int64,
    "float32": torch.float32,
    "int32": torch.int32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int16": torch.int16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "bool": torch.bool,
}
"""dtype name of an `Array` → torch's; the same names as `types.media.ITEM_SIZE`."""


def to_tensor(array: Array) -> Tensor:
    """The array's memory as a CPU tensor of its shape. Never write to it: it may be read-only.

    Memory that is not aligned for its dtype (a small message received inline) is copied.
    """
    dtype = DTYPES[array.dtype]
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    raw = np.frombuffer(array.data, np.uint8)
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    # from_dlpack takes read-only memory without the warning of from_numpy and frombuffer.
    tensor: Tensor = from_dlpack(raw)
    return tensor.view(dtype).view(array.shape)


def item_tensors(
    item: ProcessedItem, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """An item's arrays on the device, by name; floating ones in the model's dtype."""
    return {name: _moved(to_tensor(array), dtype, device) for name, array in item.arrays.items()}


def _moved(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted)
