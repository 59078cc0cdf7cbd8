"""What decoding one media item will cost, in CPU seconds, read from its headers.

    encoded bytes ─▶ estimate_cost ─▶ CPU seconds: orders the queue, sets the job's deadline
                          │
                          └ TooLargeError: no worker sees the item

No pixel or sample is decoded: the estimate is pixels (scans, seconds, channels) times rates that
were measured with this project's decoders on one core of 2.4 GHz, rounded up. A small file may be
dear: a progressive JPEG visits every block of the picture again in each scan, and a scan may be 50
bytes long. Headers may lie: a job that costs far more than its estimate is stopped by its deadline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lookonce.errors import LookOnceError, TooLargeError
from lookonce.types.media import Modality

MAX_SCANS = 100
"""Scans of one JPEG. Encoders write about 10 for a progressive picture and 1 to 4 for another."""
MAX_CHUNKS = 20_000
"""Chunks of a PNG, or blocks before the first frame of a GIF."""
MAX_ITEM_FRAMES = 16
"""Frames that an encoder takes together. Models take one or two."""
MAX_SEGMENTS = 2_000
"""Segments of a JPEG. One holds up to 64 KiB of metadata."""
UNREADABLE_SECONDS = 2.0
"""The cost of a file that begins like a known format and goes on like none."""
BASE_SECONDS = 0.002
DEADLINE_FACTOR = 6.0
SHORTEST_DEADLINE = 4.0
LONGEST_DEADLINE = 60.0
"""CPU seconds; see `cpu_deadline`."""

NS = 1e-9
JPEG_PIXEL = 5 * NS
"""Per pixel of the first component; each further component adds 2.5."""
JPEG_BYTE = 14 * NS
JPEG_BLOCK = 10 * NS
"""Per block of 8 x 8 coefficients that a scan visits."""
JPEG_REFINED = 0.8 * NS
"""Per coefficient of a block that a refining scan visits."""
JPEG_ARITHMETIC = 3 * NS
STRAY_BYTE = 500 * NS
"""Per byte between segments or blocks (JPEG, GIF), which Pillow skips one by one."""
JPEG_HEADER_COPY = 0.2 * NS
"""Per byte of headers and segment: Pillow appends each Exif segment to those before."""
SEGMENT = 10e-6
PNG_RAW_BYTE = 4 * NS
PNG_BYTE = 20 * NS
GIF_PIXEL, GIF_BYTE = 8 * NS, 10 * NS
WEBP_PIXEL = 22 * NS
WEBP_LOSSY_BYTE, WEBP_LOSSLESS_BYTE = 70 * NS, 14 * NS
FILM_PIXEL, FILM_TAKEN_PIXEL = 3 * NS, 20 * NS
"""Per pixel of a film's frame that is decoded; and of one that is taken: it becomes RGB and is
resized."""
FILM_BYTE = 110 * NS
"""Per byte of packets that are decoded. H.264, VP9 and AV1 all take 90 to 100."""
FILM_FRAME, GIF_FRAME = 15e-6, 130e-6
"""Per frame that is read, of any size; a GIF's has headers and perhaps a palette."""
GIF_FILM_PIXEL, GIF_TAKEN_PIXEL, GIF_FILM_BYTE = 8 * NS, 40 * NS, 8 * NS
FILM_READ_BYTE, FILM_OPENING = 4 * NS, 0.05
ALPHA_PIXEL = 12 * NS
"""Compositing onto white."""
RESIZED_PIXEL = 9 * NS
MODEL_PIXEL = 70 * NS
"""Per pixel of the processor's output, of which an estimate counts `MODEL_PIXELS` at most."""
MODEL_PIXELS = 3_000_000
SOUND_SAMPLE = {"wav": 5 * NS, "flac": 12 * NS, "vorbis": 35 * NS, "opus": 80 * NS, "mp3": 22 * NS}
"""Per sample of one channel."""
SOUND_FRAME = 20 * NS
"""Per sample of the averaged channels, which are resampled."""
SOUND_SECOND = 1e-3
SOUND_BYTE = 2 * NS

PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Colour type → channels."""
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
GIF_INTRODUCER = re.compile(b"[!,;]")
"""What begins an extension, a frame or the end of a GIF; Pillow passes over any other byte."""
GIF_COMMENT, GIF_APPLICATION = 0xFE, 0xFF
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""In entropy-coded data: 0xFF and a byte that is not 0, 0xFF or a restart marker."""
MARKER_WINDOW = 1 << 18
"""Bytes that are searched at a time: all other threads wait meanwhile, a millisecond at most."""
MP3_RATES = (44100, 48000, 32000)
MP3_BITRATES = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
"""kbit/s of MPEG-1 layer III by index."""
MP3_LOW_BITRATES = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
"""The same of MPEG-2 and 2.5."""


@dataclass(frozen=True, slots=True)
class CostLimits:
    """What one item may cost; above it the item is refused."""

    max_pixels: int
    max_audio_seconds: float
    max_cpu_seconds: float


UNLIMITED = CostLimits(1 << 62, math.inf, math.inf)


def estimate_cost(modality: Modality, data: bytes | memoryview, limits: CostLimits) -> float:
    """CPU seconds to decode and process the item. Bytes of no known format cost little: a worker
    refuses them at once.

    Raises `TooLargeError` that names no request part.
    """
    if not isinstance(data, (bytes, bytearray)):
        data = bytes(data)
    try:
        if modality == "video":
            seconds = _film_item(data, limits)
        else:
            seconds = _image(data, limits) if modality == "image" else _sound(data, limits)
    except LookOnceError:
        raise
    except (IndexError, ValueError, ZeroDivisionError):  # cut short, or not what it claims to be
        seconds = UNREADABLE_SECONDS
    seconds += BASE_SECONDS
    if seconds > limits.max_cpu_seconds:
        raise TooLargeError(
            f"decoding the {modality} would take about {seconds:.0f} CPU seconds; "
            f"at most {limits.max_cpu_seconds:g} are allowed"
        )
    return seconds


def cpu_deadline(seconds: float) -> float:
    """CPU seconds after which a job with this estimate is stopped."""
    return min(LONGEST_DEADLINE, max(SHORTEST_DEADLINE, DEADLINE_FACTOR * seconds))


# --- films ---------------------------------------------------------------------------------------


