"""One generation request from its body to its answer: what chat and plain completions share."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, PromptGeneration, Sample, merged, prepare
from lookonce.frontend.logprobs import prompt_entries
from lookonce.frontend.receipt import kv_transfer_params, reuse_receipt, usage
from lookonce.frontend.requests import StreamOptions
from lookonce.frontend.responses import KVTransferParams, PromptEntries, ReuseReceipt, Usage
from lookonce.frontend.sampling_params import names_limit
from lookonce.server.http.connection import header, while_connected
from lookonce.server.http.responses import (
    UNNAMED_EVENTS,
    ChunkGroup,
    ChunkGroups,
    EventEncoder,
    EventStream,
    encode,
)
from lookonce.server.services import Principal, Services
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

MAX_SCORED = 600_000
"""Log-probabilities of prompts in one answer: some 30 MB of JSON."""


MANY_LOGPROBS = 2_000
"""From so many on an answer is written beside the event loop."""


KV_TRANSFER_KEY = "num_lmcache_extra_cached_tokens"
"""In `kv_transfer_params`, whatever its value: asks what external KV tiers did."""


REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class GenerationBody(Protocol):
    """What every body that asks for tokens has."""

    model: str | None
    stream: bool | None
    stream_options: StreamOptions | None
    request_id: str | None
    cache_salt: str | None
    reuse_receipt: bool
    kv_transfer_params: dict[str, Any] | None


@dataclass(slots=True)
class ServingContext:
    """What every chunk and the final body of one response have in common."""

    services: Services
    principal: Principal
    model: str
    request_id: str
    """The client's or a fresh one; the engine gets its own, for clients may repeat theirs."""
    stream: bool
    include_usage: bool
    wants_receipt: bool
    wants_kv_transfer: bool
    limit_asked: bool
    """Whether the client said how much to generate at most."""
    cache_salt: str | None
    arrival: float
    created: int = field(default_factory=lambda: int(time.time()))
    generations: list[PromptGeneration] = field(default_factory=list)
    aborted: bool = False
    num_scored: int = 0
    """Log-probabilities of prompts that the answer will have."""
    _entries: dict[int, PromptEntries] = field(default_factory=dict)
    _prompts: list[RenderedPrompt] = field(default_factory=list)

    def __enter__(self) -> None:
        """Around rendering and generating: meanwhile the client may abort the request by its id;
        and however that ends, no prompt keeps its pins."""
        self.services.running.note(self.principal.tenant, self.request_id, self.abort)

    def __exit__(self, *_: object) -> None:
        self.services.running.forget(self.principal.tenant, self.request_id, self.abort)
        for rendered in self._prompts:
            self.services.renderer.release(rendered)

    def add_prompt(
        self,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        keep: Collection[str] = (),
        *,
        scored_by: str = "prompt_logprobs",
    ) -> None:
        """Special tokens in `keep` are text; `scored_by`: the field that asked for the prompt's
        log-probabilities. Raises `BadRequestError` where the model
        cannot take the prompt."""
        self._prompts.append(rendered)
        generation = prepare(
            self.services,
            rendered,
            sampling,
            arrival=self.arrival,
            index_base=len(self.generations) * sampling.n,
            keep=keep,
            limit_asked=self.limit_asked,
        )
        generation.aborted = self.aborted
        self.generations.append(generation)
        self._count_scored(rendered, sampling, scored_by)

    def _count_scored(
        self, rendered: RenderedPrompt, sampling: SamplingParams, scored_by: str
    ) -> None:
        """Raises `BadRequestError` for more than an answer can hold: every sample repeats them."""
        if sampling.prompt_logprobs is None:
            return
        each = len(rendered.token_ids) * (sampling.prompt_logprobs + 1)
        self.num_scored += each * sampling.n
        if self.num_scored > MAX_SCORED:
            raise BadRequestError(
                f"{scored_by}: the answer would have more than {MAX_SCORED} log-probabilities of "
                "prompts, counted for every sample; send fewer prompts at a time",
                param=scored_by,
            )

    async def abort(self) -> None:
        """End every sample with the finish reason "abort", those not begun yet too."""
        self.aborted = True
        for generation in self.generations:
            await generation.abort()

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def usage(self) -> Usage:
        return usage(self.generations)

    def receipt(self) -> ReuseReceipt | UnsetType:
        return reuse_receipt(self.generations) if self.wants_receipt else UNSET

    def prompt_entries(self, number: int, wanted: int | None) -> PromptEntries | UnsetType | None:
        """Log-probabilities of the prompt with that number; null where it was aborted before."""
        if wanted is None:
            return UNSET
        generation = self.generations[number]
        if generation.prompt_logprobs is None:
            return None
        if number not in self._entries:  # all samples of a prompt show the same
            self._entries[number] = prompt_entries(
                generation.rendered.token_ids,
                generation.prompt_logprobs,
                wanted,
                self.services.renderer.token_bytes,
            )
        return self._entries[number]

    def kv_transfer(self) -> KVTransferParams | UnsetType:
        return kv_transfer_params(self.generations) if self.wants_kv_transfer else UNSET


