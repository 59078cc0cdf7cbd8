"""A worker process of the media pool: `python -m lookonce.render.media.worker FD`.

It decodes what strangers send, so it is a process of its own: a decoder that crashes takes only
its job along. It ends when the pool's end of the socket closes.
"""

from __future__ import annotations

import io
import logging
import math
import os
import resource
import signal
import socket
import sys

import numpy as np
from PIL import Image

from lookonce.errors import LookOnceError, UnprocessableMediaError
from lookonce.render.media.processing import MediaJob, Processing
from lookonce.render.media.worker_link import (
    REQUESTS,
    Configure,
    LinkClosedError,
    Ready,
    Work,
    map_memory,
    receive,
    send,
    send_error,
    send_processed,
)

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
    assert isinstance(request, Configure)
    settings = request.settings
    try:
        processing = Processing(settings)
        warm_up(processing, settings.max_image_pixels)
    except LookOnceError as error:
        send_error(link, error)
        return None
    limit = BASE_MEMORY + BYTES_PER_PIXEL * settings.max_image_pixels
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    send(link, Ready())
    return processing


def _serve(link: socket.socket, processing: Processing) -> None:
    request, fd = receive(link, REQUESTS)
    assert isinstance(request, Work)
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
