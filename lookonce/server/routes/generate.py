"""`POST /inference/v1/generate`: token ids in, token ids out.

Media are placed by whoever rendered the prompt: `features` names them and their placeholders, in
requests of this route as in the answers of the render routes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import pybase64
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.requests import (
    NOTHING,
    Raw,
    StreamOptions,
    StructuredFields,
    TokenId,
    asks_nothing,
    raw_bytes,
)
from lookonce.frontend.responses import (
    ChatLogprobs,
    KVTransferParams,
    PromptEntries,
    ReuseReceipt,
    StopReason,
    TopLogprob,
    Usage,
)
from lookonce.frontend.sampling_params import grammar_of
from lookonce.render.media.external_items import ExternalItem, encode_kwargs
from lookonce.server.http.body import decoded_body, parse, receive
from lookonce.server.http.unknown_fields import suggestion
from lookonce.server.routes.serving_base import ServingContext, open_context, respond
from lookonce.types.media import MODALITIES, MediaFeature, Modality, ProcessedItem
from lookonce.types.request import RenderedItem, RenderedPrompt
from lookonce.types.sampling import SamplingParams, check_num_biases


class GenerateRequest(msgspec.Struct, kw_only=True):
    """A rendered prompt, from a render route or from another frontend."""

    token_ids: list[TokenId]
    features: Features | None = None
    sampling_params: Raw = NOTHING
    mm_processor_kwargs: dict[str, Any] | None = None
    """The arguments that the media was processed with: they are part of its MediaHash."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool | None = None
    receipt_first: bool = False
    """In a stream `reuse_receipt` and `kv_transfer_params` come with the first chunk."""
    shorten_max_tokens: bool = False
    """`max_tokens` is the sender's default and no client's: where the tenant may have fewer tokens
    it is shortened."""


IGNORED_PARAMS = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "spaces_between_special_tokens",
        "stream_interval",
    }
)
"""Parameters that vLLM's frontends send; they are ignored, for no token depends on them."""
KNOWN_PARAMS = IGNORED_PARAMS.union(
    SamplingParams.__struct_fields__, StructuredFields.__struct_fields__
)


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    request_id: str
    object: Literal["generate"] = "generate"
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptEntries | UnsetType | None = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


async def generate(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, GenerateRequest)
    context = open_context(request, body, arrival)
    context.limit_asked = not body.shorten_max_tokens
    raw, close = raw_bytes(body.sampling_params), context.services.defaults.closed_schemas
    sampling = await decoded_body(request, raw, lambda: sampling_of(raw, close=close))
    return await respond(request, context, GenerateResponseBuilder(context, body, sampling))


def sampling_of(raw: bytes, *, close: bool = True) -> SamplingParams:
    """Of `sampling_params` alone, without the model's defaults. Raises `BadRequestError`.

    `close`: objects of JSON schemas are closed (see `closed_schemas`).
    """
    if raw in (b"", b"null"):
        return SamplingParams()
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise BadRequestError(f"sampling_params: {error}", param="sampling_params") from None
    except RecursionError:  # the body was decoded on another stack
        raise _too_deep() from None
    if (bias := fields.get("logit_bias")) and isinstance(bias, dict):
        check_num_biases(len(bias))
    grammar = grammar_of(parse(raw, StructuredFields), close=close)
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name not in KNOWN_PARAMS and not asks_nothing(value):
            meant = suggestion(name, KNOWN_PARAMS)
            raise BadRequestError(
                f"sampling_params: {name[:60]!r} is no sampling parameter{meant}",
                param="sampling_params",
            )
    if given.get("detokenize") is False and given.get("stop"):
        raise BadRequestError(
            "sampling_params: stop strings are looked for in the text, which detokenize: false "
            "says not to make; use stop_token_ids",
            param="sampling_params",
        )
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        sampling = msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"sampling_params: {error}", param="sampling_params") from None
    except RecursionError:
        raise _too_deep() from None
    return sampling if grammar is None else msgspec.structs.replace(sampling, grammar=grammar)


def _too_deep() -> BadRequestError:
    return BadRequestError("sampling_params: nested too deeply", param="sampling_params")


