"""Films of a request → the items that they consist of, each with an identity of its own.

    a list of frames ─▶ the bytes of each frame ─────────────────┐
    a file ─▶ index (a media worker; kept, by the file's digest) ─┴▶ the family's layout ─▶ items
                                                                       resolver: only new ones
    items of a file that must be made ─▶ their frames, decoded together ─▶ made like any other item

The resolver looks up each item (`families.film`) as it does a picture. So a window that moved on,
or a longer cut of the same film, decodes, processes and encodes only what is new.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
from blake3 import blake3

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.families.base import Options
from lookonce.render.families.film import LISTED_FPS, FilmInfo, FilmLayout
from lookonce.render.media.cost import film_seconds, index_seconds, picture_size
from lookonce.render.media.film_decoding import FilmIndex, FilmLimits, check_film
from lookonce.render.media.loader import (
    OFF_LOOP_BYTES,
    Encoded,
    MediaSource,
    base64_bytes,
    for_part,
    too_large,
)
from lookonce.render.media.processing import MediaJob, Processed, pack_frames
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.logs import current_request_id

INDEX_BYTES = 16 << 20
"""Bytes of the digests of films that are kept."""
FRAMES_AT_ONCE = 16
"""Frames of a file that one job decodes."""


class FilmFamily(Protocol):
    """What a film becomes; implemented by `families.base.ProcessorFamily`."""

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout: ...


class FilmWork(Protocol):
    """Loads films and works on them; implemented by `resolver.MediaResolver`."""

    async def load(self, source: MediaSource, scope: bytes, tenant: str = "") -> Encoded: ...

    async def run_job(self, job: MediaJob) -> Processed: ...


@dataclass(frozen=True, slots=True)
class OpenFilm:
    """A film whose items are known: `sources` has one for each item of the layout."""

    layout: FilmLayout
    sources: tuple[MediaSource, ...]


class Films:
    """Opens the films of requests. One per renderer, used on its event loop."""

    def __init__(self, family: FilmFamily, work: FilmWork, media: MediaConfig) -> None:
        self._family = family
        self._work = work
        self._max_bytes = media.max_bytes
        self._max_frames = media.max_video_frames
        self._max_cpu = media.max_decode_seconds
        self._limits = FilmLimits(media.max_image_pixels, media.max_video_seconds)
        self._indexes: OrderedDict[bytes, FilmIndex] = OrderedDict()
        self._index_bytes = 0
        self._running: SingleFlight[bytes, FilmIndex] = SingleFlight()

    async def open(
        self, source: MediaSource, scope: bytes, options: Options, *, tenant: str = ""
    ) -> OpenFilm:
        """Raises a `RequestError` that names the part."""
        try:
            if source.origin == "nothing":
                raise UnprocessableMediaError("a film is sent whole: it has no uuid of its own")
            if source.frames or source.is_frame_list:
                return await self._open_list(source, scope, options, tenant)
            return await self._open_file(source, scope, options, tenant)
        except RequestError as error:
            if error.message.startswith(source.param):
                raise
            raise for_part(error, source.param) from None

    # --- lists of frames ----------------------------------------------------------------------

    async def _open_list(
        self, source: MediaSource, scope: bytes, options: Options, tenant: str
    ) -> OpenFilm:
        frames = await self._listed(source, scope, tenant)
        if sum(map(len, frames)) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._list_items, source, frames, options)
        return self._list_items(source, frames, options)

    async def _listed(self, source: MediaSource, scope: bytes, tenant: str) -> list[Encoded]:
        if source.frames:
            self._check_count(len(source.frames))
            slots, left = asyncio.Semaphore(8), self._max_bytes

            async def load(frame: MediaSource) -> Encoded:
                nonlocal left
                async with slots:
                    data = await self._work.load(frame, scope, tenant)
                    left -= len(data)
                    if left < 0:  # no more of them are loaded
                        raise too_large(source.param, self._max_bytes)
                    return data

            return await _all([load(frame) for frame in source.frames])
        self._check_count(source.value.count(",", source.start) + 1)
        if source.size > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._split, source)
        return self._split(source)

    def _check_count(self, count: int) -> None:
        if count > self._max_frames:
            raise TooLargeError(
                f"the film has {count} frames; at most {self._max_frames} are allowed"
            )

    def _split(self, source: MediaSource) -> list[Encoded]:
        if (len(source.value) - source.start) // 4 * 3 > self._max_bytes + 2:
            raise too_large(source.param, self._max_bytes)
        found: list[Encoded] = []
        for number, text in enumerate(source.value[source.start :].split(",")):
            data = base64_bytes(text)
            if not data:
                problem = "is empty" if data is not None else "is not valid base64"
                raise BadRequestError(f"frame {number} {problem}")
            found.append(data)
        return found

    def _list_items(
        self, source: MediaSource, frames: Sequence[Encoded], options: Options
    ) -> OpenFilm:
        sizes = [_size_of(frame, number) for number, frame in enumerate(frames)]
        width, height = sizes[0]
        for number, size in enumerate(sizes):
            if size != sizes[0]:
                raise UnprocessableMediaError(
                    f"frame {number} of the film is {size[0]} x {size[1]}, the first one {width} x "
                    f"{height}: all must be of one size"
                )
        fps = source.fps or LISTED_FPS
        check_film(len(frames), fps, width, height, self._limits)
        info = FilmInfo(len(frames), fps, width, height, chosen=True)
        layout = self._family.film_layout(info, options, self._max_frames)
        made = [
            replace(
                source,
                data=pack_frames([bytes(frames[index]) for index in item.frames]),
                origin="inline",
                value="",
                uuid=None,
                frames=(),
                options=layout.options,
            )
            for item in layout.items
        ]
        return OpenFilm(layout, tuple(made))

    # --- files --------------------------------------------------------------------------------

    async def _open_file(
        self, source: MediaSource, scope: bytes, options: Options, tenant: str
    ) -> OpenFilm:
        data = await self._work.load(source, scope, tenant)
        index = await self._index(bytes(data), scope, tenant)
        fps = source.fps or index.fps
        check_film(index.num_frames, fps, index.width, index.height, self._limits)
        info = FilmInfo(index.num_frames, fps, index.width, index.height)
        layout = self._family.film_layout(info, options, self._max_frames)
        film = _FilmFile(self._work, bytes(data), index, layout, tenant, self._max_cpu)
        made = [
            replace(
                source,
                origin="inline",
                value="",
                uuid=None,
                options=layout.options,
                identity=index.digests_of(item.frames),
                load=_Load(film, item.frames),
            )
            for item in layout.items
        ]
        return OpenFilm(layout, tuple(made))

    async def _index(self, data: bytes, scope: bytes, tenant: str) -> FilmIndex:
        hashed = await asyncio.to_thread(_digest, scope, data)
        held = self._indexes.get(hashed)
        if held is not None:
            self._indexes.move_to_end(hashed)
            return held
        return await self._running.run(hashed, lambda: self._make_index(hashed, data, tenant))

    async def _make_index(self, hashed: bytes, data: bytes, tenant: str) -> FilmIndex:
        limits = [self._limits.max_pixels, self._limits.max_seconds]
        job = MediaJob(
            "video",
            data,
            {"index": limits},
            tenant,
            seconds=index_seconds(data),
            request_id=current_request_id.get(),
        )
        made = await self._work.run_job(job)
        index = _read_index(made)
        self._indexes[hashed] = index
        self._index_bytes += len(index.digests)
        while self._index_bytes > INDEX_BYTES and len(self._indexes) > 1:
            _, dropped = self._indexes.popitem(last=False)
            self._index_bytes -= len(dropped.digests)
        return index


@dataclass(frozen=True, slots=True)
class _Load:
    """The frames of one item, when they are needed."""

    film: _FilmFile
    frames: tuple[int, ...]

    async def __call__(self) -> Encoded:
        return await self.film.load(self.frames)


class _FilmFile:
    """The frames of a file that items need. Items that ask while others are decoded are decoded
    together, in the film's order, so that no frame before them is decoded once for each."""

    def __init__(
        self,
        work: FilmWork,
        data: bytes,
        index: FilmIndex,
        layout: FilmLayout,
        tenant: str,
        max_cpu: float,
    ) -> None:
        self._work = work
        self._data = data
        self._index = index
        self._options = layout.options
        self._tenant = tenant
        self._max_cpu = max_cpu
        self._wanted: dict[tuple[int, ...], asyncio.Future[Encoded]] = {}
        self._task: asyncio.Task[None] | None = None

    async def load(self, frames: tuple[int, ...]) -> Encoded:
        """The frames of an item, packed. Raises a `RequestError` that names no part."""
        future = self._wanted.get(frames)
        if future is None:
            future = self._wanted[frames] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._decode_wanted())
        return await asyncio.shield(future)

    async def _decode_wanted(self) -> None:
        while self._wanted:
            await asyncio.sleep(0)  # the items of one prompt ask one after the other
            batch = sorted(self._wanted)[: self._items_at_once]
            futures = {frames: self._wanted.pop(frames) for frames in batch}
            try:
                packed = await self._decode(batch)
            except BaseException as error:
                for future in futures.values():
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # whoever waited may have gone
                if not isinstance(error, Exception):
                    raise
            else:
                for frames, future in futures.items():
                    if not future.done():
                        future.set_result(packed[frames])

    @property
    def _items_at_once(self) -> int:
        longest = max((len(frames) for frames in self._wanted), default=1)
        return max(1, FRAMES_AT_ONCE // longest)

    async def _decode(self, batch: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Encoded]:
        indices = sorted({index for frames in batch for index in frames})
        starts = [start for start in self._index.starts if start <= indices[0]] or [0]
        span = indices[-1] - starts[-1] + 1
        seconds = film_seconds(self._data, span, self._index.width * self._index.height)
        if seconds > self._max_cpu:
            raise TooLargeError(
                f"decoding the film would take about {seconds:.0f} CPU seconds for "
                f"{len(indices)} frames; at most {self._max_cpu:g} are allowed"
            )
        options: Options = {"frames": indices, **self._options}
        job = MediaJob(
            "video",
            self._data,
            options,
            self._tenant,
            seconds=seconds,
            request_id=current_request_id.get(),
        )
        made = await self._work.run_job(job)
        array = made.item.arrays.get("frames")
        if array is None or array.dtype != "uint8" or array.shape[:1] != (len(indices),):
            raise UnprocessableMediaError("the film cannot be decoded")
        pixels = np.frombuffer(array.data, np.uint8).reshape(array.shape)
        place = {index: number for number, index in enumerate(indices)}
        return {
            frames: pack_frames([pixels[place[index]] for index in frames], decoded=True)
            for frames in batch
        }


def _read_index(made: Processed) -> FilmIndex:
    """What a worker found. Raises `UnprocessableMediaError`."""
    try:
        index = msgspec.msgpack.decode(made.item.arrays["index"].data, type=FilmIndex)
    except (KeyError, msgspec.DecodeError):
        raise UnprocessableMediaError("the film cannot be read") from None
    if not index.num_frames or len(index.digests) % 32:
        raise UnprocessableMediaError("the film cannot be read")
    return index


def _size_of(frame: Encoded, number: int) -> tuple[int, int]:
    size = picture_size(frame)
    if size is None:
        raise UnprocessableMediaError(
            f"frame {number} of the film is not a readable PNG, JPEG, WebP or GIF picture"
        )
    return size


def _digest(scope: bytes, data: bytes) -> bytes:
    return blake3(scope).update(data).digest()


async def _all(works: Sequence[Coroutine[Any, Any, Encoded]]) -> list[Encoded]:
    """All results; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
