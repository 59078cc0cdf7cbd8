"""How many tokens a picture takes, from its headers alone: that follows from its upright size.

Nothing is decoded and no decoder runs. Where a file's headers leave any doubt of what a decoder
would make of it, there is no answer, and the picture is decoded as before: GIF, animations, XMP
(which may say an orientation, too), metadata that is not read here, two frame headers.
"""

from __future__ import annotations

import asyncio
import io
import logging
import struct
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import msgspec
from PIL import Image

from lookonce.errors import LookOnceError, UnprocessableMediaError
from lookonce.render.families.base import MAX_SIDE_RATIO, Options
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.types.media import Expansion, Modality

logger = logging.getLogger(__name__)

Size = tuple[int, int]
"""Width and height in pixels."""
EXIF = b"Exif\0\0"
ORIENTATION = 0x0112
TURNED = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""
MAX_TAGS = 512
TYPE_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8)
"""Of a value of each TIFF type, 1 to 12."""
FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""JPEG: baseline, extended and progressive, with Huffman codes. Others are rare."""
JPEG_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xFE})
"""Segments before the first scan that may be skipped: tables, JFIF, EXIF, ICC, Adobe's, comments.
"""
PNG_CHUNKS = frozenset(
    {b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"bKGD", b"pHYs", b"tIME", b"sBIT"}
)
HIDDEN_METADATA = (b"Raw profile", b"XML:com.")
"""Keywords of texts that hold EXIF or XMP."""
WEBP_ANIMATION, WEBP_XMP, WEBP_EXIF = 0x02, 0x04, 0x08


def upright_size(data: bytes | bytearray | memoryview) -> Size | None:
    """The size that a decoder gives the picture, turned as its EXIF orientation says; None where
    only decoding tells."""
    view = memoryview(data)
    try:
        head = view[:12].tobytes()
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            return _png(view)
        if head[:3] == b"\xff\xd8\xff":
            return _jpeg(view)
        if head[:4] == b"RIFF" and head[8:] == b"WEBP":
            return _webp(view)
    except (IndexError, struct.error):
        pass  # cut short
    return None


def _turned(size: Size, orientation: int | None) -> Size | None:
    if orientation is None or min(size) < 1:
        return None
    return (size[1], size[0]) if orientation in TURNED else size


def _png(view: memoryview) -> Size | None:
    """Only pictures whose every chunk before the pixels is known. EXIF may stand behind them, so
    the names of all chunks are looked at."""
    size: Size | None = None
    orientation: int | None = 1
    at, pixels = 8, False
    while True:
        length, name = struct.unpack_from(">I4s", view, at)
        body = view[at + 8 : at + 8 + length]
        if name == b"IEND":
            return None if size is None or not pixels else _turned(size, orientation)
        if name == b"IHDR":
            if at != 8:
                return None
            size = struct.unpack_from(">II", body)
        elif name == b"eXIf":
            orientation = _orientation(body)
        elif name == b"IDAT":
            pixels = True
        elif name == b"tEXt" and not bytes(body[:11]).startswith(HIDDEN_METADATA):
            pass
        elif name not in PNG_CHUNKS:
            return None
        at += 12 + length


def _jpeg(view: memoryview) -> Size | None:
    """Only files with one frame header, before the first scan, and at most one EXIF segment."""
    size: Size | None = None
    orientation: int | None = None
    for code, body in _segments(view):
        if code in FRAMES:
            if size is not None:
                return None
            height, width = struct.unpack_from(">HH", body, 1)
            size = width, height
        elif code == 0xDA:
            return None if size is None else _turned(size, orientation or 1)
        elif code == 0xE1:
            if bytes(body[:6]) != EXIF or orientation is not None:
                return None
            orientation = _orientation(body[6:])
            if orientation is None:
                return None
        elif code not in JPEG_SEGMENTS:
            return None
    return None


def _segments(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Code and body of each, up to the first scan; ends where anything stands between two."""
    at = 2
    while view[at] == 0xFF:
        code = view[at + 1]
        (length,) = struct.unpack_from(">H", view, at + 2)
        if length < 2 or at + 2 + length > len(view):
            return
        yield code, view[at + 4 : at + 2 + length]
        at += 2 + length


