"""Media parts → rendered items, with as little work as their bytes allow.

    source ─▶ bytes ─▶ MediaHash ─▶ key ─▶ directory lookup ─▶ hit: pinned, nothing is decoded
                                               │ held by a request that is not sent yet: shared
                                               │ expansion known: the reference goes ahead
                                               └ miss: one flight per key in the worker pool

Hits are settled at once, on the event loop, before anything waits; so no hit waits behind a miss.
Every pin taken here belongs to a `RenderedItem`, or is given back before an error leaves.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from lookonce.cache.identity import HashAlgorithm, item_key, media_hash
from lookonce.errors import (
    ConflictError,
    MediaNotCachedError,
    RequestError,
    UnprocessableMediaError,
)
from lookonce.render.families.base import Options
from lookonce.render.media.loader import OFF_LOOP_BYTES, MediaSource, for_part
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.media import Expansion, Modality, ProcessedItem
from lookonce.types.ports import ItemDirectory
from lookonce.types.request import ProcessorOutcome, RenderedItem

MAX_SIDE_BY_SIDE = 32
"""Parts of one prompt that are fetched or processed at a time: a prompt with more must neither be
refused by the pool's bounded queue nor fill it alone."""


T = TypeVar("T")


@dataclass(slots=True)
class RenderStats:
    """Work done since the start, by modality; plain counters that metrics read."""

    fetched: Counter[str] = field(default_factory=Counter)
    queued: Counter[Modality] = field(default_factory=Counter)
    """Taken by the pool's queue, whatever became of it."""
    decoded: Counter[Modality] = field(default_factory=Counter)
    processed: Counter[Modality] = field(default_factory=Counter)
    overtaking: Counter[Modality] = field(default_factory=Counter)
    """Hits, of parts held, that were settled while others waited for the pool."""
    waiting: Counter[Modality] = field(default_factory=Counter)
    """Hits that waited for the pool, having joined what it did for another part."""

    def clear(self) -> None:
        for counter in (self.fetched, self.queued, self.decoded, self.processed):
            counter.clear()
        self.overtaking.clear()
        self.waiting.clear()


