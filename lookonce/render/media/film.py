"""Films of a request → the items that they consist of, each with an identity of its own.

    a list of frames ─▶ the bytes of each frame ─────────────────┐
    a file ─▶ index (a media worker; kept, by the file's digest) ─┴▶ the family's layout ─▶ items
                                                                       resolver: only new ones
    items of a file that must be made ─▶ their frames, decoded together ─▶ made like any other item

The resolver looks up each item (`families.film`) as it does a picture. So a window that moved on,
or a longer cut of the same film, decodes, processes and encodes only what is new.

A uuid names a film, or one frame of a list. Bound to it are 32 bytes each: to a film's its
`FilmInfo`, to that and the frames of an item the item's MediaHash; to a frame's its digest, and its
size. So a film that is only named has the same layout, and its items are found by their hashes.
"""

from __future__ import annotations

import asyncio
import math
import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import msgspec
import numpy as np
from blake3 import blake3

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    ConflictError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.families.base import Options
from lookonce.render.families.film import LISTED_FPS, FilmInfo, FilmLayout
from lookonce.render.media.cost import (
    CostLimits,
    FilmCost,
    film_item_seconds,
    index_seconds,
    listed_seconds,
    picture_size,
)
from lookonce.render.media.film_decoding import GIF_HEADS, FilmIndex, FilmLimits, check_film
from lookonce.render.media.loader import (
    OFF_LOOP_BYTES,
    Encoded,
    MediaSource,
    base64_bytes,
    for_part,
    too_large,
)
from lookonce.render.media.processing import MediaJob, Processed, pack_frames
from lookonce.render.media.resolver import NameBindings
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.logs import current_request_id

INDEX_BYTES = 16 << 20
"""Bytes of the indexes of films that are kept."""
INDEX_ENTRY, INDEX_START = 400, 40
"""Bytes of an index and its key beside the digests, and of each of its `starts`, in Python."""
FRAMES_AT_ONCE, BYTES_AT_ONCE = 16, 8 << 20
"""Frames of a file that one job decodes, or as many as take so many bytes at the model's size. Each
job of a GIF begins at its first frame."""
FILM_RECORD = struct.Struct("<IdII?11x")
"""A `FilmInfo` in the 32 bytes that a uuid is bound to."""
SIZE_RECORD = struct.Struct("<II24x")
"""Width and height of a frame, likewise."""


class FilmFamily(Protocol):
    """What a film becomes; implemented by `families.base.ProcessorFamily`."""

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout: ...


