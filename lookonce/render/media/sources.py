"""From the media part of a chat message to where its bytes come from.

Nothing is fetched, decoded or even base64-decoded here: a `MediaSource` is cheap, and many are
never opened because their bytes are already known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pybase64

from lookonce.errors import BadRequestError, RequestError, TooLargeError
from lookonce.types.media import Modality

Origin = Literal["inline", "remote", "file", "nothing"]

MAX_URL_LENGTH = 8192
MAX_HEADER_LENGTH = 256
MAX_UUID_LENGTH = 512
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
ESCAPES = {
    "%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "=",
    "%0A": "", "%0a": "", "%0D": "", "%0d": "", "%20": "",
}  # fmt: skip
"""What there is to escape in base64: text of many escapes is not worth decoding."""
PART_MODALITY: dict[str, Modality] = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
}
"""Part types that carry media; `video_url` is refused by name."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media part: what it is, and where its encoded bytes come from.

    `value` is base64 text from `start` on ("inline"), a URL ("remote", "file") or empty ("nothing":
    the part names only a `uuid`). `param` names the part in errors: `messages[1].content[0]`.
    """

    modality: Modality
    origin: Origin
    value: str
    param: str
    uuid: str | None = None
    start: int = 0
    """Length of a data URL's header: cutting it off would copy megabytes."""
    digest: bytes | None = None
    """The MediaHash the bytes must have; None: whichever they have."""

    def inline_bytes(self, max_bytes: int) -> bytes:
        """The bytes of an inline source. Raises `BadRequestError`, or `TooLargeError` first."""
        if (len(self.value) - self.start) // 4 * 3 > max_bytes + 2:
            raise too_large(self.param, max_bytes)
        text = self.value[self.start :] if self.start else self.value
        data = _decoded(text)
        if data is None:
            raise BadRequestError(f"{self.param}: the data is not valid base64", param=self.param)
        if not data:
            raise BadRequestError(f"{self.param}: the data is empty", param=self.param)
        if len(data) > max_bytes:
            raise too_large(self.param, max_bytes)
        return data


def _decoded(text: str) -> bytes | None:
    """The bytes of base64, of which programs write several kinds: percent-encoded in a data URL,
    in lines, without padding. None for anything else."""
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


def media_source(part: Mapping[str, object], param: str) -> MediaSource:
    """The source of a media part. Raises `BadRequestError` naming the part."""
    kind = part.get("type")
    if kind == "video_url":
        raise BadRequestError(f"{param}: video is not supported", param=param)
    modality = PART_MODALITY.get(kind) if isinstance(kind, str) else None
    if modality is None:
        raise BadRequestError(f"{param}: unknown content type {_shown(kind)}", param=param)
    uuid = _uuid(part, param)
    body = part.get(str(kind))
    if body is None and uuid is not None:
        return MediaSource(modality, "nothing", "", param, uuid)
    if kind == "input_audio":
        data = _audio_data(body, param)
        start = _data_url_start(data, param) if data[:5].lower() == "data:" else 0
        return MediaSource(modality, "inline", data, param, uuid, start)
    return source_of_url(_url(body, str(kind), param), modality, param, uuid)


def source_of_url(url: str, modality: Modality, param: str, uuid: str | None = None) -> MediaSource:
    """The source behind a https, http, data or file URL. Raises `BadRequestError`."""
    # A data URL is megabytes long: it is never split, only its beginning is looked at.
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
    raise BadRequestError(
        f"{param}: the URL must be https, http, data (base64) or file", param=param
    )


def for_part(error: RequestError, param: str) -> RequestError:
    """The same error, naming the part it struck.

    What fetches, decodes and processes is shared by many requests, so it raises errors that know
    no part; each request that waited names its own.
    """
    return type(error)(f"{param}: {error.message}", param=param, code=error.code)


def too_large(param: str, max_bytes: int) -> TooLargeError:
    """Encoded media above the limit."""
    return TooLargeError(f"{param}: the media is larger than {max_bytes} bytes", param=param)


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
    """OpenAI nests the URL, `{"url": ...}`; a bare text is accepted as vLLM does."""
    url = body.get("url") if isinstance(body, Mapping) else body
    if not isinstance(url, str) or not url:
        raise BadRequestError(f"{param}: {kind} needs a url", param=param)
    return url


def _audio_data(body: object, param: str) -> str:
    data = body.get("data") if isinstance(body, Mapping) else None
    name = body.get("format") if isinstance(body, Mapping) else None
    if not isinstance(data, str) or not data:
        raise BadRequestError(f"{param}: input_audio needs base64 data", param=param)
    # The format is only checked: what the bytes are is read from the bytes.
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
