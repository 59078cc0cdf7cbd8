"""What a request refers to, from its encoded bytes: nothing is decoded, tokenized or rendered.

Media     the keys under which engines hold them: a digest of the bytes, as `cache.identity` makes
          it. Where bytes or options are not known here (a URL, a uuid), an alias: a digest of
          what was sent, whose key is learned when an engine has computed the prompt.
Chain     one digest for each piece of the prompt (a stretch of text, a media item), over all
          pieces before it and the scope: two prompts share the digests of their common beginning.
Adapter   what a request names, or its media ask for: other contents, other digests of the chain,
          and where it changes the encoder, other keys of encoder outputs.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pybase64
from blake3 import blake3

from lookonce.cache.identity import HashAlgorithm, frame, item_key, media_hash, scope_digest
from lookonce.fleet.index import short
from lookonce.types.lora import LoRAIdentity, adapted_item_key
from lookonce.types.model import RenderingFacts

BASE64_MARK = b";base64,"
LARGE_BASE64 = 1 << 12
"""Characters of base64 from which it is cut out of a body before that is decoded, and from which a
picture that an engine holds is sent by its name: conversations send all of theirs each time."""
MAX_TYPE_LENGTH = 256
"""Of a data URL before its base64, as engines read it."""
HASH_SCHEME = "lookonce:"
"""Of URLs that name a picture by its MediaHash (`render.media.loader`)."""
PIECE_CHARS = 1024
"""Text is cut at multiples of so many characters from its beginning."""
PIECE_TOKENS = 256
MAX_PIECES = 4096
"""Of one prompt; what follows is one more piece."""
MAX_PARTS = 8192
"""Of one prompt that are read: messages, their parts, stretches of token ids. What follows only its
engine reads."""
MAX_MEDIA = 1024
"""Of one prompt that are read; far more than engines take."""
MAX_VALUES = 1 << 18
"""Commas and brackets of a body that is looked into, without its large media. Of one that has more
the first level alone is read: the event loop, which all tenants share, does all of this."""
MAX_FIRST_LEVEL_VALUES = 1 << 21
"""Of a body that has more nothing is read: engines refuse it (`server.http.body.MAX_VALUES`)."""
MAX_MARKS = 4096
"""Of base64 of a body that are looked at; large media behind them are not cut out."""
SLICE_BYTES = 1 << 20
VALUE_MARKS = b",[{"
MEDIA_FIELDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "input_video": "video",
}
"""Types of parts that are one media item → modality."""
ROOT_FIELDS = (
    "system",
    "instructions",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "conversation",
    "previous_response_id",
)
"""What stands before the messages in a prompt, or decides all of it."""


class Processor(msgspec.Struct, frozen=True):
    """What the keys of a model's media and blocks depend on (`GET /inference/v1/media_cache`)."""

    fingerprint: bytes = b""
    algorithm: HashAlgorithm = "blake3"
    model: str | None = None
    """What clients call the model without adapters."""
    adapters: Mapping[str, LoRAIdentity] = {}
    media_adapters: tuple[tuple[str, LoRAIdentity], ...] = ()
    """(modality, adapter) of those that prompts with media get where they name none."""
    dtype: str = ""
    facts: RenderingFacts | None = None
    """For front-ends that render; None: the engine told none."""
    files_digest: str = ""
    """Of its files that decide what prompts and answers become."""

    @classmethod
    def told(cls, model: str, info: Mapping[str, Any]) -> Processor:
        """What an engine tells. Raises `LookupError`, `TypeError`, `ValueError` or
        `MsgspecError`."""

        def identities(name: str) -> dict[str, LoRAIdentity]:
            return {
                each: LoRAIdentity(
                    bytes.fromhex(digests["digest"]), bytes.fromhex(digests["encoder_digest"])
                )
                for each, digests in info.get(name, {}).items()
            }

        return cls(
            bytes.fromhex(info["fingerprint"]),
            info["algorithm"],
            model,
            identities("adapters"),
            tuple(identities("media_adapters").items()),
            str(info.get("dtype", "")),
            msgspec.convert(info.get("model"), RenderingFacts | None),
            str(info.get("files_digest", "")),
        )

    def adapter_of(self, model: Any, modalities: Iterable[str]) -> LoRAIdentity | None:
        """Of a request that names this model and has these media."""
        named = self.adapters.get(model) if isinstance(model, str) else None
        if named is not None or not self.media_adapters:
            return named
        found = set(modalities)
        return next((own for modality, own in self.media_adapters if modality in found), None)


