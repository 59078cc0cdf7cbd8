"""What all routes that generate have in common: a request from its body to its answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, PromptGeneration, Sample, merged, prepare
from lookonce.frontend.logprobs import TokenName, chat_logprobs, prompt_entries, token_id_name
from lookonce.frontend.pooling import require_generates
from lookonce.frontend.reasoning import AnswerReaders
from lookonce.frontend.receipt import kv_transfer_params, reuse_receipt, usage
from lookonce.frontend.requests import StreamOptions, TakesControls
from lookonce.frontend.responses import (
    ChatLogprobs,
    CompletionTokensDetails,
    KVTransferParams,
    PromptEntries,
    ReuseReceipt,
    Usage,
)
from lookonce.frontend.sampling_params import limit_name, names_limit
from lookonce.frontend.template_controls import template_controls
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import renaming_errors
from lookonce.server.http.headers import header
from lookonce.server.http.responses import (
    UNNAMED_EVENTS,
    ChunkGroup,
    ChunkGroups,
    EventEncoder,
    EventStream,
    encode,
    while_connected,
)
from lookonce.server.http.unknown_fields import note_ignored
from lookonce.server.rate_limits import NO_LIMITS, RequestUsage
from lookonce.server.services import Services
from lookonce.types.logs import current_request_id
from lookonce.types.request import RenderedPrompt
from lookonce.types.request_trace import LoggedMedium
from lookonce.types.sampling import SamplingParams

MAX_SCORED = 600_000
"""Most log-probabilities of prompts in one answer: some 30 MB of JSON."""
MANY_LOGPROBS = 2_000
"""An answer with so many log-probabilities or more is encoded in a thread."""
MANY_NUMBERS = 50_000
"""So is one whose vectors have so many numbers."""
KV_TRANSFER_KEY = "num_lmcache_extra_cached_tokens"
"""With this key in `kv_transfer_params` the answer tells what external KV tiers did."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Of a body's `request_id` and of the header `X-Request-Id`."""


Complete = Callable[[], Awaitable[None]] | None
"""Called when an answer is whole, before its end is sent."""


class GenerationBody(Protocol):
    """The fields of every body that asks for generated tokens."""

    model: str | None
    stream: bool | None
    stream_options: StreamOptions | None
    request_id: str | None
    cache_salt: str | None
    reuse_receipt: bool
    kv_transfer_params: dict[str, Any] | None


class ResponseBuilder(Protocol):
    """How one route renders its prompts and builds its answer. `render` is called first."""

    async def render(self) -> None: ...

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct: ...

    def chunks(self, piece: Piece) -> Iterator[msgspec.Struct]: ...

    def usage_chunk(self) -> msgspec.Struct: ...


def open_context(
    request: Request, body: GenerationBody, arrival: float, *, pools: bool = False
) -> ServingContext:
    """The context of a request that may be served; `pools`: not of one for generated tokens.
    Raises `ModelNotFoundError`, `UnavailableError`, `BadRequestError`."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    model = services.require_model(body.model)
    services.require_ready()
    if not pools:
        require_generates(services.engine.model)
    check_body(body)
    options = body.stream_options or StreamOptions()
    context = ServingContext(
        services=services,
        principal=principal,
        model=model,
        request_id=request_id_of(request, body.request_id),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        wants_kv_transfer=KV_TRANSFER_KEY in (body.kv_transfer_params or ()),
        wants_receipt=body.reuse_receipt or header(request.scope, b"x-reuse-receipt") == "1",
        limit_asked=names_limit(body),
        limit_name=limit_name(body),
        arrival=arrival,
        usage_limits=request.state.usage,
        lora_name="" if services.engine.adapters.get(model) is None else model,
        token_name=token_id_name if getattr(body, "return_tokens_as_token_ids", None) else None,
    )
    if (trace := request.scope["state"].get("trace")) is not None:
        trace.serving = context
    return context


def apply_controls(
    request: Request, body: TakesControls, asked: Mapping[str, Any] | None = None
) -> None:
    """Turn `reasoning_effort` and its kin into variables of the chat template, where it reads such;
    the answer's header names those that are ignored. Variables of the client's own stay.

    `asked` is what the body asks for, by the request's names, unless the body itself was sent."""
    services: Services = request.app.state.services
    known = services.renderer.template_variables
    asked = body.asked_controls() if asked is None else asked
    variables, ignored = template_controls(asked, known)
    if variables:
        body.chat_template_kwargs = {**variables, **(body.chat_template_kwargs or {})}
    if ignored:
        note_ignored(request, services.unknown_fields, ignored)