@dataclass(frozen=True, slots=True)
class ResolvedPart:
    """A part whose content is known. `data` is None when only a uuid named it."""

    source: MediaSource
    options: Options
    scope: bytes
    digest: bytes
    key: bytes
    data: bytes | None

    @property
    def job(self) -> MediaJob:
        return MediaJob(self.source.modality, self.data or b"", self.options)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One call of `resolve`: for whom, how, and the pins it has taken."""

    scope: bytes
    options: Mapping[Modality, Options]
    pinned: list[RenderedItem] = field(default_factory=list)
    overtaking: Counter[Modality] = field(default_factory=Counter)
    waiting: Counter[Modality] = field(default_factory=Counter)


class MediaResolver:
    """One per API process; all methods run on its event loop."""

    def __init__(
        self,
        *,
        family: ItemIdentity,
        directory: RendererDirectory,
        uuids: NameBindings,
        loader: Loader,
        pool: Pool,
        max_bytes: int,
        algorithm: HashAlgorithm = "blake3",
    ) -> None:
        """`max_bytes` limits the encoded bytes of inline media."""
        self.stats = RenderStats(fetched=loader.fetched)
        self._family = family
        self._fingerprint = family.fingerprint()
        self.directory = directory
        self._uuids = uuids
        self._loader = loader
        self._pool = pool
        self._max_bytes = max_bytes
        self._algorithm: HashAlgorithm = algorithm
        self._flights: SingleFlight[bytes, Processed] = SingleFlight()
        self._num_in_pool = 0
        self._live: weakref.WeakValueDictionary[bytes, RenderedItem] = weakref.WeakValueDictionary()
        """Parts with their item at hand, of prompts that may not be sent yet."""

    def beside(
        self, *, directory: RendererDirectory, uuids: NameBindings, loader: Loader
    ) -> MediaResolver:
        """The same processing with other memory: nothing it does shows in this one."""
        return MediaResolver(
            family=self._family,
            directory=directory,
            uuids=uuids,
            loader=loader,
            pool=self._pool,
            max_bytes=self._max_bytes,
            algorithm=self._algorithm,
        )

    async def resolve(
        self, sources: Sequence[MediaSource], scope: bytes, kwargs: Mapping[str, object]
    ) -> list[RenderedItem]:
        """One item per source, in order. `kwargs` are the request's `mm_processor_kwargs`.

        Raises a `RequestError` that names the part; then, as when cancelled, no pin is left.
        """
        modalities = {source.modality for source in sources}
        prompt = _Prompt(scope, {m: self._family.item_options(m, kwargs) for m in modalities})
        try:
            items = await self._resolve_all(sources, prompt)
        except BaseException:
            self.release(prompt.pinned)
            raise
        self._count(items, prompt)
        return items

    def release(self, items: Iterable[RenderedItem]) -> None:
        """Give back the pins of a prompt that is over, and count what nobody asked for."""
        for item in items:
            if item.pinned:
                item.pinned = False
                self.directory.unpin(item.key)
            if item.uncounted:
                item.uncounted = False
                self.directory.count(item.outcome)

    def _count(self, items: Iterable[RenderedItem], prompt: _Prompt) -> None:
        for item in items:
            item.uncounted = item.outcome == "not_needed"
            if not item.uncounted:
                self.directory.count(item.outcome)
        if self.directory.capacity_bytes:
            self.stats.overtaking.update(prompt.overtaking)
            self.stats.waiting.update(prompt.waiting)

    async def _resolve_all(
        self, sources: Sequence[MediaSource], prompt: _Prompt
    ) -> list[RenderedItem]:
        settled: dict[int, RenderedItem] = {}
        waiting: dict[int, Callable[[], Coroutine[Any, Any, RenderedItem]]] = {}
        for number, source in enumerate(sources):
            part = self._identify_now(source, prompt)
            held = None if part is None else self._held(part, prompt)
            if held is not None:
                settled[number] = held
            elif part is not None:
                waiting[number] = partial(self._make, part, prompt)
            else:
                waiting[number] = partial(self._load_and_make, source, prompt)
        if waiting:
            settled |= zip(waiting, await _all_of(waiting.values()), strict=True)
        return [settled[number] for number in range(len(sources))]

    async def _load_and_make(self, source: MediaSource, prompt: _Prompt) -> RenderedItem:
        data = await self._loader.load(source, prompt.scope)
        if len(data) > OFF_LOOP_BYTES:
            digest = await asyncio.to_thread(self._hash, source, prompt, data)
        else:
            digest = self._hash(source, prompt, data)
        part = self._identified(source, prompt, digest, data)
        return self._held(part, prompt) or await self._make(part, prompt)

    # --- identity -----------------------------------------------------------------------------

    def _identify_now(self, source: MediaSource, prompt: _Prompt) -> ResolvedPart | None:
        """Where that needs no waiting. Raises `RequestError`."""
        if source.origin == "nothing":
            return self._identify_by_uuid(source, prompt)
        if source.origin != "inline" or len(source.value) > OFF_LOOP_BYTES:
            return None
        data = source.inline_bytes(self._max_bytes)
        return self._identified(source, prompt, self._hash(source, prompt, data), data)

    def _identify_by_uuid(self, source: MediaSource, prompt: _Prompt) -> ResolvedPart:
        name = _uuid_name(source, prompt.options[source.modality])
        digest = self._uuids.resolve(prompt.scope, name)
        if digest is None:
            raise _not_cached(source)
        return self._identified(source, prompt, digest, None)

    def _hash(self, source: MediaSource, prompt: _Prompt, data: bytes) -> bytes:
        return media_hash(
            data,
            modality=source.modality,
            fingerprint=self._fingerprint,
            processor_options=prompt.options[source.modality],
            algorithm=self._algorithm,
        )

    def _identified(
        self, source: MediaSource, prompt: _Prompt, digest: bytes, data: bytes | None
    ) -> ResolvedPart:
        """Raises before any work when the part's uuid or digest means other media."""
        options, scope = prompt.options[source.modality], prompt.scope
        if source.digest not in (None, digest):
            raise _other_media(source)
        if source.uuid is not None:
            bound = self._uuids.resolve(scope, _uuid_name(source, options))
            if bound not in (None, digest):
                raise ConflictError(
                    f"{source.param}: this uuid is bound to other media", param=source.param
                )
        return ResolvedPart(source, options, scope, digest, item_key(scope, digest), data)

    # --- content ------------------------------------------------------------------------------

    def _held(self, part: ResolvedPart, prompt: _Prompt) -> RenderedItem | None:
        """The item of a part that needs no work here. Raises when a bare uuid has nothing."""
        expansion = self.directory.lookup(part.key)
        if expansion is not None:
            outcome = self.directory.held_as(part.key)
            item = self._item(part, expansion, outcome=outcome, pinned=True)
            prompt.pinned.append(item)
            prompt.overtaking[item.modality] += self._num_in_pool > 0
            return self._bound(part, item)
        live = self._live.get(part.key)
        if live is not None and live.item is not None:
            item = self._item(part, live.expansion, item=live.item, outcome="hit")
            return self._bound(part, item)
        if part.data is not None and not self.directory.capacity_bytes:
            return None  # with the cache off the engine is not asked to do without the item
        expansion = self.directory.known_expansion(part.key)
        if expansion is not None:
            return self._bound(part, self._item(part, expansion, outcome="not_needed"))
        if part.data is None:
            raise _not_cached(part.source)
        return None

    async def _make(self, part: ResolvedPart, prompt: _Prompt) -> RenderedItem:
        """Decode and process, or join who is doing it."""
        joined = part.key in self._flights
        made = await self._process(part)
        prompt.waiting[part.source.modality] += joined
        outcome: ProcessorOutcome = "hit" if joined else self._outcome_of(made.item)
        item = self._item(part, made.item.expansion, item=made.item, outcome=outcome)
        if not joined:
            item.decode_ms, item.process_ms = made.decode_ms, made.process_ms
        return self._bound(part, item)

    async def _process(self, part: ResolvedPart) -> Processed:
        try:
            return await self._flights.run(part.key, lambda: self._run(part.job))
        except RequestError as error:
            raise for_part(error, part.source.param) from None

    async def _run(self, job: MediaJob) -> Processed:
        working = self._pool.run(job)
        self.stats.queued[job.modality] += 1
        self._num_in_pool += 1
        try:
            made = await working
        finally:
            self._num_in_pool -= 1
        self.stats.decoded[job.modality] += 1
        self.stats.processed[job.modality] += 1
        return made

    def _item(
        self,
        part: ResolvedPart,
        expansion: Expansion,
        *,
        outcome: ProcessorOutcome,
        item: ProcessedItem | None = None,
        pinned: bool = False,
    ) -> RenderedItem:
        rendered = RenderedItem(
            key=part.key,
            media_hash=part.digest,
            modality=part.source.modality,
            expansion=expansion,
            item=item,
            outcome=outcome,
            pinned=pinned,
        )
        rendered.encoded = part.data
        if part.data is not None:
            rendered.recover = self._recovery(part, weakref.ref(rendered))
        if item is not None:
            self._live[part.key] = rendered
        return rendered

    def _recovery(
        self, part: ResolvedPart, item: weakref.ref[RenderedItem]
    ) -> Callable[[], Coroutine[Any, Any, ProcessedItem]]:
        """Makes the item again from its bytes, and lets the receipt say so, unless the part has
        been counted: the receipt says what was counted, and a resend counts nothing.

        The prompt keeps the item until it is sent: nobody else need make it meanwhile.
        """

        async def recover() -> ProcessedItem:
            live = self._live.get(part.key)
            if live is not None and live.item is not None:
                made, joined = Processed(live.item, 0.0, 0.0), True
            else:
                joined = part.key in self._flights
                made = await self._process(part)
            rendered = item()
            if rendered is not None:
                rendered.item = made.item
                if not joined:
                    self._live[part.key] = rendered
                if rendered.uncounted:
                    self._made_after_all(rendered, made, joined=joined)
            return made.item

        return recover

    def _made_after_all(self, rendered: RenderedItem, made: Processed, *, joined: bool) -> None:
        """A part that went ahead was needed: it will be counted as what that took."""
        rendered.outcome = "hit" if joined else self._outcome_of(made.item)
        if not joined:
            rendered.decode_ms, rendered.process_ms = made.decode_ms, made.process_ms

    def _outcome_of(self, item: ProcessedItem) -> ProcessorOutcome:
        return "miss" if item.nbytes <= self.directory.capacity_bytes else "bypass"

    def _bound(self, part: ResolvedPart, item: RenderedItem) -> RenderedItem:
        """The item, its uuid bound now that its content is known to be good."""
        source = part.source
        if source.uuid is not None:
            name = _uuid_name(source, part.options)
            self._uuids.bind(part.scope, name, part.digest, param=source.param)
        return item


