"""The largest media a server takes: what warming up processes, encodes and prefills."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lookonce.config import MediaConfig
from lookonce.render.families.base import Decoded, ProcessorFamily
from lookonce.types.media import Modality


@dataclass(frozen=True, slots=True)
class Largest:
    """The item of one modality with the largest placeholder that the limits allow."""

    modality: Modality
    size: tuple[int, ...]
    """(width, height) of a picture; (samples,) of a sound at the family's rate."""
    sampling_rate: int = 0

    def decoded(self) -> Decoded:
        """A grey picture, or a quiet hum: silence takes shortcuts in some processors."""
        if self.modality == "image":
            return Image.new("RGB", (self.size[0], self.size[1]), (127, 127, 127))
        time = np.arange(self.size[0]) / self.sampling_rate
        return (0.1 * np.sin(2 * np.pi * 220.0 * time)).astype(np.float32)

    def encoded(self) -> bytes:
        """The same as a file that clients could send: PNG or WAV."""
        target, decoded = io.BytesIO(), self.decoded()
        if isinstance(decoded, Image.Image):
            decoded.save(target, "PNG", compress_level=1)
            return target.getvalue()
        with wave.open(target, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self.sampling_rate)
            file.writeframes((decoded * 32767).astype("<i2").tobytes())
        return target.getvalue()


def largest_media(
    family: ProcessorFamily, media: MediaConfig, max_tokens: int
) -> Iterator[Largest]:
    """One for each modality with a limit above 0, with a placeholder of at most `max_tokens`.

    A modality whose smallest item has more is left out.
    """
    for modality in family.modalities:
        if media.limit_per_prompt.get(modality, 0) > 0:
            size = _largest_size(family, media, modality, max_tokens)
            if size is not None:
                yield Largest(modality, size, family.sampling_rate)


def _largest_size(
    family: ProcessorFamily, media: MediaConfig, modality: Modality, max_tokens: int
) -> tuple[int, ...] | None:
    size = family.largest_size(modality, max_tokens)
    if modality == "audio":
        longest = int(media.max_audio_seconds * family.sampling_rate)
        return None if size is None else (min(size[0], longest),)
    while size is not None and size[0] * size[1] > media.max_image_pixels:
        num_tokens = family.expansion_of_size(modality, size, {}).length
        size = family.largest_size(modality, num_tokens // 2) if num_tokens > 1 else None
    return size