class Medium(msgspec.Struct, frozen=True, gc=False):
    """One media part: its key, or its alias where the key is not known."""

    modality: str
    key: int
    exact: bool
    """`key` is that of the caches, not an alias."""
    output: int | None = None
    """Key of its encoder output, where an adapter changes that."""
    bare: bool = False
    """It came without bytes or a URL: only an engine that knows its name can serve it."""
    num_bytes: int = 0
    """As encoded; 0 where its bytes did not come with it."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A stretch of the prompt up to here; the digest is of all pieces until then."""

    digest: int
    num_chars: int
    """Of its text; 0 for a media item, and where tokens are known."""
    medium: int | None = None
    """Index in `Identity.media`."""
    num_tokens: int | None = None
    """Of a prompt that is tokenized already."""


class InlinePicture(msgspec.Struct, frozen=True, gc=False):
    """Where the data URL of a large picture stands in a body, and what names it instead."""

    key: int
    start: int
    end: int
    digest: bytes
    """Its MediaHash."""


class Identity(msgspec.Struct, frozen=True):
    """What the router needs to know of a request."""

    model: str | None = None
    media: tuple[Medium, ...] = ()
    pieces: tuple[Piece, ...] = ()
    max_tokens: int | None = None
    session: int | None = None
    """Digest of the session that it names: its requests go to one engine."""
    stored: str | None = None
    """Id of a stored response or conversation that it goes on with."""
    inline: tuple[InlinePicture, ...] = ()
    """In the order of the body."""
    encoder_digest: bytes = b""
    """Of the request's LoRA adapter, where that changes encoder outputs."""
    tenant: str = ""
    """Of the request's key."""


def body_with_names(body: bytes, pictures: Iterable[InlinePicture]) -> bytes:
    """The body with `lookonce:` URLs in place of these pictures' data URLs."""
    kept: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    for picture in pictures:
        kept += (view[at : picture.start], f"{HASH_SCHEME}{picture.digest.hex()}".encode())
        at = picture.end
    return b"".join([*kept, view[at:]]) if kept else body


def without_payloads(body: bytes) -> bytes:
    """The body without large base64 of data URLs, which nobody looked at. To pass over it as JSON
    takes longer than to decode it."""
    kept: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    for start, end in _large_base64(body):
        kept.append(view[at:start])
        at = end
    return b"".join([*kept, view[at:]]) if kept else body


def _large_base64(body: bytes) -> Iterator[tuple[int, int]]:
    """`(start, end)` of each, of data URLs."""
    end = 0
    for _ in range(MAX_MARKS):
        found = body.find(BASE64_MARK, end)
        if found < 0:
            return
        start = found + len(BASE64_MARK)
        end = body.find(b'"', start)
        if end < 0:
            return
        if end - start >= LARGE_BASE64:
            yield start, end


def has_more(body: bytes, marks: bytes, most: int) -> bool:
    """Whether there are more than `most` of these characters; it is not read further than that."""
    if len(body) <= most:
        return False
    count = 0
    for start in range(0, len(body), SLICE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(SLICE_BYTES, len(body) - start), start)
        count += sum(int(np.count_nonzero(piece == mark)) for mark in marks)
        if count > most:
            return True
    return False


