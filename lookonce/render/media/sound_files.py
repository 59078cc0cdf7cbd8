"""Sound files for models that hear one window at a time.

    file ─▶ decoded and processed once, as a whole ─▶ windows, cut where the model wants them
                                                      each an item, by its own content

A window's identity is its content, so files that share a beginning share its windows. What a
file's windows contain is remembered by (scope, file, start): the same file again is not even
decoded, as long as its windows, or their encoder outputs, are held.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

from lookonce.render.families.speech import SpeechProcessing
from lookonce.render.media.loader import Encoded, MediaSource
from lookonce.render.media.processing import Processed
from lookonce.render.media.resolver import MediaResolver, ResolvedPart
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.media import Expansion, ProcessedItem
from lookonce.types.request import RenderedItem

MAX_KNOWN_FILES = 4096
MAX_KNOWN_WINDOWS = 4096
"""Windows remembered of one file: those of 34 hours."""


@dataclass(frozen=True, slots=True)
class _Window:
    digest: bytes
    expansion: Expansion


@dataclass(slots=True)
class _KnownFile:
    num_frames: int
    num_samples: int
    windows: dict[int, _Window] = field(default_factory=dict)


class DecodedFile:
    """A file's processed whole, shared by the requests that have it open now."""

    __slots__ = ("__weakref__", "_times", "item")

    def __init__(self, processed: Processed) -> None:
        self.item = processed.item
        self._times = (processed.decode_ms, processed.process_ms)

    def take_times(self) -> tuple[float, float]:
        """Milliseconds of decoding and processing, for the first window that is made."""
        times, self._times = self._times, (0.0, 0.0)
        return times


class SoundFiles:
    """Opens sound files; one per process that renders."""

    def __init__(self, resolver: MediaResolver, family: SpeechProcessing) -> None:
        self._resolver = resolver
        self._family = family
        self._known: OrderedDict[bytes, _KnownFile] = OrderedDict()
        self._decoded: weakref.WeakValueDictionary[bytes, DecodedFile] = (
            weakref.WeakValueDictionary()
        )
        self._decoding: SingleFlight[bytes, DecodedFile] = SingleFlight()

    async def open(self, data: Encoded, scope: bytes, *, tenant: str, param: str) -> SoundFile:
        """Identify a file, and decode it if it is new. Raises a `RequestError` that names it."""
        source = MediaSource("audio", "inline", "", param, data=data)
        part = await asyncio.to_thread(self._resolver.file_part, source, scope, tenant=tenant)
        decoded = None
        if part.key not in self._known:
            decoded = await self.decode(part)
        known = self._known.get(part.key)
        if known is None:
            assert decoded is not None, "an unknown file was decoded"
            item = decoded.item
            known = _KnownFile(self._family.num_frames(item), self._family.num_samples(item))
            self._known[part.key] = known
        self._known.move_to_end(part.key)
        if len(self._known) > MAX_KNOWN_FILES:
            self._known.popitem(last=False)
        return SoundFile(self, self._resolver, self._family, part, known, decoded)

    async def decode(self, part: ResolvedPart) -> DecodedFile:
        """The file's processed whole; decoded once for all who want it now."""
        found = self._decoded.get(part.key)
        if found is None:
            found = await self._decoding.run(part.key, lambda: self._decode(part))
        return found

    async def _decode(self, part: ResolvedPart) -> DecodedFile:
        found = DecodedFile(await self._resolver.process_file(part))
        self._decoded[part.key] = found
        return found


class SoundFile:
    """One file of one request; decoded only if a window of it is not known, or not held."""

    def __init__(
        self,
        files: SoundFiles,
        resolver: MediaResolver,
        family: SpeechProcessing,
        part: ResolvedPart,
        known: _KnownFile,
        decoded: DecodedFile | None,
    ) -> None:
        self._files = files
        self._resolver = resolver
        self._family = family
        self._part = part
        self._known = known
        self._decoded = decoded

    @property
    def num_frames(self) -> int:
        return self._known.num_frames

    @property
    def sound_frames(self) -> int:
        """Frames that begin within the sound, without what pads it."""
        per_frame = self._family.sampling_rate // self._family.frames_per_second
        return -(-self._known.num_samples // per_frame)

    @property
    def seconds(self) -> float:
        return self._known.num_samples / self._family.sampling_rate

    async def window(self, start: int) -> RenderedItem:
        """The item of the window that begins at frame `start`; the caller releases its prompt."""
        window, made = self._known.windows.get(start), None
        item = None if window is None else self._item(start, window, None)
        if item is None:
            made, window = await self._make(start)
            item = self._item(start, window, made)
        assert item is not None, "an item was made"
        return item

    def _item(self, start: int, window: _Window, made: Processed | None) -> RenderedItem | None:
        return self._resolver.window_item(
            self._part, window.digest, window.expansion, made, partial(self._recover, start)
        )

    async def _make(self, start: int) -> tuple[Processed, _Window]:
        if self._decoded is None:
            self._decoded = await self._files.decode(self._part)
        decoded = self._decoded
        item = await asyncio.to_thread(self._family.window, decoded.item, start)
        digest = await asyncio.to_thread(self._resolver.window_digest, item)
        window = _Window(digest, item.expansion)
        if len(self._known.windows) < MAX_KNOWN_WINDOWS:
            self._known.windows[start] = window
        return Processed(item, *decoded.take_times()), window

    async def _recover(self, start: int) -> ProcessedItem:
        """The window's arrays again; the engine turned out to need them."""
        made, _ = await self._make(start)
        return made.item