def check_body(body: GenerationBody) -> None:
    """Raises `BadRequestError` for options that contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options")


def request_id_of(request: Request, asked: str | None) -> str:
    """The id `asked` by the client, else the response's. Raises `BadRequestError`."""
    if asked is None:
        return str(request.state.request_id)
    if not REQUEST_ID.fullmatch(asked):
        raise BadRequestError(
            "request_id takes 1 to 128 letters, digits and . _ : -", param="request_id"
        )
    request.state.request_id = asked  # the response's header has the same
    current_request_id.set(asked)
    return asked


@dataclass(slots=True, kw_only=True)
class ServingContext:
    """One request for generated tokens: its options, its prompts, and the parts of its answer that
    all routes have in common."""

    services: Services
    principal: Principal
    model: str
    request_id: str
    """The client's, or a random one. The engine gets ids of its own: clients may repeat theirs."""
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk has the usage so far."""
    wants_receipt: bool
    wants_kv_transfer: bool = False
    limit_asked: bool = False
    """The client set the most tokens to generate."""
    limit_name: str = "max_tokens"
    """The field in which it did."""
    shortens_asked: bool = False
    """What the client set is shortened to what the context leaves, not refused."""
    arrival: float = field(default_factory=time.monotonic)
    usage_limits: RequestUsage = field(default_factory=lambda: NO_LIMITS)
    """What of its limits the request uses."""
    lora_name: str = ""
    """The LoRA adapter that answers; empty: none."""
    token_name: TokenName | None = None
    """What log-probabilities are listed by, if not by the text of the token."""
    created: int = field(default_factory=lambda: int(time.time()))
    generations: list[PromptGeneration] = field(default_factory=list)
    aborted: bool = False
    num_scored: int = 0
    """Log-probabilities of prompts that the answer will have."""
    num_pooled: int = 0
    """Numbers of the vectors that the answer is made of."""
    readers: AnswerReaders | None = None
    """What reads a chat's answers."""
    on_exit: list[Callable[[], None]] = field(default_factory=list)
    """Called when the request ends, however it does."""
    _entries: dict[int, PromptEntries] = field(default_factory=dict)
    _prompts: list[RenderedPrompt] = field(default_factory=list)
    _logged: list[tuple[PromptGeneration, tuple[LoggedMedium, ...]]] = field(default_factory=list)
    """What the request log tells at the end."""

    def __enter__(self) -> None:
        """Around rendering and generating. Inside, the client may abort the request by its id; at
        the end all prompts are released."""
        self.services.running.note(self.principal.tenant, self.request_id, self.abort)

    def __exit__(self, *_: object) -> None:
        self.services.running.forget(self.principal.tenant, self.request_id, self.abort)
        self.usage_limits.generated(sum(each.completion_tokens for each in self.generations))
        if (log := self.services.request_log) is not None:
            for generation, media in self._logged:
                log.note(generation, media, self.arrival, self.principal.tenant)
        for generation in self.generations:
            if generation.reuse_stats is not None:
                self.services.savings.count(
                    self.principal.tenant, generation.rendered, generation.reuse_stats
                )
        for rendered in self._prompts:
            self.services.renderer.release(rendered)
        for end in self.on_exit:
            end()

    def add_prompt(
        self,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        keep: Collection[str] = (),
        *,
        scored_by: str = "prompt_logprobs",
        pools: bool = False,
        makes_text: bool = True,
    ) -> None:
        """Take a prompt to generate from, or to pool. Special tokens in `keep` are shown as text;
        without `makes_text` there is no text; `scored_by` is the field that asked for the prompt's
        log-probabilities. Raises `BadRequestError` for a prompt that the model cannot take."""
        self._prompts.append(rendered)
        rendered.tenant = self.principal.tenant
        rendered.lora_name = self.lora_name
        with renaming_errors(lambda name: self.limit_name if name == "max_tokens" else name):
            if not pools:
                limit = self.usage_limits.limit_answer(sampling.max_tokens, asked=self.limit_asked)
                sampling = msgspec.structs.replace(sampling, max_tokens=limit)
            generation = prepare(
                self.services,
                rendered,
                sampling,
                arrival=self.arrival,
                index_base=len(self.generations) * sampling.n,
                keep=keep,
                limit_asked=self.limit_asked and not self.shortens_asked,
                pools=pools,
                makes_text=makes_text,
            )
        most = 0 if pools else generation.sampling.max_tokens or 0
        self.usage_limits.take_tokens(rendered.num_tokens, most * sampling.n)
        self.watch(generation)
        self._count_scored(rendered, sampling, scored_by)
        if (log := self.services.request_log) is not None and not pools:
            generation.recorded = []
            self._logged.append((generation, log.media(rendered)))

    def _count_scored(
        self, rendered: RenderedPrompt, sampling: SamplingParams, scored_by: str
    ) -> None:
        """Raises `BadRequestError` for more than `MAX_SCORED`; every sample repeats a prompt's."""
        if sampling.prompt_logprobs is None:
            return
        each = rendered.num_tokens * (sampling.prompt_logprobs + 1)
        self.num_scored += each * sampling.n
        if self.num_scored > MAX_SCORED:
            raise BadRequestError(
                f"{scored_by}: the answer would have more than {MAX_SCORED} log-probabilities of "
                "prompts, counted for every sample; send fewer prompts at a time",
                param=scored_by,
            )

    def chat_logprobs(
        self, sampling: SamplingParams, generated: Piece | Sample
    ) -> ChatLogprobs | None:
        """The log-probabilities of generated tokens; None where they were not asked for."""
        if sampling.logprobs is None or not generated.logprobs:
            return None
        token_bytes = self.services.renderer.token_bytes
        return chat_logprobs(generated.token_ids, generated.logprobs, token_bytes, self.token_name)

    def watch(self, generation: PromptGeneration) -> None:
        """Take a generation that others run: it is aborted with the request, and traced."""
        generation.aborted = self.aborted
        self.generations.append(generation)

    async def abort(self) -> None:
        """End every sample, also those that have not begun, with the finish reason "abort"."""
        self.aborted = True
        for generation in self.generations:
            await generation.abort()

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def usage(self) -> Usage:
        told = usage(self.generations)
        count = None if self.readers is None else self.readers.num_reasoning_tokens
        if count is not None:
            told.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=count)
        return told

    def chunk_usage(self) -> Usage | UnsetType | None:
        """What a chunk of a stream has as `usage`."""
        if self.continuous_usage:
            return self.usage()
        return None if self.include_usage else UNSET

    def receipt(self) -> ReuseReceipt | UnsetType:
        return reuse_receipt(self.generations) if self.wants_receipt else UNSET

    def prompt_entries(self, number: int, wanted: int | None) -> PromptEntries | UnsetType | None:
        """The `wanted` likeliest tokens at each position of prompt `number`; None for a prompt that
        was aborted before it was computed. All samples of a prompt share one result."""
        if wanted is None:
            return UNSET
        generation = self.generations[number]
        if generation.prompt_logprobs is None:
            return None
        if number not in self._entries:
            self._entries[number] = prompt_entries(
                generation.rendered.token_ids,
                generation.prompt_logprobs,
                wanted,
                self.services.renderer.token_bytes,
            )
        return self._entries[number]

    def kv_transfer(self) -> KVTransferParams | UnsetType:
        return kv_transfer_params(self.generations) if self.wants_kv_transfer else UNSET


