"""A worker process of the media pool, and the messages by which pool and worker talk.

    python -m lookonce.render.media.worker FD

A worker decodes files of unknown origin, so it is a process of its own: if a decoder crashes, only
the job is lost, and once it is warmed up it can do no more than decode (`sandbox`). The worker ends
when the pool closes its end of the socket.

They talk over a pair of unix sockets (`ipc/framing.py`), in msgpack; encoded media (to the worker)
and large arrays (back) are frames of their own.

Where the pool has slabs (`cache/slabs.py`), a worker asks for one as soon as it knows how large an
array of floats becomes, and the processor writes it there:

    pool ── JobRequest ──▶ worker ── SlabWanted ──▶ pool ── SlabGranted, descriptor ──▶ worker
                  with a slab                               (the first time)
                  it has mapped, which it need not ask for if it fits
         ◀── JobDone: slab number, offset, dtype, shape; other arrays as they are ──
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import ExifTags, Image

from lookonce.cache.slab_pool import arrange, fits
from lookonce.cache.slabs import ALIGNMENT, LARGE, map_memory, slab_size
from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import (
    LookOnceError,
    ModelLoadError,
    ProtocolError,
    UnprocessableMediaError,
    WireError,
    error_to_wire,
)
from lookonce.ipc.codec import MessageDecoder, MessageEncoder, ReadSlab
from lookonce.ipc.framing import MessageSocket, close_fds
from lookonce.ipc.peer import peer_pid, peer_uid, require_same_user
from lookonce.ipc.worker_process import die_with_parent
from lookonce.render.media.film_decoding import (
    FilmLimits,
    decode_frames,
    index_film,
    warm_up_files,
)
from lookonce.render.media.pdf import (
    DOCUMENTS_MISSING,
    PagesJob,
    PdfRenderer,
    RenderedPages,
    can_read_pdf,
    sample_pdf,
)
from lookonce.render.media.processing import (
    IMAGE_FORMATS,
    MediaJob,
    Processed,
    Processing,
    ProcessingSettings,
    decode_audio,
    decode_image,
    processing_settings,
)
from lookonce.render.media.sandbox import SandboxReport, close_sandbox, limit_resources
from lookonce.types.logs import (
    LogConfig,
    LogFormat,
    LogLevel,
    configure_logging,
    current_request_id,
)
from lookonce.types.media import FLOATS, Array, Modality, ProcessedItem, SlabPlace
from lookonce.types.memory import give_memory_back
from lookonce.types.scheduling import run_behind_others
from lookonce.types.stack_samples import listen_for_samples

NICENESS = 5
"""Workers run at lower priority than the event loop and the engine, which share the cores."""
BASE_MEMORY = 4 << 30
BYTES_PER_PIXEL = 64
"""Address space a worker may use: `BASE_MEMORY`, and this much per pixel of the largest picture."""
TORCH_MEMORY = 8 << 30
"""Address space that torch's libraries take beside that, bytes."""
REST_SECONDS = 1.0
"""Without a job for so long, a worker gives the memory that its jobs have freed to the system."""
WARM_UP_SIDE = 1024
TEXT_CODECS = ("ascii", "latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp1252")
"""Encodings of texts in media files, which Python loads when they are first used."""
SOUND_CODECS = (
    ("WAV", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
)
M = TypeVar("M")
log = logging.getLogger("lookonce.render.media.worker")


class ConfigureWorker(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `WorkerReady` or `JobFailed`."""

    settings: ProcessingSettings
    slab_bytes: int = 0
    """Slabs that the worker may have to map."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    samples_folder: str | None = None
    """Where the worker listens for those who profile it."""


class JobRequest(msgspec.Struct, frozen=True, tag="work", array_like=True):
    """One job."""

    modality: Modality
    options: dict[str, Any]
    """`Options`; the decoder has no type `object`."""
    data: Array
    """The encoded media."""
    uses_slabs: bool = False
    request_id: str = ""
    """Whose item it is, for the log."""
    slab: int = 0
    """The number of a slab, mapped before, that the worker need not ask for; 0: none."""


class PagesRequest(msgspec.Struct, frozen=True, tag="render", array_like=True):
    """Pages of a PDF file to render: a `PagesJob`."""

    data: Array
    first: int
    count: int
    pictures: bool
    request_id: str = ""


class DropSlabs(msgspec.Struct, frozen=True, tag="drop_slabs", array_like=True):
    """The worker is to unmap these slabs; it answers nothing."""

    numbers: tuple[int, ...]


class TrimMemory(msgspec.Struct, frozen=True, tag="trim", array_like=True):
    """The worker is to give the memory that its jobs have freed to the system now; it answers
    `MemoryTrimmed`."""


class SlabGranted(msgspec.Struct, frozen=True, tag="slab", array_like=True):
    """A slab for this job, with its descriptor the first time. `number` 0: there is none."""

    number: int
    num_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker takes jobs."""

    sandbox: SandboxReport


class JobBegun(msgspec.Struct, frozen=True, tag="begun", array_like=True):
    """The worker has taken up the job; another answer follows."""


class SlabWanted(msgspec.Struct, frozen=True, tag="slab_wanted", array_like=True):
    """The job needs shared memory; the pool answers `SlabGranted`."""

    num_bytes: int
    declined: bool = False
    """The slab that came with the job does not fit."""


class JobDone(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The processed item."""

    processed: Processed


class MemoryTrimmed(msgspec.Struct, frozen=True, tag="trimmed", array_like=True):
    """What the worker still has, it needs, or something in it keeps."""


class PagesDone(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    """The rendered pages."""

    rendered: RenderedPages


class JobFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The error of a job, or of starting the worker."""

    error: WireError
    out_of_memory: bool = False
    """The worker ends: what is left of its memory may be in pieces."""


WorkerRequest = ConfigureWorker | JobRequest | PagesRequest | DropSlabs | TrimMemory | SlabGranted
WorkerReply = WorkerReady | JobBegun | SlabWanted | JobDone | PagesDone | MemoryTrimmed | JobFailed


def request_decoder() -> MessageDecoder[WorkerRequest]:
    """The decoder of a worker."""
    return MessageDecoder(WorkerRequest)


def reply_decoder() -> MessageDecoder[WorkerReply]:
    """The decoder of a thread of the pool."""
    return MessageDecoder(WorkerReply)


class LinkClosedError(Exception):
    """The other process has ended, or sent something that is not a message."""


@dataclass(frozen=True, slots=True)
class Decoders:
    """What a worker has loaded."""

    settings: ProcessingSettings
    processing: Processing | None
    """None where the model takes no media."""
    pdf: PdfRenderer | None
    """None without the extra `documents`."""

    @property
    def needs_torch(self) -> bool:
        return self.processing is not None and self.processing.family.needs_torch


def load_decoders(settings: ProcessingSettings) -> Decoders:
    """Raises `ModelLoadError`."""
    processing = None if settings.documents_only else Processing(settings)
    pdf = None
    if can_read_pdf():
        pdf = PdfRenderer(
            max_pages=settings.max_document_pages, max_pixels=settings.max_image_pixels
        )
    return Decoders(settings, processing, pdf)


def preloaded(settings: Mapping[str, Any]) -> Callable[[], None]:
    """`main` for processes that are forked from this one, with `model` and `media` of a
    configuration: all is loaded and warmed up here. Raises `ModelLoadError`."""
    model = msgspec.convert(settings["model"], ModelConfig)
    media = msgspec.convert(settings["media"], MediaConfig)
    decoders = load_decoders(processing_settings(model, media))
    if decoders.needs_torch:
        return main
    warm_up(decoders)
    return partial(main, decoders)


def main(warm: Decoders | None = None) -> None:
    """Serve jobs on the socket whose descriptor is the only argument, until it closes.

    `warm` needs no loading where its settings are those that the pool sends.
    """
    _restrict_process()
    with contextlib.closing(pool_socket()) as link:
        requests = request_decoder()
        try:
            decoders = _configured(link, requests, warm)
            if decoders is None:
                return
            slabs = WorkerSlabs(link, requests)
            if decoders.processing is not None:
                decoders.processing.family.memory.source = slabs.take
            while True:
                _serve(link, requests, decoders, slabs)
        except LinkClosedError:
            return


def pool_socket() -> MessageSocket:
    """This end of the connection to the pool. Raises `ProtocolError` for another user's."""
    link = socket.socket(fileno=int(sys.argv[-1]))
    require_same_user(peer_uid(link))
    if peer_pid(link) == os.getppid():  # else the fork server sees to it
        die_with_parent()
    return MessageSocket(link, takes_fds=True)


def _restrict_process() -> None:
    # Without torch transformers starts in one second instead of four, and takes 70 MB, not 300.
    sys.modules["torch"] = None  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when workers end
    os.nice(NICENESS)
    run_behind_others()
    # C libraries write warnings about broken media straight to descriptor 2: it becomes /dev/null.
    # Python's own messages keep the real one.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    configure_logging("media worker")


def _configured(
    link: MessageSocket, requests: MessageDecoder[WorkerRequest], warm: Decoders | None
) -> Decoders | None:
    request, fds = receive(link, requests)
    close_fds(fds)
    assert isinstance(request, ConfigureWorker)
    configure_logging("media worker", LogConfig(request.log_format, request.log_level))
    if request.samples_folder is not None:
        listen_for_samples(Path(request.samples_folder), "media worker")
    settings = request.settings
    try:
        if warm is not None and warm.settings == settings:
            decoders = warm
        else:
            decoders = load_decoders(settings)
            if decoders.needs_torch:
                _allow_torch()
            warm_up(decoders)
    except LookOnceError as error:
        send_error(link, error)
        return None
    memory = BASE_MEMORY + BYTES_PER_PIXEL * settings.max_image_pixels
    if decoders.needs_torch:
        memory += TORCH_MEMORY
    limit_resources(memory + request.slab_bytes)
    send(link, WorkerReady(close_sandbox()))
    return decoders


def _allow_torch() -> None:
    """Transformers has not been imported yet: then it would know of no torch for good."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    sys.modules.pop("torch", None)


def _serve(
    link: MessageSocket,
    requests: MessageDecoder[WorkerRequest],
    decoders: Decoders,
    slabs: WorkerSlabs,
) -> None:
    if not link.wait(REST_SECONDS):
        give_memory_back()
    request, fds = receive(link, requests)
    close_fds(fds)
    if isinstance(request, DropSlabs):
        slabs.unmap(request.numbers)
        return
    if isinstance(request, TrimMemory):
        give_memory_back()
        send(link, MemoryTrimmed())
        return
    assert isinstance(request, (JobRequest, PagesRequest))
    current_request_id.set(request.request_id)
    send(link, JobBegun())
    modality = request.modality if isinstance(request, JobRequest) else "document"
    try:
        if isinstance(request, JobRequest):
            done: WorkerReply = _process(request, decoders, slabs)
        else:
            done = _render(request, decoders)
    except LinkClosedError:
        raise
    except LookOnceError as refused:
        send_error(link, refused)
    except MemoryError:
        error = UnprocessableMediaError(f"the {modality} takes too much memory")
        send(link, JobFailed(error_to_wire(error), out_of_memory=True))
        raise LinkClosedError from None
    except Exception:  # one bad item must not end the worker
        log.exception("processing failed", extra={"modality": modality})
        send_error(link, UnprocessableMediaError(f"the {modality} cannot be processed"))
    else:
        send(link, done)


def _process(request: JobRequest, decoders: Decoders, slabs: WorkerSlabs) -> JobDone:
    slabs.begin(usable=request.uses_slabs, ahead=request.slab)
    if decoders.processing is None:
        raise UnprocessableMediaError("the model takes no media")
    job = MediaJob(request.modality, request.data.data, request.options)
    processed = decoders.processing.run(job)
    return JobDone(msgspec.structs.replace(processed, item=slabs.placed(processed.item)))


def _render(request: PagesRequest, decoders: Decoders) -> PagesDone:
    if decoders.pdf is None:
        raise UnprocessableMediaError(DOCUMENTS_MISSING)
    job = PagesJob(request.data.data, request.first, request.count, request.pictures)
    return PagesDone(decoders.pdf.render(job))


@dataclass(frozen=True, slots=True)
class WorkerSlab:
    """A slab that this worker writes."""

    number: int
    memory: NDArray[np.uint8]
    is_leased: bool = True

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def next_use(self) -> int:
        return 0  # the pool does not count them

    def offset_of(self, array: Array) -> int | None:
        """Where the array starts, if it lies in this slab."""
        offset = _address(np.frombuffer(array.data, np.uint8)) - _address(self.memory)
        inside = offset >= 0 and offset + array.nbytes <= self.nbytes
        return offset if inside and offset % ALIGNMENT == 0 else None


class WorkerSlabs:
    """The slabs that this worker has mapped; they stay mapped until the pool says otherwise."""

    def __init__(self, link: MessageSocket, requests: MessageDecoder[WorkerRequest]) -> None:
        self._link = link
        self._requests = requests
        self._mapped: dict[int, WorkerSlab] = {}
        self._granted: list[WorkerSlab] = []
        """What the job in progress writes."""
        self._usable = False
        self._ahead: WorkerSlab | None = None

    def begin(self, *, usable: bool, ahead: int = 0) -> None:
        """A new job; `usable`: it may ask for slabs, and has the one of number `ahead` already."""
        self._usable = usable
        self._ahead = self._mapped.get(ahead)
        self._granted = []

    def unmap(self, numbers: Iterable[int]) -> None:
        self._granted = []
        self._ahead = None
        for number in numbers:
            self._mapped.pop(number, None)

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """The first bytes of a slab that nobody else writes; None: use private memory."""
        if not self._usable or num_bytes < LARGE:
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and fits(slab_size(num_bytes), ahead.nbytes):
            self._granted.append(ahead)
            return ahead.memory[:num_bytes]
        send(self._link, SlabWanted(num_bytes, declined=ahead is not None))
        granted, fds = receive(self._link, self._requests)
        try:
            if not isinstance(granted, SlabGranted):
                raise LinkClosedError
            if granted.number == 0:
                return None
            if fds:
                memory = map_memory(fds[0], granted.num_bytes, writable=True)
                self._mapped[granted.number] = WorkerSlab(granted.number, memory)
        except (OSError, ProtocolError):
            raise LinkClosedError from None
        finally:
            close_fds(fds)
        slab = self._mapped.get(granted.number)
        if slab is None:
            raise LinkClosedError
        self._granted.append(slab)
        return slab.memory[:num_bytes]

    def placed(self, item: ProcessedItem) -> ProcessedItem:
        """The item with its large arrays of floats in slabs; those that the processor has put
        elsewhere are copied into one."""
        arrays: dict[str, Array] = {}
        elsewhere: dict[str, Array] = {}
        for name, array in item.arrays.items():
            found = self._place_of(array)
            arrays[name] = Array(array.dtype, array.shape, array.data, found)
            if found is None:
                elsewhere[name] = array
        offsets = arrange({name: (a.dtype, a.nbytes) for name, a in elsewhere.items()})
        end = max((offset + elsewhere[name].nbytes for name, offset in offsets.items()), default=0)
        memory = self.take(end)
        if memory is not None:
            for name, offset in offsets.items():
                array = elsewhere[name]
                memory[offset : offset + array.nbytes] = np.frombuffer(array.data, np.uint8)
                place = SlabPlace(self._granted[-1], offset)
                arrays[name] = Array(array.dtype, array.shape, array.data, place)
        return ProcessedItem(item.modality, arrays, item.expansion)

    def _place_of(self, array: Array) -> SlabPlace | None:
        if array.nbytes < LARGE or array.dtype not in FLOATS:
            return None
        for slab in self._granted:
            offset = slab.offset_of(array)
            if offset is not None:
                return SlabPlace(slab, offset)
        return None


def _address(memory: NDArray[np.uint8]) -> int:
    """Where it begins; `memory.ctypes` takes ten times as long."""
    return int(memory.__array_interface__["data"][0])


def warm_up(decoders: Decoders) -> None:
    """Process an item of each modality and format, so that decoders and processors are loaded, and
    memory is allocated, before the first real item comes. Later no file can be opened.

    Raises `ModelLoadError` where the model's processor cannot process the sample.
    """
    for name in TEXT_CODECS:
        codecs.lookup(name)
    Image.init()
    if decoders.pdf is not None:
        with contextlib.suppress(LookOnceError):  # the limits may be below any page
            decoders.pdf.render(PagesJob(sample_pdf()))
    if decoders.processing is not None:
        try:
            _warm_up_processing(decoders.processing, decoders.settings.max_image_pixels)
        except UnprocessableMediaError as error:  # the sample is sound: the folder is not
            cause = f": {error.__cause__}" if error.__cause__ else ""
            raise ModelLoadError(f"of a sample, {error.message}{cause}") from error


def _warm_up_processing(processing: Processing, max_image_pixels: int) -> None:
    family = processing.family
    if "image" in family.modalities:
        side = min(WARM_UP_SIDE, math.isqrt(max_image_pixels))
        for file_format in IMAGE_FORMATS:
            processing.run(MediaJob("image", _sample_picture(file_format, side)))
        with contextlib.suppress(UnprocessableMediaError):
            decode_image(b"neither", 1)
    if "video" in family.modalities:
        _warm_up_film()
    if "audio" in family.modalities:
        for container, codec in SOUND_CODECS:
            decode_audio(_sample_sound(container, codec), family.sampling_rate, 1.0)
        family.process("audio", np.zeros(family.sampling_rate, np.float32), {})


def _warm_up_film() -> None:
    file = io.BytesIO()
    Image.new("P", (16, 16)).save(file, "GIF")
    index_film(file.getvalue(), FilmLimits(1 << 20, 60.0))
    decode_frames(file.getvalue(), (0,), 28, 28, 3)
    warm_up_files()


def _sample_picture(file_format: str, side: int) -> bytes:
    """A grey picture that lies on its side."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.new("RGB", (side, side), (127, 127, 127))
    image.save(file, file_format, **({} if file_format == "GIF" else {"exif": exif}))
    return file.getvalue()


def _sample_sound(container: str, codec: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4800, np.float32), 48000, codec, format=container)
    return file.getvalue()


def send(
    link: MessageSocket,
    message: WorkerRequest | WorkerReply,
    fds: Sequence[int] = (),
    *,
    wait: bool = True,
) -> None:
    """Raises `LinkClosedError` when the other process has ended, or `TimeoutError`."""
    try:
        link.send(MessageEncoder().encode(message), fds, wait=wait)
    except ConnectionError:
        raise LinkClosedError from None


def receive(
    link: MessageSocket,
    messages: MessageDecoder[M],
    read_slab: ReadSlab | None = None,
    max_head_bytes: int | None = None,
) -> tuple[M, Sequence[int]]:
    """The next message and its descriptors. Raises `LinkClosedError`, `TimeoutError` or `OSError`.

    Large arrays are views of the memory that they were received into, or what `read_slab` makes.
    A message whose first frame has more than `max_head_bytes` is not decoded.
    """
    try:
        frames, fds = link.receive()
    except (ConnectionError, ProtocolError):
        raise LinkClosedError from None
    try:
        if max_head_bytes is not None and len(frames[0]) > max_head_bytes:
            raise ProtocolError("a message whose head is too long")
        return messages.decode(frames, read_slab), fds
    except ProtocolError:
        close_fds(fds)
        raise LinkClosedError from None


def send_error(link: MessageSocket, error: LookOnceError) -> None:
    send(link, JobFailed(error_to_wire(error)))


if __name__ == "__main__":
    main()
