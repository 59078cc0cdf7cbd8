"""`POST /v1/responses`, which answers input items with output items, and `/input_tokens`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.logprobs import TextCursor, chat_logprobs
from lookonce.frontend.reasoning import AnswerReader, AnswerReaders
from lookonce.frontend.responses import TokenEntry, ToolCallDelta
from lookonce.frontend.sampling_params import SamplingDefaults, response_sampling
from lookonce.frontend.tools.calls import (
    AnswerDelta,
    PlainTextReader,
    ToolCalling,
    tool_calling,
)
from lookonce.frontend.tools.parser import ContentText, ReasoningText
from lookonce.render.prompt.messages import check_count, has_many_values
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.http.responses import encode, error_body, json_response, while_connected
from lookonce.server.rate_limits import RequestUsage, count_media
from lookonce.server.routes.responses_api.events import (
    ConversationId,
    ErrorEvent,
    InputTokensDetails,
    OutputTokensDetails,
    RawMessage,
    ResponseObject,
    ResponseStreamEvent,
    ResponseTextConfig,
    ResponseUsage,
    ResponseWriter,
    new_id,
)
from lookonce.server.routes.responses_api.input import (
    LOGPROBS,
    Json,
    ReadInput,
    ResponsesRequest,
    TextFormat,
    check_response,
    read_input,
    response_tools,
    text_grammar,
)
from lookonce.server.routes.responses_api.stored import (
    StoredTurn,
    turn_of,
    with_references,
)
from lookonce.server.routes.serving_base import (
    ServingContext,
    apply_controls,
    open_context,
    respond,
)
from lookonce.server.services import Services
from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams

ScoredDelta: TypeAlias = tuple[AnswerDelta, list[TokenEntry]]
"""A part of an answer; content has the log-probabilities of its tokens."""


async def create_response(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, ResponsesRequest)
    context = open_context(request, body, arrival)
    context.include_usage = context.continuous_usage = False  # the last event always has it
    check_response(body)
    turn = turn_of(context.services, context.principal, body)
    apply_controls(request, body)
    defaults = context.services.defaults
    asked = response_tools(body, close=defaults.closed_schemas)
    tools = tool_calling(asked, context.services.tool_dialect)
    sampling = _sampling(body, defaults)
    if tools is not None:
        sampling = tools.constrain(sampling)
    builder = ResponsesApiBuilder(context, body, sampling, tools, turn)
    context.on_exit.append(turn.end)
    return await respond(request, context, builder, encoder=builder, complete=builder.store)


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


async def count_input_tokens(request: Request) -> Response:
    """The tokens that the engine would get, media placeholders included."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    body = await receive(request, ResponsesRequest)
    services.require_model(body.model)
    check_response(body)
    turn = turn_of(services, principal, body)
    apply_controls(request, body)
    asked = response_tools(body, close=services.defaults.closed_schemas)
    tools = tool_calling(asked, services.tool_dialect)
    asked_input = [] if body.input is None else body.input
    _check_count(services, asked_input)
    given = await with_references(services.responses, principal.tenant, asked_input)
    before = await turn.context()
    read = await _read(services, principal.tenant, body, given, before, turn)
    usage: RequestUsage = request.state.usage
    usage.take_media(count_media(read.messages))
    usage.take_tokens(0, 1)  # how many there will be is not known
    with _naming_items(read):
        work = services.readonly.render_chat(
            read.messages, tenant=principal.tenant, options=_chat_options(body, tools)
        )
        rendered = await while_connected(request.receive, work)
    services.readonly.release(rendered)
    usage.generated(rendered.num_tokens)
    return json_response(InputTokens(rendered.num_tokens))


def _check_count(services: Services, given: str | list[Json]) -> None:
    """Refuse more items or parts than the model's context can hold."""
    most = services.max_model_len()
    if most is not None and not isinstance(given, str):
        check_count(given, most, "input")


async def _read(
    services: Services,
    tenant: str,
    body: ResponsesRequest,
    given: str | list[Json],
    before: list[Json],
    turn: StoredTurn,
) -> ReadInput:
    """`read_input`, in turn where it may take long."""
    name = "" if turn.origin is None else turn.origin.param
    large = has_many_values(given, before)
    work = partial(read_input, given, body.instructions, before, name)
    return await services.renderer.in_turn_if(large, tenant, work)


def _chat_options(body: ResponsesRequest, tools: ToolCalling | None) -> dict[str, object]:
    return {
        "chat_template_kwargs": body.chat_template_kwargs,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "tools": None if tools is None else tools.asked.for_template(),
    }


def _sampling(body: ResponsesRequest, defaults: SamplingDefaults) -> SamplingParams:
    asked = body.top_logprobs or 0
    wanted = LOGPROBS in (body.include or ()) or asked
    sampling = response_sampling(body, asked if wanted else None, defaults)
    grammar = text_grammar(body, close=defaults.closed_schemas)
    if grammar is None:
        return sampling
    if sampling.grammar is not None:
        param = sampling.grammar.param
        raise BadRequestError(f"{param} cannot be used with text.format", param=param)
    return msgspec.structs.replace(sampling, grammar=grammar)


