"""A worker process of the media pool: `python -m lookonce.render.media.worker FD`.

It decodes what strangers send, so it is a process of its own: a decoder that crashes takes only
its job along. It ends when the pool's end of the socket closes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np
from PIL import Image

from lookonce.errors import LookOnceError, UnprocessableMediaError, error_to_wire
from lookonce.render.families.base import Options
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
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


class ConfigureWorker(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `WorkerReady` or `JobFailed`."""

    settings: ProcessingSettings


class JobRequest(msgspec.Struct, frozen=True, tag="work", array_like=True):
    """One job; its encoded bytes are the memory beside the message."""

    modality: Modality
    options: Options
    num_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    pass


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where an array lies in the memory beside the message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class JobDone(msgspec.Struct, frozen=True, tag="done", array_like=True):
    modality: Modality
    expansion: Expansion
    arrays: tuple[ArrayLocation, ...]
    num_bytes: int
    decode_ms: float
    process_ms: float


class JobFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    error: tuple[str, str, str | None]


Request = ConfigureWorker | JobRequest


Reply = WorkerReady | JobDone | JobFailed


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
        placed.append(ArrayLocation(name, array.dtype, array.shape, end))
        pieces.append((end, array.data))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    last = max((offset + piece.nbytes for offset, piece in pieces), default=0)
    item = processed.item
    message = JobDone(
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
    send(link, JobFailed(error_to_wire(error)))


def processed_from(message: JobDone, fd: int | None) -> Processed:
    """The item a worker sent, its arrays views of the mapped memory."""
    memory = map_memory(fd, message.num_bytes)
    arrays = {place.name: _array(place, memory) for place in message.arrays}
    item = ProcessedItem(message.modality, arrays, message.expansion)
    return Processed(item, message.decode_ms, message.process_ms)


def _array(place: ArrayLocation, memory: memoryview) -> Array:
    end = place.offset + math.prod(place.shape) * ITEM_SIZE[place.dtype]
    return Array(place.dtype, place.shape, memory[place.offset : end])


NICENESS = 5
"""Answering comes before decoding: the event loop and the engine step share the same cores."""


BASE_MEMORY = 4 << 30


BYTES_PER_PIXEL = 64
"""Address space allowed: a base, and what decoding, compositing and processing a pixel takes."""


WARM_UP_SIDE = 1024


log = logging.getLogger("lookonce.render.media.worker")


def main() -> None:
    """Serve jobs on the socket whose descriptor is the only argument, until it closes."""
    _settle()
    with socket.socket(fileno=int(sys.argv[1])) as link:
        try:
            processing = _configured(link)
            while processing is not None:
                _serve(link, processing)
        except LinkClosedError:
            return


def _settle() -> None:
    # Not installed, as far as this process is concerned: transformers then starts in one second
    # instead of four and needs 70 MB instead of 300.
    sys.modules["torch"] = None  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when workers end
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # C libraries write warnings about broken media straight to descriptor 2; Python's own
    # messages keep the real one.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    logging.basicConfig(stream=sys.stderr)


def _configured(link: socket.socket) -> Processing | None:
    request, _ = receive(link, REQUESTS)
    assert isinstance(request, ConfigureWorker)
    settings = request.settings
    try:
        processing = Processing(settings)
        warm_up(processing, settings.max_image_pixels)
    except LookOnceError as error:
        send_error(link, error)
        return None
    limit = BASE_MEMORY + BYTES_PER_PIXEL * settings.max_image_pixels
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    send(link, WorkerReady())
    return processing


def _serve(link: socket.socket, processing: Processing) -> None:
    request, fd = receive(link, REQUESTS)
    assert isinstance(request, JobRequest)
    job = MediaJob(request.modality, map_memory(fd, request.num_bytes), request.options)
    try:
        processed = processing.run(job)
    except LookOnceError as error:
        send_error(link, error)
    except Exception as error:  # noqa: BLE001  one bad item must not end the worker
        log.error("processing %s failed: %r", request.modality, error)
        send_error(link, UnprocessableMediaError(f"the {request.modality} cannot be processed"))
    else:
        send_processed(link, processed)


def warm_up(processing: Processing, max_image_pixels: int) -> None:
    """Process an item of each modality, so that the first real one finds all loaded: decoders,
    processors, and memory the allocator has already got."""
    Image.preinit()
    family = processing.family
    if "image" in family.modalities:
        side = min(WARM_UP_SIDE, math.isqrt(max_image_pixels))
        for file_format in ("PNG", "JPEG"):
            file = io.BytesIO()
            Image.new("RGB", (side, side), (127, 127, 127)).save(file, file_format)
            processing.run(MediaJob("image", file.getvalue()))
    if "audio" in family.modalities:
        family.process("audio", np.zeros(family.sampling_rate, np.float32), {})


if __name__ == "__main__":
    main()
