"""OpenAI's messages → a conversation for chat templates, and the list of its media parts.

Nothing is fetched or decoded here. The content of a message stays a text or a list of parts, as the
client sent it; `encoder.ChatTemplate` adapts it to the template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lookonce.errors import BadRequestError
from lookonce.render.media.documents import DocumentSource, PartContent, document_source
from lookonce.render.media.loader import MediaSource, media_source
from lookonce.render.prompt.placeholders import refuse_reserved
from lookonce.types.json_places import unreadable_number
from lookonce.types.media import Modality

FEW_VALUES = 2048
"""A conversation with more JSON values than this takes over 5 ms: it is converted in a thread."""
CHARACTERS_PER_VALUE = 32
"""Characters of a text that take as long as one value."""
MAX_ARGUMENT_VALUES = 1 << 18
"""Most commas and brackets in the arguments of all tool calls, which are JSON within JSON: those
of the body itself are counted before, but not what its texts hide (`\\u002c`)."""
CONTENTS = frozenset({"content", "output"})
"""Names of a message's content and of a function's output, of which only texts reach a template."""
FILES = frozenset({"url", "data", "image_url", "audio_url"})
"""Names of texts in them that are files or their addresses."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PAIR_ROLES = ("query", "document")
"""Of the two messages that the template of a model which compares texts takes."""

Json = dict[str, Any]


@dataclass(slots=True)
class ParsedMessages:
    """`conversation` is for templates: in it a media part is only `{"type": modality}`."""

    conversation: list[Json] = field(default_factory=list)
    sources: list[MediaSource] = field(default_factory=list)
    """One per media part, in the order of the messages."""
    documents: list[DocumentSource] = field(default_factory=list)
    """Of file parts, in the same order. In `conversation` nothing stands for those whose content
    was not given."""


def read_messages(
    messages: Sequence[object],
    modalities: Collection[Modality],
    limits: Mapping[str, int],
    max_tokens: int | None = None,
    roles: Collection[str] = ROLES,
    documents: Mapping[str, Sequence[PartContent]] | None = None,
    *,
    limit_pages: bool = False,
    longest_token: int | None = None,
) -> ParsedMessages:
    """Check and convert a request's messages. `limits` is media parts per modality; pages of
    documents count only if `limit_pages`. `documents` is what file parts are, by the part's name.

    Raises `BadRequestError` naming the part, e.g. `messages[1].content[0]`. More messages or parts
    than `max_tokens` are refused before anything is converted, and arguments of tool calls whose
    commas and brackets alone would be more tokens, of `longest_token` characters at most, before
    they are.
    """
    if not messages:
        raise BadRequestError("messages must not be empty", param="messages")
    if max_tokens is not None:
        check_count(messages, max_tokens)
    most = MAX_ARGUMENT_VALUES
    if max_tokens is not None and longest_token is not None:
        most = min(most, max_tokens * longest_token)
    chat = ParsedMessages()
    reader = _Reader(chat, documents or {}, roles, max_argument_values=most)
    for number, message in enumerate(messages):
        chat.conversation.append(reader.message(message, f"messages[{number}]"))
    if not chat.sources:
        return chat
    for source in chat.sources:
        if source.modality not in modalities:
            raise BadRequestError(
                f"{source.param}: the model takes no {source.modality}", param=source.param
            )
    _check_limits([s for s in chat.sources if limit_pages or not s.is_page], limits)
    return chat


def check_films_alone(chat: ParsedMessages) -> None:
    """Raise `BadRequestError` for pictures beside films."""
    if {"image", "video"} <= {source.modality for source in chat.sources}:
        raise BadRequestError(
            "messages: a prompt of this model has pictures or films, and not both",
            param="messages",
        )


def check_sound_alone(chat: ParsedMessages) -> None:
    """Raise `BadRequestError` unless the messages are one sound and no text, which this model would
    not see."""
    for number, message in enumerate(chat.conversation):
        where, content = f"messages[{number}].content", message.get("content")
        texts = [content] if isinstance(content, str) else [p.get("text") for p in content or ()]
        if any(text and text.strip() for text in texts) or message.get("tool_calls"):
            raise BadRequestError(
                f"{where}: this model transcribes sound and takes no text", param=where
            )
    if len(chat.sources) != 1:
        raise BadRequestError(
            f"the messages have {len(chat.sources)} sounds; this model takes one", param="messages"
        )


def texts_of(chat: ParsedMessages) -> list[str]:
    """All texts of the messages."""
    texts: list[str | None] = []
    for message in chat.conversation:
        content = message.get("content")
        texts += [content] if isinstance(content, str) else [p.get("text") for p in content or ()]
    return [text for text in texts if text]


