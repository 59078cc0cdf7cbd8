"""Messages survive the way through frames; arrays are not copied; nonsense is a ProtocolError."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import ProtocolError
from lookonce.ipc.codec import (
    INLINE_LIMIT,
    MessageEncoder,
    client_message_decoder,
    engine_message_decoder,
    frames_nbytes,
)
from lookonce.types.media import Array
from tests.support.ipc_samples import client_messages, engine_messages, item, request, update


def round_trip(message):
    return client_message_decoder().decode(MessageEncoder().encode(message))


@given(client_messages)
def test_every_client_message_comes_out_as_it_went_in(message):
    assert round_trip(message) == message


@pytest.mark.parametrize("message", engine_messages, ids=lambda m: type(m).__name__)
def test_every_engine_message_comes_out_as_it_went_in(message):
    assert engine_message_decoder().decode(MessageEncoder().encode(message)) == message


def test_large_arrays_are_frames_that_view_their_own_buffers():
    message = update(1, 10, INLINE_LIMIT - 1, INLINE_LIMIT, 100_000)
    large = list(message.ops.adds[0].item.arrays.values())[2:]
    head, *frames = MessageEncoder().encode(message)
    assert len(head) < 2 * INLINE_LIMIT + 500
    assert [np.shares_memory(a.data, f) for a, f in zip(large, frames, strict=True)] == [True] * 2


def test_decoded_arrays_view_their_frames_and_are_read_only():
    frames = MessageEncoder().encode(update(1, 50_000))
    writable = [frames[0], bytearray(frames[1])]
    arrays = client_message_decoder().decode(writable).ops.adds[0].item.arrays
    assert np.shares_memory(arrays["array0"].data, writable[1])
    assert arrays["array0"].data.readonly


def test_bfloat16_empty_and_scalar_arrays_keep_dtype_and_shape():
    made = item(4096, dtype="bfloat16")
    made.arrays["empty"] = Array("float32", (0, 3), b"")
    made.arrays["scalar"] = Array("int64", (), bytes(8))
    message = update(1, 1)
    message.ops.adds[0].item.arrays.update(made.arrays)
    arrays = round_trip(message).ops.adds[0].item.arrays
    assert {name: (a.dtype, a.shape) for name, a in arrays.items() if name != "array0"} == {
        "empty": ("float32", (0, 3)),
        "scalar": ("int64", ()),
    }
    assert (arrays["array0"].dtype, arrays["array0"].shape) == ("bfloat16", (2048,))


def test_one_encoder_serves_many_messages():
    encoder, decoder = MessageEncoder(), client_message_decoder()
    for seq, size in enumerate((2000, 0, 5000), 1):
        assert decoder.decode(encoder.encode(update(seq, size))) == update(seq, size)


def test_a_message_weighs_what_its_frames_do():
    assert 5000 < frames_nbytes(MessageEncoder().encode(update(1, 2000, 3000))) < 5500


@given(st.lists(st.binary(max_size=50), max_size=4))
def test_any_other_frames_are_a_protocol_error(frames):
    with pytest.raises(ProtocolError):
        client_message_decoder().decode(frames)


@given(st.data())
def test_a_message_with_one_byte_changed_decodes_or_is_a_protocol_error(data):
    head, *rest = MessageEncoder().encode(update(1, 2000))
    at = data.draw(st.integers(0, len(head) - 1))
    spoilt = bytearray(head)
    spoilt[at] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        client_message_decoder().decode([spoilt, *rest])


def wire_update(array: object) -> bytes:
    """An `UpdateCache` with one array in whatever form."""
    processed = ["image", {"x": array}, [[[9, 1]], 9]]
    return msgspec.msgpack.encode(["update", 1, 1, [[], [[b"k", processed]]]])


@pytest.mark.parametrize(
    ("array", "frames"),
    [
        (["uint8", [2000], 0], []),
        (["uint8", [2000], -1], [bytes(2000)]),
        (["uint8", [2000], 0], [bytes(1999)]),
        (["uint8", [2], bytes(2)], [b"never used"]),
        (["complex64", [1], bytes(8)], []),
        (["uint8", [-1], b""], []),
        (["uint8", [2]], []),
        ("nonsense", []),
    ],
    ids=["no frame", "negative", "short", "unused", "dtype", "shape", "missing", "text"],
)
def test_arrays_that_do_not_agree_with_their_frames_are_refused(array, frames):
    with pytest.raises(ProtocolError):
        client_message_decoder().decode([wire_update(array), *frames])


def test_two_arrays_cannot_share_a_frame():
    two = {"x": ["uint8", [2000], 0], "y": ["uint8", [2000], 0]}
    head = msgspec.msgpack.encode(["update", 1, 1, [[], [[b"k", ["image", two, [[[9, 1]], 9]]]]]])
    with pytest.raises(ProtocolError, match="twice"):
        client_message_decoder().decode([head, bytes(2000)])


def test_sampling_values_out_of_range_are_refused_as_protocol_errors():
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(["submit", 1, 1, [], None]))
    raw[4] = ["r", b"s", ["int32", [1], bytes(4)], [], {"temperature": -5.0}, 0.0]
    with pytest.raises(ProtocolError, match="temperature"):
        client_message_decoder().decode([msgspec.msgpack.encode(raw)])


def test_only_arrays_and_plain_data_can_be_sent():
    class Strange(msgspec.Struct):
        what: object

    with pytest.raises(NotImplementedError):
        MessageEncoder().encode(Strange(object()))


def test_the_sample_request_has_an_inline_prompt():
    assert len(MessageEncoder().encode(request())) == 1