def _film_item(data: bytes, limits: CostLimits) -> float:
    """The frames of one item (`processing.pack_frames`): pictures, or pixels as they are."""
    at, seconds, count = 8, 0.0, 0
    while at < len(data):
        count += 1
        if count > MAX_ITEM_FRAMES:
            raise ValueError
        size = int.from_bytes(data[at : at + 8], "little")
        frame = data[at + 8 : at + 8 + size]
        if len(frame) < size:
            raise ValueError
        pictures = data.startswith(b"frames")
        seconds += _image(frame, limits) if pictures else _processing(size // 3)
        at += 8 + size
    return seconds


@dataclass(frozen=True, slots=True)
class FilmCost:
    """What it costs to decode frames of a film, from what its index says of it."""

    num_bytes: int
    num_frames: int
    pixels: int
    """Of a frame."""
    is_gif: bool

    def reading(self) -> float:
        """CPU seconds to find out what is in the film, or where its frames are."""
        return index_seconds(self.num_bytes) + self.num_frames * FILM_FRAME

    def decoding(self, num_frames: int, num_taken: int) -> float:
        """CPU seconds of one job that decodes so many frames of the film, and takes some of them.
        The film's bytes are counted as if all frames had as many."""
        num_bytes = self.num_bytes * num_frames / max(1, self.num_frames)
        if self.is_gif:
            frames = num_frames * (GIF_FRAME + self.pixels * GIF_FILM_PIXEL)
            taken = num_taken * self.pixels * GIF_TAKEN_PIXEL
            return BASE_SECONDS + frames + taken + num_bytes * GIF_FILM_BYTE
        frames = num_frames * (FILM_FRAME + self.pixels * FILM_PIXEL)
        taken = num_taken * self.pixels * FILM_TAKEN_PIXEL
        return self.reading() + frames + taken + num_bytes * FILM_BYTE


def index_seconds(num_bytes: int) -> float:
    """CPU seconds to find out what is in a film of which nothing else is known."""
    return BASE_SECONDS + num_bytes * FILM_READ_BYTE + FILM_OPENING


def listed_seconds(frames: Iterable[bytes | bytearray], pixels: int, limits: CostLimits) -> float:
    """CPU seconds to decode pictures that are a film's frames, and to process them at the size, in
    `pixels`, that the model takes them at. Raises `TooLargeError` for one that is above a limit."""
    seconds = 0.0
    for frame in frames:
        own = math.prod(picture_size(frame) or (0, 0))
        decoding = max(0.0, estimate_cost("image", bytes(frame), limits) - _processing(own))
        seconds += decoding + film_item_seconds(own, pixels)
    return seconds


def film_item_seconds(pixels: int, model_pixels: int) -> float:
    """CPU seconds to resize a decoded frame of `pixels`, and to make the model's arrays of it."""
    return pixels * RESIZED_PIXEL + model_pixels * MODEL_PIXEL


def picture_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """(width, height) of a picture by its header, as it lies in the file; None if it has none that
    is known. No pixel is decoded."""
    try:
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            found = _big(data, 16, 4), _big(data, 20, 4)
        elif data[:3] == b"\xff\xd8\xff":
            found = _jpeg_size(data)
        elif data[:6] in (b"GIF87a", b"GIF89a"):
            found = _little(data, 6, 2), _little(data, 8, 2)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            found = _webp_size(data)
        else:
            return None
    except (IndexError, ValueError):
        return None
    return found if min(found) > 0 else None


def _jpeg_size(data: bytes | bytearray) -> tuple[int, int]:
    """Raises `IndexError` where there is no frame header."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ValueError
        code = data[at + 1]
        if code in JPEG_FRAMES:
            return _big(data, at + 7, 2), _big(data, at + 5, 2)
        if code == START_OF_SCAN:
            raise ValueError
        at += 1 if code == 0xFF else 2 + max(2, _big(data, at + 2, 2))


def _webp_size(data: bytes | bytearray) -> tuple[int, int]:
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        return _little(data, 24, 3) + 1, _little(data, 27, 3) + 1
    if kind == b"VP8L":
        bits = _little(data, 21, 4)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
    raise ValueError


# --- pictures ------------------------------------------------------------------------------------


def _image(data: bytes, limits: CostLimits) -> float:
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return _png(data, limits)
    if data[:3] == b"\xff\xd8\xff":
        return _Jpeg(data, limits).cost()
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif(data, limits)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data, limits)
    return 0.0


def _pixels(width: int, height: int, limits: CostLimits) -> int:
    """Raises `TooLargeError` with the words of `processing.decode_image`."""
    if width * height > limits.max_pixels:
        raise TooLargeError(f"the image has more than {limits.max_pixels} pixels")
    return width * height


def _processing(pixels: int) -> float:
    """Resizing the picture and making the model's arrays of it."""
    return pixels * RESIZED_PIXEL + min(pixels, MODEL_PIXELS) * MODEL_PIXEL


def _big(data: bytes | bytearray, start: int, size: int) -> int:
    return _number(data, start, size, "big")


def _little(data: bytes | bytearray, start: int, size: int) -> int:
    return _number(data, start, size, "little")


def _number(data: bytes | bytearray, start: int, size: int, order: str) -> int:
    """Raises `IndexError` where the data ends before."""
    if start < 0 or start + size > len(data):
        raise IndexError
    return int.from_bytes(data[start : start + size], "big" if order == "big" else "little")


def _png(data: bytes, limits: CostLimits) -> float:
    if data[12:16] != b"IHDR":
        raise ValueError
    pixels = _pixels(_big(data, 16, 4), _big(data, 20, 4), limits)
    depth, colour = data[24], data[25]
    num_chunks = _num_png_chunks(data)
    raw_bytes = pixels * PNG_CHANNELS[colour] * depth / 8 if colour in PNG_CHANNELS else pixels * 8
    seconds = raw_bytes * PNG_RAW_BYTE + pixels * PNG_RAW_BYTE + len(data) * PNG_BYTE
    seconds += pixels * ALPHA_PIXEL if colour != 2 else 0.0
    return seconds + num_chunks * SEGMENT + _processing(pixels)


def _num_png_chunks(data: bytes) -> int:
    at, count = 8, 0
    while at + 8 <= len(data):
        count += 1
        _check_count(count, MAX_CHUNKS, "chunks (PNG)")
        name = data[at + 4 : at + 8]
        if name == b"IEND":
            break
        if name == b"IHDR" and at != 8:  # Pillow would take the size of the last one
            raise ValueError
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return count


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise TooLargeError(f"the image has more than {most} {what}, the most allowed")


def _gif(data: bytes, limits: CostLimits) -> float:
    """An animation is its first frame, which may be larger than the canvas."""
    width, height = _little(data, 6, 2), _little(data, 8, 2)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    blocks = strays = 0
    while True:
        found = GIF_INTRODUCER.search(data, at)
        if found is None:
            raise IndexError
        strays += found.start() - at
        at = found.end()
        if found[0] != b"!":
            break
        at, blocks = _skip_gif_extension(data, at, blocks)
    if found[0] == b",":
        left, top = _little(data, at, 2), _little(data, at + 2, 2)
        width = max(width, left + _little(data, at + 4, 2))
        height = max(height, top + _little(data, at + 6, 2))
    pixels = _pixels(width, height, limits)
    decoding = pixels * (GIF_PIXEL + ALPHA_PIXEL) + len(data) * GIF_BYTE
    return decoding + blocks * SEGMENT + strays * STRAY_BYTE + _processing(pixels)


def _skip_gif_extension(data: bytes, at: int, blocks: int) -> tuple[int, int]:
    """Where the extension ends whose label is at `at`, and the blocks counted so far.

    As Pillow reads it: an empty block ends it, but the first one only of a comment, and of an
    animation's the second one neither.
    """
    label, at = data[at], at + 1
    unheeded = 0 if label == GIF_COMMENT else 1
    if label == GIF_APPLICATION and data[at] >= 11 and data.startswith(b"NETSCAPE2.0", at + 1):
        unheeded = 2
    while True:
        size = data[at]
        at += 1 + size
        blocks += 1
        _check_count(blocks, MAX_CHUNKS, "blocks before its first frame (GIF)")
        if not size and not unheeded:
            return at, blocks
        unheeded = max(0, unheeded - 1)


def _webp(data: bytes, limits: CostLimits) -> float:
    """An animation is its first frame, decoded on a canvas of the whole size."""
    kind = data[12:16]
    byte = WEBP_LOSSY_BYTE
    if kind == b"VP8L" or (kind == b"VP8X" and data.find(b"VP8 ", 30) < 0):
        byte = WEBP_LOSSLESS_BYTE
    width, height = _webp_size(data)
    pixels = _pixels(width, height, limits)
    return pixels * (WEBP_PIXEL + ALPHA_PIXEL) + len(data) * byte + _processing(pixels)


@dataclass(frozen=True, slots=True)
class _Component:
    """Sampling factors of one colour component."""

    horizontal: int
    vertical: int


class _Jpeg:
    """A walk over the segments of a JPEG, which adds up what each scan costs."""

    def __init__(self, data: bytes, limits: CostLimits) -> None:
        self._data = data
        self._limits = limits
        self._components: dict[int, _Component] = {}
        self._width = self._height = 0
        self._frame = 0
        self._num_scans = self._num_segments = self._stray_bytes = 0
        self._scanning = 0.0

    def cost(self) -> float:
        first_scan = self._walk()
        strays = self._stray_bytes * STRAY_BYTE
        if not self._frame:
            return UNREADABLE_SECONDS + strays
        pixels = self._width * self._height
        channels = 1 + 0.5 * (len(self._components) - 1)
        alike = JPEG_PIXEL * (1.5 if len(self._components) == 4 else 1.0)  # CMYK is converted
        headers = self._num_segments * (SEGMENT + first_scan * JPEG_HEADER_COPY)
        decoding = pixels * channels * alike + len(self._data) * JPEG_BYTE + self._scanning
        return decoding + headers + strays + _processing(pixels)

    def _walk(self) -> int:
        """Visit all segments that the decoder would; the position of the first scan."""
        at, first_scan = 2, 0
        while (found := self._next_marker(at)) is not None:
            at, code = found
            if code == END_OF_IMAGE:
                break
            self._num_segments += 1
            _check_count(self._num_segments, MAX_SEGMENTS, "segments (JPEG)")
            if code == 1 or 0xD0 <= code <= 0xD8:
                continue  # these have no body
            size = _big(self._data, at, 2)
            if code in JPEG_FRAMES:
                if self._frame:  # Pillow would take its size, and the decoder refuse it
                    raise ValueError
                self._read_frame(code, at)
            elif code == START_OF_SCAN:
                first_scan = first_scan or at
                if self._read_scan(at):
                    break
            at += max(2, size)
        return first_scan or at

    def _next_marker(self, at: int) -> tuple[int, int] | None:
        """Where the next segment's body starts, and its code; None at the end of the data.

        Before the first scan bytes between segments are strays; after it they are its data.
        """
        found = self._find_marker(at)
        if not self._num_scans:
            end = len(self._data) if found is None else found
            self._stray_bytes += max(0, end - at)  # a segment may claim to end beyond the data
        return None if found is None else (found + 2, self._data[found + 1])

    def _find_marker(self, at: int) -> int | None:
        """Position of the first 0xFF that 0, 0xFF or a restart marker does not follow."""
        while at + 1 < len(self._data):
            found = MARKER.search(self._data, at, at + MARKER_WINDOW + 1)
            if found is not None:
                return found.start()
            at += MARKER_WINDOW
        return None

    def _read_frame(self, code: int, at: int) -> None:
        self._frame = code
        self._height, self._width = _big(self._data, at + 3, 2), _big(self._data, at + 5, 2)
        _pixels(self._width, self._height, self._limits)
        for number in range(self._data[at + 7]):
            start = at + 8 + 3 * number
            sampling = self._data[start + 1]
            self._components[self._data[start]] = _Component(
                min(4, max(1, sampling >> 4)), min(4, max(1, sampling & 15))
            )

    def _read_scan(self, at: int) -> bool:
        """Count a scan; True if the decoder reads no other one."""
        self._num_scans += 1
        _check_count(self._num_scans, MAX_SCANS, "scans (JPEG)")
        count = _big(self._data, at + 2, 1)
        body = self._data[at + 3 : at + 3 + 2 * count]
        names = body[::2]
        if self._frame not in PROGRESSIVE and count >= len(self._components):
            return True
        spectrum = at + 3 + 2 * count
        first, last = _big(self._data, spectrum, 1), _big(self._data, spectrum + 1, 1)
        refined = _big(self._data, spectrum + 2, 1) >> 4
        block = JPEG_BLOCK
        coefficients = min(64, max(1, last - first + 1))
        if self._frame not in PROGRESSIVE:
            block = 4 * JPEG_BLOCK
        elif refined:
            block += JPEG_BLOCK + coefficients * JPEG_REFINED
        if self._frame > 0xC8:
            block += coefficients * JPEG_ARITHMETIC
        self._scanning += sum(self._num_blocks(name) for name in names) * block
        return False

    def _num_blocks(self, name: int) -> int:
        """Blocks of a component; of the largest one if the frame has none of this name."""
        horizontal = max(each.horizontal for each in self._components.values())
        vertical = max(each.vertical for each in self._components.values())
        own = self._components.get(name, _Component(horizontal, vertical))
        across = -(-self._width * own.horizontal // (8 * horizontal))
        return across * -(-self._height * own.vertical // (8 * vertical))


# --- sounds --------------------------------------------------------------------------------------


def sound_seconds(data: bytes | bytearray, longest: float) -> float:
    """Seconds of a sound by its header, at most `longest`; an estimate from above for MP3.

    0 for data that is no readable sound.
    """
    try:
        return min(longest, _sound_header(data, longest)[3])
    except (ValueError, IndexError, ZeroDivisionError, KeyError):
        return 0.0


def _sound(data: bytes, limits: CostLimits) -> float:
    codec, rate, channels, seconds = _sound_header(data, limits.max_audio_seconds)
    # The decoder stops at the longest time allowed, whatever the header says.
    seconds = min(seconds, limits.max_audio_seconds)
    per_second = rate * (channels * SOUND_SAMPLE[codec] + SOUND_FRAME) + SOUND_SECOND
    return seconds * per_second + len(data) * SOUND_BYTE


def _sound_header(data: bytes | bytearray, longest: float) -> tuple[str, int, int, float]:
    """Codec, samples per second, channels and seconds; seconds are `longest` if unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    if data[:4] == b"fLaC":
        bits = _big(data, 18, 8)
        rate, channels, total = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
        return "flac", rate, channels, total / rate if total else longest
    if data[:4] == b"OggS":
        return _ogg(data, longest)
    return _mp3(data, longest)


def _wav(data: bytes | bytearray) -> tuple[str, int, int, float]:
    start = data.find(b"fmt ", 12)
    if start < 0:
        raise ValueError
    channels, rate = _little(data, start + 10, 2), _little(data, start + 12, 4)
    frame_bytes = max(1, _little(data, start + 20, 2))
    # ADPCM and the like have blocks of many samples; their bytes hold two samples at most.
    per_byte = 2 * channels if _little(data, start + 8, 2) not in (1, 3, 0xFFFE) else 0
    frames = len(data) * per_byte / channels if per_byte else len(data) / frame_bytes
    return "wav", rate, channels, frames / rate


def _ogg(data: bytes | bytearray, longest: float) -> tuple[str, int, int, float]:
    """The first page holds the codec's header; the last one the position of the end."""
    opus, vorbis, flac = (data.find(name, 0, 512) for name in (b"OpusHead", b"\x01vorbis", b"fLaC"))
    if opus >= 0:
        codec, rate, channels = "opus", 48000, _big(data, opus + 9, 1)
    elif vorbis >= 0:
        codec, rate, channels = "vorbis", _little(data, vorbis + 12, 4), data[vorbis + 11]
    elif flac >= 0:
        bits = _big(data, flac + 18, 8)
        codec, rate, channels = "flac", bits >> 44, (bits >> 41 & 7) + 1
    else:
        raise ValueError
    end = _little(data, data.rfind(b"OggS") + 6, 8)
    return codec, rate, channels, end / rate if 0 < end < 1 << 62 else longest


def _mp3(data: bytes | bytearray, longest: float) -> tuple[str, int, int, float]:
    at = 0
    if data[:3] == b"ID3":
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        at = 10 + size
    if not (data[at] == 0xFF and data[at + 1] & 0xE0 == 0xE0):
        raise ValueError
    version, head = data[at + 1] >> 3 & 3, data[at + 2]
    if version == 1 or head >> 2 & 3 == 3:
        raise ValueError
    rate = MP3_RATES[head >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    bitrates = MP3_BITRATES if version == 3 else MP3_LOW_BITRATES
    # The bitrate may vary from frame to frame: half of the first one's gives a longer time.
    bits = max(bitrates[1], bitrates[head >> 4] / 2) * 1000
    channels = 1 if data[at + 3] >> 6 == 3 else 2
    return "mp3", rate, channels, min(longest, (len(data) - at) * 8 / bits)
