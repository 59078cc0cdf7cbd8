"""The renderer: what a client sent → the token ids and media items the engine computes from.

    messages ─▶ template ─▶ text ─▶ token ids ─▶ placeholders matched with media parts
                                                    │
    media parts ─▶ resolver (hits at once, misses in the pool) ─▶ expansions
                                                    │
                                RenderedPrompt ◀────┘

It lives in the API process and imports no torch. Cheap checks come first: a prompt that is too long
or whose template lost a picture is refused before anything is fetched.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from lookonce.cache.identity import scope_digest
from lookonce.cache.uuids import UuidBindings
from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import BadRequestError
from lookonce.render.chat import template_sources
from lookonce.render.detokenize import Detokenizer
from lookonce.render.encoding import ChatOptions, EncodedPrompt, PromptEncoder, chat_options
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.render.load import MediaLoader
from lookonce.render.media import MediaSource
from lookonce.render.messages import read_messages
from lookonce.render.placeholders import MediaPart, match_placeholders, place_media
from lookonce.render.pool import MediaPool
from lookonce.render.processing import ProcessingSettings
from lookonce.render.resolve import MediaResolver, RendererDirectory, RenderStats
from lookonce.render.tokenizer import Tokenizer
from lookonce.types.request import RenderedItem, RenderedPrompt
from lookonce.types.sampling import SamplingParams


class Renderer:
    """One per API process, used on its event loop.

    `resolver` and `family` are None for a text-only model; `limits` is media parts per modality.
    `max_model_len` and `vocab_size` may be learnt later and set; until then the former is not
    checked, and the tokenizer's vocabulary stands in for the latter.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        family: ProcessorFamily | None = None,
        resolver: MediaResolver | None = None,
        limits: Mapping[str, int] | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._encoder = encoder
        self._family = family
        self._resolver = resolver
        self._limits = dict(limits or {})

    # --- prompts ------------------------------------------------------------------------------

    async def render_chat(
        self,
        messages: Sequence[object],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        options: ChatOptions | Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render OpenAI messages. The prompt's pins are the caller's to hand on, or `release`.

        Raises a `RequestError` that names the part at fault; then, as when cancelled, no pin is
        left.
        """
        chosen = chat_options(options)
        kwargs = self._processor_kwargs(chosen.mm_processor_kwargs)
        placeholder_ids = self._encoder.placeholder_ids
        chat = read_messages(messages, modalities=placeholder_ids, limits=self._limits)
        encoded = await self._encoder.encode_chat(chat.conversation, chosen)
        modalities = [source.modality for source in chat.sources]
        match_placeholders(encoded.token_ids, modalities, placeholder_ids)
        self._check_length(len(encoded.token_ids), "messages")
        scope = scope_digest(tenant, cache_salt)
        if not chat.sources or self._resolver is None:
            return RenderedPrompt(encoded.token_ids, scope=scope, text=encoded.text)
        return await self._with_media(self._resolver, encoded, chat.sources, scope, kwargs)

    async def render_completion(
        self,
        prompt: str | Sequence[int],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> RenderedPrompt:
        """Render a plain prompt: a text, in which media tokens are ordinary text, or token ids."""
        scope = scope_digest(tenant, cache_salt)
        if isinstance(prompt, str):
            encoded = await self._encoder.encode_text(prompt, add_special_tokens=add_special_tokens)
            rendered = RenderedPrompt(encoded.token_ids, scope=scope, text=encoded.text)
        else:
            self._check_token_ids(prompt)
            rendered = RenderedPrompt(list(prompt), scope=scope)
        self._check_length(len(rendered.token_ids), "prompt")
        return rendered

    def release(self, prompt: RenderedPrompt) -> None:
        """Give back the pins of a prompt that will not be sent. May be called again."""
        if self._resolver is not None:
            self._resolver.release(prompt.items)

    # --- answers ------------------------------------------------------------------------------

    def detokenizer(self, sampling: SamplingParams, context: Sequence[int] = ()) -> Detokenizer:
        """For one sample. `context` is the prompt's token ids (its end is enough)."""
        return Detokenizer(
            self.tokenizer,
            stops=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            context=context,
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self.tokenizer.token_text(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Every token's text, special tokens included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def counts(self) -> dict[str, float]:
        """Fetches, decodes and processor runs, as `name:modality` → value."""
        stats = RenderStats() if self._resolver is None else self._resolver.stats
        counted: dict[str, Counter[Any]] = {
            "media_fetches_total": stats.fetched,
            "media_decodes_total": stats.decoded,
            "media_processed_total": stats.processed,
        }
        return {
            f"{name}:{modality}": float(by_modality[modality])
            for name, by_modality in counted.items()
            for modality in self._encoder.placeholder_ids
        }

    # --- inside -------------------------------------------------------------------------------

    async def _with_media(
        self,
        resolver: MediaResolver,
        encoded: EncodedPrompt,
        sources: Sequence[MediaSource],
        scope: bytes,
        kwargs: Mapping[str, Any],
    ) -> RenderedPrompt:
        items = await resolver.resolve(sources, scope, kwargs)
        try:
            rendered = self._placed(encoded, items, scope)
            self._check_length(len(rendered.token_ids), "messages")
        except BaseException:
            resolver.release(items)
            raise
        return rendered

    def _placed(
        self, encoded: EncodedPrompt, items: Sequence[RenderedItem], scope: bytes
    ) -> RenderedPrompt:
        parts = [MediaPart(item.key, item.modality, item.expansion) for item in items]
        placed = place_media(encoded.token_ids, parts, self._encoder.placeholder_ids)
        return RenderedPrompt(
            placed.token_ids,
            features=placed.features,
            items=[items[index] for index in placed.order],
            scope=scope,
            text=encoded.text,
        )

    def _processor_kwargs(self, kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if not kwargs:
            return {}
        if self._family is None:
            raise BadRequestError("the model takes no media", param="mm_processor_kwargs")
        self._family.check_options(kwargs)
        return kwargs

    def _check_length(self, length: int, param: str) -> None:
        """Something must be there, and room for one generated token must be left."""
        if length == 0:
            raise BadRequestError("the prompt is empty", param=param)
        if self.max_model_len is not None and length >= self.max_model_len:
            raise BadRequestError(
                f"the prompt has {length} tokens and at least one is to be generated, but the "
                f"model's context is {self.max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self.vocab_size or self.tokenizer.vocab_size
        placeholders = set(self._encoder.placeholder_ids.values())
        for number, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                problem = f"token ids are 0 to {vocab_size - 1}"
            elif token_id in placeholders:
                problem = f"token {token_id} stands for media, which a plain prompt has none of"
            else:
                continue
            raise BadRequestError(f"prompt[{number}]: {problem}", param=f"prompt[{number}]")


@asynccontextmanager
async def open_renderer(
    model: ModelConfig,
    media: MediaConfig,
    *,
    directory: RendererDirectory,
    uuids: UuidBindings,
    chat_template: str | None = None,
    max_model_len: int | None = None,
) -> AsyncIterator[Renderer]:
    """Load the tokenizer and, for a model with media, start the worker pool.

    `chat_template` is a file's path. Raises `ModelLoadError` or `ConfigError`.
    """
    family = load_family(Path(model.folder), model.dtype)
    tokenizer, encoder = await asyncio.to_thread(_load_encoder, model.folder, chat_template, family)
    async with AsyncExitStack() as stack:
        resolver = None
        if family is not None:
            resolver = await _open_resolver(stack, model, media, family, directory, uuids)
        yield Renderer(
            tokenizer=tokenizer,
            encoder=encoder,
            family=family,
            resolver=resolver,
            limits=media.limit_per_prompt,
            max_model_len=max_model_len,
        )


def _load_encoder(
    folder: str, chat_template: str | None, family: ProcessorFamily | None
) -> tuple[Tokenizer, PromptEncoder]:
    tokenizer = Tokenizer.load(folder)
    sources = template_sources(folder, tokenizer, chat_template)
    return tokenizer, PromptEncoder(tokenizer, sources, family)


async def _open_resolver(
    stack: AsyncExitStack,
    model: ModelConfig,
    media: MediaConfig,
    family: ProcessorFamily,
    directory: RendererDirectory,
    uuids: UuidBindings,
) -> MediaResolver:
    loader = MediaLoader(media)
    stack.push_async_callback(loader.aclose)
    pool = MediaPool(
        ProcessingSettings(
            folder=model.folder,
            dtype=model.dtype,
            max_image_pixels=media.max_image_pixels,
            max_audio_seconds=media.max_audio_seconds,
        )
    )
    stack.push_async_callback(pool.aclose)
    await pool.start()
    return MediaResolver(
        family=family,
        directory=directory,
        uuids=uuids,
        loader=loader,
        pool=pool,
        max_bytes=media.max_bytes,
        algorithm=media.hash_algorithm,
    )
