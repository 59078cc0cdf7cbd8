"""One media item from encoded bytes to arrays: decode, then the family's processor.

Workers of the pool run this; where blocking is fine (offline tools, tests) it is called directly.

* **Pictures**: PNG, JPEG, WebP and GIF only. The pixel count is read from the header and checked
  before anything is decoded. The result is what Hugging Face makes of the same bytes: the EXIF
  orientation is applied (`image_utils.load_image`), transparency is composited onto white
  (`image_transforms.convert_to_rgb`), an animation is its first frame, and other modes become RGB
  by Pillow's own rules.
* **Sound**: WAV, FLAC, Ogg and MP3 only. Rate, channels and duration are read from the header and
  checked before a sample is decoded; decoding then goes block by block and stops if the header was
  wrong. Channels are averaged and samples resampled (soxr, "HQ", length rounded up) as librosa
  does, with which Hugging Face's examples load sound.
* **Films**: an item is a few frames, as pictures (`pack_frames`) or decoded before and resized.
  Two other jobs work on whole files (`film_decoding`): what is in one, and some of its frames.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import soundfile
import soxr
from msgspec import convert
from numpy.typing import NDArray
from PIL import Image, ImageOps

from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import ModelLoadError, TooLargeError, UnprocessableMediaError
from lookonce.render.families.base import MAX_SIDE_RATIO, Decoded, Options, ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.render.media.cost import MAX_ITEM_FRAMES
from lookonce.render.media.film_decoding import FilmLimits, decode_frames, index_film
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem

Samples = NDArray[np.float32]
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
AUDIO_CONTAINERS = frozenset({"WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG"})
MIN_RATE, MAX_RATE = 4_000, 192_000
"""Hz. Outside of these a false rate would make a small file huge when it is resampled."""
MAX_CHANNELS = 16
BLOCK_FRAMES = 1 << 16


class ProcessingSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings of a worker."""

    folder: str
    """A Hugging Face folder or hub id."""
    dtype: str
    """The model's."""
    max_image_pixels: int
    max_audio_seconds: float
    max_document_pages: int = 100
    documents_only: bool = False
    """The model takes no media: the worker renders documents and processes nothing."""


FRAMES, LEVELS = b"frames\0\0", b"levels\0\0"
"""What packed frames begin with: as pictures, or as levels [height, width, 3]."""


def pack_frames(frames: Sequence[Any], *, decoded: bool = False) -> bytes:
    """The frames of one item of a film, as `Processing` takes them: encoded pictures, or `decoded`
    levels of the size that the item's options name."""
    parts = [LEVELS if decoded else FRAMES]
    for each in frames:
        data = each.tobytes() if decoded else each
        parts += (len(data).to_bytes(8, "little"), data)
    return b"".join(parts)


def unpack_frames(data: bytes | memoryview) -> list[memoryview]:
    """Raises `ValueError` for data that `pack_frames` has not made."""
    view, frames, at = memoryview(data), [], len(FRAMES)
    while at < len(view):
        size = int.from_bytes(view[at : at + 8], "little")
        frames.append(view[at + 8 : at + 8 + size])
        at += 8 + size
        if len(frames) > MAX_ITEM_FRAMES:
            break
    if at != len(view) or not frames:
        raise ValueError("the frames are not packed")
    return frames


def processing_settings(
    model: ModelConfig, media: MediaConfig, *, documents_only: bool = False
) -> ProcessingSettings:
    return ProcessingSettings(
        folder=model.folder,
        dtype=model.dtype,
        max_image_pixels=media.max_image_pixels,
        max_audio_seconds=media.max_audio_seconds,
        max_document_pages=media.max_document_pages,
        documents_only=documents_only,
    )


class MediaJob(msgspec.Struct, frozen=True, array_like=True):
    """One item to decode and process; `options` are `ProcessorFamily.item_options`."""

    modality: Modality
    data: bytes | memoryview
    """The encoded media."""
    options: Options = {}
    tenant: str = ""
    """Who pays for it."""
    seconds: float = 0.0
    """CPU seconds that it will take: `cost.estimate_cost`."""
    request_id: str = ""
    """Whose it is, for the log."""