class GenerateResponseBuilder:
    """Builds answers of token ids, and their chunks."""

    def __init__(
        self, context: ServingContext, body: GenerateRequest, sampling: SamplingParams
    ) -> None:
        self._context = context
        self._body = body
        self._sampling = sampling
        self._receipt_due = bool(body.stream and body.receipt_first)
        self._prompt_logprobs_due = body.stream and sampling.prompt_logprobs is not None
        services = context.services
        limit = services.max_model_len() or len(body.token_ids)
        self._media = external_media(
            body.features,
            services.config.media.items_per_prompt,
            min(limit, len(body.token_ids)),
        )

    async def render(self) -> None:
        context, body = self._context, self._body
        media, self._media, body.features = (
            self._media,
            [],
            None,
        )  # not kept while tokens are generated
        context.usage_limits.take_media(len(media))
        with context.services.metrics.render.time():
            rendered = await context.services.renderer.render_tokens(
                body.token_ids,
                media,
                tenant=context.principal.tenant,
                cache_salt=body.cache_salt,
                mm_processor_kwargs=body.mm_processor_kwargs,
                trusted=context.principal.inject,
            )
        # Nobody is shown the text: it is made where stop strings are looked for in it.
        context.add_prompt(rendered, self._sampling, makes_text=bool(self._sampling.stop))

    def whole(self, samples: Sequence[Sample]) -> GenerateResponse:
        body = self._envelope([self._choice(i, sample) for i, sample in enumerate(samples)])
        body.usage = self._context.usage()
        body.prompt_logprobs = self._context.prompt_entries(0, self._sampling.prompt_logprobs)
        return self._with_reuse(body)

    def _choice(self, index: int, sample: Sample) -> GenerateChoice:
        return GenerateChoice(
            index=index,
            token_ids=sample.token_ids,
            logprobs=self._logprobs(sample),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def chunks(self, piece: Piece) -> Iterator[GenerateResponse]:
        choice = GenerateChoice(
            index=piece.index,
            token_ids=piece.token_ids,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if piece.token_ids or piece.finish_reason is not None:
            chunk = self._envelope([choice])
            self._add_prefill(chunk)
            last = self._context.finished and piece.finish_reason is not None
            if last and not self._context.include_usage and not self._body.receipt_first:
                self._with_reuse(chunk)
            yield chunk

    def _add_prefill(self, chunk: GenerateResponse) -> None:
        """What is known of the prompt with its first token, to the first chunk that may have it."""
        (generation,) = self._context.generations
        if self._receipt_due and (generation.reuse_stats is not None or generation.finished):
            self._receipt_due = False
            self._with_reuse(chunk)
        if self._prompt_logprobs_due and generation.prompt_logprobs is not None:
            self._prompt_logprobs_due = False
            chunk.prompt_logprobs = self._context.prompt_entries(0, self._sampling.prompt_logprobs)

    def _logprobs(self, generated: Sample | Piece) -> ChatLogprobs | None:
        """As vLLM's: the first candidate of `logprobs: 0` is the token itself."""
        found = self._context.chat_logprobs(self._sampling, generated)
        if found is not None and self._sampling.logprobs == 0:
            for entry in found.content:
                entry.top_logprobs = [TopLogprob(entry.token, entry.logprob, entry.bytes)]
        return found

    def usage_chunk(self) -> GenerateResponse:
        chunk = self._envelope([])
        chunk.usage = self._context.usage()
        return chunk if self._body.receipt_first else self._with_reuse(chunk)

    def _with_reuse(self, body: GenerateResponse) -> GenerateResponse:
        body.reuse_receipt = self._context.receipt()
        body.kv_transfer_params = self._context.kv_transfer()
        return body

    def _envelope(self, choices: list[GenerateChoice]) -> GenerateResponse:
        context = self._context
        return GenerateResponse(
            request_id=context.request_id,
            created=context.created,
            model=context.model,
            choices=choices,
            usage=context.chunk_usage(),
        )


# --- features -----------------------------------------------------------------------------------

MediaForm = Literal["encoded", "reference", "tensors"]
"""What a rendered body has of its media: the file, the MediaHash alone, or processed tensors."""
Start = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Payloads = dict[str, list[str | None] | None]
"""Modality → base64 text of each item; null for an item without."""
ItemOf = Callable[[RenderedItem], Awaitable[ProcessedItem | None]]


class Placeholder(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where an item's tokens are. `is_embed` says which of them take encoder output: one boolean
    per token, or `[start, end]` pairs relative to `offset`; null for all. `film_time`: how far an
    item of a film lies after the film's beginning, for models whose positions say it."""

    offset: Start
    length: Count
    is_embed: list[bool | tuple[int, int]] | None = None
    film_time: Start | None = None


class Features(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Each field maps a modality to a list with one entry per item."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Placeholder]] = {}
    kwargs_data: Payloads | None = None
    media_data: Payloads | None = None


def external_media(
    features: Features | None, limits: Mapping[str, int], num_tokens: int
) -> list[ExternalItem]:
    """The items of a request, at most `limits` of each modality, whose prompt has `num_tokens`
    tokens at most. Raises `BadRequestError` naming the list at fault."""
    if features is None:
        return []
    for field in ("mm_placeholders", "kwargs_data", "media_data"):
        for modality in getattr(features, field) or ():
            if modality not in features.mm_hashes:
                raise _bad(f"{field}.{modality}", "there are no mm_hashes of this modality")
    items: list[ExternalItem] = []
    for modality, names in features.mm_hashes.items():
        if modality not in MODALITIES:
            raise _bad(f"mm_hashes.{modality[:40]}", f"modalities are {', '.join(MODALITIES)}")
        if len(names) > limits.get(modality, 0):
            raise _bad(
                f"mm_hashes.{modality}",
                f"{len(names)} items; at most {limits.get(modality, 0)} are allowed",
            )
        items += _items(features, modality, num_tokens)
    return items


def _items(features: Features, modality: Modality, num_tokens: int) -> list[ExternalItem]:
    names = features.mm_hashes[modality]
    placeholders = features.mm_placeholders.get(modality, [])
    kwargs = _payloads(features.kwargs_data, modality)
    media = _payloads(features.media_data, modality)
    lists = {"mm_placeholders": placeholders, "kwargs_data": kwargs, "media_data": media}
    for field, entries in lists.items():
        if entries is not None and len(entries) != len(names):
            raise _bad(f"{field}.{modality}", f"{len(entries)} entries for {len(names)} mm_hashes")
    return [
        ExternalItem(
            modality=modality,
            name=name,
            offset=place.offset,
            length=place.length,
            is_embed=_ranges(place, f"mm_placeholders.{modality}[{number}].is_embed", num_tokens),
            kwargs_data=None if kwargs is None else kwargs[number],
            media_data=None if media is None else media[number],
            param=f"features.mm_hashes.{modality}[{number}]",
            film_time=place.film_time,
        )
        for number, (name, place) in enumerate(zip(names, placeholders, strict=True))
    ]


def _payloads(payloads: Payloads | None, modality: str) -> list[str | None] | None:
    return None if payloads is None else payloads.get(modality)


def _ranges(place: Placeholder, param: str, num_tokens: int) -> tuple[tuple[int, int], ...] | None:
    if place.is_embed is None:
        return None
    if len(place.is_embed) > num_tokens:
        raise _bad(param, f"{len(place.is_embed)} entries for a prompt of {num_tokens} tokens")
    pairs = [entry for entry in place.is_embed if not isinstance(entry, bool)]
    if len(pairs) == len(place.is_embed):
        return tuple(pairs)
    if pairs or len(place.is_embed) != place.length:
        raise _bad(param, "one boolean per token, or [start, end] pairs")
    return _runs_of(cast("list[bool]", place.is_embed))


def _runs_of(mask: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """`(start, end)` of each run of True."""
    found: list[tuple[int, int]] = []
    for position, embeds in enumerate(mask):
        if embeds and found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        elif embeds:
            found.append((position, position + 1))
    return tuple(found)


async def features_of(
    rendered: RenderedPrompt, form: MediaForm, item_of: ItemOf
) -> Features | None:
    """The `features` of a rendered prompt; None without media.

    An item that the client named by uuid, without its file, is given by its hash in any form.
    Items of films, which are parts of a file, are given as tensors instead of the file.
    """
    if not rendered.items:
        return None
    features = Features(mm_hashes={}, mm_placeholders={})
    payloads: dict[str, list[str | None]] = {}
    for item, feature in zip(rendered.items, rendered.features, strict=True):
        features.mm_hashes.setdefault(item.modality, []).append(item.media_hash.hex())
        features.mm_placeholders.setdefault(item.modality, []).append(_placeholder(feature))
        payload = await _payload(item, _carried_as(item.modality, form), item_of)
        payloads.setdefault(item.modality, []).append(payload)
    for modality, entries in payloads.items():
        match _carried_as(modality, form):
            case "encoded":
                features.media_data = {**(features.media_data or {}), modality: entries}
            case "tensors":
                features.kwargs_data = {**(features.kwargs_data or {}), modality: entries}
    return features


def referring_features(rendered: RenderedPrompt, held: Collection[bytes]) -> Features | None:
    """As `features_of` with encoded media, but that items whose keys the receiver holds are given
    by their hashes alone."""
    if not rendered.items:
        return None
    features = Features(mm_hashes={}, mm_placeholders={}, media_data={})
    for item, feature in zip(rendered.items, rendered.features, strict=True):
        text = None
        if item.encoded is not None and item.key not in held:
            text = pybase64.b64encode(item.encoded).decode("ascii")
        for listed, entry in (
            (features.mm_hashes, item.media_hash.hex()),
            (features.mm_placeholders, _placeholder(feature)),
            (features.media_data, text),
        ):
            cast("dict[str, list[Any]]", listed).setdefault(item.modality, []).append(entry)
    return features


def _carried_as(modality: str, form: MediaForm) -> MediaForm:
    return "tensors" if modality == "video" and form == "encoded" else form


async def _payload(item: RenderedItem, form: MediaForm, item_of: ItemOf) -> str | None:
    if form == "encoded" and item.encoded is not None:
        text: bytes = pybase64.b64encode(item.encoded)
        return text.decode("ascii")
    if form == "tensors":
        processed = await item_of(item)
        return None if processed is None else encode_kwargs(processed)
    return None


def _placeholder(feature: MediaFeature) -> Placeholder:
    runs = None if feature.is_embed is None else list(feature.is_embed)
    return Placeholder(
        offset=feature.offset,
        length=feature.length,
        is_embed=cast("list[bool | tuple[int, int]] | None", runs),
        film_time=feature.film_time,
    )


def _bad(field: str, problem: str) -> BadRequestError:
    return BadRequestError(f"features.{field}: {problem}", param=f"features.{field}")