async def respond(
    request: Request,
    context: ServingContext,
    builder: ResponseBuilder,
    encoder: EventEncoder = UNNAMED_EVENTS,
    complete: Complete = None,
) -> Response:
    """Render, generate, and answer in one body or in a stream of events. `complete` is called when
    the answer is whole, before its end is sent."""
    if context.stream:
        return EventStream(_streamed(context, builder, complete), encoder)
    body = await while_connected(request.receive, _collected(context, builder, complete))
    return Response(body, media_type="application/json")


async def _collected(
    context: ServingContext, builder: ResponseBuilder, complete: Complete
) -> bytes:
    with context:
        await builder.render()
        samples = [Sample() for g in context.generations for _ in range(g.sampling.n)]
        async with aclosing(merged(context.generations)) as pieces:
            async for piece in pieces:
                samples[piece.index].take(piece)

        def encoded() -> bytes:
            return encode(builder.whole(samples))

        many = context.num_scored + _num_logprobs(samples) >= MANY_LOGPROBS
        many = many or context.num_pooled >= MANY_NUMBERS
        body = await asyncio.to_thread(encoded) if many else encoded()
        if complete is not None:
            await complete()
    return body


def _num_logprobs(samples: Sequence[Sample]) -> int:
    return sum(1 + len(entry.top) for sample in samples for entry in sample.logprobs)


async def _streamed(
    context: ServingContext, builder: ResponseBuilder, complete: Complete
) -> ChunkGroups:
    with context:
        await builder.render()
        unfinished = sum(generation.sampling.n for generation in context.generations)
        begun: set[int] = set()
        async with aclosing(merged(context.generations)) as pieces:
            async for piece in pieces:
                if context.num_scored >= MANY_LOGPROBS and piece.index not in begun:
                    begun.add(piece.index)  # a sample's first piece has the prompt's logprobs
                    chunks = await asyncio.to_thread(list, builder.chunks(piece))
                else:
                    chunks = list(builder.chunks(piece))
                unfinished -= piece.finish_reason is not None
                if not unfinished and context.include_usage:
                    chunks.append(builder.usage_chunk())
                if not unfinished and complete is not None:
                    await complete()
                if chunks or not unfinished:
                    yield ChunkGroup(chunks, last=not unfinished)