class Processed(msgspec.Struct, frozen=True, array_like=True):
    """The processed item, and the time it took."""

    item: ProcessedItem
    decode_ms: float
    process_ms: float


class Processing:
    """Decodes and processes items, one after another."""

    def __init__(self, settings: ProcessingSettings) -> None:
        """Raises `ModelLoadError`, also for a text-only model."""
        family = load_family(settings.folder, settings.dtype)
        if family is None:
            raise ModelLoadError("the model takes no media")
        self.settings = settings
        self.family: ProcessorFamily = family
        self._max_pixels = settings.max_image_pixels
        self._max_seconds = min(settings.max_audio_seconds, family.max_audio_seconds)

    def run(self, job: MediaJob) -> Processed:
        """Raises `UnprocessableMediaError` or `TooLargeError`, naming no request part."""
        start = time.perf_counter()
        decoded: Decoded
        if job.modality == "video" and "index" in job.options:
            return _film_index(job)
        if job.modality == "video" and "frames" in job.options:
            return _film_frames(job, self.family.film_resample)
        if job.modality == "image":
            decoded = decode_image(job.data, self._max_pixels)
        elif job.modality == "video":
            decoded = decode_film_item(job.data, job.options, self._max_pixels)
        else:
            decoded = decode_audio(job.data, self.family.sampling_rate, self._max_seconds)
        middle = time.perf_counter()
        item = self.family.process(job.modality, decoded, job.options)
        end = time.perf_counter()
        return Processed(item, (middle - start) * 1e3, (end - middle) * 1e3)


def makes_item(job: MediaJob) -> bool:
    """Whether the job's result is an item: not what is in a film's file, or its frames."""
    return job.modality != "video" or not {"index", "frames"} & job.options.keys()


NO_EXPANSION = Expansion(((0, 1),), 0)
"""Of what is no item yet: the shortest that the pool takes."""


def _film_index(job: MediaJob) -> Processed:
    pixels, seconds = convert(job.options["index"], tuple[int, float])
    start = time.perf_counter()
    index = msgspec.msgpack.encode(index_film(job.data, FilmLimits(pixels, seconds)))
    arrays = {"index": Array("uint8", (len(index),), index)}
    took = (time.perf_counter() - start) * 1e3
    return Processed(ProcessedItem("video", arrays, NO_EXPANSION), took, 0.0)


def _film_frames(job: MediaJob, resample: int) -> Processed:
    wanted = convert(job.options["frames"], tuple[int, ...])
    width, height = (convert(job.options.get(name, 0), int) for name in ("width", "height"))
    start = time.perf_counter()
    frames = np.stack(decode_frames(job.data, wanted, width, height, resample))
    arrays = {"frames": Array("uint8", frames.shape, frames.reshape(-1).data)}
    took = (time.perf_counter() - start) * 1e3
    return Processed(ProcessedItem("video", arrays, NO_EXPANSION), took, 0.0)


def decode_film_item(
    data: bytes | memoryview, options: Options, max_pixels: int
) -> tuple[Image.Image, ...]:
    """The frames of one item, which `pack_frames` has packed. Raises as `decode_image` does."""
    try:
        frames = unpack_frames(data)
    except ValueError as error:
        raise UnprocessableMediaError(str(error)) from None
    width, height = (convert(options.get(name, 0), int) for name in ("width", "height"))
    if width < 1 or height < 1:
        raise UnprocessableMediaError("the frames do not belong to a film")
    if bytes(data[: len(LEVELS)]) != LEVELS:
        # A frame that is repeated to fill up the item is decoded once.
        encoded = [bytes(frame) for frame in frames]
        found = {each: decode_image(each, max_pixels, upright=False) for each in {*encoded}}
        return tuple(found[each] for each in encoded)
    if any(len(frame) != 3 * width * height for frame in frames):
        raise UnprocessableMediaError("the frames are not of the size that was asked for")
    return tuple(Image.frombytes("RGB", (width, height), bytes(frame)) for frame in frames)


