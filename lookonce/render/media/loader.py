"""Where the encoded bytes of a media part come from, and how they are loaded.

    part of a message ─▶ media_source ─▶ MediaSource ─▶ MediaLoader.load ─▶ bytes
                         nothing is opened             inline: base64 decoded
                                                       remote: fetched (see `fetch`)
                                                       file:   read beneath the allowed folder

A `MediaSource` is cheap to make, and many are never loaded because their content is held already.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

import pybase64

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    MediaForbiddenError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.media.address_guard import GuardedBackend, is_any, is_public
from lookonce.render.media.fetch import FetchCounts, Fetcher
from lookonce.render.media.fetch_cache import FetchCache
from lookonce.render.media.single_flight import SingleFlight
from lookonce.types.held_bytes import current_held_bytes
from lookonce.types.media import Modality

Origin = Literal["inline", "remote", "file", "nothing"]
MAX_URL_LENGTH = 8192
HASH_SCHEME = "lookonce:"
"""Begins the URL of a picture that is named by its MediaHash, which was sent before."""
HASH_URL = re.compile(HASH_SCHEME + "[0-9a-f]{64}", re.IGNORECASE)
MAX_HEADER_LENGTH = 256
MAX_UUID_LENGTH = 512
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
ESCAPES = {
    "%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "=",
    "%0A": "", "%0a": "", "%0D": "", "%0d": "", "%20": "",
}  # fmt: skip
"""Percent-encodings of the characters of base64 and of line ends, all that a data URL needs."""
PART_MODALITY: dict[str, Modality] = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
}
"""Part type → modality. "video" is the part of transformers and Qwen: a URL, or a list of those of
frames."""
FRAME_LISTS = ("data:video/jpeg;", "data:video/png;", "data:video/webp;")
"""How a data URL begins that has its frames as pictures, between commas, as vLLM takes them."""
MAX_LISTED_FRAMES = 100_000
"""Frames that a part may list at all; `--max-video-frames` is far below."""
FETCH_CACHE_BYTES = 256 * 1024 * 1024
Encoded = bytes | bytearray
"""The bytes of a file; a bytearray is one that came in a form, which nobody writes any more."""
OFF_LOOP_BYTES = 4 * 1024 * 1024
"""Encoded media above this many bytes is decoded from base64, and hashed, in a thread."""


class LaterBytes(Protocol):
    """Bytes of an item that are made of a larger file, where they are needed."""

    def announce(self) -> None:
        """They will be asked for: what all of a prompt's items take is judged before any is made,
        and items that lie side by side are made together."""

    def forget(self) -> None:
        """They need not be made, nor kept, before they are asked for: somebody else makes the item,
        or its prompt is through."""

    async def __call__(self) -> Encoded:
        """Raises a `RequestError`."""
        ...


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media part and where its encoded bytes come from.

    `value` is base64 text from `start` on ("inline"), a URL ("remote", "file") or empty ("nothing":
    the part has only a `uuid`). `param` names the part in errors: `messages[1].content[0]`.
    """

    modality: Modality
    origin: Origin
    value: str
    param: str
    uuid: str | None = None
    start: int = 0
    """Length of a data URL's header, which stays in `value`: cutting it off copies megabytes."""
    digest: bytes | None = None
    """The MediaHash that the bytes must have; None for any."""
    data: Encoded | None = None
    """The bytes of an "inline" source that came as they are, not in base64."""
    is_page: bool = False
    """It is a page of a document, drawn here: limits of what clients send do not hold for it."""
    frames: tuple[MediaSource, ...] = ()
    """Of a film that is a list of URLs: the sources of its frames, which are pictures."""
    fps: float | None = None
    """Of a film: the rate of its frames, as its client says."""
    options: Mapping[str, object] | None = None
    """The options of this item; None: those of the request for its modality."""
    identity: bytes | None = None
    """What is hashed instead of the encoded bytes, which `load` makes where they are needed."""
    load: LaterBytes | None = None

    @property
    def is_frame_list(self) -> bool:
        """Whether its data URL holds frames between commas."""
        return self.origin == "inline" and self.value[:16].lower().startswith(FRAME_LISTS)

    @property
    def size(self) -> int:
        """Bytes, or characters of base64, that an "inline" source holds."""
        return len(self.value) if self.data is None else len(self.data)

    def inline_bytes(self, max_bytes: int) -> Encoded:
        """The bytes of an inline source. Raises `BadRequestError` or `TooLargeError`."""
        if self.data is not None:
            if len(self.data) > max_bytes and not self.is_page:
                raise too_large(self.param, max_bytes)
            return self.data
        if (len(self.value) - self.start) // 4 * 3 > max_bytes + 2:
            raise too_large(self.param, max_bytes)
        text = self.value[self.start :] if self.start else self.value
        data = base64_bytes(text)
        if data is None:
            raise BadRequestError(f"{self.param}: the data is not valid base64", param=self.param)
        if not data:
            raise BadRequestError(f"{self.param}: the data is empty", param=self.param)
        if len(data) > max_bytes:
            raise too_large(self.param, max_bytes)
        return data


