"""OpenAI's messages → what chat templates take, with the media parts listed beside.

Nothing is fetched or decoded here. A message's content stays the text or the list of parts its
author chose; `chat` shapes it for the template at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lookonce.errors import BadRequestError
from lookonce.render.media import MediaSource, media_source
from lookonce.render.spelling import refuse_reserved
from lookonce.types.media import Modality

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Json = dict[str, Any]


@dataclass(slots=True)
class Chat:
    """`conversation` in templates' terms: a media part is only `{"type": its modality}`."""

    conversation: list[Json] = field(default_factory=list)
    sources: list[MediaSource] = field(default_factory=list)
    """One per media part, in the order of the messages."""


def read_messages(
    messages: Sequence[object],
    *,
    modalities: Collection[Modality],
    limits: Mapping[str, int],
) -> Chat:
    """Check and convert a request's messages. `limits` is media parts per modality.

    Raises `BadRequestError` naming the part, e.g. `messages[1].content[0]`.
    """
    if not messages:
        raise BadRequestError("messages must not be empty", param="messages")
    chat = Chat()
    for number, message in enumerate(messages):
        chat.conversation.append(_message(message, f"messages[{number}]", chat.sources))
    if not chat.sources:
        return chat
    for source in chat.sources:
        if source.modality not in modalities:
            raise BadRequestError(
                f"{source.param}: the model takes no {source.modality}", param=source.param
            )
    _check_limits(chat.sources, limits)
    return chat


def _check_limits(sources: Sequence[MediaSource], limits: Mapping[str, int]) -> None:
    for modality, count in Counter(source.modality for source in sources).items():
        allowed = limits.get(modality, 0)
        if count > allowed:
            raise BadRequestError(
                f"the messages have {count} parts of type {modality}, {allowed} are allowed",
                param="messages",
            )


def _message(message: object, param: str, sources: list[MediaSource]) -> Json:
    if not isinstance(message, Mapping):
        raise BadRequestError(f"{param}: a message is an object", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequestError(
            f"{param}.role: must be one of {', '.join(ROLES)}", param=f"{param}.role"
        )
    # Absent rather than None: templates handle a missing key, and print `None`.
    fields = {key: value for key, value in message.items() if value is not None}
    content = fields.pop("content", None)
    tool_calls = fields.pop("tool_calls", None)
    refuse_reserved(fields, param)
    converted: Json = {"role": role}
    if content is not None:
        converted["content"] = _content(content, f"{param}.content", sources)
    elif role != "assistant" or not tool_calls:
        raise BadRequestError(f"{param}.content is missing", param=f"{param}.content")
    if tool_calls is not None:
        converted["tool_calls"] = _tool_calls(tool_calls, f"{param}.tool_calls")
    return {**fields, **converted}


def _content(content: object, param: str, sources: list[MediaSource]) -> str | list[Json]:
    if isinstance(content, str):
        refuse_reserved(content, param)
        return content
    if isinstance(content, list):
        return [_part(part, f"{param}[{number}]", sources) for number, part in enumerate(content)]
    raise BadRequestError(f"{param}: must be a text or a list of parts", param=param)


def _part(part: object, param: str, sources: list[MediaSource]) -> Json:
    if not isinstance(part, Mapping):
        raise BadRequestError(f"{param}: a content part is an object", param=param)
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise BadRequestError(f"{param}.{kind}: must be a text", param=f"{param}.{kind}")
        refuse_reserved(text, param)
        return {"type": "text", "text": text}
    source = media_source(part, param)
    sources.append(source)
    return {"type": source.modality}


def _tool_calls(calls: object, param: str) -> list[Json]:
    if not isinstance(calls, list):
        raise BadRequestError(f"{param}: must be a list", param=param)
    return [_tool_call(call, f"{param}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: object, param: str) -> Json:
    """Clients send arguments as JSON text; templates print the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadRequestError(f"{param}: a tool call needs a function", param=param)
    if not isinstance(function.get("name"), str):
        raise BadRequestError(f"{param}.function.name: must be a text", param=param)
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    converted = {**call, "function": {**function, "arguments": arguments}}
    refuse_reserved(converted, param)
    return converted


def _arguments(arguments: object, param: str) -> object:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        raise BadRequestError(f"{param}: not valid JSON", param=param) from None
