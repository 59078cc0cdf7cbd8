"""Sound files for models that hear one window at a time.

    file ─▶ decoded and processed once, as a whole ─▶ windows, cut where the model wants them
                                                      each an item, by its own content

A window's identity is its content, so files that share a beginning share its windows. What a
file's windows contain is remembered by (scope, file, start): the same file again is not even
decoded, as long as its windows, or their encoder outputs, are held.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

from lookonce.render.families.speech import SpeechProcessing
from lookonce.render.media.loader import Encoded, MediaSource
from lookonce.render.media.processing import Processed
from lookonce.render.media.resolver import MediaResolver, ResolvedPart
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


class SoundFiles:
    """Opens sound files; one per process that renders."""

    def __init__(self, resolver: MediaResolver, family: SpeechProcessing) -> None:
        self._resolver = resolver
        self._family = family
        self._known: OrderedDict[bytes, _KnownFile] = OrderedDict()

    async def open(self, data: Encoded, scope: bytes, *, tenant: str, param: str) -> SoundFile:
        """Identify a file, and decode it if it is new. Raises a `RequestError` that names it."""
        source = MediaSource("audio", "inline", "", param, data=data)
        part = await asyncio.to_thread(self._resolver.file_part, source, scope, tenant=tenant)
        file = SoundFile(self._resolver, self._family, part, self._known.get(part.key))
        known = await file.learn()
        self._known[part.key] = known
        self._known.move_to_end(part.key)
        if len(self._known) > MAX_KNOWN_FILES:
            self._known.popitem(last=False)
        return file


class SoundFile:
    """One file of one request; decoded only if something about it is not known."""

    def __init__(
        self,
        resolver: MediaResolver,
        family: SpeechProcessing,
        part: ResolvedPart,
        known: _KnownFile | None,
    ) -> None:
        self._resolver = resolver
        self._family = family
        self._part = part
        self._known = known
        self._processed: Processed | None = None
        self._times = (0.0, 0.0)

    async def learn(self) -> _KnownFile:
        """What is known of the file; decodes it if that is nothing."""
        if self._known is None:
            item = (await self._decoded()).item
            self._known = _KnownFile(self._family.num_frames(item), self._family.num_samples(item))
        return self._known

    @property
    def known(self) -> _KnownFile:
        assert self._known is not None, "the file was opened"
        return self._known

    @property
    def num_frames(self) -> int:
        return self.known.num_frames

    @property
    def sound_frames(self) -> int:
        """Frames that begin within the sound, without what pads it."""
        per_frame = self._family.sampling_rate // self._family.frames_per_second
        return -(-self.known.num_samples // per_frame)

    @property
    def seconds(self) -> float:
        return self.known.num_samples / self._family.sampling_rate

    async def window(self, start: int) -> RenderedItem:
        """The item of the window that begins at frame `start`; the caller releases its prompt."""
        window, made = self.known.windows.get(start), None
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
        whole = await self._decoded()
        item = await asyncio.to_thread(self._family.window, whole.item, start)
        digest = await asyncio.to_thread(self._resolver.window_digest, item)
        window = _Window(digest, item.expansion)
        if len(self.known.windows) < MAX_KNOWN_WINDOWS:
            self.known.windows[start] = window
        # The first window that is made shows what decoding the file took.
        times, self._times = self._times, (0.0, 0.0)
        return Processed(item, *times), window

    async def _recover(self, start: int) -> ProcessedItem:
        """The window's arrays again; the engine turned out to need them."""
        made, _ = await self._make(start)
        return made.item

    async def _decoded(self) -> Processed:
        if self._processed is None:
            self._processed = found = await self._resolver.process_file(self._part)
            self._times = (found.decode_ms, found.process_ms)
        return self._processed
