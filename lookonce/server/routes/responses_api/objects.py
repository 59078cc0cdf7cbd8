"""What `/v1/responses` answers: the response, its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from lookonce.frontend.responses import KVTransferParams, ReuseReceipt, TokenEntry
from lookonce.server.routes.responses_api.body import ResponseTool, ResponseToolChoice, TextFormat

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
