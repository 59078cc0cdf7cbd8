"""A worker process of the media pool, and the messages by which pool and worker talk.

    python -m lookonce.render.media.worker FD

A worker decodes files of unknown origin, so it is a process of its own: if a decoder crashes, only
the job is lost. The worker ends when the pool closes its end of the socket.

A message is a 4-byte length and msgpack, on a unix socket. Encoded media (to the worker) and arrays
(back) are not in the message but in anonymous memory, whose file descriptor is sent with it and
which the receiver maps. The memory has no name that could leak; the kernel frees it with its last
mapping, whichever process dies.
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
"""Arrays start at multiples of this many bytes, so that every dtype can be viewed in place."""
HEADER_BYTES = 4
NICENESS = 5
"""Workers run at lower priority than the event loop and the engine, which share the cores."""
BASE_MEMORY = 4 << 30
BYTES_PER_PIXEL = 64
"""Address space a worker may use: `BASE_MEMORY`, and this much per pixel of the largest picture."""
WARM_UP_SIDE = 1024
M = TypeVar("M")
log = logging.getLogger("lookonce.render.media.worker")


class ConfigureWorker(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `WorkerReady` or `JobFailed`."""

    settings: ProcessingSettings


class JobRequest(msgspec.Struct, frozen=True, tag="work", array_like=True):
    """One job; its encoded bytes are in the memory sent with the message."""

    modality: Modality
    options: Options
    num_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker takes jobs."""


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where an array starts in the memory sent with the message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class JobDone(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The processed item; its arrays are in the memory sent with the message."""

    modality: Modality
    expansion: Expansion
    arrays: tuple[ArrayLocation, ...]
    num_bytes: int
    decode_ms: float
    process_ms: float


class JobFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The error of a job, or of starting the worker."""

    error: tuple[str, str, str | None]


WorkerRequest = ConfigureWorker | JobRequest
WorkerReply = WorkerReady | JobDone | JobFailed
REQUESTS: msgspec.msgpack.Decoder[WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest)
REPLIES: msgspec.msgpack.Decoder[WorkerReply] = msgspec.msgpack.Decoder(WorkerReply)


class LinkClosedError(Exception):
    """The other process has ended, or sent something that is not a message."""


def main() -> None:
    """Serve jobs on the socket whose descriptor is the only argument, until it closes."""
    _restrict_process()
    with socket.socket(fileno=int(sys.argv[1])) as link:
        try:
            processing = _configured(link)
            while processing is not None:
                _serve(link, processing)
        except LinkClosedError:
            return


def _restrict_process() -> None:
    # Without torch transformers starts in one second instead of four, and takes 70 MB, not 300.
    sys.modules["torch"] = None  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when workers end
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # C libraries write warnings about broken media straight to descriptor 2: it becomes /dev/null.
    # Python's own messages keep the real one.
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
    """Process an item of each modality, so that decoders and processors are loaded, and memory is
    allocated, before the first real item comes."""
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


def send(
    link: socket.socket, message: WorkerRequest | WorkerReply, memory: int | None = None
) -> None:
    """Send a message; `memory` is a file descriptor of which the receiver gets a copy."""
    body = msgspec.msgpack.encode(message)
    frame = len(body).to_bytes(HEADER_BYTES, "little") + body
    try:
        # The descriptor goes with the first byte; sendmsg may send only part of the frame.
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
    """A read-only view of the memory, mapped as long as the view lives. Closes the descriptor.

    Raises `OSError` when the descriptor did not arrive: the kernel drops it when this process has
    too many open.
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
    """Send a `JobDone` with the item's arrays one after another in one memory."""
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
    """The item of a `JobDone`; its arrays are views of the mapped memory."""
    memory = map_memory(fd, message.num_bytes)
    arrays = {place.name: _array(place, memory) for place in message.arrays}
    item = ProcessedItem(message.modality, arrays, message.expansion)
    return Processed(item, message.decode_ms, message.process_ms)


def _array(place: ArrayLocation, memory: memoryview) -> Array:
    end = place.offset + math.prod(place.shape) * ITEM_SIZE[place.dtype]
    return Array(place.dtype, place.shape, memory[place.offset : end])


if __name__ == "__main__":
    main()
