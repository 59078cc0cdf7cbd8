"""Small files that are dear to decode: progressive JPEGs with many scans, and others."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_RUN = (1 << 15) - 1
"""Blocks that one end-of-band code of a progressive scan covers."""


@dataclass(frozen=True)
class Scan:
    """One scan of one component, which changes no coefficient."""

    component: int = 0
    first: int = 1
    last: int = 63
    refining: bool = False


def progressive_jpeg(side: int, scans: Sequence[Scan], *, components: int = 1) -> bytes:
    """A grey or, with three components, coloured square JPEG: one DC scan, then `scans`."""
    frame = struct.pack(">BHHB", 8, side, side, components)
    frame += b"".join(bytes([number + 1, 0x11, 0]) for number in range(components))
    num_blocks = math.ceil(side / 8) ** 2
    names = b"".join(bytes([number + 1, 0]) for number in range(components))
    file = [
        b"\xff\xd8",
        segment(0xDB, b"\0" + bytes([16] * 64)),
        segment(0xC2, frame),
        segment(0xC4, b"\x00" + bytes([1] + [0] * 15) + b"\x00"),  # DC: "0" is no difference
        segment(0xC4, b"\x10" + bytes([1, 1] + [0] * 14) + b"\xe0\x00"),  # AC: "0" run, "10" end
        segment(0xDA, bytes([components]) + names + b"\0\0\0"),
        _packed("0" * (num_blocks * components)),
    ]
    body = _empty_blocks(num_blocks)
    for scan in scans:
        head = bytes([1, scan.component + 1, 0, scan.first, scan.last, 0x10 * scan.refining])
        file += [segment(0xDA, head), body]
    return b"".join([*file, b"\xff\xd9"])


def segment(code: int, body: bytes) -> bytes:
    """A JPEG segment."""
    return bytes([0xFF, code]) + struct.pack(">H", len(body) + 2) + body


def png(width: int, height: int, *, chunks: int = 0) -> bytes:
    """A black grey PNG of any size in few bytes, with `chunks` empty chunks before its picture."""
    rows = zlib.compress(bytes(1 + math.ceil(width / 8)) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *[chunk(b"tIME", b"")] * chunks, chunk(b"IDAT", rows)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def chunk(name: bytes, body: bytes) -> bytes:
    """A PNG chunk."""
    check = zlib.crc32(name + body)
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", check)


def gif(width: int, height: int, *, comments: int = 0) -> bytes:
    """The headers of a GIF, with `comments` blocks of one byte before its only frame."""
    comment = b"\x21\xfe" + b"\x01x" * comments + b"\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00\x3b"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + comment + frame


def gif_film(num_frames: int) -> bytes:
    """A GIF film of frames of one pixel, 23 bytes each, at 100 frames per second."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    picture = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + (b"\x21\xf9\x04\x00\x01\x00\x00\x00" + picture) * num_frames + b"\x3b"


def _empty_blocks(num_blocks: int) -> bytes:
    runs, rest = divmod(num_blocks, LONGEST_RUN)
    bits = ("0" + "1" * 14) * runs
    if rest >= 1 << 14:
        return _packed(bits + "0" + format(rest - (1 << 14), "014b"))
    return _packed(bits + "10" * rest)


def _packed(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    raw = int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""
    return raw.replace(b"\xff", b"\xff\x00")
