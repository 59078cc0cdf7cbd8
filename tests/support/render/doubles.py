"""Doubles of the resolver's components. Items have one embed token per byte of their data."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from lookonce.cache.directory import Directory
from lookonce.errors import UnprocessableMediaError
from lookonce.render.media.loader import MediaSource, for_part
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem
from lookonce.types.ports import ClaimsItems, Publish

PLACEHOLDERS: dict[Modality, int] = {"image": 9, "audio": 3}


def processed_item(modality: Modality, data: bytes) -> ProcessedItem:
    token = PLACEHOLDERS[modality]
    expansion = Expansion(((token, max(1, len(data))),), token)
    return ProcessedItem(modality, {"x": Array("uint8", (len(data),), data)}, expansion)


class FakePool:
    """Processes instantly while `gate` is open; data that begins with "bad" cannot be decoded, nor
    any while there is a `failure`."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.jobs: list[MediaJob] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self, job: MediaJob) -> Processed:
        self.jobs.append(job)
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        data = bytes(job.data)
        if data.startswith(b"bad"):
            raise UnprocessableMediaError("the image is broken")
        return Processed(processed_item(job.modality, data), 1.0, 2.0)

    def counts(self) -> dict[str, float]:
        return {}


class FakeLoader:
    """URL → bytes; loading takes as long as `gate` is closed, an unknown URL fails."""

    def __init__(self, web: Mapping[str, bytes]) -> None:
        self.web = dict(web)
        self.loaded: list[str] = []
        self.fetched: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, source: MediaSource, scope: bytes = b"", *, tenant: str = "") -> bytes:
        if source.origin == "inline":
            return source.inline_bytes(2**30)
        self.loaded.append(source.value)
        await self.gate.wait()
        if source.value not in self.web:
            raise for_part(UnprocessableMediaError("the media could not be fetched"), source.param)
        self.fetched[source.modality] += 1
        return self.web[source.value]


class ClaimDesk:
    """The engine's part in claims, for resolvers on one event loop.

    While it is `forgetful`, what has been published is gone before another one finds it.
    """

    def __init__(self) -> None:
        self.queues: dict[bytes, list[asyncio.Future[bool]]] = {}
        self.published: dict[bytes, ProcessedItem] = {}
        self.forgetful = False

    def of(self, directory: Directory) -> ClaimsItems:
        return _Claims(self, directory)


class _Claims:
    def __init__(self, desk: ClaimDesk, directory: Directory) -> None:
        self._desk, self._directory = desk, directory

    @asynccontextmanager
    async def claimed(self, key: bytes) -> AsyncIterator[Publish | None]:
        desk = self._desk
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        queue = desk.queues.setdefault(key, [])
        queue.append(granted)
        if key in desk.published:
            granted.set_result(False)
        elif len(queue) == 1:
            granted.set_result(True)

        async def publish(item: ProcessedItem) -> None:
            desk.published[key] = item
            self._directory.try_list(key, item.nbytes, item.expansion)
            for waiting in queue[1:]:
                waiting.set_result(False)

        try:
            if await granted:
                yield publish
            else:
                item = desk.published[key]
                if not desk.forgetful:
                    self._directory.hint(key, item.nbytes, item.expansion)
                yield None
        finally:
            queue.remove(granted)
            if not queue:
                del desk.queues[key]
            elif not queue[0].done():
                queue[0].set_result(True)


class FakeFamily:
    """Pictures take the option `max_pixels`."""

    def fingerprint(self) -> bytes:
        return b"fake"

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> dict[str, object]:
        wanted = {"image": ("max_pixels",), "audio": ()}[modality]
        return {name: kwargs[name] for name in wanted if name in kwargs}

    def options_beside(
        self, modality: Modality, modalities: Collection[Modality]
    ) -> dict[str, object]:
        return {}


def inline(data: bytes, *, param: str = "messages[0].content[0]", **fields: str) -> MediaSource:
    encoded = base64.b64encode(data).decode()
    return MediaSource("image", "inline", encoded, param, **fields)


def remote(url: str, *, param: str = "messages[0].content[0]", **fields: str) -> MediaSource:
    return MediaSource("image", "remote", url, param, **fields)


def named(uuid: str, *, param: str = "messages[0].content[0]") -> MediaSource:
    return MediaSource("image", "nothing", "", param, uuid)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that changes in another task, thread or process."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