def media_source(part: Mapping[str, object], param: str) -> MediaSource:
    """The source of a media part. Raises `BadRequestError` naming the part."""
    kind = part.get("type")
    modality = PART_MODALITY.get(kind) if isinstance(kind, str) else None
    if modality is None:
        raise BadRequestError(f"{param}: unknown content type {_shown(kind)}", param=param)
    uuid = _uuid(part, param)
    body = part.get(str(kind))
    if body is None and uuid is not None:
        return MediaSource(modality, "nothing", "", param, uuid)
    if kind == "input_audio":
        plain = body.get("data") if isinstance(body, Mapping) else None
        if isinstance(plain, (bytes, bytearray)) and plain:  # of a file; JSON holds no bytes
            return MediaSource(modality, "inline", "", param, uuid, data=plain)
        data = _audio_data(body, param)
        start = _data_url_start(data, param) if data[:5].lower() == "data:" else 0
        return MediaSource(modality, "inline", data, param, uuid, start)
    if modality == "video":
        return _film_source(part, body, str(kind), param, uuid)
    return source_of_url(_url(body, str(kind), param), modality, param, uuid)


def _film_source(
    part: Mapping[str, object], body: object, kind: str, param: str, uuid: str | None
) -> MediaSource:
    """The source of a film: a URL, or a list of the URLs of its frames."""
    holder = body if isinstance(body, Mapping) else part
    fps = holder.get("fps")
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000
    ):
        raise BadRequestError(f"{param}.fps: must be a number above 0, at most 1000", param=param)
    rate = None if fps is None else float(fps)
    value = body.get("url", body.get("data")) if isinstance(body, Mapping) else body
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not 0 < len(value) <= MAX_LISTED_FRAMES:
            raise BadRequestError(f"{param}: a film needs at least one frame", param=param)
        frames = tuple(_frame_source(url, f"{param}[{n}]") for n, url in enumerate(value))
        return MediaSource("video", "inline", "", param, uuid, frames=frames, fps=rate)
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{param}: {kind} needs a url", param=param)
    if kind == "input_video" and ":" not in value[:16]:
        return MediaSource("video", "inline", value, param, uuid, fps=rate)  # base64 alone
    found = source_of_url(value, "video", param, uuid)
    return found if rate is None else replace(found, fps=rate)


def _frame_source(frame: object, param: str) -> MediaSource:
    """The source of one frame: a URL, `{"url": ..., "uuid": ...}`, or a uuid alone."""
    uuid, url = None, frame
    if isinstance(frame, Mapping):
        uuid, url = _uuid(frame, param), frame.get("url")
        if url is None and uuid is not None:
            return MediaSource("video", "nothing", "", param, uuid)
    if not isinstance(url, str) or not url:
        raise BadRequestError(f"{param}: a frame is the URL of a picture", param=param)
    return source_of_url(url, "video", param, uuid)


