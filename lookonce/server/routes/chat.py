"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.reasoning import AnswerReaders
from lookonce.frontend.requests import TEMPLATE_FIELDS, ChatRequest, TokenizeRequest
from lookonce.frontend.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from lookonce.frontend.sampling_params import chat_sampling
from lookonce.frontend.tools.calls import (
    AnswerDelta,
    Reason,
    RequestedTools,
    ToolCalling,
    call_deltas_of,
    content_of,
    finish_reason_shown,
    read_tools,
    reasoning_of,
    tool_calling,
)
from lookonce.frontend.tools.function_fields import read_functions
from lookonce.frontend.tools.parser import ReasoningText
from lookonce.server.http.body import receive
from lookonce.server.rate_limits import count_media
from lookonce.server.routes.serving_base import (
    ServingContext,
    apply_controls,
    open_context,
    respond,
)
from lookonce.server.services import Services
from lookonce.types.sampling import SamplingParams


async def chat_completions(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, ChatRequest)
    context = open_context(request, body, arrival)
    apply_controls(request, body)
    sampling, tools = checked_chat(body, context.services)
    return await respond(request, context, ChatResponseBuilder(context, body, sampling, tools))


def checked_chat(
    body: ChatRequest, services: Services
) -> tuple[SamplingParams, ToolCalling | None]:
    """How to sample, and the tools the model may call. Raises `BadRequestError` naming the part at
    fault."""
    if not body.messages:
        raise BadRequestError("messages must not be empty", param="messages")
    if body.modalities not in (None, [], ["text"]):
        raise BadRequestError("modalities other than text are not supported", param="modalities")
    asked = requested_tools(body, close=services.defaults.closed_schemas)
    tools = tool_calling(asked, services.tool_dialect)
    sampling = chat_sampling(body, services.defaults)
    return (sampling if tools is None else tools.constrain(sampling)), tools


def requested_tools(body: ChatRequest | TokenizeRequest, *, close: bool) -> RequestedTools | None:
    """Of `tools` or `functions`. Raises `BadRequestError` naming the part at fault."""
    if body.functions and body.tools:
        raise BadRequestError("functions and tools cannot be used together", param="functions")
    if body.functions or body.function_call not in (None, "none", "auto"):
        return read_functions(body.functions or (), body.function_call, close=close)
    return read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, close=close)


def chat_options(body: ChatRequest | TokenizeRequest, tools: ToolCalling | None) -> dict[str, Any]:
    """The options of the chat template."""
    options = template_options(body)
    return options if tools is None else {**options, "tools": tools.asked.for_template()}


