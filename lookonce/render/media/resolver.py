"""Media parts → rendered items, with as little work as their bytes allow.

    source ─▶ identify: bytes ─▶ MediaHash ─▶ key
                                               │
              look up in the directory ◀───────┘
                │ held: pinned, nothing is decoded
                │ at hand in a prompt that is not sent yet: shared
                │ only its expansion known: the item is referenced by its key
                └ miss: make it, in the worker pool, once per key at a time: in this process by
                  single flight, among the API processes of the server by a claim at the engine

Parts whose bytes are in the request are identified and looked up at once, on the event loop, before
anything waits; so no hit waits for a miss. Every pin taken here belongs to a `RenderedItem`, or is
given back before an error is raised.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from lookonce.cache.identity import HashAlgorithm, item_key, media_hash
from lookonce.errors import (
    ConflictError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.families.base import Options
from lookonce.render.media.cost import UNLIMITED, CostLimits, estimate_cost
from lookonce.render.media.fair_queue import QueueLimitError
from lookonce.render.media.loader import (
    OFF_LOOP_BYTES,
    Encoded,
    LaterBytes,
    MediaSource,
    for_part,
)
from lookonce.render.media.picture_size import ExpansionsBySize
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.counts import Counts
from lookonce.types.fair_queue import LoopTurns
from lookonce.types.held_bytes import current_held_bytes
from lookonce.types.logs import current_request_id
from lookonce.types.media import Expansion, Modality, ProcessedItem
from lookonce.types.ports import ClaimsItems, ItemDirectory, Publish
from lookonce.types.request import ProcessorOutcome, RenderedItem

MAX_SIDE_BY_SIDE = 32
"""Parts of one prompt that are fetched or processed at a time: a prompt with more must neither be
refused by the pool's bounded queue nor fill it alone."""

FILM_SIDE_BY_SIDE = 8
"""The same where a part is a film, which has many items: `frontend.max_prompts_rendered` counts
parts."""
LARGE_BYTES = 64 * 1024
"""A file of more bytes may have headers that take a millisecond to read: in turn by tenant."""
MAX_CLAIMS_OF_ONE_PART = 3
"""How often to look for what another API process has made before it is made here, too."""
REFUSALS = ("estimate", "queue", "tenant")
"""Why a job is refused before any worker sees it: its cost, a full queue, its tenant's share."""

T = TypeVar("T")


class ItemIdentity(Protocol):
    """What an item's identity depends on; implemented by `families.base.ProcessorFamily`."""

    def fingerprint(self) -> bytes: ...

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options: ...
    def options_beside(self, modality: Modality, modalities: Collection[Modality]) -> Options: ...

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion: ...


class Loader(Protocol):
    """Loads the encoded bytes of a source; implemented by `loader.MediaLoader`."""

    @property
    def fetched(self) -> Counter[str]:
        """Bodies fetched and files read, by modality."""

    async def load(
        self, source: MediaSource, scope: bytes = b"", *, tenant: str = ""
    ) -> Encoded: ...


class Pool(Protocol):
    """Decodes and processes off the event loop; implemented by `pool.MediaPool`."""

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Raises at once if the job is refused; other errors are raised when awaited."""


class RendererDirectory(ItemDirectory, Protocol):
    """The directory of held items, and how much they may take; 0 means that the cache is off."""

    @property
    def capacity_bytes(self) -> int: ...


class NameBindings(Protocol):
    """Which content each uuid stands for; implemented by `cache.identity.UuidBindings`."""

    def bind(
        self, scope: bytes, uuid: str, digest: bytes, *, tenant: str, param: str | None = None
    ) -> None: ...

    def resolve(self, scope: bytes, uuid: str) -> bytes | None: ...


class RenderStats:
    """Counts by modality since the start, which are in `counts` under the names of metrics.

    `prefix` begins the names. `fetched` is what the loader counts.
    """

    def __init__(
        self,
        fetched: Counter[str] | None = None,
        counts: Counts | None = None,
        prefix: str = "",
    ) -> None:
        counts = Counts() if counts is None else counts
        self.fetched: Counter[str] = Counter() if fetched is None else fetched
        self.queued = counts.by_label(f"{prefix}media_queued_total")
        """Jobs accepted by the pool's queue, finished or not."""
        self.decoded = counts.by_label(f"{prefix}media_decodes_total")
        self.processed = counts.by_label(f"{prefix}media_processed_total")
        self.overtaking = counts.by_label(f"{prefix}mm_cache_overtaking_hits_total")
        """Directory hits that were answered while other parts waited for the pool."""
        self.waiting = counts.by_label(f"{prefix}mm_cache_waiting_hits_total")
        """Hits that waited for the pool, because another part's job for the same key was
        running."""

        self.refused = counts.by_label(f"{prefix}media_refused_total")
        """Jobs refused before any worker saw them, by `REFUSALS`."""

    def by_name(self) -> dict[str, Counter[str]]:
        """The counters by the names of their metrics, without prefix."""
        return {
            "media_fetches_total": self.fetched,
            "media_queued_total": self.queued,
            "media_decodes_total": self.decoded,
            "media_processed_total": self.processed,
            "mm_cache_overtaking_hits_total": self.overtaking,
            "mm_cache_waiting_hits_total": self.waiting,
        }

    def show(self, modalities: Iterable[str]) -> None:
        """Let the counts of these modalities appear before anything is counted."""
        for reason in REFUSALS:
            self.refused[reason] += 0
        for counter in self.by_name().values():
            for modality in modalities:
                counter[modality] += 0

    def clear(self) -> None:
        for counter in self.by_name().values():
            counter.clear()
        self.refused.clear()