def source_of_url(url: str, modality: Modality, param: str, uuid: str | None = None) -> MediaSource:
    """The source behind a https, http, data or file URL. Raises `BadRequestError`."""
    # A data URL is megabytes long: only its beginning is looked at.
    scheme, colon, _ = url[:16].partition(":")
    match scheme.lower() if colon else "":
        case "data":
            start = _data_url_start(url, param)
            return MediaSource(modality, "inline", url, param, uuid, start)
        case "http" | "https":
            _check_length(url, param)
            return MediaSource(modality, "remote", url, param, uuid)
        case "file":
            _check_length(url, param)
            return MediaSource(modality, "file", url, param, uuid)
        case "lookonce" if modality == "image":
            return MediaSource(modality, "nothing", "", param, uuid, digest=_named(url, param))
    raise BadRequestError(
        f"{param}: the URL must be https, http, data (base64) or file", param=param
    )


def _named(url: str, param: str) -> bytes:
    """The MediaHash in `lookonce:HEX`. Raises `BadRequestError`."""
    if not HASH_URL.fullmatch(url):
        raise BadRequestError(
            f"{param}: lookonce: is followed by a media hash, 64 hexadecimal digits", param=param
        )
    return bytes.fromhex(url[len(HASH_SCHEME) :])


class MediaLoader:
    """Loads media sources within the limits of the configuration. One per API process."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        cache_bytes: int = FETCH_CACHE_BYTES,
        fetched: Counter[str] | None = None,
    ) -> None:
        """`fetched` counts bodies fetched and files read, by modality."""
        self._max_bytes = config.max_bytes
        self._local = LocalFiles(config.local_path, config.max_bytes)
        self._fetcher = Fetcher(
            timeout=config.timeout,
            max_bytes=config.max_bytes,
            allowed_domains=config.allowed_domains,
            cache=FetchCache(cache_bytes),
            backend=GuardedBackend(is_any if config.allow_private else is_public),
            fetched=fetched,
        )
        self._reads: SingleFlight[str, bytes] = SingleFlight()

    @property
    def counts(self) -> FetchCounts:
        return self._fetcher.counts

    @property
    def fetched(self) -> Counter[str]:
        """Bodies fetched and files read, by modality."""
        return self._fetcher.counts.fetched

    async def load(
        self, source: MediaSource, scope: bytes = b"", kind: str = "", tenant: str = ""
    ) -> Encoded:
        """The encoded bytes. `scope` (32 bytes) separates tenants in the fetch cache; what is
        fetched is counted as `kind`, by default the source's modality, and takes `tenant`'s part
        of the connections.

        Raises a `RequestError` that names the part.
        """
        kind = kind or source.modality
        if source.origin == "inline" and source.size > OFF_LOOP_BYTES:
            return await asyncio.to_thread(source.inline_bytes, self._max_bytes)
        if source.origin == "inline":
            return source.inline_bytes(self._max_bytes)
        try:
            if source.origin == "remote":
                return _held(await self._fetcher.fetch(source.value, scope, kind, tenant))
            if source.origin == "file":
                return _held(await self._reads.run(source.value, lambda: self._read(source, kind)))
        except RequestError as error:
            raise for_part(error, source.param) from None
        raise MediaNotCachedError(
            f"{source.param}: no media is held under this uuid; send it again",
            param=source.param,
        )

    async def _read(self, source: MediaSource, kind: str) -> bytes:
        data = await asyncio.to_thread(self._local.read, source.value)
        self.fetched[kind] += 1
        return data

    async def aclose(self) -> None:
        await self._fetcher.aclose()


def _held(data: bytes) -> bytes:
    """`data`, which the request being served holds. Raises `QueueFullError`."""
    held = current_held_bytes.get()
    if held is not None:
        held.take_media(data)
    return data


class LocalFiles:
    """Reads `file://` URLs beneath one folder."""

    def __init__(self, root: str | None, max_bytes: int) -> None:
        self._root = None if root is None else Path(root).resolve()
        self._max_bytes = max_bytes

    def read(self, url: str) -> bytes:
        """The file's bytes. No error tells whether a file outside the folder exists."""
        path = self._resolved(url)
        try:
            # O_NONBLOCK: a FIFO would block. O_NOFOLLOW: the file may just have become a link.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise UnprocessableMediaError("the file cannot be read") from None
        try:
            data = self._read_open(fd)
        except OSError:  # the disk failed, or went away
            raise UnprocessableMediaError("the file cannot be read") from None
        finally:
            os.close(fd)
        if len(data) > self._max_bytes:
            raise TooLargeError(f"the media is larger than {self._max_bytes} bytes")
        return data

    def _read_open(self, fd: int) -> bytes:
        """The first `max_bytes` + 1 bytes of a regular file."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise UnprocessableMediaError("the file cannot be read")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(self._max_bytes + 1)

    def _resolved(self, url: str) -> Path:
        """The path with symlinks followed. Raises unless it is beneath the allowed folder."""
        if self._root is None:
            raise MediaForbiddenError("local files are not allowed")
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict")).resolve()
        except (ValueError, OSError, RuntimeError):
            raise BadRequestError("the file URL is not valid") from None
        if parts.netloc not in ("", "localhost"):
            raise MediaForbiddenError("a file URL must not name a host")
        if not path.is_relative_to(self._root):
            raise MediaForbiddenError("the file is not beneath the allowed folder")
        return path


def for_part(error: RequestError, param: str) -> RequestError:
    """The same error, with the request part `param` in its message.

    Fetching, decoding and processing are shared by several requests, so their errors name no part;
    each request that waited adds its own.
    """
    return type(error)(f"{param}: {error.message}", param=param, code=error.code)


def too_large(param: str, max_bytes: int) -> TooLargeError:
    """The error for encoded media above the limit."""
    return TooLargeError(f"{param}: the media is larger than {max_bytes} bytes", param=param)


def base64_bytes(text: str) -> bytes | None:
    """The bytes of base64 text, also percent-encoded, in lines or without padding; else None."""
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError:
        for escape, meant in ESCAPES.items() if "%" in text else ():
            text = text.replace(escape, meant)
        joined = "".join(text.split()).rstrip("=")
        try:
            data = pybase64.b64decode(joined + "=" * (-len(joined) % 4), validate=True)
        except ValueError:
            return None
    return data


def _uuid(part: Mapping[str, object], param: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise BadRequestError(
            f"{param}: uuid must be a text of 1 to {MAX_UUID_LENGTH} characters", param=param
        )
    return uuid


def _url(body: object, kind: str, param: str) -> str:
    """The URL of a part: `{"url": ...}` as in OpenAI's API, or a plain text as vLLM accepts."""
    url = body.get("url") if isinstance(body, Mapping) else body
    if not isinstance(url, str) or not url:
        raise BadRequestError(f"{param}: {kind} needs a url", param=param)
    return url


def _audio_data(body: object, param: str) -> str:
    data = body.get("data") if isinstance(body, Mapping) else None
    name = body.get("format") if isinstance(body, Mapping) else None
    if not isinstance(data, str) or not data:
        raise BadRequestError(f"{param}: input_audio needs base64 data", param=param)
    # The decoder finds the real format in the bytes.
    if name not in AUDIO_FORMATS:
        allowed = ", ".join(AUDIO_FORMATS)
        raise BadRequestError(f"{param}: the audio format must be one of {allowed}", param=param)
    return data


def _data_url_start(url: str, param: str) -> int:
    """Where the payload of `data:image/png;base64,AAAA` begins. The media type is not trusted."""
    comma = url.find(",", 0, MAX_HEADER_LENGTH)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise BadRequestError(f"{param}: a data URL must hold base64", param=param)
    return comma + 1


def _check_length(url: str, param: str) -> None:
    if len(url) > MAX_URL_LENGTH:
        raise BadRequestError(
            f"{param}: the URL is longer than {MAX_URL_LENGTH} characters", param=param
        )


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else "(not a text)"