class ChatResponseBuilder:
    """Builds chat completion objects and their chunks."""

    def __init__(
        self,
        context: ServingContext,
        body: ChatRequest,
        sampling: SamplingParams,
        tools: ToolCalling | None,
    ) -> None:
        self._context = context
        self._body = body
        self._sampling = sampling
        self._tools = tools
        self._answers = AnswerReaders(tools, context.services.reasoning, context.services.renderer)
        context.readers = self._answers
        self._with_reasoning = shows_reasoning(body)
        self._begun: set[int] = set()
        self._old_form = bool(body.functions)
        """Calls are shown as `function_call`."""
        self._id = f"chatcmpl-{context.request_id}"

    async def render(self) -> None:
        context, body = self._context, self._body
        continued = continued_text(body)
        messages, body.messages = body.messages, []  # media are not kept while tokens are generated
        context.usage_limits.take_media(count_media(messages))
        with context.services.metrics.render.time():
            rendered = await context.services.renderer.render_chat(
                messages,
                tenant=context.principal.tenant,
                cache_salt=body.cache_salt,
                options=chat_options(body, self._tools),
            )
        sampling = self._answers.begin(rendered, self._sampling, continued)
        context.add_prompt(rendered, sampling, self._answers.markers)

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        context = self._context
        return ChatCompletion(
            id=self._id,
            created=context.created,
            model=context.model,
            request_id=context.request_id,
            choices=[self._choice(index, sample) for index, sample in enumerate(samples)],
            usage=context.usage(),
            prompt_logprobs=context.prompt_entries(0, self._body.prompt_logprobs),
            reuse_receipt=context.receipt(),
            kv_transfer_params=context.kv_transfer(),
        )

    def _choice(self, index: int, sample: Sample) -> ChatChoice:
        deltas = self._read(index, sample, "".join(sample.text), last=True)
        called = self._answers.called(index)
        message = ChatMessage(content=content_of(deltas))
        message.reasoning = message.reasoning_content = reasoning_of(deltas) or UNSET
        if called:
            message.content = message.content or None
            self._show_calls(message, self._answers.of(index).calls)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._context.chat_logprobs(self._sampling, sample),
            finish_reason=self._finish_reason(sample.finish_reason, called=called),
            stop_reason=sample.stop_reason,
        )

    def _show_calls(self, message: ChatMessage, calls: list[ToolCall]) -> None:
        if self._old_form:
            message.function_call = calls[0].function
        else:
            message.tool_calls = calls

    def _finish_reason(self, reason: Reason, *, called: bool) -> Reason:
        shown = "function_call" if self._old_form else "tool_calls"
        return finish_reason_shown(reason, called=called, as_called=shown)

    def _delta(self, deltas: Sequence[AnswerDelta]) -> ChatDelta:
        shown = _delta(deltas)
        if self._old_form and shown.tool_calls:
            shown.function_call, shown.tool_calls = shown.tool_calls[0].function, UNSET
        return shown

    def _read(self, index: int, new: Sample | Piece, text: str, *, last: bool) -> list[AnswerDelta]:
        """The content, reasoning and tool calls that `text` adds to a sample."""
        self._answers.note(index, new.token_ids)
        deltas = self._answers.of(index).push(text, last=last)
        if self._with_reasoning:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, ReasoningText)]

    def chunks(self, piece: Piece) -> Iterator[msgspec.Struct]:
        """The role first; reasoning, content and calls as they come; at last the finish reason."""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self._chunk(piece.index, ChatDelta(role="assistant", content=""))
        logprobs = self._context.chat_logprobs(self._sampling, piece)
        last = piece.finish_reason is not None
        deltas = self._read(piece.index, piece, piece.text, last=last)
        if deltas or logprobs is not None:
            yield self._chunk(piece.index, self._delta(deltas), logprobs)
        if piece.finish_reason is not None:
            yield self._finish_chunk(piece)

    def _finish_chunk(self, piece: Piece) -> ChatChunk:
        chunk = self._chunk(piece.index, ChatDelta())
        called = self._answers.called(piece.index)
        chunk.choices[0].finish_reason = self._finish_reason(piece.finish_reason, called=called)
        chunk.choices[0].stop_reason = piece.stop_reason
        if self._context.finished and not self._context.include_usage:
            chunk.reuse_receipt = self._context.receipt()
            chunk.kv_transfer_params = self._context.kv_transfer()
        return chunk

    def usage_chunk(self) -> ChatChunk:
        chunk = self._envelope([])
        chunk.usage = self._context.usage()
        chunk.reuse_receipt = self._context.receipt()
        chunk.kv_transfer_params = self._context.kv_transfer()
        return chunk

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None
    ) -> ChatChunk:
        return self._envelope([ChatChunkChoice(index=index, delta=delta, logprobs=logprobs)])

    def _envelope(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        context = self._context
        return ChatChunk(
            id=self._id,
            created=context.created,
            model=context.model,
            request_id=context.request_id,
            choices=choices,
            usage=self._context.chunk_usage(),
        )


def _delta(deltas: Sequence[AnswerDelta]) -> ChatDelta:
    """A delta of log-probabilities alone has empty content."""
    content, reasoning = content_of(deltas), reasoning_of(deltas) or UNSET
    return ChatDelta(
        content=content if content or not deltas else UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=call_deltas_of(deltas) or UNSET,
    )


def shows_reasoning(body: ChatRequest) -> bool:
    """Whether the answer has the model's thoughts."""
    excluded = body.reasoning is not None and body.reasoning.exclude is True
    return body.include_reasoning is not False and not excluded


def continued_text(body: ChatRequest) -> str | None:
    """The text of the last message, which the answer continues; None where it begins anew."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The renderer's options, which have the names of the request's fields."""
    return {name: getattr(body, name) for name in TEMPLATE_FIELDS}
