"""How the pool and a worker process talk: small typed messages, bulk bytes in anonymous memory.

A message is a 4-byte length and msgpack on a unix socket; encoded media (there) and arrays (back)
travel beside it as a file descriptor of anonymous memory, which the receiver maps. Nothing has a
name that could leak, and the kernel frees it with its last mapping, whoever dies.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import socket
import tempfile
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from lookonce.errors import LookOnceError, error_to_wire
from lookonce.render.families.base import Options
from lookonce.render.media.processing import Processed, ProcessingSettings
from lookonce.types.media import (
    ITEM_SIZE,
    Array,
    Buffer,
    Expansion,
    Modality,
    ProcessedItem,
)

ALIGNMENT = 64
"""Arrays start at multiples of this, in bytes, so that every dtype may be viewed in place."""
HEADER_BYTES = 4

M = TypeVar("M")


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `Ready` or `Failed`."""

    settings: ProcessingSettings


class Work(msgspec.Struct, frozen=True, tag="work", array_like=True):
    """One job; its encoded bytes are the memory beside the message."""

    modality: Modality
    options: Options
    num_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    pass


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where an array lies in the memory beside the message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    modality: Modality
    expansion: Expansion
    arrays: tuple[Placed, ...]
    num_bytes: int
    decode_ms: float
    process_ms: float


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    error: tuple[str, str, str | None]


Request = Configure | Work
Reply = Ready | Done | Failed
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class LinkClosedError(Exception):
    """The other side is gone, or has lost its mind: what it sent is no message."""


def send(link: socket.socket, message: Request | Reply, memory: int | None = None) -> None:
    """`memory` is a file descriptor that the receiver gets a copy of."""
    body = msgspec.msgpack.encode(message)
    frame = len(body).to_bytes(HEADER_BYTES, "little") + body
    try:
        # The descriptor rides on the first byte; sendmsg may take only part of the frame.
        sent = socket.send_fds(link, [frame], [] if memory is None else [memory])
        link.sendall(frame[sent:])
    except (BrokenPipeError, ConnectionError):
        raise LinkClosedError from None


def receive(link: socket.socket, messages: msgspec.msgpack.Decoder[M]) -> tuple[M, int | None]:
    """The next message and the descriptor that came with it. Raises `LinkClosedError`."""
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(link, HEADER_BYTES, 1)
        if not head:
            raise LinkClosedError
        head += _read(link, HEADER_BYTES - len(head))
        message = messages.decode(_read(link, int.from_bytes(head, "little")))
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ConnectionError | msgspec.DecodeError):
            raise LinkClosedError from None
        raise
    return message, fds[0] if fds else None


def _read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            raise LinkClosedError
        data += chunk
    return bytes(data)


def new_memory(pieces: Iterable[tuple[int, Buffer]]) -> int:
    """A descriptor of anonymous memory with the pieces written at their offsets."""
    fd = _anonymous_file()
    try:
        for offset, piece in pieces:
            view = memoryview(piece)
            while view.nbytes:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int | None, num_bytes: int) -> memoryview:
    """The memory, read-only; it lives as long as the view. Closes the descriptor.

    Raises `OSError` when it did not arrive: the kernel drops it where this process has too many.
    """
    if fd is None:
        if num_bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return memoryview(b"")
    with contextlib.closing(os.fdopen(fd, "rb")) as file:
        if num_bytes == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lookonce-media", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send_processed(link: socket.socket, processed: Processed) -> None:
    """A worker's answer: the item's arrays side by side in one memory."""
    placed, pieces, end = [], [], 0
    for name, array in processed.item.arrays.items():
        placed.append(Placed(name, array.dtype, array.shape, end))
        pieces.append((end, array.data))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    last = max((offset + piece.nbytes for offset, piece in pieces), default=0)
    item = processed.item
    message = Done(
        modality=item.modality,
        expansion=item.expansion,
        arrays=tuple(placed),
        num_bytes=last,
        decode_ms=processed.decode_ms,
        process_ms=processed.process_ms,
    )
    memory = new_memory(pieces)
    try:
        send(link, message, memory)
    finally:
        os.close(memory)


def send_error(link: socket.socket, error: LookOnceError) -> None:
    send(link, Failed(error_to_wire(error)))


def processed_from(message: Done, fd: int | None) -> Processed:
    """The item a worker sent, its arrays views of the mapped memory."""
    memory = map_memory(fd, message.num_bytes)
    arrays = {place.name: _array(place, memory) for place in message.arrays}
    item = ProcessedItem(message.modality, arrays, message.expansion)
    return Processed(item, message.decode_ms, message.process_ms)


def _array(place: Placed, memory: memoryview) -> Array:
    end = place.offset + math.prod(place.shape) * ITEM_SIZE[place.dtype]
    return Array(place.dtype, place.shape, memory[place.offset : end])