@dataclass(frozen=True, slots=True)
class ResolvedPart:
    """A part whose key is known. `data` is None when only a uuid named the content."""

    source: MediaSource
    options: Options
    scope: bytes
    digest: bytes
    key: bytes
    data: Encoded | None
    tenant: str = ""

    @property
    def has_bytes(self) -> bool:
        """Whether the item can be made: its bytes are here, or can be had."""
        return self.data is not None or self.source.load is not None

    async def job(self) -> MediaJob:
        """Raises what `MediaSource.load` does."""
        data = self.data or b""
        if self.data is None and self.source.load is not None:
            data = await self.source.load()
        view = memoryview(data).toreadonly() if isinstance(data, bytearray) else data
        return MediaJob(
            self.source.modality,
            view,
            self.options,
            self.tenant,
            request_id=current_request_id.get(),
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """State of one call of `resolve`: scope, options, who pays, the pins taken, what to count."""

    scope: bytes
    options: Mapping[Modality, Options]
    tenant: str
    pinned: list[RenderedItem] = field(default_factory=list)
    overtaking: Counter[Modality] = field(default_factory=Counter)
    waiting: Counter[Modality] = field(default_factory=Counter)


Make = Callable[[ResolvedPart], Coroutine[Any, Any, Processed | None]]


class Unclaimed:
    """The `ClaimsItems` of a process that is alone."""

    @asynccontextmanager
    async def claimed(self, key: bytes) -> AsyncIterator[Publish | None]:
        async def keep(item: ProcessedItem) -> None:
            """It goes with its request."""

        yield keep


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
        cost_limits: CostLimits = UNLIMITED,
        algorithm: HashAlgorithm = "blake3",
        stats: RenderStats | None = None,
        claims: ClaimsItems | None = None,
        sizes: ExpansionsBySize | None = None,
        turns: LoopTurns | None = None,
    ) -> None:
        """`max_bytes` limits the encoded bytes of inline media, `cost_limits` what decoding one
        item may cost; without `claims` nobody else makes items. `sizes` says the tokens of new
        pictures, where nothing else of them is wanted. `turns` are those of tenants on the event
        loop."""
        self.stats = RenderStats(loader.fetched) if stats is None else stats
        self._family = family
        self.fingerprint = family.fingerprint()
        """That `media_hash` takes. Made once: it describes all of the processor's configuration."""
        self.directory = directory
        self._uuids = uuids
        self._loader = loader
        self._pool = pool
        self._max_bytes = max_bytes
        self._cost_limits = cost_limits
        self._algorithm: HashAlgorithm = algorithm
        self._claims = Unclaimed() if claims is None else claims
        self._sizes = sizes
        self._turns = LoopTurns() if turns is None else turns
        self._running: SingleFlight[bytes, Processed | None] = SingleFlight()
        """What is being made, by key; None: another API process has made it."""
        self._num_in_pool = 0
        self._unsent: weakref.WeakValueDictionary[bytes, RenderedItem] = (
            weakref.WeakValueDictionary()
        )
        """Key → a rendered item that holds its arrays, of a prompt that may not be sent yet."""

    def with_memory(
        self,
        *,
        directory: RendererDirectory,
        uuids: NameBindings,
        loader: Loader,
        stats: RenderStats | None = None,
        reads_headers: bool = False,
    ) -> MediaResolver:
        """A resolver that shares the family and the pool, but has its own directory and counts.

        `reads_headers`: it decodes no picture whose tokens its headers tell.
        """
        return MediaResolver(
            family=self._family,
            directory=directory,
            uuids=uuids,
            loader=loader,
            pool=self._pool,
            max_bytes=self._max_bytes,
            cost_limits=self._cost_limits,
            algorithm=self._algorithm,
            stats=stats,
            sizes=ExpansionsBySize(self._family, self._pool.run) if reads_headers else None,
            turns=self._turns,
        )

    async def prove_sizes(self) -> None:
        """Try out now what the family says of pictures by their sizes: with the options of most
        requests the first picture need not wait for it."""
        if self._sizes is not None:
            await self._sizes.is_proven(self._options({"image"}, {})["image"])

    def _options(
        self, modalities: Collection[Modality], kwargs: Mapping[str, object]
    ) -> dict[Modality, Options]:
        """Of the items of a prompt that has media of these modalities."""
        return {
            m: {
                **self._family.item_options(m, kwargs),
                **self._family.options_beside(m, modalities),
            }
            for m in modalities
        }

    async def resolve(
        self,
        sources: Sequence[MediaSource],
        scope: bytes,
        kwargs: Mapping[str, object],
        *,
        tenant: str = "",
    ) -> list[RenderedItem]:
        """One item per source, in order. `kwargs` are the request's `mm_processor_kwargs`; the work
        is queued in the name of `tenant`.

        Raises a `RequestError` that names the part; then, as when cancelled, no pin is left.
        """
        modalities = {source.modality for source in sources}
        prompt = _Prompt(scope, self._options(modalities, kwargs), tenant)
        try:
            items = await self._resolve_all(sources, prompt)
        except BaseException:
            self.release(prompt.pinned)
            raise
        for item in items:
            item.uncounted = item.outcome == "not_needed"
            if not item.uncounted:
                self.directory.count(item.outcome)
        if self.directory.capacity_bytes:
            for modality in modalities:
                self.stats.overtaking[modality] += prompt.overtaking[modality]
                self.stats.waiting[modality] += prompt.waiting[modality]
        return items

    def release(self, items: Iterable[RenderedItem]) -> None:
        """Unpin a finished prompt's items, and count those whose arrays were never asked for."""
        for item in items:
            if item.pinned:
                item.pinned = False
                self.directory.unpin(item.key)
            if item.uncounted:
                item.uncounted = False
                self.directory.count(item.outcome)

    async def _resolve_all(
        self, sources: Sequence[MediaSource], prompt: _Prompt
    ) -> list[RenderedItem]:
        found: dict[int, RenderedItem] = {}
        missing: dict[int, Callable[[], Coroutine[Any, Any, RenderedItem]]] = {}
        announced: list[LaterBytes] = []
        for number, source in enumerate(sources):
            part = self._identify_now(source, prompt)
            held = None if part is None else self._lookup(part, prompt)
            if held is not None:
                found[number] = held
            elif part is not None:
                if source.load is not None:
                    source.load.announce()
                    announced.append(source.load)
                missing[number] = partial(self._make, part, prompt)
            else:
                missing[number] = partial(self._load_and_make, source, prompt)
        if missing:
            has_film = any(source.modality == "video" for source in sources)
            most = FILM_SIDE_BY_SIDE if has_film else MAX_SIDE_BY_SIDE
            try:
                found |= zip(missing, await gather(missing.values(), most), strict=True)
            finally:  # another prompt may have joined one of the items, whose film goes on
                for load in announced:
                    load.forget()
        return [found[number] for number in range(len(sources))]

    async def _load_and_make(self, source: MediaSource, prompt: _Prompt) -> RenderedItem:
        begun = time.monotonic()
        data = await self._loader.load(source, prompt.scope, tenant=prompt.tenant)
        loaded = time.monotonic()
        if len(data) > OFF_LOOP_BYTES:
            digest = await asyncio.to_thread(self._hash, source, prompt, data)
        else:
            digest = self._hash(source, prompt, data)
        part = self._identified(source, prompt, digest, data)
        item = self._lookup(part, prompt) or await self._make(part, prompt)
        item.fetched = begun, loaded
        held = current_held_bytes.get()
        if held is not None:
            item.given_back = partial(held.give_media, data)
        return item

    # --- films --------------------------------------------------------------------------------

    @property
    def uuids(self) -> NameBindings:
        return self._uuids

    async def load(self, source: MediaSource, scope: bytes, tenant: str = "") -> Encoded:
        """The encoded bytes of a source. Raises a `RequestError` that names the part."""
        return await self._loader.load(source, scope, tenant=tenant)

    def count_refusal(self) -> None:
        """A film was refused by what decoding it would cost."""
        self.stats.refused["estimate"] += 1

    # --- windows of sound files ---------------------------------------------------------------

    def file_part(self, source: MediaSource, scope: bytes, *, tenant: str = "") -> ResolvedPart:
        """A whole file by its content; nothing is looked up. Raises `RequestError`."""
        prompt = _Prompt(scope, {source.modality: {}}, tenant)
        data = source.inline_bytes(self._max_bytes)
        return self._identified(source, prompt, self._hash(source, prompt, data), data)

    async def process_file(self, part: ResolvedPart) -> Processed:
        """Decode and process a whole file, once for all who want it now. Its result is not in the
        directory: its windows are. Raises a `RequestError` that names the part."""
        return await self._make_unclaimed(part)

    def window_digest(self, item: ProcessedItem) -> bytes:
        """The MediaHash of a window: equal windows of different files share it."""
        parts = [bytes(array.data) for _, array in sorted(item.arrays.items())]
        return media_hash(
            b"".join(parts),
            modality=item.modality,
            fingerprint=self.fingerprint,
            decode_options={"window": [list(a.shape) for _, a in sorted(item.arrays.items())]},
            algorithm=self._algorithm,
        )

    def window_item(
        self,
        part: ResolvedPart,
        digest: bytes,
        expansion: Expansion,
        made: Processed | None,
        recover: Callable[[], Awaitable[ProcessedItem]],
    ) -> RenderedItem | None:
        """The window of a file (`part`) that has this digest; None if it must be `made` first.

        A pin that is taken belongs to the item.
        """
        window = ResolvedPart(
            part.source, {}, part.scope, digest, item_key(part.scope, digest), part.data
        )
        prompt = _Prompt(part.scope, {}, part.tenant)
        item = self._lookup(window, prompt)
        if item is None:
            if made is None:
                return None
            outcome: ProcessorOutcome = self._outcome(made, joined=False)
            item = self._item(window, expansion, outcome, made.item)
            item.decode_ms, item.process_ms = made.decode_ms, made.process_ms
        item.recover, item.encoded = recover, None
        item.uncounted = item.outcome == "not_needed"
        if not item.uncounted:
            self.directory.count(item.outcome)
        return item

    # --- identify -----------------------------------------------------------------------------

    def _identify_now(self, source: MediaSource, prompt: _Prompt) -> ResolvedPart | None:
        """The part, if its content is known without waiting. Raises `RequestError`."""
        if source.identity is not None:
            return self._identified(source, prompt, self._hash(source, prompt, b""), None)
        if source.origin == "nothing" and source.digest is not None:
            return self._identified(source, prompt, source.digest, None)
        if source.origin == "nothing":
            name = _uuid_name(source, _options_of(source, prompt))
            digest = self._uuids.resolve(prompt.scope, name)
            if digest is None:
                raise _not_cached(source)
            return self._identified(source, prompt, digest, None)
        if source.origin != "inline" or source.size > OFF_LOOP_BYTES:
            return None
        data = source.inline_bytes(self._max_bytes)
        return self._identified(source, prompt, self._hash(source, prompt, data), data)

    def _hash(self, source: MediaSource, prompt: _Prompt, data: Encoded) -> bytes:
        of_frames = {"of": "frames"} if source.identity is not None else None
        return media_hash(
            data if source.identity is None else source.identity,
            modality=source.modality,
            fingerprint=self.fingerprint,
            decode_options=of_frames,
            processor_options=_options_of(source, prompt),
            algorithm=self._algorithm,
        )

    def _identified(
        self, source: MediaSource, prompt: _Prompt, digest: bytes, data: Encoded | None
    ) -> ResolvedPart:
        """Raises `RequestError` if the part's uuid or the digest it came with means other media."""
        options, scope = _options_of(source, prompt), prompt.scope
        if source.digest not in (None, digest):
            raise UnprocessableMediaError(
                f"{source.param}: the media does not have the hash it was sent with: its bytes, "
                "the processor's options, or the processor itself (version, dtype) differ",
                param=source.param,
            )
        if source.uuid is not None:
            bound = self._uuids.resolve(scope, _uuid_name(source, options))
            if bound not in (None, digest):
                raise ConflictError(
                    f"{source.param}: this uuid is bound to other media", param=source.param
                )
        key = item_key(scope, digest)
        return ResolvedPart(source, options, scope, digest, key, data, prompt.tenant)

    # --- look up ------------------------------------------------------------------------------

    def _lookup(
        self, part: ResolvedPart, prompt: _Prompt, *, waited: bool = False
    ) -> RenderedItem | None:
        """The item, if nothing must be decoded for it now; None if it must be made. `waited`:
        another API process has made it meanwhile.

        Raises `MediaNotCachedError` if the part has no bytes and nothing is known of its content.
        """
        expansion = self.directory.lookup(part.key)
        if expansion is not None:
            outcome = self.directory.held_as(part.key)
            item = self._item(part, expansion, outcome)
            item.pinned = True
            prompt.pinned.append(item)  # before `_bind`, which may raise
            prompt.overtaking[item.modality] += self._num_in_pool > 0 and not waited
            prompt.waiting[item.modality] += waited
            return self._bind(part, item)
        unsent = self._unsent.get(part.key)
        if unsent is not None and unsent.item is not None:
            return self._bind(part, self._item(part, unsent.expansion, "hit", unsent.item))
        if part.has_bytes and not self.directory.capacity_bytes:
            return None  # with the cache off, the engine always needs the arrays
        expansion = self.directory.known_expansion(part.key)
        if expansion is not None:
            return self._bind(part, self._item(part, expansion, "not_needed"))
        if not part.has_bytes:
            raise _not_cached(part.source)
        return None

    def _item(
        self,
        part: ResolvedPart,
        expansion: Expansion,
        outcome: ProcessorOutcome,
        item: ProcessedItem | None = None,
    ) -> RenderedItem:
        rendered = RenderedItem(
            key=part.key,
            media_hash=part.digest,
            modality=part.source.modality,
            expansion=expansion,
            item=item,
            outcome=outcome,
            param=part.source.param,
        )
        rendered.encoded = part.data
        if part.has_bytes:
            rendered.recover = partial(self._recover, part, weakref.ref(rendered))
        if item is not None:
            self._unsent[part.key] = rendered
        return rendered

    def _bind(self, part: ResolvedPart, item: RenderedItem) -> RenderedItem:
        """The item; its uuid is bound only now, when its content is known to be good."""
        source = part.source
        if source.uuid is not None:
            name = _uuid_name(source, part.options)
            self._uuids.bind(part.scope, name, part.digest, tenant=part.tenant, param=source.param)
        return item

    # --- make ---------------------------------------------------------------------------------

    async def _make(self, part: ResolvedPart, prompt: _Prompt) -> RenderedItem:
        """Decode and process the part, or wait for whoever does so for the same key: another part,
        or another API process."""
        if self._sizes is not None and part.source.modality == "image":
            expansion = await self._expansion_by_size(self._sizes, part)
            if expansion is not None:
                return self._bind(part, self._item(part, expansion, "not_needed"))
        begun = time.monotonic()
        for _ in range(MAX_CLAIMS_OF_ONE_PART):
            joined = part.key in self._running
            if joined:
                _forget(part)
            made = await self._process(part, self._make_claimed)
            if made is not None:
                break
            _forget(part)
            held = self._lookup(part, prompt, waited=True)
            if held is not None:
                held.made = begun, time.monotonic()
                return held
        else:  # what others made was gone each time before it could be used here
            joined = part.key in self._running
            made = await self._make_unclaimed(part)
        prompt.waiting[part.source.modality] += joined
        item = self._item(part, made.item.expansion, self._outcome(made, joined=joined), made.item)
        item.made = begun, time.monotonic()
        if not joined:
            item.decode_ms, item.process_ms = made.decode_ms, made.process_ms
        if self.directory.lookup(part.key) is not None:  # it is published: keep it until it is used
            item.pinned = True
            prompt.pinned.append(item)
        return self._bind(part, item)

    async def _expansion_by_size(
        self, sizes: ExpansionsBySize, part: ResolvedPart
    ) -> Expansion | None:
        """What the picture's headers tell, if its decoding would be within the limits. Raises a
        `RequestError` that names the part where it would not."""
        if part.data is None:
            return None
        job = await part.job()
        try:
            await self._estimated(job)
        except TooLargeError as error:
            self.stats.refused["estimate"] += 1
            raise for_part(error, part.source.param) from None
        return await sizes.find(job.data, part.options)

    async def _process(self, part: ResolvedPart, make: Make) -> Processed | None:
        try:
            return await self._running.run(part.key, lambda: make(part))
        except RequestError as error:
            raise for_part(error, part.source.param) from None

    async def _make_unclaimed(self, part: ResolvedPart) -> Processed:
        made = None
        while made is None:  # it may join others that wait for another API process
            made = await self._process(part, self._run)
        return made

    async def _make_claimed(self, part: ResolvedPart) -> Processed | None:
        """None if another API process has made it."""
        async with self._claims.claimed(part.key) as publish:
            if publish is None:
                return None
            made = await self._run(part)
            await publish(made.item)
            return made

    async def _run(self, part: ResolvedPart) -> Processed:
        job = await part.job()
        made = await self.run_job(job)
        self.stats.decoded[job.modality] += 1
        self.stats.processed[job.modality] += 1
        return made

    async def run_job(self, job: MediaJob) -> Processed:
        """What a worker makes of a job. Raises a `RequestError` that names no part."""
        try:
            working = self._pool.run(await self._estimated(job))
        except TooLargeError:
            self.stats.refused["estimate"] += 1
            raise
        except QueueLimitError as error:
            self.stats.refused[error.reason] += 1
            raise
        self.stats.queued[job.modality] += 1
        self._num_in_pool += 1
        try:
            return await working
        finally:
            self._num_in_pool -= 1

    async def _estimated(self, job: MediaJob) -> MediaJob:
        """The job with its cost. Raises `TooLargeError` where that is above the limits."""
        if job.seconds:
            return job
        if len(job.data) > OFF_LOOP_BYTES:
            seconds = await asyncio.to_thread(
                estimate_cost, job.modality, job.data, self._cost_limits
            )
        else:
            if len(job.data) > LARGE_BYTES:
                await self._turns.turn(job.tenant, len(job.data))
            seconds = estimate_cost(job.modality, job.data, self._cost_limits)
        return msgspec.structs.replace(job, seconds=seconds)

    def _outcome(self, made: Processed, *, joined: bool) -> ProcessorOutcome:
        if joined:
            return "hit"
        return "miss" if made.item.nbytes <= self.directory.capacity_bytes else "bypass"

    async def _recover(self, part: ResolvedPart, item: weakref.ref[RenderedItem]) -> ProcessedItem:
        """Make the arrays again from the part's bytes; the engine turned out to need them.

        A part that is not counted yet is counted as what it took to make it again. The item keeps
        the arrays until the prompt is sent, so that no other part has to make them meanwhile.
        """
        unsent = self._unsent.get(part.key)
        if unsent is not None and unsent.item is not None:
            made, joined = Processed(unsent.item, 0.0, 0.0), True
        else:
            joined = part.key in self._running
            made = await self._make_unclaimed(part)
        rendered = item()
        if rendered is not None:
            rendered.item = made.item
            if not joined:
                self._unsent[part.key] = rendered
            if rendered.uncounted:
                rendered.outcome = self._outcome(made, joined=joined)
                if not joined:
                    rendered.decode_ms, rendered.process_ms = made.decode_ms, made.process_ms
        return made.item


def _forget(part: ResolvedPart) -> None:
    """Somebody else makes the item, or has made it."""
    if part.source.load is not None:
        part.source.load.forget()


def _options_of(source: MediaSource, prompt: _Prompt) -> Options:
    return prompt.options[source.modality] if source.options is None else dict(source.options)


def _uuid_name(source: MediaSource, options: Options) -> str:
    """The name a uuid is bound under: with other options the same uuid is another item."""
    return msgspec.json.encode([source.uuid, options], order="deterministic").decode()


def _not_cached(source: MediaSource) -> MediaNotCachedError:
    name = "uuid" if source.digest is None else "hash"
    return MediaNotCachedError(
        f"{source.param}: no media is held under this {name}; send it again", param=source.param
    )


async def gather(
    works: Iterable[Callable[[], Coroutine[Any, Any, T]]], side_by_side: int
) -> list[T]:
    """All results; the first failure cancels the rest and is raised as it is."""
    slots = asyncio.Semaphore(side_by_side)

    async def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with slots:
            return await work()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(work)) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