class Payloads:
    """Large base64 of data URLs that was cut out of a body: name → bytes, decoded from the body
    itself. Decoding them as JSON first would take longer than all else that routing does."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        """Name → where its URL stands in the body."""
        self._prefix = f"#{os.urandom(8).hex()}-"  # no base64, and nothing that a client can name
        self._read: set[str] = set()

    def cut(self, body: bytes) -> bytes:
        """The body with names in place of base64."""
        kept: list[bytes | memoryview] = []
        view, at = memoryview(body), 0
        for start, end in _large_base64(body):
            try:  # what is all base64 holds no escape: the quote is the end of the JSON string
                data = pybase64.b64decode(view[start:end], validate=True)
            except (binascii.Error, ValueError):
                continue
            name = f"{self._prefix}{len(self._data)}"
            self._data[name] = data
            mark = start - len(BASE64_MARK)
            opened = body.rfind(b'"', max(0, mark - MAX_TYPE_LENGTH), mark) + 1
            if opened and body[opened : opened + 5] == b"data:":
                self._spans[name] = opened, end
            kept += (view[at:start], name.encode())
            at = end
        return b"".join([*kept, view[at:]]) if kept else body

    def get(self, name: str) -> bytes | None:
        data = self._data.get(name)
        if data is not None:
            self._read.add(name)
        return data

    def picture(self, name: str, key: int, digest: bytes) -> InlinePicture | None:
        """A payload that is a picture by itself; None for what is not a whole URL."""
        span = self._spans.get(name)
        return None if span is None else InlinePicture(key, *span, digest)

    @property
    def all_read(self) -> bool:
        return len(self._read) == len(self._data)


def identify_body(
    body: bytes,
    tenant: str,
    processor_of: Callable[[Any], Processor],
    session: str | None = None,
) -> tuple[dict[str, Any], Identity]:
    """The fields of a JSON body, without its large media, and what it refers to; of what is no JSON
    object, nothing. `processor_of`: by the name of a model."""
    payloads = Payloads()
    try:
        given = _json_object(payloads.cut(body))
        if not given:
            return given, Identity()
        identity = identify(given, tenant, processor_of(given.get("model")), session, payloads)
        if not payloads.all_read:  # base64 in a text, whose name would say nothing of it
            given = _json_object(body)
            identity = identify(given, tenant, processor_of(given.get("model")), session)
    except RecursionError:  # engines refuse it
        return {}, Identity()
    return given, identity


def _json_object(body: bytes) -> dict[str, Any]:
    """Raises `RecursionError`."""
    try:
        if has_more(body, VALUE_MARKS, MAX_VALUES):
            refused = has_more(body, VALUE_MARKS, MAX_FIRST_LEVEL_VALUES)
            return {} if refused else _first_level(body)
        given = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return given if isinstance(given, dict) else {}


def _first_level(body: bytes) -> dict[str, Any]:
    """The fields that say where a request belongs, without its prompt. Raises `MsgspecError`."""
    return {
        name: value
        for name, value in msgspec.to_builtins(_FIRST_LEVEL.decode(body)).items()
        if value is not None
    }


class _FirstLevel(msgspec.Struct):
    """All else is passed over."""

    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None


_FIRST_LEVEL = msgspec.json.Decoder(_FirstLevel)


def identify(
    body: Mapping[str, Any],
    tenant: str,
    processor: Processor,
    session: str | None = None,
    payloads: Payloads | None = None,
) -> Identity:
    """`body`: the decoded JSON of a request to any route. Never raises for what clients send."""
    salt = body.get("cache_salt")
    scope = scope_digest(tenant, salt if isinstance(salt, str) and salt else None)
    model = body.get("model")
    reader = _Reader(scope, processor, body, payloads or Payloads())
    reader.read()
    tokens = next(
        (body[name] for name in _MAX_TOKENS if isinstance(body.get(name), int)), None
    )  # fmt: skip
    pieces = reader.pieces
    adapter = processor.adapter_of(model, (medium.modality for medium in reader.media))
    if adapter is not None:
        salt_of_blocks = short(adapter.digest)
        pieces = [
            msgspec.structs.replace(piece, digest=piece.digest ^ salt_of_blocks) for piece in pieces
        ]
        if adapter.encoder_digest:
            reader.adapt(adapter.encoder_digest)
    session = session or body.get("prompt_cache_key")
    named = isinstance(session, str) and session
    return Identity(
        model if isinstance(model, str) else None,
        tuple(reader.media),
        tuple(pieces),
        tokens,
        session_digest(scope, str(session)) if named else None,
        _stored(body),
        tuple(sorted(reader.inline, key=lambda picture: picture.start)),
        b"" if adapter is None else adapter.encoder_digest,
        tenant,
    )


_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def _stored(body: Mapping[str, Any]) -> str | None:
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for found in (body.get("previous_response_id"), conversation):
        if isinstance(found, str) and found:
            return found
    return None


def session_digest(scope: bytes, session: str) -> int:
    """What a session of this tenant and salt is known by."""
    return _digest(b"session", scope, session.encode(errors="replace"))


def _digest(*fields: bytes) -> int:
    return short(blake3(frame(*fields)).digest(8))


class _Reader:
    """Walks a body and collects its media and the pieces of its prompt."""

    def __init__(
        self, scope: bytes, processor: Processor, body: Mapping[str, Any], payloads: Payloads
    ) -> None:
        self._payloads = payloads
        self._scope, self._processor, self._body = scope, processor, body
        options = body.get("mm_processor_kwargs")
        self._options = _encoded(options) if options else b""
        self.media: list[Medium] = []
        self.pieces: list[Piece] = []
        self.inline: list[InlinePicture] = []
        self._full: dict[int, bytes] = {}
        """Key of an item, short and whole."""
        self._hash = scope
        self._num_parts = 0

    def read(self) -> None:
        body = self._body
        model = body.get("model")
        if isinstance(model, str) and model in self._processor.adapters:
            model = self._processor.model  # the adapter's contents tell, whatever its name
        root = [model, *(body.get(name) for name in ROOT_FIELDS)]
        self._add(_encoded(root), 0 if root[1:] == [None] * len(ROOT_FIELDS) else None)
        for name in ("messages", "input", "prompt", "token_ids"):
            given = body.get(name)
            if given is not None:
                self._read_content(given)
        features = body.get("features")
        if isinstance(features, dict):
            self._read_hashes(features.get("mm_hashes"))

    def adapt(self, encoder_digest: bytes) -> None:
        """The prompt has an adapter that changes encoder outputs."""
        for at, medium in enumerate(self.media):
            full = self._full.get(medium.key)
            if full is not None:
                output = short(adapted_item_key(encoder_digest, full))
                self.media[at] = msgspec.structs.replace(medium, output=output)

    def _exact(self, digest: bytes) -> int:
        """The key of an item with this MediaHash."""
        full = item_key(self._scope, digest)
        key = short(full)
        self._full[key] = full
        return key

    def _read_content(self, given: Any) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or len(self.media) >= MAX_MEDIA:
            return
        if isinstance(given, str):
            self._read_text(given)
        elif isinstance(given, dict):
            self._read_part(given)
        elif isinstance(given, list):
            if given and isinstance(given[0], int):
                for at in range(0, len(given), PIECE_TOKENS):
                    part = given[at : at + PIECE_TOKENS]
                    self._num_parts += 1
                    self._add(_encoded(part), 4 * len(part))
            else:
                for part in given:
                    self._read_content(part)

    def _read_part(self, part: dict[str, Any]) -> None:
        """A message, or a part of its content."""
        if "content" in part and "role" in part:
            rest = {name: part[name] for name in part if name != "content"}
            self._add(_encoded(rest), 8)
            self._read_content(part["content"])
            return
        kind = part.get("type")
        text = part.get("text")
        if isinstance(text, str) and kind in (None, "text", "input_text", "output_text"):
            self._read_text(text)
            return
        modality = MEDIA_FIELDS.get(kind) if isinstance(kind, str) else None
        if modality is None:
            encoded = _encoded(part)
            self._add(encoded, len(encoded))
            return
        self._add_medium(self._medium(part, modality))

    def _medium(self, part: dict[str, Any], modality: str) -> Medium:
        sent = next(_sent_media(part), None)
        uuid = part.get("uuid")
        if sent is None:
            if isinstance(uuid, str):
                alias = _digest(b"uuid", self._scope, modality.encode(), uuid.encode())
                return Medium(modality, alias, exact=False, bare=True)
            return Medium(modality, self._alias(_encoded(part)), exact=False)
        data = self._decoded(sent)
        if data is not None and modality != "video" and not self._options:
            digest = self._media_hash(modality, data)
            key = self._exact(digest)
            if modality == "image" and len(sent) < MAX_TYPE_LENGTH:
                picture = self._payloads.picture(sent.partition(",")[2], key, digest)
                self.inline += () if picture is None else (picture,)
            return Medium(modality, key, exact=True, num_bytes=len(data))
        named = sent.encode(errors="replace") if data is None else data
        alias = self._alias(modality.encode(), named)
        return Medium(modality, alias, exact=False, num_bytes=0 if data is None else len(data))

    def _decoded(self, sent: str) -> bytes | None:
        """The bytes of a data URL or of base64; None for any other URL, or what is no base64."""
        if sent.startswith("data:"):
            head, comma, sent = sent.partition(",")
            if not comma or not head.endswith(";base64"):
                return None
            if (data := self._payloads.get(sent)) is not None:
                return data
        elif "://" in sent[:16]:
            return None
        try:
            return bytes(pybase64.b64decode(sent, validate=True))
        except (binascii.Error, ValueError):
            return None

    def _media_hash(self, modality: str, data: bytes) -> bytes:
        return media_hash(
            data,
            modality=modality,
            fingerprint=self._processor.fingerprint,
            algorithm=self._processor.algorithm,
        )

    def _alias(self, *sent: bytes) -> int:
        return _digest(b"alias", self._scope, self._options, *sent)

    def _read_hashes(self, hashes: Any) -> None:
        """`features.mm_hashes` of rendered requests: MediaHashes in hex, by modality."""
        for modality, listed in hashes.items() if isinstance(hashes, dict) else ():
            for given in listed if isinstance(listed, list) else ():
                if len(self.media) >= MAX_MEDIA:
                    return
                try:
                    key = self._exact(bytes.fromhex(given))
                except (TypeError, ValueError):
                    continue
                self._add_medium(Medium(str(modality), key, exact=True))

    def _read_text(self, text: str) -> None:
        for at in range(0, len(text), PIECE_CHARS):
            rest = len(self.pieces) >= MAX_PIECES
            stretch = text[at:] if rest else text[at : at + PIECE_CHARS]
            self._add(b"text" + stretch.encode(errors="replace"), len(stretch))
            if rest:
                break

    def _add_medium(self, medium: Medium) -> None:
        self.media.append(medium)
        self._add(b"media" + medium.key.to_bytes(8, "little"), 0, len(self.media) - 1)

    def _add(self, content: bytes, num_chars: int | None, medium: int | None = None) -> None:
        self._hash = blake3(self._hash + content).digest()
        if num_chars is None:
            num_chars = len(content)
        if len(self.pieces) < MAX_PIECES or medium is not None:
            self.pieces.append(Piece(short(self._hash), num_chars, medium))
        else:
            last = self.pieces[-1]
            chars = last.num_chars + num_chars
            self.pieces[-1] = Piece(short(self._hash), chars, last.medium)


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError):
        return b"?"


def _sent_media(part: dict[str, Any]) -> Iterator[str]:
    """Data URL, base64 or URL of a part, as OpenAI's and Anthropic's forms have it."""
    for name in (*MEDIA_FIELDS, "source"):
        given = part.get(name)
        if isinstance(given, str):
            yield given
        elif isinstance(given, dict):
            for field in ("url", "data"):
                if isinstance(given.get(field), str):
                    yield given[field]
