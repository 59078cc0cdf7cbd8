"""The items of a session, and the chat messages that the model reads them as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pybase64

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.server.http.body import message_place
from lookonce.server.realtime_sessions import ByteBudget, full_error
from lookonce.server.routes.realtime.audio import AudioFormat, Clip
from lookonce.server.routes.realtime.events import ContentPart, ConversationItem, new_id

Json = dict[str, Any]
ROOT = "root"
MAX_ITEMS = 2048
"""Of a conversation; a transcription session forgets its oldest."""
KEPT_TRANSCRIPTS = 64
MAX_ID_CHARACTERS = 128
MAX_TEXT_CHARACTERS = 1_000_000
MAX_SHOWN_URL = 2_048
"""Characters of an address that events repeat; a picture's data is only in what was retrieved."""
DETAILS = ("auto", "low", "high")
PARTS = {
    "user": ("input_text", "input_image", "input_audio"),
    "system": ("input_text",),
    "assistant": ("output_text", "text"),
}
"""Role → the parts that its messages may have."""


@dataclass(slots=True)
class Item:
    """A message of the conversation. Sound is kept beside `shown`, which events send."""

    shown: ConversationItem
    clips: dict[int, Clip] = field(default_factory=dict)
    """By the number of their part."""

    @property
    def id(self) -> str:
        assert self.shown.id is not None, "an item has an id"
        return self.shown.id

    @property
    def nbytes(self) -> int:
        """Of texts, pictures and sound; a letter counts as one."""
        texts = sum(
            len(text)
            for part in self.shown.content
            for text in (part.text, part.image_url, part.transcript)
            if isinstance(text, str)
        )
        return texts + sum(len(clip.data) for clip in self.clips.values())

    def copy(self) -> ConversationItem:
        """What an event shows, without media: it may be encoded later."""
        shown = self._copy()
        for part in shown.content:
            if isinstance(part.image_url, str) and len(part.image_url) > MAX_SHOWN_URL:
                part.image_url = None
        return shown

    def _copy(self) -> ConversationItem:
        content = [msgspec.structs.replace(part) for part in self.shown.content]
        return msgspec.structs.replace(self.shown, content=content)

    def with_media(self) -> ConversationItem:
        """With pictures, and with the sound in base64, as the client sent them."""
        shown = self._copy()
        for number, clip in self.clips.items():
            shown.content[number].audio = pybase64.b64encode(clip.data).decode()
        return shown


def spoken_item(item_id: str, clip: Clip | None = None) -> Item:
    """A user's message of committed sound; None: of sound that is not kept."""
    part = ContentPart(type="input_audio", transcript=None)
    return Item(
        ConversationItem(
            id=item_id, object="realtime.item", status="completed", role="user", content=[part]
        ),
        {} if clip is None else {0: clip},
    )