class ResponsesApiBuilder:
    """Builds a response, or the events it is streamed as; also encodes these events."""

    end = b""

    def __init__(
        self,
        context: ServingContext,
        body: ResponsesRequest,
        sampling: SamplingParams,
        tools: ToolCalling | None,
        turn: StoredTurn,
    ) -> None:
        self._turn = turn
        self._raw = RawMessage(message="", tokens=[])
        """The answer so far, where the response shall have it."""
        self._context = context
        self._body = body
        self._sampling = sampling
        self._tools = tools
        self._answers = AnswerReaders(tools, context.services.reasoning, context.services.renderer)
        context.readers = self._answers
        self._reader: LogprobsReader | None = None
        """None before the prompt is rendered."""
        self._writer = ResponseWriter(self._response())
        self._begun = False

    async def render(self) -> None:
        context, body, tools = self._context, self._body, self._tools
        given = [] if body.input is None else body.input
        body.input = ""  # media are not kept while tokens are generated
        _check_count(context.services, given)
        services, tenant = context.services, context.principal.tenant
        given = await with_references(services.responses, tenant, given)
        before = await self._turn.begin(self._writer.response.id, given)
        self._writer.response.store = self._turn.keep
        read = await _read(services, tenant, body, given, before, self._turn)
        context.usage_limits.take_media(count_media(read.messages))
        with _naming_items(read):
            with context.services.metrics.render.time():
                rendered = await context.services.renderer.render_chat(
                    read.messages,
                    tenant=context.principal.tenant,
                    cache_salt=body.cache_salt,
                    options=_chat_options(body, tools),
                )
            sampling = self._answers.begin(rendered, self._sampling)
            context.add_prompt(rendered, sampling, self._answers.markers)
        self._reader = LogprobsReader(
            self._answers.of(0),
            textless=services.renderer.skipped(sampling, self._answers.markers),
            scored=sampling.logprobs is not None,
        )

    async def store(self) -> None:
        """Store the finished response, where it shall be."""
        await self._turn.finish(self._writer.response)

    def whole(self, samples: Sequence[Sample]) -> ResponseObject:
        (sample,) = samples
        for _ in self._add("".join(sample.text), sample, sample.finish_reason):
            pass
        return self._finished()

    def chunks(self, piece: Piece) -> Iterator[ResponseStreamEvent]:
        if not self._begun:
            self._begun = True
            yield from self._writer.begin()
        yield from self._add(piece.text, piece, piece.finish_reason)
        if piece.finish_reason is not None:
            self._finished()
            yield self._writer.end()

    def usage_chunk(self) -> ResponseStreamEvent:
        raise AssertionError("the last event has the usage")

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

    def _add(
        self, text: str, new: Sample | Piece, finish_reason: str | None
    ) -> Iterator[ResponseStreamEvent]:
        writer, reader = self._writer, self._reader
        assert reader is not None  # the prompt is rendered first
        if self._body.enable_response_messages:
            self._raw.message += text
            self._raw.tokens += new.token_ids
        self._answers.note(0, new.token_ids)
        reader.note(new.token_ids, self._logprobs(new))
        for delta, logprobs in reader.push(text, last=finish_reason is not None):
            match delta:
                case ContentText(more):
                    yield from writer.content(more, logprobs)
                case ReasoningText(more):
                    yield from writer.reasoning(more)
                case ToolCallDelta():
                    yield from writer.call(delta)
        if finish_reason is not None:
            yield from writer.finish(finish_reason)

    def _finished(self) -> ResponseObject:
        context, response = self._context, self._writer.response
        usage = context.usage()
        details = usage.prompt_tokens_details
        num_reasoning = self._answers.num_reasoning_tokens or 0
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=details.cached_tokens,
                image_tokens=details.image_tokens,
                audio_tokens=details.audio_tokens,
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.total_tokens,
        )
        response.reuse_receipt = context.receipt()
        response.kv_transfer_params = context.kv_transfer()
        if self._body.enable_response_messages:
            (generation,) = context.generations
            ids = generation.rendered.ids.tolist()
            text = generation.rendered.text
            if text is None:
                text = context.services.renderer.decode(ids)
            response.input_messages = [RawMessage(message=text, tokens=ids)]
            response.output_messages = [self._raw]
        return response

    def _response(self) -> ResponseObject:
        context, body, sampling = self._context, self._body, self._sampling
        turn = self._turn
        # Clients repeat request ids; the id of a stored response is its only name.
        stored = turn.keep or turn.adds_to_conversation
        return ResponseObject(
            id=new_id("resp") if stored else f"resp_{context.request_id}",
            previous_response_id=body.previous_response_id,
            conversation=None if turn.conversation is None else ConversationId(turn.conversation),
            store=turn.keep,
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

    def _logprobs(self, new: Sample | Piece) -> list[TokenEntry]:
        logprobs: Sequence[TokenLogprob] | None = new.logprobs
        if self._sampling.logprobs is None or not logprobs:
            return []
        token_bytes = self._context.services.renderer.token_bytes
        return chat_logprobs(new.token_ids, logprobs, token_bytes).content


class LogprobsReader:
    """Reads an answer's deltas from its text, the content with the logprobs of its tokens.

        tokens       <|channel|> analysis <|message|> Hm .  …  <|message|>  Hel  lo
        characters   decided: no content                                    decided: content
        entries      left out                                               given with the content

    An entry is given if any of its token's characters is content. A token without characters (part
    of a character, a special token) goes with the next character. So the result does not depend on
    how the text is cut into pieces.
    """

    def __init__(self, reader: AnswerReader, *, textless: Collection[int], scored: bool) -> None:
        """`textless`: token ids that add no text; `scored`: there are log-probabilities."""
        self._reader = reader
        self._scored = scored
        self._pending = PendingEntries(TextCursor(textless))
        self._num_read = self._num_decided = 0

    def note(self, token_ids: Sequence[int], entries: Sequence[TokenEntry]) -> None:
        """Take the entries of tokens whose text is pushed next; the text may come in part."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            self._pending.add(token_id, entry)

    def push(self, text: str, *, last: bool) -> list[ScoredDelta]:
        """What `text` adds, in the order it was written; `last`: no more text comes."""
        if not self._scored:
            return [(delta, []) for delta in self._reader.push(text, last=last)]
        # One character at a time: other readers do not tell where in the text content was.
        pieces = (text,) if isinstance(self._reader, PlainTextReader) else text
        parts = [scored for piece in pieces for scored in self._decided(piece, last=False)]
        if last:
            parts += self._decided("", last=True)
        return _joined(parts)

    def _decided(self, text: str, *, last: bool) -> Iterator[ScoredDelta]:
        deltas = self._reader.push(text, last=last)
        self._num_read += len(text)
        contents = [each for each in deltas if isinstance(each, ContentText)]
        num_content = sum(len(each.text) - each.num_added for each in contents)
        num_held = 0 if last else self._reader.num_held
        entries = self._decide(self._num_read - num_held, num_content)
        for each in deltas:
            yield each, entries if isinstance(each, ContentText) else []

    def _decide(self, end: int, num_content: int) -> list[TokenEntry]:
        """The entries of the content among the characters up to `end`, which are decided now.

        The reader decides on content, on content before a marker, or on no content at once.
        """
        begin, self._num_decided = self._num_decided, end
        entries: list[TokenEntry] = []
        if num_content:
            entries = self._pending.take(min(begin + num_content, end))
        self._pending.drop(end)
        return entries


@dataclass(slots=True)
class PendingEntries:
    """Logprobs entries in the order of their tokens, until the reader decides on their text."""

    cursor: TextCursor
    _spans: deque[TokenSpan] = field(default_factory=deque)

    def add(self, token_id: int, entry: TokenEntry) -> None:
        start = self.cursor.take(token_id, bytes(entry.bytes))
        self._spans.append(TokenSpan(start, max(self.cursor.at, start + 1), entry))

    def take(self, end: int) -> list[TokenEntry]:
        """The entries of tokens that begin before character `end`, which are content."""
        taken = []
        while self._spans and self._spans[0].start < end:
            taken.append(self._spans.popleft().entry)
        return taken

    def drop(self, end: int) -> None:
        """Forget the tokens that end at character `end` or before, which are no content."""
        while self._spans and self._spans[0].end <= end:
            self._spans.popleft()


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token's entry, and its characters' positions in the answer's text."""

    start: int
    end: int
    entry: TokenEntry


def _joined(scored: list[ScoredDelta]) -> list[ScoredDelta]:
    """Neighbouring deltas of one kind joined, as if the text had come in one piece."""
    result: list[ScoredDelta] = []
    for is_content, group in groupby(scored, key=lambda each: isinstance(each[0], ContentText)):
        run = list(group)
        if is_content:
            text = "".join(delta.text for delta, _ in run if isinstance(delta, ContentText))
            result.append((ContentText(text), [entry for _, entries in run for entry in entries]))
        else:
            result += _joined_others(run)
    return result


def _joined_others(scored: list[ScoredDelta]) -> list[ScoredDelta]:
    result: list[ScoredDelta] = []
    for delta, entries in scored:
        last = result[-1][0] if result else None
        if isinstance(last, ReasoningText) and isinstance(delta, ReasoningText):
            result[-1] = (ReasoningText(last.text + delta.text), [])
            continue
        more = isinstance(delta, ToolCallDelta) and delta.id is UNSET
        if isinstance(last, ToolCallDelta) and isinstance(delta, ToolCallDelta) and more:
            last.function.arguments += delta.function.arguments
        else:
            result.append((delta, entries))
    return result


def _naming_items(read: ReadInput) -> AbstractContextManager[None]:
    """The renderer's errors name messages; this makes them name the items of the request."""
    return renaming_errors(
        lambda param: "max_output_tokens" if param == "max_tokens" else read.renamed(param)
    )
