"""Items that somebody else processed: from hostile bytes to a `ProcessedItem`, and back to bytes.

    base64 ─▶ msgpack {name: {dtype, shape, data}} ─▶ arrays ─▶ judged by the family ─▶ item

Nothing is allocated for what bytes merely claim: arrays are views of the bytes that came, and one
whose shape and data disagree is refused. Two arrays cannot overlap, for each brings its own data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pybase64

from lookonce.errors import LookOnceError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.external_arrays import Arrays, in_model_dtype, refuse_arrays
from lookonce.types.media import ITEM_SIZE, Array, Modality, ProcessedItem

MAX_ARRAYS = 16
MAX_DIMENSIONS = 8


class WireArray(msgspec.Struct, forbid_unknown_fields=True):
    """One array: `data` is its elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, WireArray])


def encode_kwargs(item: ProcessedItem) -> str:
    """The item's arrays as `kwargs_data` carries them."""
    wire = {
        name: WireArray(a.dtype, a.shape, memoryview(a.data)) for name, a in item.arrays.items()
    }
    text: bytes = pybase64.b64encode(_encoder.encode(wire))
    return text.decode("ascii")


def decode_kwargs(text: str) -> dict[str, Array]:
    """The arrays in `kwargs_data`, views of its bytes. Raises `BadRequestError`."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        raise refuse_arrays("kwargs_data is not valid base64") from None
    try:
        wire = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise refuse_arrays(
            "kwargs_data must be msgpack of {name: {dtype, shape, data}}, and nothing after it"
        ) from None
    if len(wire) > MAX_ARRAYS:
        raise refuse_arrays(f"an item has at most {MAX_ARRAYS} arrays")
    return {name: _array(name, array) for name, array in wire.items()}


def arrays_of(kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """NumPy arrays or torch tensors as `Array`s over copies: the caller may write to its own.

    Raises `BadRequestError` for anything else, and for dtypes no item has.
    """
    return {str(name): _copied(str(name), value) for name, value in kwargs.items()}


def given_item(family: ProcessorFamily, modality: Modality, arrays: Arrays) -> ProcessedItem:
    """The item, if this model's processor could have made it. Raises `BadRequestError`."""
    if modality not in family.modalities:
        raise refuse_arrays(f"this model takes no {modality}")
    cast = in_model_dtype(arrays, family.dtype)
    try:
        expansion = family.expansion_of_arrays(modality, cast)
    except LookOnceError as error:
        raise refuse_arrays(error.message) from None
    return ProcessedItem(modality, cast, expansion)


def _array(name: str, wire: WireArray) -> Array:
    shown = repr(name[:40])
    if wire.dtype not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} has a dtype that is not one of {', '.join(ITEM_SIZE)}")
    if len(wire.shape) > MAX_DIMENSIONS:
        raise refuse_arrays(f"{shown} has more than {MAX_DIMENSIONS} dimensions")
    try:
        return Array(wire.dtype, wire.shape, wire.data)
    except ValueError:
        raise refuse_arrays(
            f"{shown}: its shape and the {wire.data.nbytes} bytes of its data disagree"
        ) from None


def _copied(name: str, value: Any) -> Array:
    shown = repr(name[:40])
    if hasattr(value, "detach"):  # a torch tensor: NumPy has no bfloat16, so its bits are taken
        return _copied_tensor(shown, value.detach().cpu().contiguous())
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.name not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} must be a NumPy array or a torch tensor of numbers")
    little = np.array(value, dtype=value.dtype.newbyteorder("<"), order="C", copy=True)
    return Array(value.dtype.name, little.shape, little.tobytes())


def _copied_tensor(shown: str, tensor: Any) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} has dtype {dtype}, which no item has")
    flat = tensor.reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(_int16_of(tensor))
    return Array(dtype, tuple(tensor.shape), flat.numpy().tobytes())


def _int16_of(tensor: Any) -> Any:
    """torch.int16, without importing torch."""
    return tensor.new_empty(0).short().dtype
