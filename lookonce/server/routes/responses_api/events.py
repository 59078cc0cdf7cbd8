"""What `/v1/responses` answers: the response object, its items, and the events of a stream.

    item added ─▶ part added ─▶ text deltas ─▶ text done ─▶ part done ─▶ item done     (message)
    item added ─▶ part added ─▶ reasoning deltas ─▶ reasoning done ─▶ part done ─▶ item done
    item added ─▶ arguments deltas ─▶ arguments done ─▶ item done                      (call)

`ResponseWriter` makes the events from what the model writes. One item is open at a time.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from lookonce.frontend.responses import KVTransferParams, ReuseReceipt, TokenEntry, ToolCallDelta
from lookonce.server.routes.responses_api.input import ResponseTool, ResponseToolChoice, TextFormat

ResponseStatus = Literal["in_progress", "completed", "incomplete", "cancelled"]


class ResponseOutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenEntry] = []


class ResponseOutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus = "in_progress"
    content: list[ResponseOutputText] = []


class ResponseFunctionToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ResponseStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class ResponseReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class ResponseReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, whole: no summary is made of it."""

    id: str
    status: ResponseStatus = "in_progress"
    summary: list[None] = []
    content: list[ResponseReasoningText] = []


Item: TypeAlias = ResponseOutputMessage | ResponseReasoningItem | ResponseFunctionToolCall


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    image_tokens: int
    audio_tokens: int
    cache_write_tokens: int = 0
    """Writing to the prefix cache is not charged."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseTextConfig(msgspec.Struct):
    format: TextFormat


class ConversationId(msgspec.Struct):
    id: str


class RawMessage(msgspec.Struct, kw_only=True):
    """A text as the model reads or writes it, and its token ids."""

    type: Literal["raw_message_tokens"] = "raw_message_tokens"
    message: str
    tokens: list[int]


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    store: bool = False
    """The response can be read and continued later."""
    temperature: float
    text: ResponseTextConfig
    tool_choice: str | ResponseToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    request_id: str
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


# --- events -----------------------------------------------------------------------------------


class ResponseStreamEvent(msgspec.Struct, kw_only=True):
    """Base of all events; `ResponseWriter` numbers them in the order they are sent."""

    type: str
    sequence_number: int = 0


class ResponseLifecycleEvent(ResponseStreamEvent, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`."""

    response: ResponseObject


class OutputItemEvent(ResponseStreamEvent, kw_only=True):
    """`response.output_item.added` and `.done`."""

    output_index: int
    item: Item


class ContentPartEvent(ResponseStreamEvent, kw_only=True):
    """`response.content_part.added` and `.done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: ResponseOutputText | ResponseReasoningText


class TextDeltaEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenEntry]


class TextDoneEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenEntry]


class ReasoningDeltaEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.reasoning_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.reasoning_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(ResponseStreamEvent, kw_only=True):
    type: str = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(ResponseStreamEvent, kw_only=True):
    type: str = "error"
    code: str | None
    message: str
    param: str | None


AnyEvent = TypeVar("AnyEvent", bound=ResponseStreamEvent)
STATUSES: dict[str, ResponseStatus] = {"length": "incomplete", "abort": "cancelled"}
"""Finish reason → the response's status; "completed" for any other."""