class ResponseBuilder(Protocol):
    """How one route writes its answer. The prompts are rendered before any other call."""

    async def render(self) -> None: ...

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct: ...

    def chunks(self, piece: Piece) -> Iterator[msgspec.Struct]: ...

    def usage_chunk(self) -> msgspec.Struct: ...


def open_context(request: Request, body: GenerationBody, arrival: float) -> ServingContext:
    """Checks who asks for what; raises before anything costs time."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    model = services.require_model(body.model)
    services.require_ready()
    check_body(body)
    return ServingContext(
        services=services,
        principal=principal,
        model=model,
        request_id=request_id_of(request, body.request_id),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        wants_kv_transfer=KV_TRANSFER_KEY in (body.kv_transfer_params or ()),
        wants_receipt=body.reuse_receipt or header(request.scope, b"x-reuse-receipt") == "1",
        limit_asked=names_limit(body),
        cache_salt=body.cache_salt,
        arrival=arrival,
    )


def check_body(body: GenerationBody) -> None:
    """Raises `BadRequestError` for what no generation can be asked for."""
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options")


def request_id_of(request: Request, asked: str | None) -> str:
    """The client's own or the response's. Raises `BadRequestError` for a malformed one."""
    if asked is None:
        return str(request.state.request_id)
    if not REQUEST_ID.fullmatch(asked):
        raise BadRequestError(
            "request_id takes 1 to 128 letters, digits and . _ : -", param="request_id"
        )
    request.state.request_id = asked  # the response's header follows
    return asked


async def respond(
    request: Request,
    context: ServingContext,
    form: ResponseBuilder,
    wire: EventEncoder = UNNAMED_EVENTS,
) -> Response:
    """Render, generate, and respond whole or streamed."""
    if context.stream:
        return EventStream(_streamed(context, form), wire)
    body = await while_connected(request.receive, _collected(context, form))
    return Response(body, media_type="application/json")


async def _collected(context: ServingContext, form: ResponseBuilder) -> bytes:
    with context:
        await form.render()
        samples = [Sample() for g in context.generations for _ in range(g.sampling.n)]
        async with aclosing(merged(context.generations)) as pieces:
            async for piece in pieces:
                samples[piece.index].take(piece)

    def written() -> bytes:
        return encode(form.whole(samples))

    many = context.num_scored + _num_logprobs(samples) >= MANY_LOGPROBS
    return await asyncio.to_thread(written) if many else written()


def _num_logprobs(samples: Sequence[Sample]) -> int:
    return sum(1 + len(entry.top) for sample in samples for entry in sample.logprobs)


async def _streamed(context: ServingContext, form: ResponseBuilder) -> ChunkGroups:
    with context:
        await form.render()
        unfinished = sum(generation.sampling.n for generation in context.generations)
        begun: set[int] = set()
        async with aclosing(merged(context.generations)) as pieces:
            async for piece in pieces:
                if context.num_scored >= MANY_LOGPROBS and piece.index not in begun:
                    begun.add(piece.index)  # what is told of the prompt comes with its first piece
                    chunks = await asyncio.to_thread(list, form.chunks(piece))
                else:
                    chunks = list(form.chunks(piece))
                unfinished -= piece.finish_reason is not None
                if not unfinished and context.include_usage:
                    chunks.append(form.usage_chunk())
                if chunks or not unfinished:
                    yield ChunkGroup(chunks, last=not unfinished)
