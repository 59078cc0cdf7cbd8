"""The renderer: a request's messages, text or token ids → token ids and media items for the engine.

    messages ─▶ template ─▶ text ─▶ token ids ─▶ placeholders matched with media parts
                                                    │
    media parts ─▶ resolver (hits at once, misses in the pool) ─▶ expansions
                                                    │
                                RenderedPrompt ◀────┘

It runs in the API process and imports no torch. Cheap checks come first: a prompt that is too long,
or whose template dropped a picture, is refused before anything is fetched.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.identity import item_key, scope_digest
from lookonce.cache.slab_pool import OwnSlabs
from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import BadRequestError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.film import FilmLayout
from lookonce.render.families.registry import load_family
from lookonce.render.families.speech import SpeechProcessing
from lookonce.render.families.voxtral_realtime import LiveSound, VoxtralRealtimeProcessing
from lookonce.render.media.cost import CostLimits
from lookonce.render.media.documents import Documents, DocumentSource, PartContent
from lookonce.render.media.external_items import (
    ExternalItem,
    ExternalItemResolver,
    item_from_arrays,
    place_external_items,
    placeholder_span,
    storage_digest,
)
from lookonce.render.media.film import Films, OpenFilm
from lookonce.render.media.loader import Encoded, MediaLoader, MediaSource
from lookonce.render.media.pool import MAX_QUEUE_PER_TENANT, MediaPool, ServerShare
from lookonce.render.media.processing import processing_settings
from lookonce.render.media.resolver import (
    MediaResolver,
    NameBindings,
    RendererDirectory,
    RenderStats,
)
from lookonce.render.media.sound_files import SoundFile, SoundFiles
from lookonce.render.prompt.detokenizer import Detokenizer
from lookonce.render.prompt.encoder import (
    ChatOptions,
    Follows,
    PromptEncoder,
    chat_options,
    load_encoder,
)
from lookonce.render.prompt.messages import (
    PAIR_ROLES,
    ROLES,
    ParsedMessages,
    check_films_alone,
    check_sound_alone,
    has_many_values,
    read_messages,
    texts_of,
)
from lookonce.render.prompt.placeholders import (
    PlacedFilm,
    match_placeholders,
    place_media,
    place_sound,
)
from lookonce.render.prompt.token_cache import TokenCache
from lookonce.types.media import Array, Modality, ProcessedItem
from lookonce.types.request import RenderedItem, RenderedPrompt
from lookonce.types.request_validation import (
    check_input_length,
    check_prompt_length,
    check_token_ids,
)
from lookonce.types.sampling import SamplingParams

T = TypeVar("T")


class Renderer:
    """One per API process, used on its event loop.

    `resolver` and `family` are None for a text-only model; `limits` is media parts per modality.
    `max_model_len` and `vocab_size` may be set later: until then lengths are not checked, and token
    ids are checked against the tokenizer's vocabulary.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        family: ProcessorFamily | None = None,
        resolver: MediaResolver | None = None,
        limits: Mapping[str, int] | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        token_cache: TokenCache | None = None,
        own_slabs: OwnSlabs | None = None,
        documents: Documents | None = None,
        media: MediaConfig | None = None,
    ) -> None:
        """`documents` reads files; None: file parts are refused. `media` limits films."""
        self.tokenizer = encoder.tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.served_modalities: Collection[Modality] | None = None
        """Of the family's, those that the engine serves; None until it says so."""
        self.pools = False
        """The model generates nothing, so that a prompt needs no room for an answer; may be set
        later, too."""
        self._encoder = encoder
        self._family = family
        self._resolver = resolver
        self._external = (
            None
            if family is None or resolver is None
            else ExternalItemResolver(family, resolver, own_slabs)
        )
        self._max_film_items = (media or MediaConfig()).items_per_prompt["video"]
        self._films: Films | None = None
        if family is not None and resolver is not None and "video" in family.modalities:
            self._films = Films(family, resolver, media or MediaConfig())
        self.speech = family if isinstance(family, SpeechProcessing) else None
        """The family of an encoder-decoder, which transcribes and does nothing else."""
        self._sound_files = (
            None if self.speech is None or resolver is None else SoundFiles(resolver, self.speech)
        )
        self.max_audio_seconds = (
            math.inf if family is None else family.max_audio_seconds or math.inf
        )
        """Longest sound that the model takes."""
        self._own_slabs = own_slabs
        self._documents = documents
        self._limit_pages = family is not None and family.max_items is not None
        """Pages count as pictures where the model takes a number of pictures that is its own."""
        self._limits = dict(limits or {})
        if family is not None and family.max_items is not None:
            most = family.max_items
            self._limits = {name: min(limit, most) for name, limit in self._limits.items()}
        for name, most in ({} if family is None else family.max_of).items():
            self._limits[name] = min(self._limits.get(name, most), most)
        self.token_cache = TokenCache() if token_cache is None else token_cache

    # --- prompts ------------------------------------------------------------------------------

    async def loop_turn(self, tenant: str, nbytes: int) -> None:
        """Wait for the tenant's turn to hold the event loop with so many bytes."""
        await self._encoder.loop_turns.turn(tenant, nbytes)

    async def in_turn_if(self, large: bool, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work` on what a client sent: where that is `large` in a thread, when it is
        the tenant's turn beside its long texts. Raises `QueueFullError` and what `work` raises."""
        return await self._encoder.in_turn_if(large, tenant, work)

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
        """Render OpenAI messages. The caller sends the prompt on with its pins, or calls `release`.
        With `follows` they go on after an answer or a message of a live session.

        Raises a `RequestError` that names the part at fault. After an error or a cancellation no
        pin is left.
        """
        chosen = chat_options(options)
        kwargs = self._processor_kwargs(chosen.mm_processor_kwargs)
        placeholder_ids = self._encoder.placeholder_ids
        if self._family is not None and self.item_alone:
            named = self._family.modalities
            placeholder_ids = {each: self._family.placeholder_token_id(each) for each in named}
        accepted = [each for each in placeholder_ids if each in self.modalities]
        large = has_many_values(messages, chosen.tools, chosen.chat_template_kwargs)
        chat = await self.in_turn_if(
            large,
            tenant,
            lambda: read_messages(
                messages,
                accepted,
                self._limits,
                self.max_model_len,
                roles,
                longest_token=self.tokenizer.longest_token if large else None,
            ),
        )
        scope = scope_digest(tenant, cache_salt)
        if chat.documents:
            contents = await self._read_documents(chat.documents, scope, tenant)
            chat = await self.in_turn_if(
                True,
                tenant,
                lambda: read_messages(
                    messages,
                    accepted,
                    self._limits,
                    self.max_model_len,
                    roles,
                    contents,
                    limit_pages=self._limit_pages,
                    longest_token=self.tokenizer.longest_token,
                ),
            )
        if self._family is not None and self._family.films_alone:
            check_films_alone(chat)
        if self._family is not None and self._family.whole_prompt is not None:
            check_sound_alone(chat)
            return await self._render_sound(self._family.whole_prompt, chat, scope, kwargs, tenant)
        if self.item_alone:
            return await self._render_alone(chat, placeholder_ids, scope, kwargs, tenant)
        encoded = await self._encoder.encode_chat(
            chat.conversation,
            chosen,
            self._text_limit,
            large=large,
            cache=self.token_cache,
            scope=scope,
            tenant=tenant,
            follows=follows,
        )
        modalities = [source.modality for source in chat.sources]
        positions = match_placeholders(encoded.ids, modalities, placeholder_ids)
        self._check_length(len(encoded.ids), "messages")
        if not chat.sources or self._resolver is None:
            return RenderedPrompt(encoded.ids, scope=scope, text=encoded.text)
        films = await self._open_films(chat.sources, scope, kwargs, tenant)
        self._check_films_fit(len(encoded.ids), films)
        sources = [
            each
            for index, source in enumerate(chat.sources)
            for each in (films[index].sources if index in films else (source,))
        ]
        items = await self._resolver.resolve(sources, scope, kwargs, tenant=tenant)
        try:
            self._bind_films(films, scope, tenant)
            parts = self._parts(chat.sources, films, items, encoded.ids, positions)
            rendered = place_media(encoded.ids, parts, positions)
            self._check_length(rendered.num_tokens, "messages")
        except BaseException:
            self._resolver.release(items)
            raise
        rendered.scope, rendered.text = scope, encoded.text
        return rendered

    async def _render_alone(
        self,
        chat: ParsedMessages,
        placeholder_ids: Mapping[Modality, int],
        scope: bytes,
        kwargs: Mapping[str, Any],
        tenant: str,
    ) -> RenderedPrompt:
        """One text, or one item and no text: what a model with two towers takes."""
        text = "\n".join(text for text in texts_of(chat) if text.strip())
        if len(chat.sources) + bool(text) != 1:
            raise BadRequestError(
                "messages: this model takes one text, or one picture without text",
                param="messages",
            )
        if text:
            encoded = await self._encoder.encode_text(
                text,
                add_special_tokens=True,
                max_tokens=self._text_limit,
                cache=self.token_cache,
                scope=scope,
                tenant=tenant,
            )
            self._check_length(len(encoded.ids), "messages")
            return RenderedPrompt(encoded.ids, scope=scope, text=encoded.text)
        assert self._resolver is not None
        items = await self._resolver.resolve(chat.sources, scope, kwargs, tenant=tenant)
        placeholder = placeholder_ids[items[0].modality]
        rendered = place_media([placeholder], items, [(0, 0)])
        rendered.scope = scope
        return rendered

    async def render_pair(
        self,
        query: str | list[Any],
        document: str | list[Any],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        options: ChatOptions | Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """A query and a document, texts or parts of messages, as one prompt of a model that
        compares them: by its chat template where that takes them, else as its tokenizer joins two.

        Raises a `RequestError` that names `messages[0].content` or `messages[1].content`.
        """
        self._encoder.note_asked(tenant)
        if self._encoder.compares_by_template:
            messages = [
                {"role": role, "content": content}
                for role, content in zip(PAIR_ROLES, (query, document), strict=True)
            ]
            return await self.render_chat(
                messages, tenant=tenant, cache_salt=cache_salt, options=options, roles=PAIR_ROLES
            )
        texts = []
        for number, content in enumerate((query, document)):
            found = content if isinstance(content, str) else _text_alone(content)
            if found is None:
                param = f"messages[{number}].content"
                raise BadRequestError(
                    f"{param}: this model compares texts; its chat template takes no query and "
                    "document with other parts",
                    param=param,
                )
            texts.append(found)
        encoded = await self._encoder.encode_pair(*texts, max_tokens=self._text_limit)
        self._check_length(len(encoded.ids), "prompt")
        scope = scope_digest(tenant, cache_salt)
        return RenderedPrompt(encoded.ids, scope=scope, text=encoded.text)

    async def _read_documents(
        self, sources: Sequence[DocumentSource], scope: bytes, tenant: str
    ) -> dict[str, list[PartContent]]:
        where = sources[0].param
        if self._family is not None and self._family.whole_prompt is not None:
            raise BadRequestError(
                f"{where}: this model transcribes sound and takes no files", param=where
            )
        if self._documents is None:
            raise BadRequestError(f"{where}: no files are read here", param=where)
        return await self._documents.read(sources, scope, tenant)

    # --- films --------------------------------------------------------------------------------

    async def _open_films(
        self,
        sources: Sequence[MediaSource],
        scope: bytes,
        kwargs: Mapping[str, Any],
        tenant: str,
    ) -> dict[int, OpenFilm]:
        """By index of the source. Raises a `RequestError` that names the part."""
        opened: dict[int, OpenFilm] = {}
        if self._family is None or self._films is None:
            return opened
        for index, source in enumerate(sources):
            if source.modality == "video":
                options = self._family.item_options("video", kwargs)
                opened[index] = await self._films.open(source, scope, options, tenant=tenant)
        return opened

    def _bind_films(self, films: Mapping[int, OpenFilm], scope: bytes, tenant: str) -> None:
        if self._films is not None:
            for film in films.values():
                self._films.bind(film, scope, tenant)

    def _check_films_fit(self, num_tokens: int, films: Mapping[int, OpenFilm]) -> None:
        """Refuse films that are too long for the context before any frame is decoded."""
        for film in films.values():
            expansion = film.layout.expansion
            num_tokens += len(film.sources) * (1 if expansion is None else expansion.length)
            num_tokens += sum(len(item.before) for item in film.layout.items)  # at least
        self._check_length(num_tokens, "messages")

    def _parts(
        self,
        sources: Sequence[MediaSource],
        films: Mapping[int, OpenFilm],
        items: Sequence[RenderedItem],
        ids: NDArray[np.int32],
        positions: Sequence[tuple[int, int]],
    ) -> list[RenderedItem | PlacedFilm]:
        """One per source."""
        parts: list[RenderedItem | PlacedFilm] = []
        place = {index: position for position, index in positions}
        done = 0
        for index in range(len(sources)):
            film = films.get(index)
            count = 1 if film is None else len(film.sources)
            its = items[done : done + count]
            done += count
            if film is None:
                parts += its
            else:
                parts.append(self._placed_film(film.layout, its, ids, place[index]))
        return parts

    def _placed_film(
        self,
        layout: FilmLayout,
        items: Sequence[RenderedItem],
        ids: NDArray[np.int32],
        position: int,
    ) -> PlacedFilm:
        before, after = layout.replaces
        start, end = position - len(before), position + 1 + len(after)
        if start < 0 or (*ids[start:position], *ids[position + 1 : end]) != (*before, *after):
            raise BadRequestError(
                "the chat template writes other tokens around a film than the model's processor "
                "replaces",
                param="messages",
            )
        between = [self._encoder.encode_tokens(item.before) for item in layout.items]
        first = layout.items[0].before
        if first and isinstance(first[0], str):
            # A text merges with the text before it, as where the processor writes both.
            start, text = self._encoder.text_before(ids, start)
            between[0] = self._encoder.encode_tokens((text + first[0], *first[1:]))
        times = [item.time for item in layout.items]
        for item, of_film in zip(items, layout.items, strict=True):
            item.num_frames = len({*of_film.frames})
        after_it = self._encoder.encode_tokens(layout.after)
        return PlacedFilm(items, times, between, after_it, start, end)

    async def _render_sound(
        self,
        whole_prompt: tuple[int, ...],
        chat: ParsedMessages,
        scope: bytes,
        kwargs: Mapping[str, Any],
        tenant: str,
    ) -> RenderedPrompt:
        """The prompt of a model that takes one sound and no text."""
        assert self._resolver is not None
        items = await self._resolver.resolve(chat.sources, scope, kwargs, tenant=tenant)
        try:
            rendered = place_sound(whole_prompt, items[0])
            # Every frame of the sound takes a token.
            self._check_length(items[0].expansion.length, "messages")
        except BaseException:
            self._resolver.release(items)
            raise
        rendered.scope = scope
        return rendered

    @property
    def transcribes_live(self) -> bool:
        """Whether the model takes sound alone, frame by frame (`live_sound`)."""
        return isinstance(self._family, VoxtralRealtimeProcessing)

    def live_sound(self, *, tenant: str = "", cache_salt: str | None = None) -> LiveSoundPrompt:
        """What a live session is opened with and extended by. Raises `BadRequestError` for a model
        that does not add sound to its tokens frame by frame."""
        if not isinstance(self._family, VoxtralRealtimeProcessing):
            raise BadRequestError("the model takes no sound frame by frame", param="model")
        return LiveSoundPrompt(self._family, scope_digest(tenant, cache_salt), tenant)

    def _check_takes_text(self, param: str) -> None:
        if self._family is not None and self._family.whole_prompt is not None:
            raise BadRequestError(
                f"{param}: this model's prompt is one sound; send it in a chat or to "
                "/v1/audio/transcriptions",
                param=param,
            )

    async def render_completion(
        self,
        prompt: str | Sequence[int],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> RenderedPrompt:
        """Render a plain prompt: token ids, or a text, in which media tokens are ordinary text."""
        self._check_takes_text("prompt")
        scope = scope_digest(tenant, cache_salt)
        if isinstance(prompt, str):
            encoded = await self._encoder.encode_text(
                prompt,
                add_special_tokens=add_special_tokens,
                max_tokens=self._text_limit,
                cache=self.token_cache,
                scope=scope,
                tenant=tenant,
            )
            rendered = RenderedPrompt(encoded.ids, scope=scope, text=encoded.text)
        else:
            self._check_length(len(prompt), "prompt")
            self._check_token_ids(prompt)
            rendered = RenderedPrompt(prompt, scope=scope)
        self._check_length(rendered.num_tokens, "prompt")
        return rendered

    async def render_tokens(
        self,
        token_ids: Sequence[int],
        media: Sequence[ExternalItem] = (),
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trusted: bool = False,
    ) -> RenderedPrompt:
        """Check a prompt that was rendered elsewhere: token ids with placeholders expanded.

        `trusted`: the client may name its arrays by a MediaHash. Raises a `RequestError` that names
        the part at fault. After an error or a cancellation no pin is left.
        """
        self._encoder.note_asked(tenant)
        self._check_takes_text("token_ids")
        self._check_length(len(token_ids), "token_ids")
        scope = scope_digest(tenant, cache_salt)
        placed = sorted(media, key=lambda each: each.offset)
        items = await self._external_items(
            placed, scope, mm_processor_kwargs, trusted=trusted, tenant=tenant
        )
        try:
            features = place_external_items(token_ids, placed, items)
            spans = [placeholder_span(f, i) for f, i in zip(features, items, strict=True)]
            self._check_token_ids(token_ids, spans, "token_ids")
        except BaseException:
            self.release(RenderedPrompt([], items=items))
            raise
        return RenderedPrompt(token_ids, features, items, scope)

    async def open_sound(
        self, data: Encoded, *, tenant: str = "", cache_salt: str | None = None, param: str = "file"
    ) -> SoundFile:
        """A sound file for an encoder-decoder. Raises a `RequestError` that names `param`."""
        if self._sound_files is None:
            raise BadRequestError("the model does not transcribe by itself", param="model")
        scope = scope_digest(tenant, cache_salt)
        return await self._sound_files.open(data, scope, tenant=tenant, param=param)

    def speech_prompt(
        self,
        token_ids: Sequence[int],
        item: RenderedItem,
        *,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> RenderedPrompt:
        """A decoder's prompt, with the one input that it cross-attends to."""
        rendered = place_sound(token_ids, item)
        rendered.scope, rendered.tenant = scope_digest(tenant, cache_salt), tenant
        return rendered

    def injected(
        self,
        modality: Modality,
        name: str,
        arrays: Mapping[str, Array],
        *,
        tenant: str,
        cache_salt: str | None = None,
        trusted: bool = False,
    ) -> tuple[bytes, ProcessedItem]:
        """The key and the item of arrays that were processed elsewhere. Copies: not for the loop.

        Raises `BadRequestError` for arrays that this model's processor could not have made.
        """
        if self._family is None:
            raise BadRequestError("the model takes no media")
        digest = storage_digest(name, modality, trusted=trusted)
        item = item_from_arrays(self._family, modality, arrays)
        if self._own_slabs is not None:
            item = self._own_slabs.place(item)
        return item_key(scope_digest(tenant, cache_salt), digest), item

    @property
    def tools_template(self) -> str | None:
        """Source of the chat template for requests with tools; None if there is none."""
        return self._encoder.tools_template

    @property
    def item_alone(self) -> bool:
        """A prompt is one text, or one item and no text."""
        return self._family is not None and self._family.item_alone

    @property
    def takes_arrays(self) -> bool:
        """Whether items may come processed."""
        return self._family is not None and self._family.takes_arrays

    @property
    def takes_messages(self) -> bool:
        """Whether the model has a chat template, or needs none."""
        whole = self._family is not None and self._family.whole_prompt is not None
        return whole or self.item_alone or self._encoder.has_template

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The media that the model takes."""
        named = () if self._family is None else self._family.modalities
        served = self.served_modalities
        return named if served is None else tuple(each for each in named if each in served)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat templates read."""
        return self._encoder.template_variables

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text → id of every special token."""
        return self.tokenizer.special_texts

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text → id of every token that is cut out of a text, special or not."""
        return {text: token_id for token_id, text in self.tokenizer.added_tokens.items()}

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint that `media_hash` takes; empty for a text-only model."""
        return b"" if self._resolver is None else self._resolver.fingerprint

    @property
    def files_digest(self) -> str:
        """Digest, in hex, of the files that decide what prompts and answers become."""
        return self._encoder.files_digest

    def release(self, prompt: RenderedPrompt) -> None:
        """Unpin the items of a prompt that will not be sent. May be called twice."""
        if self._resolver is not None:
            self._resolver.release(prompt.items)

    # --- answers ------------------------------------------------------------------------------

    def detokenizer(
        self, sampling: SamplingParams, context: Sequence[int] = (), keep: Collection[str] = ()
    ) -> Detokenizer:
        """The detokenizer of one sample; special tokens whose text is in `keep` are shown.

        `context` is the prompt's token ids, of which the last ones are enough.
        """
        return Detokenizer(
            self.tokenizer,
            stops=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skipped=self.skipped(sampling, keep),
            min_tokens=sampling.min_tokens,
            context=context,
        )

    def skipped(self, sampling: SamplingParams, keep: Collection[str] = ()) -> Collection[int]:
        """Ids of the tokens that are not shown in a sample's text."""
        return self.tokenizer.special_ids_except(keep) if sampling.skip_special_tokens else ()

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The token as written in the vocabulary."""
        return self.tokenizer.token_text(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises `BadRequestError` for an id outside the vocabulary, which no text stands for.
        """
        vocab_size = max(self.vocab_size or 0, self.tokenizer.vocab_size)
        check_token_ids(token_ids, vocab_size, frozenset(), (), "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    # --- inside -------------------------------------------------------------------------------

    def _check_length(self, num_tokens: int, param: str) -> None:
        """Refuse an empty prompt and one that is too long."""
        if self.pools and self.max_model_len is not None:
            check_input_length(num_tokens, self.max_model_len, param)
        else:
            check_prompt_length(num_tokens, self.max_model_len, param)

    @property
    def _text_limit(self) -> int | None:
        """Tokens that a text must stay below."""
        return None if self.max_model_len is None else self.max_model_len + self.pools

    def _processor_kwargs(self, kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if not kwargs:
            return {}
        if self._family is None:
            raise BadRequestError("the model takes no media", param="mm_processor_kwargs")
        self._family.check_options(kwargs)
        return kwargs

    async def _external_items(
        self,
        media: Sequence[ExternalItem],
        scope: bytes,
        kwargs: Mapping[str, Any] | None,
        *,
        trusted: bool,
        tenant: str,
    ) -> list[RenderedItem]:
        if not media:
            return []
        if self._external is None:
            raise BadRequestError("the model takes no media", param="features")
        for modality, count in Counter(each.modality for each in media).items():
            allowed = self._limits.get(modality, 0)
            if modality == "video" and allowed:
                allowed = self._max_film_items
            if modality not in self._encoder.placeholder_ids or count > allowed:
                raise BadRequestError(
                    f"features: {count} items of type {modality}; at most {allowed} are allowed",
                    param=f"features.mm_hashes.{modality}",
                )
        checked = self._processor_kwargs(kwargs)
        return await self._external.resolve(media, scope, checked, trusted=trusted, tenant=tenant)

    def _check_token_ids(
        self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]] = (), param: str = "prompt"
    ) -> None:
        vocab_size = self.vocab_size or self.tokenizer.vocab_size
        placeholders = frozenset(self._encoder.placeholder_ids.values())
        check_token_ids(token_ids, vocab_size, placeholders, spans, param)


def _text_alone(content: Sequence[Any]) -> str | None:
    """The text of content parts; None where they are not texts alone."""
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        for part in content
    ]
    found = [text for text in texts if isinstance(text, str)]
    return "\n".join(found) if texts and len(found) == len(texts) else None


class LiveSoundPrompt:
    """Renders one live sound: what opens a session, then what extends it as samples come."""

    def __init__(self, family: VoxtralRealtimeProcessing, scope: bytes, tenant: str) -> None:
        self._sound = LiveSound(family)
        self._scope, self._tenant = scope, tenant
        self.sampling_rate = family.sampling_rate
        """Hz of the samples that `push` takes."""
        self.frame_seconds = family.frame_samples / family.sampling_rate
        opening = self._sound.push(np.zeros(0, np.float32))
        self.opening = RenderedPrompt(
            family.whole_prompt, scope=scope, tenant=tenant, frames=opening
        )
        """The whole prompt, and the frames of the silence before every sound."""

    def push(self, samples: NDArray[np.float32]) -> RenderedPrompt | None:
        """What mono samples [n] add; None for less than a frame."""
        return self._rendered(self._sound.push(samples))

    def finish(self) -> RenderedPrompt | None:
        """The silence after the sound, in which its last words are written; more may follow."""
        return self._rendered(self._sound.finish())

    def _rendered(self, frames: Array | None) -> RenderedPrompt | None:
        if frames is None:
            return None
        return RenderedPrompt([], scope=self._scope, tenant=self._tenant, frames=frames)


def preloaded_encoder(model: ModelConfig) -> PromptEncoder:
    """The encoder for `open_renderer`, made before processes are forked that share its memory.

    Raises `ModelLoadError`.
    """
    family = load_family(Path(model.folder), model.dtype)
    return load_encoder(model.folder, None, _in_prompt(family))


def _in_prompt(family: ProcessorFamily | None) -> ProcessorFamily | None:
    """None where items have no tokens in the prompt."""
    return None if family is None or family.encoder_decoder else family


@asynccontextmanager
async def open_renderer(
    model: ModelConfig,
    media: MediaConfig,
    *,
    directory: RendererDirectory,
    uuids: NameBindings,
    chat_template: str | None = None,
    max_model_len: int | None = None,
    share: ServerShare | None = None,
    encoder: PromptEncoder | None = None,
) -> AsyncIterator[Renderer]:
    """Load the tokenizer and, for a model with media, start the worker pool.

    `chat_template` is a file's path; `encoder` is `preloaded_encoder`'s for this model, if that was
    called. Raises `ModelLoadError` or `ConfigError`.
    """
    share = ServerShare() if share is None else share
    family = load_family(Path(model.folder), model.dtype)
    if encoder is None or chat_template is not None:
        encoder = await asyncio.to_thread(
            load_encoder, model.folder, chat_template, _in_prompt(family)
        )
    encoder = encoder.with_weights(share.weights)
    async with AsyncExitStack() as stack:
        if family is not None and family.needs_torch:
            share = replace(share, fork_server=None)  # what it has imported knows no torch
        loader = MediaLoader(media, fetched=share.counts.by_label("media_fetches_total"))
        stack.push_async_callback(loader.aclose)
        settings = processing_settings(model, media, documents_only=family is None)
        pool = MediaPool(
            settings,
            share=share,
            max_queue_per_tenant=MAX_QUEUE_PER_TENANT,
            check_processed=None if family is None else family.check_processed,
        )
        stack.push_async_callback(pool.aclose)
        resolver = None
        if family is not None:
            if share.wait_for_worker:
                await pool.start()
            else:
                pool.start_beside()
            resolver = MediaResolver(
                family=family,
                directory=directory,
                uuids=uuids,
                loader=loader,
                pool=pool,
                max_bytes=media.max_bytes,
                cost_limits=CostLimits(
                    media.max_image_pixels, media.max_audio_seconds, media.max_decode_seconds
                ),
                algorithm=media.hash_algorithm,
                stats=RenderStats(loader.fetched, share.counts),
                claims=share.claims,
                turns=encoder.loop_turns,
            )
            resolver.stats.show(encoder.placeholder_ids)
        yield Renderer(
            encoder=encoder,
            family=family,
            resolver=resolver,
            limits=media.limit_per_prompt,
            media=media,
            max_model_len=max_model_len,
            token_cache=TokenCache(counts=share.counts),
            own_slabs=None if share.slabs is None else OwnSlabs(share.slabs),
            documents=Documents(
                loader=loader,
                pool=pool,
                pictures="image" in encoder.placeholder_ids,
                max_pages=media.max_document_pages,
                max_pixels=media.max_image_pixels,
                algorithm=media.hash_algorithm,
                counts=share.counts,
            ),
        )
