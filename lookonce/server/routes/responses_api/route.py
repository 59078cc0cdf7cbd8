"""`POST /v1/responses`: the common core, over the same exchange as a chat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError, RequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.logprobs import chat_logprobs
from lookonce.frontend.responses import TokenEntry, ToolCallDelta
from lookonce.frontend.sampling_params import SamplingDefaults, response_sampling
from lookonce.frontend.tools.calls import ToolCalling, reader_of, tool_calling
from lookonce.frontend.tools.parser import ContentText
from lookonce.server.http.body import receive
from lookonce.server.http.error_responses import encode, error_body
from lookonce.server.routes.responses_api.body import (
    LOGPROBS,
    ResponsesRequest,
    TextFormat,
    check_response,
    response_tools,
    text_grammar,
)
from lookonce.server.routes.responses_api.objects import (
    ErrorEvent,
    Event,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
    ShownText,
)
from lookonce.server.routes.responses_api.reading import ReadInput, read_input
from lookonce.server.routes.responses_api.scored import ScoredReader
from lookonce.server.routes.responses_api.writing import ResponseWriter
from lookonce.server.routes.serving_base import Exchange, answer, open_exchange
from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams


async def create_response(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, ResponsesRequest)
    exchange = open_exchange(request, body, arrival)
    exchange.include_usage = False  # the last event always has it
    check_response(body)
    tools = tool_calling(response_tools(body), exchange.services.tool_dialect)
    sampling = _sampling(body, exchange.services.defaults)
    if tools is not None:
        sampling = tools.constrain(sampling)
    form = ResponseFormat(exchange, body, sampling, tools)
    return await answer(request, exchange, form, form)


def _sampling(body: ResponsesRequest, defaults: SamplingDefaults) -> SamplingParams:
    asked = body.top_logprobs or 0
    wanted = LOGPROBS in (body.include or ()) or asked
    sampling = response_sampling(body, asked if wanted else None, defaults)
    grammar = text_grammar(body)
    if grammar is None:
        return sampling
    if sampling.grammar is not None:
        param = sampling.grammar.param
        raise BadRequestError(f"{param} cannot be used with text.format", param=param)
    return msgspec.structs.replace(sampling, grammar=grammar)


class ResponseFormat:
    """A response, whole and as events. Also how its events are written: with their names."""

    end = b""

    def __init__(
        self,
        exchange: Exchange,
        body: ResponsesRequest,
        sampling: SamplingParams,
        tools: ToolCalling | None,
    ) -> None:
        self._exchange = exchange
        self._body = body
        self._sampling = sampling
        self._tools = tools
        self._keep = () if tools is None else tools.markers
        self._reader = ScoredReader(
            reader_of(tools),
            unheard=exchange.services.renderer.skipped(sampling, self._keep),
            scored=sampling.logprobs is not None,
        )
        self._writer = ResponseWriter(self._response())
        self._begun = False

    async def render(self) -> None:
        exchange, body, tools = self._exchange, self._body, self._tools
        given, body.input = body.input, ""  # pictures are not kept for the whole answer
        read = read_input(given, body.instructions)
        options = {
            "chat_template_kwargs": body.chat_template_kwargs,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "tools": None if tools is None else tools.asked.for_template(),
        }
        with _naming(read):
            with exchange.services.metrics.render.time():
                rendered = await exchange.services.renderer.render_chat(
                    read.messages,
                    tenant=exchange.principal.tenant,
                    cache_salt=body.cache_salt,
                    options=options,
                )
            exchange.add_prompt(rendered, self._sampling, self._keep)

    def whole(self, samples: Sequence[Sample]) -> ResponseObject:
        (sample,) = samples
        for _ in self._grow("".join(sample.text), sample, sample.finish_reason):
            pass
        return self._finished()

    def chunks(self, piece: Piece) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield from self._writer.begin()
        yield from self._grow(piece.text, piece, piece.finish_reason)
        if piece.finish_reason is not None:
            self._finished()
            yield self._writer.end()

    def usage_chunk(self) -> Event:
        raise AssertionError("the last event has the usage")

    # --- how events are written ---------------------------------------------------------------

    def event(self, body: msgspec.Struct) -> bytes:
        assert isinstance(body, Event)
        return b"event: " + body.type.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def failure(self, error: Exception) -> bytes:
        known = error_body(error).error
        return self.event(
            ErrorEvent(
                sequence_number=self._writer.next_number(),
                code=known.code or known.type,
                message=known.message,
                param=known.param,
            )
        )

    # --- inside -------------------------------------------------------------------------------

    def _grow(self, text: str, said: Sample | Piece, finish_reason: str | None) -> Iterator[Event]:
        writer = self._writer
        self._reader.note(said.token_ids, self._logprobs(said))
        for told, logprobs in self._reader.push(text, last=finish_reason is not None):
            match told:
                case ContentText(more):
                    yield from writer.words(more, logprobs)
                case ToolCallDelta():
                    yield from writer.call(told)
        if finish_reason is not None:
            yield from writer.finish(finish_reason)

    def _finished(self) -> ResponseObject:
        exchange, response = self._exchange, self._writer.response
        usage = exchange.usage()
        details = usage.prompt_tokens_details
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=details.cached_tokens,
                image_tokens=details.image_tokens,
                audio_tokens=details.audio_tokens,
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
        response.reuse_receipt = exchange.receipt()
        response.kv_transfer_params = exchange.kv_transfer()
        return response

    def _response(self) -> ResponseObject:
        exchange, body, sampling = self._exchange, self._body, self._sampling
        return ResponseObject(
            id=f"resp_{exchange.request_id}",
            created_at=exchange.created,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=exchange.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            text=ShownText((body.text and body.text.format) or TextFormat()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=sampling.logprobs or 0,
            top_p=sampling.top_p,
            user=body.user,
            request_id=exchange.request_id,
        )

    def _logprobs(self, said: Sample | Piece) -> list[TokenEntry]:
        logprobs: Sequence[TokenLogprob] | None = said.logprobs
        if self._sampling.logprobs is None or not logprobs:
            return []
        token_bytes = self._exchange.services.renderer.token_bytes
        return chat_logprobs(said.token_ids, logprobs, token_bytes).content


@contextmanager
def _naming(read: ReadInput) -> Iterator[None]:
    """The renderer knows messages; errors name the items they were made from."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        named = "max_output_tokens" if param == "max_tokens" else read.renamed(param)
        if named == param:
            raise
        message = error.message.replace(param, named, 1)
        raise type(error)(message, param=named, code=error.code) from None