def check_count(messages: Sequence[object], most: int, field: str = "messages") -> None:
    """Refuse too many messages or parts: each takes at least one token. `field` is their name in
    the request."""
    if len(messages) > most:
        raise _too_many(field, f"there are {len(messages)}", most)
    count = 0
    for number, message in enumerate(messages):
        for name in ("content", "tool_calls"):
            parts = message.get(name) if isinstance(message, Mapping) else None
            count += len(parts) if isinstance(parts, list) else 0
            if count > most:
                raise _too_many(f"{field}[{number}].{name}", f"{count} parts up to here", most)


def _too_many(param: str, what: str, most: int) -> BadRequestError:
    return BadRequestError(
        f"{param}: {what}, more than the model's context of {most} tokens can hold",
        param=param,
        code="context_length_exceeded",
    )


def has_many_values(*values: object, most: int = FEW_VALUES) -> bool:
    """Whether JSON values contain more than `most` others, or texts and keys that take as long: in
    O(`most`). Files in the content of messages are passed over."""
    waiting: list[tuple[object, bool]] = [(value, False) for value in values]
    count = 0
    while waiting:
        part, in_content = waiting.pop()
        if isinstance(part, str):
            count += len(part) // CHARACTERS_PER_VALUE
        elif isinstance(part, (dict, list, tuple)):
            count += len(part)
        if count > most:
            return True
        if isinstance(part, dict):
            for name in part:
                inner = part[name]
                if isinstance(name, str):  # of a caller in Python it may be no text
                    count += len(name) // CHARACTERS_PER_VALUE
                if not (in_content and name in FILES and isinstance(inner, str)):
                    waiting.append((inner, in_content or name in CONTENTS))
        elif isinstance(part, (list, tuple)):
            waiting += ((inner, in_content) for inner in part)
    return count > most


def _check_limits(sources: Sequence[MediaSource], limits: Mapping[str, int]) -> None:
    for modality, count in Counter(source.modality for source in sources).items():
        allowed = limits.get(modality, 0)
        if count > allowed:
            raise BadRequestError(
                f"the messages have {count} parts of type {modality}, {allowed} are allowed",
                param="messages",
            )


