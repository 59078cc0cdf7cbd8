"""What `/v1/responses` answers: the response, its items, and the events of a stream."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from lookonce.frontend.responses import KVTransferParams, ReuseReceipt, TokenEntry, ToolCallDelta
from lookonce.server.routes.responses_api.input import ResponseTool, ResponseToolChoice, TextFormat

Status = Literal["in_progress", "completed", "incomplete", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenEntry] = []


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class Call(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item: TypeAlias = Message | Call


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    image_tokens: int
    audio_tokens: int
    cache_write_tokens: int = 0
    """What is kept is kept for nothing."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ShownText(msgspec.Struct):
    format: TextFormat


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    """Nothing is: a response can be read once."""
    temperature: float
    text: ShownText
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


# --- events -----------------------------------------------------------------------------------


class Event(msgspec.Struct, kw_only=True):
    """Base of all; numbered when it is sent."""

    type: str
    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`."""

    response: ResponseObject


class ItemEvent(Event, kw_only=True):
    """`response.output_item.added` and `.done`."""

    output_index: int
    item: Item


class PartEvent(Event, kw_only=True):
    """`response.content_part.added` and `.done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class TextDelta(Event, kw_only=True):
    type: str = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenEntry]


class TextDone(Event, kw_only=True):
    type: str = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenEntry]


class ArgumentsDelta(Event, kw_only=True):
    type: str = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True):
    type: str = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Event, kw_only=True):
    type: str = "error"
    code: str | None
    message: str
    param: str | None


AnyEvent = TypeVar("AnyEvent", bound=Event)


STATUSES: dict[str, Status] = {"length": "incomplete", "abort": "cancelled"}
"""Finish reason → how the response ended; any other is complete."""


class ResponseWriter:
    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._numbers = itertools.count()
        self._open: Item | None = None

    def begin(self) -> Iterator[Event]:
        yield self._response_event("response.created")
        yield self._response_event("response.in_progress")

    def words(self, text: str, logprobs: list[TokenEntry]) -> Iterator[Event]:
        if not isinstance(self._open, Message):
            yield from self._close("completed")
            yield from self._open_message()
        message = self._open
        assert isinstance(message, Message)
        (part,) = message.content
        part.text += text
        part.logprobs += logprobs
        yield self._numbered(
            TextDelta(item_id=message.id, output_index=self._index, delta=text, logprobs=logprobs)
        )

    def call(self, delta: ToolCallDelta) -> Iterator[Event]:
        function = delta.function
        if isinstance(delta.id, str) and isinstance(function.name, str):
            yield from self._close("completed")
            self._open = Call(id=_id("fc"), call_id=delta.id, name=function.name)
            yield self._add_item(self._open)
        if function.arguments and isinstance(self._open, Call):
            self._open.arguments += function.arguments
            yield self._numbered(
                ArgumentsDelta(
                    item_id=self._open.id,
                    output_index=self._index,
                    delta=function.arguments,
                )
            )

    def finish(self, reason: str) -> Iterator[Event]:
        """All but the response's own last event. An answer without a word is an empty message."""
        status = STATUSES.get(reason, "completed")
        if not self.response.output:
            yield from self._open_message()
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        if reason == "length":
            self.response.incomplete_details = Incomplete("max_output_tokens")

    def end(self) -> Event:
        """The last event, once usage and all else is known."""
        complete = self.response.status == "completed"
        return self._response_event(f"response.{'completed' if complete else 'incomplete'}")

    def next_number(self) -> int:
        return next(self._numbers)

    # --- inside -------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _open_message(self) -> Iterator[Event]:
        message = self._open = Message(id=_id("msg"))
        yield self._add_item(message)
        message.content = [OutputText()]
        yield self._part_event("response.content_part.added", message)

    def _close(self, status: Status) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, Message):
            (part,) = item.content
            yield self._numbered(
                TextDone(
                    item_id=item.id,
                    output_index=self._index,
                    text=part.text,
                    logprobs=list(part.logprobs),
                )
            )
            yield self._part_event("response.content_part.done", item)
        else:
            yield self._numbered(
                ArgumentsDone(
                    item_id=item.id,
                    output_index=self._index,
                    name=item.name,
                    arguments=item.arguments,
                )
            )
        item.status = status
        yield self._item_event("response.output_item.done", item)

    def _add_item(self, item: Item) -> Event:
        self.response.output.append(item)
        return self._item_event("response.output_item.added", item)

    def _item_event(self, name: str, item: Item) -> Event:
        shown = msgspec.structs.replace(item)
        return self._numbered(ItemEvent(type=name, output_index=self._index, item=shown))

    def _part_event(self, name: str, message: Message) -> Event:
        (part,) = message.content
        shown = msgspec.structs.replace(part, logprobs=list(part.logprobs))
        return self._numbered(
            PartEvent(type=name, item_id=message.id, output_index=self._index, part=shown)
        )

    def _response_event(self, name: str) -> Event:
        shown = msgspec.structs.replace(self.response, output=list(self.response.output))
        return self._numbered(ResponseEvent(type=name, response=shown))

    def _numbered(self, event: AnyEvent) -> AnyEvent:
        event.sequence_number = self.next_number()
        return event


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