def read_item(sent: ConversationItem, format: AudioFormat, where: str = "item") -> Item:
    """An item of the client's. Raises `BadRequestError` naming the part at fault."""
    if sent.type != "message":
        raise BadRequestError(
            f"{where}.type: {sent.type[:60]!r} is not supported; items are messages",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    allowed = PARTS.get(sent.role or "")
    if allowed is None:
        raise BadRequestError(f"{where}.role is one of {', '.join(PARTS)}", param=f"{where}.role")
    if not sent.content:
        raise BadRequestError(f"{where}.content must not be empty", param=f"{where}.content")
    item = Item(
        ConversationItem(
            id=_item_id(sent.id, where),
            object="realtime.item",
            status="completed",
            role=sent.role,
        )
    )
    for number, part in enumerate(sent.content):
        read, clip = _read_part(part, allowed, format, f"{where}.content[{number}]")
        item.shown.content.append(read)
        if clip is not None:
            item.clips[number] = clip
    return item


def _item_id(asked: str | None, where: str) -> str:
    if asked is None:
        return new_id("item")
    if not 0 < len(asked) <= MAX_ID_CHARACTERS or asked == ROOT:
        raise BadRequestError(
            f"{where}.id has 1 to {MAX_ID_CHARACTERS} characters", param=f"{where}.id"
        )
    return asked


def _read_part(
    part: ContentPart, allowed: Sequence[str], format: AudioFormat, where: str
) -> tuple[ContentPart, Clip | None]:
    """The part with what its type has, and its sound."""
    if part.type not in allowed:
        raise BadRequestError(
            f"{where}.type: {part.type[:60]!r} is not one of {', '.join(allowed)}",
            param=f"{where}.type",
        )
    if part.type == "input_audio":
        data = read_audio(part.audio, format, f"{where}.audio")
        if not data:
            raise BadRequestError(f"{where}.audio is empty", param=f"{where}.audio")
        return ContentPart(type="input_audio", transcript=None), Clip(format, data)
    if part.type == "input_image":
        if not isinstance(part.image_url, str) or not part.image_url:
            raise BadRequestError(f"{where}.image_url is missing", param=f"{where}.image_url")
        detail = part.detail if part.detail in DETAILS else "auto"
        return ContentPart(type="input_image", image_url=part.image_url, detail=detail), None
    if not isinstance(part.text, str):
        raise BadRequestError(f"{where}.text is missing", param=f"{where}.text")
    if len(part.text) > MAX_TEXT_CHARACTERS:
        raise BadRequestError(
            f"{where}.text has more than {MAX_TEXT_CHARACTERS} characters", param=f"{where}.text"
        )
    return ContentPart(type=part.type, text=part.text), None


def read_audio(encoded: object, format: AudioFormat, param: str) -> bytes:
    """Raises `BadRequestError` for what is not base64 of whole samples."""
    if not isinstance(encoded, str):
        raise BadRequestError(f"{param} is missing", param=param)
    try:
        data: bytes = pybase64.b64decode(encoded, validate=True)
    except ValueError:
        raise BadRequestError(
            f"{param} is not valid base64", param=param, code="invalid_audio"
        ) from None
    if len(data) % format.sample_bytes:
        raise BadRequestError(
            f"{param} has {len(data)} bytes, which are not whole samples of 16 bits",
            param=param,
            code="invalid_audio",
        )
    return data


class Conversation:
    """Items in their order, by id. Their bytes are taken from a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self.id = new_id("conv")
        self._budget = budget
        self._items: dict[str, Item] = {}
        self._order: list[str] = []
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Item]:
        return (self._items[each] for each in self._order)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._items

    def get(self, item_id: str, param: str = "item_id") -> Item:
        """Raises `BadRequestError`."""
        found = self._items.get(item_id)
        if found is None:
            raise BadRequestError(
                f"{param}: there is no item {item_id[:200]!r} in this session",
                param=param,
                code="item_not_found",
            )
        return found

    @property
    def last_id(self) -> str | None:
        return self._order[-1] if self._order else None

    def add(self, item: Item, after: str | None = None, *, charged: int = 0) -> str | None:
        """Put the item at the end, or after another, or at the beginning (`root`).

        `charged` bytes of it were taken from the budget before. Returns the id of the item before
        it; raises `BadRequestError`, `TooLargeError`.
        """
        if item.id in self._items:
            raise BadRequestError(
                f"item.id: there is an item {item.id[:200]!r} already",
                param="item.id",
                code="item_exists",
            )
        if len(self._order) >= MAX_ITEMS:
            raise TooLargeError(
                f"the conversation has {MAX_ITEMS} items, which is the limit: delete some"
            )
        place = len(self._order)
        if after is not None:
            found = after == ROOT or self.get(after, "previous_item_id").id
            place = 0 if found is True else self._order.index(after) + 1
        nbytes = item.nbytes
        if not self._budget.take(nbytes - charged):
            raise full_error("the item")
        self._sizes[item.id] = nbytes
        self._items[item.id] = item
        self._order.insert(place, item.id)
        return self._order[place - 1] if place else None

    def resized(self, item: Item) -> None:
        """Count again what an item holds that has changed; never refused."""
        if item.id not in self._items:
            return
        nbytes = item.nbytes
        self._budget.give(self._sizes[item.id] - nbytes)
        self._sizes[item.id] = nbytes

    def remove(self, item_id: str) -> None:
        self.get(item_id)
        self._order.remove(item_id)
        del self._items[item_id]
        self._budget.give(self._sizes.pop(item_id))

    def before(self, item_id: str) -> str | None:
        """The id of the item before this one."""
        at = self._order.index(item_id) if item_id in self._items else 0
        return self._order[at - 1] if at else None

    def keep_newest(self, count: int) -> None:
        while len(self._order) > count:
            self.remove(self._order[0])

    def clear(self) -> None:
        self.keep_newest(0)


# --- messages -----------------------------------------------------------------------------------


@dataclass(slots=True)
class ChatMessages:
    """Items as a chat, and what its parts are called in errors."""

    messages: list[Json] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def renamed(self, param: str) -> str:
        """`messages[1].content[0]` → `item_ab.content[0]`; other names stay as they are."""
        place = message_place(param)
        if place is None or place[0] >= len(self.origins):
            return "conversation" if param == "messages" else param
        number, rest = place
        origin = self.origins[number]
        return origin if origin == "instructions" else origin + rest


def chat_bytes(items: Sequence[Item]) -> int:
    """Of the WAV files in their `chat_messages`."""
    return sum(clip.wav_bytes for item in items for clip in item.clips.values())


def chat_messages(instructions: str, items: Sequence[Item]) -> ChatMessages:
    """What the model reads. Sound goes as WAV files: equal sound is encoded once."""
    chat = ChatMessages()
    if instructions:
        chat.messages.append({"role": "system", "content": instructions})
        chat.origins.append("instructions")
    for item in items:
        parts = [_chat_part(part, item.clips.get(n)) for n, part in enumerate(item.shown.content)]
        content: object = parts
        if item.shown.role != "user":
            content = "".join(part["text"] for part in parts)
        if not content:
            continue  # an answer that was cancelled before its first word
        chat.messages.append({"role": item.shown.role, "content": content})
        chat.origins.append(item.id)
    return chat


def _chat_part(part: ContentPart, clip: Clip | None) -> Json:
    if clip is not None:
        return {"type": "input_audio", "input_audio": {"data": clip.wav(), "format": "wav"}}
    if part.type == "input_image":
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text or ""}