def _webp(view: memoryview) -> Size | None:
    kind = bytes(view[12:16])
    if kind == b"VP8 ":
        if view[23:26].tobytes() != b"\x9d\x01\x2a":
            return None
        width, height = struct.unpack_from("<HH", view, 26)
        return _turned((width & 0x3FFF, height & 0x3FFF), 1)
    if kind == b"VP8L" and view[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", view, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind != b"VP8X" or view[20] & (WEBP_ANIMATION | WEBP_XMP | WEBP_EXIF):
        return None
    width, height = (int.from_bytes(view[at : at + 3], "little") + 1 for at in (24, 27))
    return width, height


def _orientation(tiff: memoryview) -> int | None:
    """Of an EXIF block: 1 to 8, 1 where it says none; None where it cannot be told."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        return None
    mark, at = struct.unpack_from(f"{order}HI", tiff, 2)
    (count,) = struct.unpack_from(f"{order}H", tiff, at)
    if mark != 42 or count > MAX_TAGS:
        return None
    found = 1
    for number in range(count):
        entry = at + 2 + 12 * number
        tag, kind, values, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
        if not 1 <= kind < len(TYPE_BYTES):
            return None
        nbytes = TYPE_BYTES[kind] * values
        (begin,) = struct.unpack_from(f"{order}I", tiff, entry + 8)
        if nbytes > 4 and begin + nbytes > len(tiff):
            return None  # a decoder that cannot read one entry may pass over all
        if tag == ORIENTATION:
            if kind != 3 or values != 1 or not 1 <= value <= 8:
                return None
            found = value
    return found


# --- tokens --------------------------------------------------------------------------------------

PROVEN_SIZES = ((61, 83), (250, 31), (640, 427), (33, 33), (1021, 509))
MIN_AGREED = 3
"""Of these sizes, how many a model must take."""
PROVEN_TURNS = (1, 6, 8)
"""Sizes and EXIF orientations that a family's answer is tried out on."""
MAX_PROOFS = 16
"""Options whose proofs are remembered."""


class SaysExpansions(Protocol):
    """Implemented by `families.base.ProcessorFamily`."""

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion: ...


class ExpansionsBySize:
    """Expansions of pictures that nobody has decoded.

    A family is believed once its answers agree with what the workers make of small pictures of odd
    sizes and turns, with the options in question; that is tried out before the first answer. One
    wrong answer, or a family that cannot say, and pictures are decoded as before.
    """

    def __init__(
        self, family: SaysExpansions, run: Callable[[MediaJob], Coroutine[Any, Any, Processed]]
    ) -> None:
        self._family = family
        self._run = run
        self._proofs: dict[bytes, asyncio.Task[bool]] = {}

    async def find(
        self, data: bytes | bytearray | memoryview, options: Options
    ) -> Expansion | None:
        """The expansion; None where only decoding tells."""
        size = upright_size(data)
        if size is None or max(size) > MAX_SIDE_RATIO * min(size):
            return None
        return self._say(size, options) if await self.is_proven(options) else None

    def _say(self, size: Size, options: Options) -> Expansion | None:
        try:
            return self._family.expansion_of_size("image", size, options)
        except LookOnceError:
            return None

    async def is_proven(self, options: Options) -> bool:
        """Tried out once for each options; again where the workers had no time for it."""
        name = msgspec.json.encode(options, order="deterministic")
        proof = self._proofs.get(name)
        if proof is None:
            while len(self._proofs) >= MAX_PROOFS:
                self._proofs.pop(next(iter(self._proofs)))
            proof = self._proofs[name] = asyncio.create_task(self._prove(options))
        try:
            return await asyncio.shield(proof)
        except LookOnceError:
            self._proofs.pop(name, None)
            return False

    async def _prove(self, options: Options) -> bool:
        """Raises a `LookOnceError` where a worker could not be asked."""
        agreed = 0
        for number, size in enumerate(PROVEN_SIZES):
            turn = PROVEN_TURNS[number % len(PROVEN_TURNS)]
            data = _example(size, turn)
            upright = upright_size(data)
            said = None if upright is None else self._say(upright, options)
            if said is None:
                return False
            try:
                made = await self._run(MediaJob("image", data, options))
            except UnprocessableMediaError:
                continue  # too small for this model
            if made.item.expansion != said:
                logger.warning("tokens of pictures are not known before they are decoded")
                return False
            agreed += 1
        return agreed >= MIN_AGREED


def _example(size: Size, turn: int) -> bytes:
    """A grey picture as a JPEG with this EXIF orientation, or as a PNG where that is 1."""
    target = io.BytesIO()
    picture = Image.new("RGB", size, (127, 127, 127))
    if turn == 1:
        picture.save(target, "PNG")
    else:
        exif = Image.Exif()
        exif[ORIENTATION] = turn
        picture.save(target, "JPEG", exif=exif)
    return target.getvalue()
