"""Photo-like pictures for benchmarks.

`variant` makes a picture new without encoding it again: a comment inside the file changes its bytes
and so its media hash, but not what decoding and processing it costs.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image

SIZES = {
    "256": (256, 256),
    "512": (512, 512),
    "720p": (1280, 720),
    "1024": (1024, 1024),
    "1080p": (1920, 1080),
    "2048": (2048, 2048),
    "4K": (3840, 2160),
}


def encoded_picture(size: str, file_format: str, *, seed: int = 0) -> bytes:
    """A photo-like picture (smooth areas, edges and some noise) as JPEG or PNG bytes."""
    width, height = SIZES[size]
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (18, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + rng.integers(-3, 4, smooth.shape, dtype=np.int16)
    noisy[height // 3 : height // 2, width // 4 : width // 2] = (220, 30, 30)
    picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, file_format, quality=90)
    return buffer.getvalue()


def distinct_pictures(count: int, size: str, file_format: str, *, first: int = 0) -> list[bytes]:
    """`count` pictures with different pixels each: new also for servers that compare pixels."""
    width, height = SIZES[size]
    encoded = encoded_picture(size, file_format)
    base = np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))
    pictures = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        patch = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        base[: height // 4, : width // 4] = np.kron(
            patch, np.ones((height // 32, width // 32, 1), dtype=np.uint8)
        )
        buffer = io.BytesIO()
        Image.fromarray(base).save(buffer, file_format, quality=90)
        pictures.append(buffer.getvalue())
    return pictures


def variant(encoded: bytes, number: int) -> bytes:
    """The same JPEG or PNG pixels in other bytes. Raises `ValueError` for other files."""
    comment = f"variant {number}".encode()
    if encoded.startswith(b"\xff\xd8"):
        segment = b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment
        return encoded[:2] + segment + encoded[2:]
    if encoded.startswith(b"\x89PNG"):
        body = b"tEXt" + b"Comment\0" + comment
        chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        return encoded[:33] + chunk + encoded[33:]
    raise ValueError("neither a JPEG nor a PNG file")


def data_url(encoded: bytes) -> str:
    kind = "png" if encoded.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
