"""`POST /v1/responses`: the common core, over the same context as a chat."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError, RequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.logprobs import TextCursor, chat_logprobs
from lookonce.frontend.responses import TokenEntry, ToolCallDelta
from lookonce.frontend.sampling_params import SamplingDefaults, response_sampling
from lookonce.frontend.tools.calls import (
    AnswerDelta,
    CallReader,
    PlainTextReader,
    ToolCalling,
    reader_of,
    tool_calling,
)
from lookonce.frontend.tools.parser import ContentText
from lookonce.server.http.body import receive
from lookonce.server.http.responses import encode, error_body
from lookonce.server.routes.responses_api.events import (
    ErrorEvent,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseStreamEvent,
    ResponseTextConfig,
    ResponseUsage,
    ResponseWriter,
)
from lookonce.server.routes.responses_api.input import (
    LOGPROBS,
    ReadInput,
    ResponsesRequest,
    TextFormat,
    check_response,
    read_input,
    response_tools,
    text_grammar,
)
from lookonce.server.routes.serving_base import ServingContext, open_context, respond
from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams


async def create_response(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, ResponsesRequest)
    context = open_context(request, body, arrival)
    context.include_usage = False  # the last event always has it
    check_response(body)
    tools = tool_calling(response_tools(body), context.services.tool_dialect)
    sampling = _sampling(body, context.services.defaults)
    if tools is not None:
        sampling = tools.constrain(sampling)
    form = ResponsesApiBuilder(context, body, sampling, tools)
    return await respond(request, context, form, form)


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


class ResponsesApiBuilder:
    """A response, whole and as events. Also how its events are written: with their names."""

    end = b""

    def __init__(
        self,
        context: ServingContext,
        body: ResponsesRequest,
        sampling: SamplingParams,
        tools: ToolCalling | None,
    ) -> None:
        self._context = context
        self._body = body
        self._sampling = sampling
        self._tools = tools
        self._keep = () if tools is None else tools.markers
        self._reader = ScoredReader(
            reader_of(tools),
            unheard=context.services.renderer.skipped(sampling, self._keep),
            scored=sampling.logprobs is not None,
        )
        self._writer = ResponseWriter(self._response())
        self._begun = False

    async def render(self) -> None:
        context, body, tools = self._context, self._body, self._tools
        given, body.input = body.input, ""  # pictures are not kept for the whole answer
        read = read_input(given, body.instructions)
        options = {
            "chat_template_kwargs": body.chat_template_kwargs,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "tools": None if tools is None else tools.asked.for_template(),
        }
        with _naming(read):
            with context.services.metrics.render.time():
                rendered = await context.services.renderer.render_chat(
                    read.messages,
                    tenant=context.principal.tenant,
                    cache_salt=body.cache_salt,
                    options=options,
                )
            context.add_prompt(rendered, self._sampling, self._keep)

    def whole(self, samples: Sequence[Sample]) -> ResponseObject:
        (sample,) = samples
        for _ in self._grow("".join(sample.text), sample, sample.finish_reason):
            pass
        return self._finished()

    def chunks(self, piece: Piece) -> Iterator[ResponseStreamEvent]:
        if not self._begun:
            self._begun = True
            yield from self._writer.begin()
        yield from self._grow(piece.text, piece, piece.finish_reason)
        if piece.finish_reason is not None:
            self._finished()
            yield self._writer.end()

    def usage_chunk(self) -> ResponseStreamEvent:
        raise AssertionError("the last event has the usage")

    # --- how events are written ---------------------------------------------------------------

    def event(self, body: msgspec.Struct) -> bytes:
        assert isinstance(body, ResponseStreamEvent)
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

    def _grow(
        self, text: str, said: Sample | Piece, finish_reason: str | None
    ) -> Iterator[ResponseStreamEvent]:
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
        context, response = self._context, self._writer.response
        usage = context.usage()
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
        response.reuse_receipt = context.receipt()
        response.kv_transfer_params = context.kv_transfer()
        return response

    def _response(self) -> ResponseObject:
        context, body, sampling = self._context, self._body, self._sampling
        return ResponseObject(
            id=f"resp_{context.request_id}",
            created_at=context.created,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=context.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            text=ResponseTextConfig((body.text and body.text.format) or TextFormat()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=sampling.logprobs or 0,
            top_p=sampling.top_p,
            user=body.user,
            request_id=context.request_id,
        )

    def _logprobs(self, said: Sample | Piece) -> list[TokenEntry]:
        logprobs: Sequence[TokenLogprob] | None = said.logprobs
        if self._sampling.logprobs is None or not logprobs:
            return []
        token_bytes = self._context.services.renderer.token_bytes
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


Scored: TypeAlias = tuple[AnswerDelta, list[TokenEntry]]


@dataclass(frozen=True, slots=True)
class Place:
    """An entry, and the characters of the text it stands for."""

    start: int
    end: int
    entry: TokenEntry


@dataclass(slots=True)
class Waiting:
    """Entries in the order of their tokens, until their characters are decided."""

    cursor: TextCursor
    _places: deque[Place] = field(default_factory=deque)

    def add(self, token_id: int, entry: TokenEntry) -> None:
        start = self.cursor.take(token_id, bytes(entry.bytes))
        self._places.append(Place(start, max(self.cursor.at, start + 1), entry))

    def decide(self, end: int, *, said: bool) -> list[TokenEntry]:
        """Those to be told now that the characters up to `end` are decided, the newest so."""
        told = []
        while self._places and self._places[0].start < end:
            if said:
                told.append(self._places.popleft().entry)
            elif self._places[0].end <= end:
                self._places.popleft()
            else:
                break
        return told


class ScoredReader:
    def __init__(
        self, reader: CallReader | PlainTextReader, *, unheard: Collection[int], scored: bool
    ) -> None:
        """`scored`: there are log-probabilities."""
        self._reader = reader
        self._scored = scored
        self._waiting = Waiting(TextCursor(unheard))
        self._num_read = self._num_decided = 0

    def note(self, token_ids: Sequence[int], entries: Sequence[TokenEntry]) -> None:
        """Of tokens whose text comes next; it may be held back for a while."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            self._waiting.add(token_id, entry)

    def push(self, text: str, *, last: bool) -> list[Scored]:
        """What is new, in the order it was written; `last`: no more text comes."""
        if not self._scored:
            return [(told, []) for told in self._reader.push(text, last=last)]
        # One character at a time, for a reader of calls does not say where its words were.
        pieces = text if isinstance(self._reader, CallReader) else (text,)
        parts = [scored for piece in pieces for scored in self._decided(piece, last=False)]
        if last:
            parts += self._decided("", last=True)
        return _joined(parts)

    def _decided(self, text: str, *, last: bool) -> Iterator[Scored]:
        told = self._reader.push(text, last=last)
        self._num_read += len(text)
        num_said = sum(len(each.text) for each in told if isinstance(each, ContentText))
        num_held = 0 if last else self._reader.num_held
        entries = self._decide(self._num_read - num_held, num_said)
        for each in told:
            yield each, entries if isinstance(each, ContentText) else []

    def _decide(self, end: int, num_said: int) -> list[TokenEntry]:
        """What the reader decides at once are words, or words before a marker, or none."""
        begin, self._num_decided = self._num_decided, end
        entries = self._waiting.decide(min(begin + num_said, end), said=True) if num_said else []
        self._waiting.decide(end, said=False)
        return entries


def _joined(scored: list[Scored]) -> list[Scored]:
    """Neighbours made one, as the reader makes them of a text that comes at once."""
    result: list[Scored] = []
    for are_words, group in groupby(scored, key=lambda each: isinstance(each[0], ContentText)):
        run = list(group)
        if are_words:
            text = "".join(told.text for told, _ in run if isinstance(told, ContentText))
            result.append((ContentText(text), [entry for _, entries in run for entry in entries]))
        else:
            result += _joined_calls(run)
    return result


def _joined_calls(scored: list[Scored]) -> list[Scored]:
    result: list[Scored] = []
    for told, entries in scored:
        last = result[-1][0] if result else None
        more = isinstance(told, ToolCallDelta) and told.id is UNSET
        if isinstance(last, ToolCallDelta) and isinstance(told, ToolCallDelta) and more:
            last.function.arguments += told.function.arguments
        else:
            result.append((told, entries))
    return result