@dataclass(slots=True)
class _Reader:
    """Converts messages; what they refer to is added to `chat`.

    OpenAI's older form of calls becomes the newer one, which templates know: a `function_call` a
    tool call, and the message of role function that follows it a tool's answer.
    """

    chat: ParsedMessages
    documents: Mapping[str, Sequence[PartContent]]
    roles: Collection[str]
    max_argument_values: int
    num_argument_values: int = 0
    """Commas and brackets in the arguments of calls so far."""
    function_call_id: str | None = None
    """Of the last `function_call`, until its answer comes."""

    def message(self, message: object, param: str) -> Json:
        if not isinstance(message, Mapping):
            raise BadRequestError(f"{param}: a message is an object", param=param)
        role = message.get("role")
        if role not in self.roles:
            raise BadRequestError(
                f"{param}.role: must be one of {', '.join(self.roles)}", param=f"{param}.role"
            )
        # Keys whose value is None are removed: templates handle a missing key, but print `None`.
        fields = {key: value for key, value in message.items() if value is not None}
        content = fields.pop("content", None)
        tool_calls = self._calls(fields, param)
        if content is None and role == "assistant" and isinstance(fields.get("refusal"), str):
            content = fields.pop("refusal")  # OpenAI's answer of a model that refused
        if role == "assistant":
            _add_reasoning(fields, has_text=bool(content))
        refuse_reserved(fields, param)
        converted: Json = {"role": role}
        if role == "function" and self.function_call_id is not None:
            converted = {"role": "tool", "tool_call_id": self.function_call_id}
            self.function_call_id = None
        if content is not None:
            converted["content"] = self._content(content, f"{param}.content")
        elif role != "assistant" or not tool_calls:
            raise BadRequestError(f"{param}.content is missing", param=f"{param}.content")
        if tool_calls is not None:
            converted["tool_calls"] = tool_calls
        return {**fields, **converted}

    def _calls(self, fields: Json, param: str) -> list[Json] | None:
        """The tool calls of a message, which are taken from its `fields`; None if it has neither
        `tool_calls` nor `function_call`."""
        calls = fields.pop("tool_calls", None)
        converted = None if calls is None else self._tool_calls(calls, f"{param}.tool_calls")
        if fields["role"] != "assistant" or "function_call" not in fields:
            return converted
        if converted:
            raise BadRequestError(
                f"{param}: tool_calls and function_call cannot be used together", param=param
            )
        where = f"{param}.function_call"
        function = self._function(fields.pop("function_call"), where)
        self.function_call_id = f"call_{len(self.chat.conversation)}"
        return [{"id": self.function_call_id, "type": "function", "function": function}]

    def _tool_calls(self, calls: object, param: str) -> list[Json]:
        if not isinstance(calls, list):
            raise BadRequestError(f"{param}: must be a list", param=param)
        return [self._tool_call(call, f"{param}[{number}]") for number, call in enumerate(calls)]

    def _tool_call(self, call: object, param: str) -> Json:
        """A tool call with its arguments, which clients send as JSON text, as the object."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise BadRequestError(f"{param}: a tool call needs a function", param=param)
        others = {name: value for name, value in call.items() if name != "function"}
        refuse_reserved(others, param)
        return {**others, "function": self._function(function, f"{param}.function")}

    def _function(self, function: object, param: str) -> Json:
        """The function of a call, with its arguments as the object."""
        if not isinstance(function, Mapping):
            raise BadRequestError(f"{param}: must be an object", param=param)
        if not isinstance(function.get("name"), str):
            raise BadRequestError(f"{param}.name: must be a text", param=f"{param}.name")
        arguments = self._arguments(function.get("arguments"), f"{param}.arguments")
        converted = {**function, "arguments": arguments}
        refuse_reserved(converted, param)
        return converted

    def _arguments(self, arguments: object, param: str) -> object:
        """As an object, if they would not take long to decode or to write, and fit a prompt."""
        if arguments is None:
            return {}
        if isinstance(arguments, str):
            self.num_argument_values += sum(map(arguments.count, ",[{"))
        else:
            encoded = _encoded_arguments(arguments, param)
            self.num_argument_values += sum(map(encoded.count, (b",", b"[", b"{")))
        if self.num_argument_values > self.max_argument_values:
            raise BadRequestError(
                f"{param}: the arguments up to here have more than {self.max_argument_values} "
                "commas and brackets, which is the limit",
                param=param,
            )
        return _decoded_arguments(arguments, param) if isinstance(arguments, str) else arguments

    def _content(self, content: object, param: str) -> str | list[Json]:
        if isinstance(content, str):
            refuse_reserved(content, param)
            return content
        if isinstance(content, list):
            parts: list[Json] = []
            for number, part in enumerate(content):
                where = f"{param}[{number}]"
                if isinstance(part, Mapping) and part.get("type") == "file":
                    parts += self._document(part, where)
                else:
                    parts.append(self._part(part, where))
            return parts
        raise BadRequestError(f"{param}: must be a text or a list of parts", param=param)

    def _part(self, part: object, param: str) -> Json:
        if not isinstance(part, Mapping):
            raise BadRequestError(f"{param}: a content part is an object", param=param)
        kind = part.get("type")
        if kind in ("text", "refusal"):
            text = part.get(kind)
            if not isinstance(text, str):
                raise BadRequestError(f"{param}.{kind}: must be a text", param=f"{param}.{kind}")
            refuse_reserved(text, param)
            return {"type": "text", "text": text}
        return self._media(media_source(part, param))

    def _document(self, part: Mapping[str, object], param: str) -> list[Json]:
        self.chat.documents.append(document_source(part, param))
        parts = []
        for content in self.documents.get(param, ()):
            if isinstance(content, MediaSource):
                parts.append(self._media(content))
            else:
                refuse_reserved(content, param)
                parts.append(content)
        return parts

    def _media(self, source: MediaSource) -> Json:
        self.chat.sources.append(source)
        return {"type": source.modality}


def _add_reasoning(fields: Json, *, has_text: bool) -> None:
    """What an earlier answer thought, by the names that templates read: `reasoning_content`, and
    gpt-oss's `thinking`, which may stand in no message with text."""
    given = (fields.get(name) for name in ("reasoning_content", "reasoning"))
    thought = next((each for each in given if isinstance(each, str) and each), None)
    if thought is not None:
        fields.setdefault("reasoning_content", thought)
        if not has_text:
            fields.setdefault("thinking", thought)


def _decoded_arguments(arguments: str, param: str) -> object:
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except RecursionError:
        raise _too_deep(param) from None
    except msgspec.ValidationError:  # JSON, with a number that is not read
        raise unreadable_number(arguments, param) from None
    except ValueError:
        raise BadRequestError(f"{param}: not valid JSON", param=param) from None


def _encoded_arguments(arguments: object, param: str) -> bytes:
    try:
        return msgspec.json.encode(arguments)
    except RecursionError:
        raise _too_deep(param) from None
    except (TypeError, ValueError) as error:  # of a caller in Python
        raise BadRequestError(f"{param}: no JSON value: {error}", param=param) from None


def _too_deep(param: str) -> BadRequestError:
    return BadRequestError(f"{param}: nested too deeply", param=param)
