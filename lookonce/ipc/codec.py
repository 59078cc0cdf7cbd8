"""Messages to frames and back: msgpack for the structure, arrays beside it without copies.

A message becomes `[head, array frame, array frame, ...]`. Inside the head an `Array` is
`[dtype, shape, payload]`. The payload is its bytes (below `INLINE_LIMIT`), the number of the frame
that holds them, or, for an array in a slab, `[slab number, offset, use]`. Decoded arrays are
read-only views into their frames, or into the engine's own mapping of the slab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from lookonce.errors import LookOnceError, ProtocolError
from lookonce.ipc.messages import ClientMessage, EngineMessage
from lookonce.types.media import ITEM_SIZE, Array, Buffer

INLINE_LIMIT = 1024
"""Arrays of fewer bytes travel inside the head: an own frame would cost more than the copy."""

Message = TypeVar("Message")
SlabReference = tuple[int, int, int]
"""Slab number, offset in bytes, and which use of the slab this is (`types.media.Slab`)."""
_WireArray = tuple[str, tuple[int, ...], int | bytes | SlabReference]
ReadSlab = Callable[[str, tuple[int, ...], int, SlabReference], Array]
"""The array of a dtype, a shape and a number of bytes at a place in a slab of the message's sender.
Raises `ProtocolError`."""


class MessageEncoder:
    """Turns messages into frames. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._msgpack = msgspec.msgpack.Encoder(enc_hook=self._array)
        self._frames: list[Buffer] = []

    def encode(self, message: msgspec.Struct) -> list[Buffer]:
        """The head, then one frame per large array: views of the arrays' own buffers."""
        frames = self._frames = []
        try:
            head = self._msgpack.encode(message)
        finally:
            self._frames = []  # an encoder is part of a cycle: it must not keep media
        return [head, *frames]

    def _array(self, value: object) -> object:
        if not isinstance(value, Array):
            raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")
        place = value.place
        if place is not None:
            slab = place.slab
            return value.dtype, value.shape, (slab.number, place.offset, slab.next_use())
        if value.nbytes < INLINE_LIMIT:
            return value.dtype, value.shape, value.data
        self._frames.append(value.data)
        return value.dtype, value.shape, len(self._frames) - 1


class _Named(msgspec.Struct, array_like=True):
    """The first field of `GenerateRequest`; later fields are ignored."""

    request_id: str


class _Submission(msgspec.Struct, tag="submit", array_like=True):
    """The fields of a `Submit` up to its request id."""

    epoch: int
    seq: int
    ops: msgspec.Raw
    request: _Named


class _Supply(msgspec.Struct, tag="supply", array_like=True):
    """The fields of a `SupplyMedia` up to its request id."""

    epoch: int
    seq: int
    ops: msgspec.Raw
    request_id: str


class _Opening(_Submission, tag="open_session", array_like=True):
    """The fields of an `OpenSession` up to its request id."""


class _Extension(_Supply, tag="extend_session", array_like=True):
    """The fields of an `ExtendSession` up to its request id."""


_ENVELOPES = msgspec.msgpack.Decoder(_Submission | _Supply | _Opening | _Extension)


def request_id_of(frames: Sequence[Buffer]) -> str | None:
    """The request id of a message that cannot be decoded, if that much can be read."""
    try:
        envelope = _ENVELOPES.decode(frames[0])
    except (msgspec.MsgspecError, IndexError, ValueError, RecursionError):
        return None
    return envelope.request.request_id if isinstance(envelope, _Submission) else envelope.request_id


class MessageDecoder(Generic[Message]):
    """Turns frames into messages of one union. Not for use by two threads at once."""

    def __init__(self, union: Any) -> None:
        self._msgpack: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            union, dec_hook=self._array
        )
        self._frames: Sequence[Buffer] = ()
        self._used: set[int] = set()
        self._read_slab: ReadSlab = _no_slabs

    def decode(self, frames: Sequence[Buffer], read_slab: ReadSlab | None = None) -> Message:
        """The message whose head is the first frame. Raises `ProtocolError` for anything else.

        `read_slab` makes the arrays that lie in slabs; without it there must be none.
        """
        if not frames:
            raise ProtocolError("a message without frames")
        self._frames = frames[1:]
        self._used = set()
        self._read_slab = read_slab or _no_slabs
        try:
            message = self._msgpack.decode(frames[0])
        except (msgspec.MsgspecError, LookOnceError, ValueError, RecursionError) as error:
            raise ProtocolError(f"malformed message: {error}") from error
        finally:
            num_frames, self._frames = len(self._frames), ()
            self._read_slab = _no_slabs
        if len(self._used) != num_frames:
            raise ProtocolError(f"{num_frames} array frames came, {len(self._used)} were used")
        return message

    def _array(self, kind: type, value: object) -> object:
        if kind is not Array:
            raise NotImplementedError(f"a message cannot hold a {kind.__name__}")
        dtype, shape, payload = msgspec.convert(value, _WireArray)
        if isinstance(payload, bytes):
            return Array(dtype, shape, payload)
        if isinstance(payload, tuple):
            if dtype not in ITEM_SIZE or any(length < 0 for length in shape):
                raise ValueError(f"an array of {dtype} of shape {shape} cannot lie in a slab")
            return self._read_slab(dtype, shape, math.prod(shape) * ITEM_SIZE[dtype], payload)
        if not 0 <= payload < len(self._frames) or payload in self._used:
            raise ValueError(f"array frame {payload} does not exist or is used twice")
        self._used.add(payload)
        return Array(dtype, shape, memoryview(self._frames[payload]).toreadonly())


def _no_slabs(dtype: str, shape: tuple[int, ...], nbytes: int, reference: SlabReference) -> Array:
    raise ProtocolError("an array in a slab came where there are none")


def client_message_decoder() -> MessageDecoder[ClientMessage]:
    """The decoder of the engine process."""
    return MessageDecoder(ClientMessage)


def engine_message_decoder() -> MessageDecoder[EngineMessage]:
    """The decoder of an API process."""
    return MessageDecoder(EngineMessage)


def frames_nbytes(frames: Sequence[Buffer]) -> int:
    """Bytes of all frames: what flow control counts a message with."""
    return sum(
        len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames
    )
