"""A worker process of the media pool, and the messages by which pool and worker talk.

    python -m lookonce.render.media.worker FD

A worker decodes files of unknown origin, so it is a process of its own: if a decoder crashes, only
the job is lost. The worker ends when the pool closes its end of the socket.

They talk over a pair of unix sockets (`ipc/framing.py`), in msgpack; encoded media (to the worker)
and large arrays (back) are frames of their own.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, TypeVar

import msgspec
import numpy as np
from PIL import Image

from lookonce.errors import (
    LookOnceError,
    ProtocolError,
    UnprocessableMediaError,
    error_to_wire,
)
from lookonce.ipc.codec import MessageDecoder, MessageEncoder
from lookonce.ipc.framing import MessageSocket, close_fds, peer_uid, require_same_user
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.types.media import Array, Modality

NICENESS = 5
"""Workers run at lower priority than the event loop and the engine, which share the cores."""
BASE_MEMORY = 4 << 30
BYTES_PER_PIXEL = 64
"""Address space a worker may use: `BASE_MEMORY`, and this much per pixel of the largest picture."""
TORCH_MEMORY = 8 << 30
"""Address space that torch's libraries take beside that, bytes."""
WARM_UP_SIDE = 1024
M = TypeVar("M")
log = logging.getLogger("lookonce.render.media.worker")


class ConfigureWorker(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `WorkerReady` or `JobFailed`."""

    settings: ProcessingSettings


class JobRequest(msgspec.Struct, frozen=True, tag="work", array_like=True):
    """One job."""

    modality: Modality
    options: dict[str, Any]
    """`Options`; the decoder has no type `object`."""
    data: Array
    """The encoded media."""


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker takes jobs."""


class JobDone(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The processed item."""

    processed: Processed


class JobFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The error of a job, or of starting the worker."""

    error: tuple[str, str, str | None]


WorkerRequest = ConfigureWorker | JobRequest
WorkerReply = WorkerReady | JobDone | JobFailed


def request_decoder() -> MessageDecoder[WorkerRequest]:
    """The decoder of a worker."""
    return MessageDecoder(WorkerRequest)


def reply_decoder() -> MessageDecoder[WorkerReply]:
    """The decoder of a thread of the pool."""
    return MessageDecoder(WorkerReply)


class LinkClosedError(Exception):
    """The other process has ended, or sent something that is not a message."""


class MessageLostError(LinkClosedError):
    """The other process has ended without having read the last message."""


def main() -> None:
    """Serve jobs on the socket whose descriptor is the only argument, until it closes."""
    _restrict_process()
    with closing(pool_socket()) as link:
        requests = request_decoder()
        try:
            processing = _configured(link, requests)
            while processing is not None:
                _serve(link, requests, processing)
        except LinkClosedError:
            return


def pool_socket() -> MessageSocket:
    """This end of the connection to the pool. Raises `ProtocolError` for another user's."""
    link = socket.socket(fileno=int(sys.argv[-1]))
    require_same_user(peer_uid(link))
    return MessageSocket(link, takes_fds=True)


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


def _configured(link: MessageSocket, requests: MessageDecoder[WorkerRequest]) -> Processing | None:
    request, fds = receive(link, requests)
    close_fds(fds)
    assert isinstance(request, ConfigureWorker)
    settings = request.settings
    try:
        processing = Processing(settings)
        if processing.family.needs_torch:
            _allow_torch()
        warm_up(processing, settings.max_image_pixels)
    except LookOnceError as error:
        send_error(link, error)
        return None
    limit = BASE_MEMORY + BYTES_PER_PIXEL * settings.max_image_pixels
    if processing.family.needs_torch:
        limit += TORCH_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    send(link, WorkerReady())
    return processing


def _allow_torch() -> None:
    """Transformers has not been imported yet: then it would know of no torch for good."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    sys.modules.pop("torch", None)


def _serve(
    link: MessageSocket, requests: MessageDecoder[WorkerRequest], processing: Processing
) -> None:
    request, fds = receive(link, requests)
    close_fds(fds)
    assert isinstance(request, JobRequest)
    job = MediaJob(request.modality, request.data.data, request.options)
    try:
        processed = processing.run(job)
    except LookOnceError as error:
        send_error(link, error)
    except Exception as error:  # noqa: BLE001  one bad item must not end the worker
        log.error("processing %s failed: %r", request.modality, error)
        send_error(link, UnprocessableMediaError(f"the {request.modality} cannot be processed"))
    else:
        send(link, JobDone(processed))


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
    link: MessageSocket, message: WorkerRequest | WorkerReply, fds: Sequence[int] = ()
) -> None:
    """Raises `MessageLostError` when the other process has ended, or `TimeoutError`."""
    try:
        link.send(MessageEncoder().encode(message), fds)
    except ConnectionError:
        raise MessageLostError from None


def receive(link: MessageSocket, messages: MessageDecoder[M]) -> tuple[M, Sequence[int]]:
    """The next message and its descriptors. Raises `LinkClosedError`, `TimeoutError` or `OSError`.

    Large arrays are views of the memory that they were received into.
    """
    try:
        frames, fds = link.receive()
    except (ConnectionError, ProtocolError) as error:
        unread = isinstance(error, OSError) and error.errno == errno.ECONNRESET
        raise (MessageLostError if unread else LinkClosedError) from None
    try:
        return messages.decode(frames), fds
    except ProtocolError:
        close_fds(fds)
        raise LinkClosedError from None


def send_error(link: MessageSocket, error: LookOnceError) -> None:
    send(link, JobFailed(error_to_wire(error)))


if __name__ == "__main__":
    main()
