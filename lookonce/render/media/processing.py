"""One media item from encoded bytes to arrays: decode, then the family's processor.

This is the heavy work of rendering. It runs in the workers of `pool`; where blocking is fine
(offline tools, tests) it may be called directly.
"""

from __future__ import annotations

import time

import msgspec

from lookonce.errors import ModelLoadError
from lookonce.render.families.base import Decoded, Options, ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.render.media.audio import decode_audio
from lookonce.render.media.decode import decode_image
from lookonce.types.media import Modality, ProcessedItem


class ProcessingSettings(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to know once."""

    folder: str
    """A Hugging Face folder or hub id."""
    dtype: str
    """The model's."""
    max_image_pixels: int
    max_audio_seconds: float


class MediaJob(msgspec.Struct, frozen=True, array_like=True):
    """One item to decode and process; `options` are `ProcessorFamily.item_options`."""

    modality: Modality
    data: bytes | memoryview
    """The encoded media."""
    options: Options = {}


class Processed(msgspec.Struct, frozen=True, array_like=True):
    """The item, and where the time went."""

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
        self.family: ProcessorFamily = family
        self._max_pixels = settings.max_image_pixels
        self._max_seconds = min(settings.max_audio_seconds, family.max_audio_seconds)

    def run(self, job: MediaJob) -> Processed:
        """Raises `UnprocessableMediaError` or `TooLargeError`, naming no request part."""
        start = time.perf_counter()
        decoded = self._decode(job)
        middle = time.perf_counter()
        item = self.family.process(job.modality, decoded, job.options)
        end = time.perf_counter()
        return Processed(item, (middle - start) * 1e3, (end - middle) * 1e3)

    def _decode(self, job: MediaJob) -> Decoded:
        if job.modality == "image":
            return decode_image(job.data, self._max_pixels)
        return decode_audio(job.data, self.family.sampling_rate, self._max_seconds)
