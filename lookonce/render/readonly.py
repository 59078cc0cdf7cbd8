"""Rendering without side effects: for routes that answer with tokens, and for remote engines.

    lookup ─▶ own small memory ─▶ a peek at the main directory ─▶ process, and remember

The main directory is only read: no pin, no recency, no counter, no binding changes. New items are
remembered here. A render-only server has no main directory, and uses this memory alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from lookonce.cache.directory import ByteLRU
from lookonce.cache.identity import UuidBindings
from lookonce.config import MediaConfig
from lookonce.render.families.base import LargestItem, largest_media
from lookonce.render.media.loader import MediaLoader
from lookonce.render.media.resolver import MediaResolver, RenderStats
from lookonce.render.prompt.encoder import ChatOptions, Follows
from lookonce.render.prompt.messages import ROLES
from lookonce.render.prompt.token_cache import TokenCache
from lookonce.render.renderer import Renderer
from lookonce.types.counts import Counts
from lookonce.types.media import Expansion, ProcessedItem
from lookonce.types.request import ProcessorOutcome, RenderedItem, RenderedPrompt

MAX_EXPANSIONS = 8_192
MAX_BINDINGS = 4_096
ITEM_BYTES = 64 << 20
"""Bytes of processed items kept, for responses that contain tensors."""
FETCH_BYTES = 32 << 20
TOKEN_BYTES = 8 << 20
COUNTS_PREFIX = "readonly_"


class Peekable(Protocol):
    """The read-only part of `cache.directory.Directory`."""

    def known_expansion(self, key: bytes) -> Expansion | None: ...


class ReadOnlyDirectory:
    """A `resolver.RendererDirectory` with a memory of its own; it pins and counts nothing."""

    def __init__(self, main: Peekable | None = None, item_bytes: int = ITEM_BYTES) -> None:
        self.capacity_bytes = item_bytes
        self._main = main
        self._expansions: OrderedDict[bytes, Expansion] = OrderedDict()
        self._items: ByteLRU[ProcessedItem] = ByteLRU(item_bytes)

    def lookup(self, key: bytes) -> Expansion | None:
        own = self._expansions.get(key)
        if own is not None:
            self._expansions.move_to_end(key)
            return own
        return None if self._main is None else self._main.known_expansion(key)

    def unpin(self, key: bytes) -> None:
        pass

    def held_as(self, key: bytes) -> ProcessorOutcome:
        return "hit"

    def known_expansion(self, key: bytes) -> Expansion | None:
        return self.lookup(key)

    def count(self, outcome: ProcessorOutcome) -> None:
        pass

    def remember(self, items: Iterable[RenderedItem]) -> None:
        """Keep the expansions and arrays of a rendered prompt."""
        for part in items:
            self._expansions[part.key] = part.expansion
            self._expansions.move_to_end(part.key)
            if part.item is not None and self._items.get(part.key) is None:
                self._items.try_insert(part.key, part.item.nbytes, part.item)
        while len(self._expansions) > MAX_EXPANSIONS:
            self._expansions.popitem(last=False)

    def item(self, key: bytes) -> ProcessedItem | None:
        return self._items.get(key)

    def clear(self) -> None:
        self._expansions.clear()
        self._items.clear()


class ReadOnlyBindings:
    """A `resolver.NameBindings` that reads the main bindings and keeps new ones itself."""

    def __init__(self, main: UuidBindings | None = None) -> None:
        self._main = main
        self._own = UuidBindings(MAX_BINDINGS)

    def resolve(self, scope: bytes, uuid: str) -> bytes | None:
        bound = None if self._main is None else self._main.peek(scope, uuid)
        return self._own.resolve(scope, uuid) if bound is None else bound

    def bind(
        self, scope: bytes, uuid: str, digest: bytes, *, tenant: str, param: str | None = None
    ) -> None:
        if self._main is None or self._main.peek(scope, uuid) is None:
            self._own.bind(scope, uuid, digest, tenant=tenant, param=param)
            self._own.take_fresh()


class ReadOnlyRenderer(Renderer):
    """Renders like another renderer, with a memory of its own."""

    def __init__(
        self,
        main: Renderer,
        resolver: MediaResolver | None,
        memory: ReadOnlyDirectory,
        media: MediaConfig,
    ) -> None:
        super().__init__(
            encoder=main._encoder,
            family=main._family,
            resolver=resolver,
            limits=main._limits,
            media=media,
            max_model_len=main.max_model_len,
            vocab_size=main.vocab_size,
            token_cache=TokenCache(TOKEN_BYTES),
            documents=main._documents,
        )
        self._memory = memory
        self._media = media

    async def render_chat(
        self,
        messages: Sequence[object],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        options: ChatOptions | Mapping[str, Any] | None = None,
        follows: Follows | None = None,
        roles: Collection[str] = ROLES,
    ) -> RenderedPrompt:
        prompt = await super().render_chat(
            messages,
            tenant=tenant,
            cache_salt=cache_salt,
            options=options,
            follows=follows,
            roles=roles,
        )
        self._memory.remember(prompt.items)
        return prompt

    async def item_of(self, part: RenderedItem) -> ProcessedItem | None:
        """The part's arrays, processed again if needed; None if the part came without data."""
        item = part.item or self._memory.item(part.key)
        if item is None and part.recover is not None:
            part.item = item = await part.recover()
            self._memory.remember([part])
        return item

    def largest_media(self, max_tokens: int) -> list[LargestItem]:
        """The largest item of each modality, with a placeholder of at most `max_tokens`."""
        if self._family is None or self._resolver is None:
            return []
        return list(largest_media(self._family, self._media, max_tokens))

    async def prove_sizes(self) -> None:
        """See `MediaResolver.prove_sizes`."""
        if self._resolver is not None and "image" in self.modalities:
            await self._resolver.prove_sizes()

    def forget(self) -> None:
        """Empty the memory and set the counts to zero."""
        self._memory.clear()
        self.token_cache.clear()
        if self._resolver is not None:
            self._resolver.stats.clear()


@asynccontextmanager
async def open_readonly(
    main: Renderer,
    media: MediaConfig,
    *,
    directory: Peekable | None = None,
    uuids: UuidBindings | None = None,
    counts: Counts | None = None,
    reads_headers: bool = True,
) -> AsyncIterator[ReadOnlyRenderer]:
    """The read-only renderer beside `main`; it reads `directory` and `uuids`, if given.

    Without `reads_headers` it decodes every new picture, also where only its tokens are asked for.
    What it counts is in `counts` under names that begin with `readonly_`.
    """
    memory = ReadOnlyDirectory(directory, _item_bytes(media))
    counts = Counts() if counts is None else counts
    fetched = counts.by_label(f"{COUNTS_PREFIX}media_fetches_total")
    loader = MediaLoader(media, cache_bytes=FETCH_BYTES, fetched=fetched)
    resolver = None
    if main._resolver is not None:
        resolver = main._resolver.with_memory(
            directory=memory,
            uuids=ReadOnlyBindings(uuids),
            loader=loader,
            stats=RenderStats(fetched, counts, COUNTS_PREFIX),
            reads_headers=reads_headers,
        )
        resolver.stats.show(main._encoder.placeholder_ids)
    try:
        yield ReadOnlyRenderer(main, resolver, memory, media)
    finally:
        await loader.aclose()


def _item_bytes(media: MediaConfig) -> int:
    """Bytes of items kept. In shared memory they take from the working share of all processes."""
    if not media.shared_cache_bytes:
        return ITEM_BYTES
    return min(ITEM_BYTES, media.shared_cache_bytes // 4)