def _uuid_name(source: MediaSource, options: Options) -> str:
    """A uuid means one content; what options make of it are different items."""
    return msgspec.json.encode([source.uuid, options], order="deterministic").decode()


def _not_cached(source: MediaSource) -> MediaNotCachedError:
    return MediaNotCachedError(
        f"{source.param}: no media is held under this uuid; send it again", param=source.param
    )


def _other_media(source: MediaSource) -> UnprocessableMediaError:
    return UnprocessableMediaError(
        f"{source.param}: the media does not have the hash it was sent with: its bytes, the "
        "processor's options, or the processor itself (version, dtype) differ",
        param=source.param,
    )


async def _all_of(works: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """All results; the first failure cancels the rest and is raised as it is."""
    room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)

    async def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with room:
            return await work()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(work)) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class ItemIdentity(Protocol):
    """What identities depend on; `families.base.ProcessorFamily` is the real one."""

    def fingerprint(self) -> bytes: ...

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options: ...


class Loader(Protocol):
    """Encoded bytes of a source; `load.MediaLoader` is the real one."""

    @property
    def fetched(self) -> Counter[str]:
        """Bodies fetched and files read, by modality."""

    async def load(self, source: MediaSource, scope: bytes = b"") -> bytes: ...


class Pool(Protocol):
    """Decodes and processes off the event loop; `pool.MediaPool` is the real one."""

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Raises at once what refuses the job; the rest when awaited."""


class RendererDirectory(ItemDirectory, Protocol):
    @property
    def capacity_bytes(self) -> int: ...


class NameBindings(Protocol):
    """What uuids mean; `cache.uuids.UuidBindings` is the real one."""

    def bind(self, scope: bytes, uuid: str, digest: bytes, *, param: str | None = None) -> None: ...

    def resolve(self, scope: bytes, uuid: str) -> bytes | None: ...