def decode_image(data: bytes | memoryview, max_pixels: int, *, upright: bool = True) -> Image.Image:
    """The picture in mode RGB; `upright` if it is turned as its EXIF orientation says.

    Raises `UnprocessableMediaError` or `TooLargeError`; and `MemoryError`, which says nothing about
    the picture.
    """
    image = _open_image(data, max_pixels)
    try:
        return _to_rgb(ImageOps.exif_transpose(image) if upright else image)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  decoders raise anything on hostile bytes, with unsafe texts
        raise UnprocessableMediaError(
            f"the image is broken or incomplete ({image.format})"
        ) from None


def _open_image(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    """The picture with its header read and checked, and no pixel decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes that are checked below
            image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except Image.DecompressionBombError:
        raise _too_many_pixels(max_pixels) from None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  see decode_image
        raise UnprocessableMediaError(
            "the data is not a readable PNG, JPEG, WebP or GIF image"
        ) from None
    _check_size(*image.size, max_pixels)
    return image


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise UnprocessableMediaError("the image is empty")
    if width * height > max_pixels:
        raise _too_many_pixels(max_pixels)
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise UnprocessableMediaError(
            f"the image is more than {MAX_SIDE_RATIO} times longer than wide, or wider than long"
        )


def _too_many_pixels(max_pixels: int) -> TooLargeError:
    return TooLargeError(f"the image has more than {max_pixels} pixels")


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def decode_audio(data: bytes | memoryview, rate: int, max_seconds: float) -> Samples:
    """Mono samples at `rate` Hz, shape [n], n >= 1.

    Raises `UnprocessableMediaError`, or `TooLargeError` for more than `max_seconds`.
    """
    if not _known_magic(bytes(data[:12])):
        raise _unreadable_sound()
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            _check_sound(file, max_seconds)
            source_rate = int(file.samplerate)
            mono = _read_mono(file, int(max_seconds * source_rate))
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError):
        raise _unreadable_sound() from None
    if mono is None:
        raise _too_many_seconds(max_seconds)
    if not len(mono):
        raise UnprocessableMediaError("the audio is empty")
    if not np.isfinite(mono).all():
        raise UnprocessableMediaError("the audio holds samples that are no numbers")
    return _resample(mono, source_rate, rate)


def _known_magic(head: bytes) -> bool:
    """Whether the first bytes are of one of the four formats; the library knows many more."""
    wav = head[:4] == b"RIFF" and head[8:12] == b"WAVE"
    mp3 = head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0)
    return wav or mp3 or head[:4] in (b"fLaC", b"OggS")


def _check_sound(file: Any, max_seconds: float) -> None:
    if file.format not in AUDIO_CONTAINERS:
        raise _unreadable_sound()
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise UnprocessableMediaError(
            f"the audio's sample rate is not between {MIN_RATE} and {MAX_RATE} Hz"
        )
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise UnprocessableMediaError(f"the audio has more than {MAX_CHANNELS} channels")
    if file.frames > max_seconds * file.samplerate:
        raise _too_many_seconds(max_seconds)


def _read_mono(file: Any, max_frames: int) -> Samples | None:
    """All frames, channels averaged; None when there are more than `max_frames`."""
    blocks: list[Samples] = []
    total = 0
    while True:
        block = file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)
        if not len(block):
            break
        total += len(block)
        if total > max_frames:
            return None
        blocks.append(block[:, 0] if block.shape[1] == 1 else block.mean(axis=1))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _resample(mono: Samples, source_rate: int, rate: int) -> Samples:
    if source_rate == rate:
        return np.ascontiguousarray(mono)
    length = math.ceil(len(mono) * rate / source_rate)
    resampled = soxr.resample(mono, source_rate, rate, quality="HQ")[:length]
    out = np.zeros(length, np.float32)
    out[: len(resampled)] = resampled
    return out


def _unreadable_sound() -> UnprocessableMediaError:
    return UnprocessableMediaError("the data is not readable WAV, FLAC, Ogg or MP3 audio")


def _too_many_seconds(max_seconds: float) -> TooLargeError:
    return TooLargeError(f"the audio is longer than {max_seconds:g} seconds")