class FilmWork(Protocol):
    """Loads films and works on them; implemented by `resolver.MediaResolver`."""

    @property
    def uuids(self) -> NameBindings: ...

    async def load(self, source: MediaSource, scope: bytes, tenant: str = "") -> Encoded: ...

    async def run_job(self, job: MediaJob) -> Processed: ...

    def count_refusal(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFilm:
    """A film whose items are known: `sources` has one for each item of the layout."""

    info: FilmInfo
    layout: FilmLayout
    sources: tuple[MediaSource, ...]
    names: tuple[Name, ...] = ()
    """To be bound when the content is known to be good: `Films.bind`."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a uuid of a client stands for: 32 bytes. `param` is the part or frame that has it."""

    name: str
    value: bytes
    param: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame of a list. `data` is None where only a uuid named it."""

    digest: bytes
    size: tuple[int, int]
    data: Encoded | None
    source: MediaSource


class Films:
    """Opens the films of requests. One per renderer, used on its event loop."""

    def __init__(self, family: FilmFamily, work: FilmWork, media: MediaConfig) -> None:
        self._family = family
        self._work = work
        self._max_bytes = media.max_bytes
        self._max_frames = media.max_video_frames
        self._max_seconds = media.max_video_decode_seconds
        self._item_limits = CostLimits(
            media.max_image_pixels, media.max_audio_seconds, media.max_decode_seconds
        )
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
                return self._open_named(source, scope, options)
            if source.frames or source.is_frame_list:
                return await self._open_list(source, scope, options, tenant)
            return await self._open_file(source, scope, options, tenant)
        except RequestError as error:
            if error.message.startswith(source.param):
                raise
            raise for_part(error, source.param) from None

    def bind(self, film: OpenFilm, scope: bytes, tenant: str) -> None:
        """Bind the uuids of a film whose items could be made. Raises `ConflictError`."""
        for each in film.names:
            self._work.uuids.bind(scope, each.name, each.value, tenant=tenant, param=each.param)

    # --- names --------------------------------------------------------------------------------

    def _open_named(self, source: MediaSource, scope: bytes, options: Options) -> OpenFilm:
        """A film of which only the uuid came."""
        record = self._work.uuids.resolve(scope, _name("film", source.uuid))
        if record is None:
            raise _not_held(source.param)
        info = FilmInfo(*FILM_RECORD.unpack(record))
        layout = self._family.film_layout(info, options, self._max_frames)
        made = [
            replace(source, uuid=_item_name(source, item.frames), options=layout.options)
            for item in layout.items
        ]
        return OpenFilm(info, layout, tuple(made))

    def _names(self, source: MediaSource, scope: bytes, info: FilmInfo) -> list[Name]:
        if source.uuid is None:
            return []
        record = FILM_RECORD.pack(info.num_frames, info.fps, info.width, info.height, info.chosen)
        return self._unbound([Name(_name("film", source.uuid), record, source.param)], scope)

    def _unbound(self, names: list[Name], scope: bytes) -> list[Name]:
        """Raises `ConflictError` for a name that stands for something else already."""
        for each in names:
            if self._work.uuids.resolve(scope, each.name) not in (None, each.value):
                raise ConflictError(
                    f"{each.param}: this uuid is bound to other media", param=each.param
                )
        return names

    # --- lists of frames ----------------------------------------------------------------------

    async def _open_list(
        self, source: MediaSource, scope: bytes, options: Options, tenant: str
    ) -> OpenFilm:
        listed, loaded = await self._listed(source, scope, tenant)
        named = {
            number: self._named_frame(each, scope)
            for number, each in enumerate(listed)
            if each.origin == "nothing"
        }
        if sum(map(len, loaded.values())) > OFF_LOOP_BYTES:
            sent = await asyncio.to_thread(_read_frames, listed, loaded)
        else:
            sent = _read_frames(listed, loaded)
        found = {**named, **sent}
        frames = [found[number] for number in range(len(found))]
        film = self._list_items(source, frames, options)
        names = self._names(source, scope, film.info)
        names += self._unbound(
            [name for each in sent.values() for name in _frame_names(each)], scope
        )
        return replace(film, names=tuple(names))

    def _named_frame(self, source: MediaSource, scope: bytes) -> _Frame:
        digest, size = (
            self._work.uuids.resolve(scope, _name(kind, source.uuid)) for kind in FRAME_NAMES
        )
        if digest is None or size is None:
            raise _not_held(source.param)
        width, height = SIZE_RECORD.unpack(size)
        return _Frame(digest, (width, height), None, source)

    async def _listed(
        self, source: MediaSource, scope: bytes, tenant: str
    ) -> tuple[Sequence[MediaSource], dict[int, Encoded]]:
        """The sources of the frames, and the bytes of those that came, by number."""
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

            sent = [n for n, each in enumerate(source.frames) if each.origin != "nothing"]
            loaded = await _all([load(source.frames[number]) for number in sent])
            return source.frames, dict(zip(sent, loaded, strict=True))
        self._check_count(source.value.count(",", source.start) + 1)
        if source.size > OFF_LOOP_BYTES:
            frames = await asyncio.to_thread(self._split, source)
        else:
            frames = self._split(source)
        whole = replace(source, value="", uuid=None, frames=())
        return [whole] * len(frames), dict(enumerate(frames))

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
        self, source: MediaSource, frames: Sequence[_Frame], options: Options
    ) -> OpenFilm:
        width, height = frames[0].size
        for number, frame in enumerate(frames):
            if frame.size != (width, height):
                raise UnprocessableMediaError(
                    f"frame {number} of the film is {frame.size[0]} x {frame.size[1]}, the first "
                    f"one {width} x {height}: all must be of one size"
                )
        fps = source.fps or LISTED_FPS
        check_film(len(frames), fps, width, height, self._limits)
        info = FilmInfo(len(frames), fps, width, height, chosen=True)
        layout = self._family.film_layout(info, options, self._max_frames)
        film = _FrameList(self._work, _model_pixels(layout), self._item_limits, self._max_seconds)
        made = [
            self._list_item(source, item.frames, [frames[n] for n in item.frames], layout, film)
            for item in layout.items
        ]
        return OpenFilm(info, layout, tuple(made))

    @staticmethod
    def _list_item(
        source: MediaSource,
        numbers: tuple[int, ...],
        frames: Sequence[_Frame],
        layout: FilmLayout,
        film: _FrameList,
    ) -> MediaSource:
        """One item; without bytes where one of its frames is only named."""
        data = [frame.data for frame in frames if frame.data is not None]
        missing = next((frame.source.param for frame in frames if frame.data is None), None)
        return replace(
            source,
            origin="inline" if missing is None else "nothing",
            value="",
            param=source.param if missing is None else missing,
            uuid=_item_name(source, numbers),
            frames=(),
            options=layout.options,
            identity=LISTED + b"".join(frame.digest for frame in frames),
            load=_Pack(film, data) if missing is None else None,
        )

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
        limits = self._item_limits.max_cpu_seconds, self._max_seconds
        film = FilmFile(self._work, bytes(data), index, layout, tenant, limits)
        made = [
            replace(
                source,
                origin="inline",
                value="",
                uuid=_item_name(source, item.frames),
                options=layout.options,
                identity=index.digests_of(item.frames),
                load=_Load(film, item.frames),
            )
            for item in layout.items
        ]
        return OpenFilm(info, layout, tuple(made), tuple(self._names(source, scope, info)))

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
            seconds=index_seconds(len(data)),
            request_id=current_request_id.get(),
        )
        made = await self._work.run_job(job)
        index = _read_index(made)
        self._indexes[hashed] = index
        self._index_bytes += _index_bytes(index)
        while self._index_bytes > INDEX_BYTES and len(self._indexes) > 1:
            _, dropped = self._indexes.popitem(last=False)
            self._index_bytes -= _index_bytes(dropped)
        return index


@dataclass(frozen=True, slots=True)
class _Pack:
    """The frames of one item of a list, when they are needed."""

    film: _FrameList
    frames: Sequence[Encoded]

    def announce(self) -> None:
        self.film.expect(self.frames)

    def forget(self) -> None:
        """Nothing of a list is made before it is asked for."""

    async def __call__(self) -> Encoded:
        await self.film.judge()
        return pack_frames([bytes(frame) for frame in self.frames])


class _FrameList:
    """What the frames of one list will take: those of its items that must be made."""

    def __init__(
        self, work: FilmWork, model_pixels: int, limits: CostLimits, max_seconds: float
    ) -> None:
        self._work = work
        self._model_pixels = model_pixels
        self._limits = limits
        self._max_seconds = max_seconds
        self._expected: dict[int, Encoded] = {}
        self._lock = asyncio.Lock()
        self._is_judged = False
        self._refusal: str | None = None

    def expect(self, frames: Sequence[Encoded]) -> None:
        """A frame that fills up the last item is in the list once."""
        self._expected.update({id(frame): frame for frame in frames})

    async def judge(self) -> None:
        """Raises `TooLargeError` if the frames that are expected, or one of them, are too dear."""
        async with self._lock:
            if not self._is_judged:
                await self._judge()
                self._is_judged = True
                self._expected.clear()
        if self._refusal is not None:
            raise TooLargeError(self._refusal)

    async def _judge(self) -> None:
        frames = list(self._expected.values())
        try:
            if sum(map(len, frames)) > OFF_LOOP_BYTES:
                seconds = await asyncio.to_thread(self._seconds, frames)
            else:
                seconds = self._seconds(frames)
            _check_seconds(seconds, len(frames), self._max_seconds)
        except TooLargeError as error:
            self._refusal = error.message
            self._work.count_refusal()

    def _seconds(self, frames: Sequence[Encoded]) -> float:
        return listed_seconds(frames, self._model_pixels, self._limits)


def _check_seconds(seconds: float, num_frames: int, most: float) -> None:
    if seconds > most:
        raise TooLargeError(
            f"decoding {num_frames} frames of the film would take about {seconds:.0f} CPU seconds; "
            f"at most {most:g} are allowed (--max-video-decode-seconds)"
        )


@dataclass(frozen=True, slots=True)
class _Load:
    """The frames of one item, when they are needed."""

    film: FilmFile
    frames: tuple[int, ...]

    def announce(self) -> None:
        self.film.expect(self.frames)

    def forget(self) -> None:
        self.film.forget(self.frames)

    async def __call__(self) -> Encoded:
        return await self.film.load(self.frames)


class FilmFile:
    """The frames of a file that items need.

        expected ─▶ their cost is judged ─▶ jobs of items side by side, in the film's order
                                                 │ asked for: given to who waits
                                                 └ still expected: kept until it is, or forgotten

    So no frame that several items need to be decoded before theirs is decoded once for each. After
    a job that fails, jobs are of items that are asked for alone.
    """

    def __init__(
        self,
        work: FilmWork,
        data: bytes,
        index: FilmIndex,
        layout: FilmLayout,
        tenant: str,
        limits: tuple[float, float],
    ) -> None:
        """`limits` are the CPU seconds that one job and the whole film may take."""
        self._work = work
        self._data = data
        self._index = index
        self._options = layout.options
        self._tenant = tenant
        self._max_job, self._max_seconds = limits
        self._model_pixels = _model_pixels(layout)
        pixels = index.width * index.height
        self._cost = FilmCost(len(data), index.num_frames, pixels, data[:6] in GIF_HEADS)
        self._most_frames = max(FRAMES_AT_ONCE, BYTES_AT_ONCE // max(1, 3 * self._model_pixels))
        self._expected: set[tuple[int, ...]] = set()
        """Not asked for yet, and not made."""
        self._wanted: dict[tuple[int, ...], asyncio.Future[Encoded]] = {}
        self._ahead: dict[tuple[int, ...], Encoded] = {}
        """Made with others before they were asked for."""
        self._is_judged = False
        self._refusal: str | None = None
        self._num_waiting: Counter[tuple[int, ...]] = Counter()
        """Callers that wait, by item."""
        self._task: asyncio.Task[None] | None = None

    def expect(self, frames: tuple[int, ...]) -> None:
        """The item will be asked for: it may be made before, with others."""
        self._expected.add(frames)

    def forget(self, frames: tuple[int, ...]) -> None:
        """The item may never be asked for: it is not made, or kept, unless somebody waits for it.
        It can still be loaded."""
        self._expected.discard(frames)
        self._ahead.pop(frames, None)

    async def load(self, frames: tuple[int, ...]) -> Encoded:
        """The frames of an item, packed. Raises a `RequestError` that names no part.

        An item whose callers are all cancelled is no longer wanted; when none is, the decoding is
        cancelled.
        """
        ahead = self._ahead.pop(frames, None)
        if ahead is not None:
            return ahead
        self._judge(frames)
        self._expected.discard(frames)
        future = self._wanted.get(frames)
        if future is None:
            future = self._wanted[frames] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._decode_wanted())
        self._num_waiting[frames] += 1
        try:
            return await asyncio.shield(future)
        finally:
            self._num_waiting[frames] -= 1
            if not self._num_waiting[frames]:
                del self._num_waiting[frames]
                self._wanted.pop(frames, None)
            if not self._num_waiting:
                self._give_up()

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a later caller must not wait for what is being cancelled
        self._wanted.clear()

    # --- what it costs ------------------------------------------------------------------------

    def _judge(self, frames: tuple[int, ...]) -> None:
        """Raises `TooLargeError` if the first item that is asked for, with those that are expected
        by then, would take too long. Others were made before, and gone since."""
        if not self._is_judged:
            self._is_judged = True
            try:
                self._check_cost(sorted({*self._expected, frames}))
            except TooLargeError as error:
                self._refusal = error.message
                self._work.count_refusal()
        if self._refusal is not None:
            raise TooLargeError(self._refusal)

    def _check_cost(self, items: Sequence[tuple[int, ...]]) -> None:
        num_frames = len({index for item in items for index in item})
        seconds = num_frames * film_item_seconds(self._model_pixels, self._model_pixels)
        begun = 0
        while begun < len(items):
            count, of_job = self._job(items, begun)
            _check_job(of_job, items[begun : begun + count], self._max_job)
            seconds += of_job
            begun += count
        _check_seconds(seconds, num_frames, self._max_seconds)

    def _job(self, items: Sequence[tuple[int, ...]], begun: int) -> tuple[int, float]:
        """How many of the items from the one at `begun` on are decoded together, one at least, and
        the CPU seconds that it takes."""
        first = items[begun][0]
        starts = self._index.starts
        group = bisect_right(starts, first) - 1
        start = starts[group] if group >= 0 else 0
        taken: set[int] = set()
        count, seconds = 0, 0.0
        for item in islice(items, begun, None):
            taken.update(item)
            more = self._cost.decoding(item[-1] - start + 1, len(taken))
            if count and (len(taken) > self._most_frames or more > self._max_job):
                break
            count, seconds = count + 1, more
        return count, seconds

    # --- decoding -----------------------------------------------------------------------------

    async def _decode_wanted(self) -> None:
        while True:
            await asyncio.sleep(0)  # the items of one prompt ask one after the other
            if not self._wanted:
                return
            first = min(self._wanted)
            items = sorted({*self._wanted, *(each for each in self._expected if each > first)})
            count, seconds = self._job(items, 0)
            batch = items[:count]
            try:
                packed = await self._decode(batch, seconds)
            except BaseException as error:
                if isinstance(error, UnprocessableMediaError) and self._only_wanted(batch):
                    continue
                if self._task is asyncio.current_task():  # else nobody waits for this batch
                    for future in self._futures(batch).values():
                        future.set_exception(error)
                        future.exception()  # whoever waited may have gone
                if not isinstance(error, Exception):
                    raise
            else:
                for frames, future in self._futures(batch).items():
                    future.set_result(packed[frames])
                for frames in self._expected.intersection(batch):
                    self._expected.remove(frames)
                    self._ahead[frames] = packed[frames]

    def _only_wanted(self, batch: Sequence[tuple[int, ...]]) -> bool:
        """Make nothing more before it is asked for; whether that leaves some of the batch out, so
        that the rest is to be tried by itself."""
        self._expected.clear()
        return any(frames in self._wanted for frames in batch) and not all(
            frames in self._wanted for frames in batch
        )

    def _futures(
        self, batch: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], asyncio.Future[Encoded]]:
        """Of those of the batch that are waited for, which are no longer wanted."""
        found = {frames: self._wanted.pop(frames) for frames in batch if frames in self._wanted}
        return {frames: future for frames, future in found.items() if not future.done()}

    async def _decode(
        self, batch: Sequence[tuple[int, ...]], seconds: float
    ) -> dict[tuple[int, ...], Encoded]:
        indices = sorted({index for frames in batch for index in frames})
        _check_job(seconds, batch, self._max_job)
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


def _check_job(seconds: float, items: Sequence[tuple[int, ...]], most: float) -> None:
    if seconds > most:
        raise TooLargeError(
            f"decoding frame {items[0][0]} of the film, with those before it that it is drawn "
            f"over, would take about {seconds:.0f} CPU seconds; at most {most:g} are allowed at a "
            "time (--max-decode-seconds)"
        )


def _model_pixels(layout: FilmLayout) -> int:
    """Of a frame at the size that the model takes it at."""
    sides = [layout.options.get(name, 0) for name in ("width", "height")]
    return math.prod(side for side in sides if isinstance(side, int))


def _read_index(made: Processed) -> FilmIndex:
    """What a worker found. Raises `UnprocessableMediaError`."""
    try:
        index = msgspec.msgpack.decode(made.item.arrays["index"].data, type=FilmIndex)
    except (KeyError, msgspec.DecodeError):
        raise UnprocessableMediaError("the film cannot be read") from None
    if not index.num_frames or len(index.digests) % 32:
        raise UnprocessableMediaError("the film cannot be read")
    return index


def _index_bytes(index: FilmIndex) -> int:
    return INDEX_ENTRY + len(index.digests) + INDEX_START * len(index.starts)


LISTED = b"listed"
"""What the identity of an item of a list begins with; a file's digests are those of its packets."""
FRAME_NAMES = ("frame", "frame size")


def _name(kind: str, uuid: str | None) -> str:
    return msgspec.json.encode([kind, uuid]).decode()


def _item_name(source: MediaSource, frames: tuple[int, ...]) -> str | None:
    """The name of an item of a film that has one: its frames, of which film."""
    if source.uuid is None:
        return None
    return msgspec.json.encode([source.uuid, frames]).decode()


def _frame_names(frame: _Frame) -> list[Name]:
    if frame.source.uuid is None:
        return []
    values = frame.digest, SIZE_RECORD.pack(*frame.size)
    return [
        Name(_name(kind, frame.source.uuid), value, frame.source.param)
        for kind, value in zip(FRAME_NAMES, values, strict=True)
    ]


def _read_frames(sources: Sequence[MediaSource], loaded: dict[int, Encoded]) -> dict[int, _Frame]:
    """Sizes and digests of the frames that came. Raises `UnprocessableMediaError`."""
    return {
        number: _Frame(blake3(data).digest(), _size_of(data, number), data, sources[number])
        for number, data in loaded.items()
    }


def _not_held(param: str) -> MediaNotCachedError:
    return MediaNotCachedError(
        f"{param}: no media is held under this uuid; send it again", param=param
    )


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