class ResponseWriter:
    """Adds content, reasoning and calls to `response`, and makes an event of each change.

    An event holds copies of what it shows, for it may be encoded later.
    """

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._numbers = itertools.count()
        self._open: Item | None = None

    def begin(self) -> Iterator[ResponseStreamEvent]:
        yield self._response_event("response.created")
        yield self._response_event("response.in_progress")

    def content(self, text: str, logprobs: list[TokenEntry]) -> Iterator[ResponseStreamEvent]:
        if not isinstance(self._open, ResponseOutputMessage):
            yield from self._close("completed")
            yield from self._open_message()
        message = self._open
        assert isinstance(message, ResponseOutputMessage)
        (part,) = message.content
        part.text += text
        part.logprobs += logprobs
        yield self._numbered(
            TextDeltaEvent(
                item_id=message.id, output_index=self._index, delta=text, logprobs=logprobs
            )
        )

    def reasoning(self, text: str) -> Iterator[ResponseStreamEvent]:
        if not isinstance(self._open, ResponseReasoningItem):
            yield from self._close("completed")
            item = self._open = ResponseReasoningItem(id=new_id("rs"))
            yield self._add_item(item)
            item.content = [ResponseReasoningText()]
            yield self._part_event("response.content_part.added", item)
        item = self._open
        assert isinstance(item, ResponseReasoningItem)
        item.content[0].text += text
        yield self._numbered(
            ReasoningDeltaEvent(item_id=item.id, output_index=self._index, delta=text)
        )

    def call(self, delta: ToolCallDelta) -> Iterator[ResponseStreamEvent]:
        function = delta.function
        if isinstance(delta.id, str) and isinstance(function.name, str):
            yield from self._close("completed")
            self._open = ResponseFunctionToolCall(
                id=new_id("fc"), call_id=delta.id, name=function.name
            )
            yield self._add_item(self._open)
        if function.arguments and isinstance(self._open, ResponseFunctionToolCall):
            self._open.arguments += function.arguments
            yield self._numbered(
                ArgumentsDeltaEvent(
                    item_id=self._open.id,
                    output_index=self._index,
                    delta=function.arguments,
                )
            )

    def finish(self, reason: str) -> Iterator[ResponseStreamEvent]:
        """Close the open item. An answer without content or call gets an empty message, unless it
        was cut off while the model thought."""
        status = STATUSES.get(reason, "completed")
        if isinstance(self._open, ResponseReasoningItem) and status == "completed":
            yield from self._close(status)
        if self._open is None and not self._has_answer:
            yield from self._open_message()
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        if reason == "length":
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")

    def end(self) -> ResponseStreamEvent:
        """The last event; the response must have its usage by then."""
        complete = self.response.status == "completed"
        return self._response_event(f"response.{'completed' if complete else 'incomplete'}")

    def next_number(self) -> int:
        return next(self._numbers)

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    @property
    def _has_answer(self) -> bool:
        return any(not isinstance(item, ResponseReasoningItem) for item in self.response.output)

    def _open_message(self) -> Iterator[ResponseStreamEvent]:
        message = self._open = ResponseOutputMessage(id=new_id("msg"))
        yield self._add_item(message)
        message.content = [ResponseOutputText()]
        yield self._part_event("response.content_part.added", message)

    def _close(self, status: ResponseStatus) -> Iterator[ResponseStreamEvent]:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, ResponseOutputMessage):
            (part,) = item.content
            yield self._numbered(
                TextDoneEvent(
                    item_id=item.id,
                    output_index=self._index,
                    text=part.text,
                    logprobs=list(part.logprobs),
                )
            )
            yield self._part_event("response.content_part.done", item)
        elif isinstance(item, ResponseReasoningItem):
            yield self._numbered(
                ReasoningDoneEvent(
                    item_id=item.id, output_index=self._index, text=item.content[0].text
                )
            )
            yield self._part_event("response.content_part.done", item)
        else:
            yield self._numbered(
                ArgumentsDoneEvent(
                    item_id=item.id,
                    output_index=self._index,
                    name=item.name,
                    arguments=item.arguments,
                )
            )
        item.status = status
        yield self._item_event("response.output_item.done", item)

    def _add_item(self, item: Item) -> ResponseStreamEvent:
        self.response.output.append(item)
        return self._item_event("response.output_item.added", item)

    def _item_event(self, name: str, item: Item) -> ResponseStreamEvent:
        shown = msgspec.structs.replace(item)
        return self._numbered(OutputItemEvent(type=name, output_index=self._index, item=shown))

    def _part_event(
        self, name: str, item: ResponseOutputMessage | ResponseReasoningItem
    ) -> ResponseStreamEvent:
        (part,) = item.content
        shown = msgspec.structs.replace(part)
        if isinstance(shown, ResponseOutputText):
            shown.logprobs = list(shown.logprobs)
        return self._numbered(
            ContentPartEvent(type=name, item_id=item.id, output_index=self._index, part=shown)
        )

    def _response_event(self, name: str) -> ResponseStreamEvent:
        shown = msgspec.structs.replace(self.response, output=list(self.response.output))
        return self._numbered(ResponseLifecycleEvent(type=name, response=shown))

    def _numbered(self, event: AnyEvent) -> AnyEvent:
        event.sequence_number = self.next_number()
        return event


def new_id(prefix: str) -> str:
    """A random id as OpenAI's: `resp_5b1e…`."""
    return f"{prefix}_{secrets.token_hex(16)}"
