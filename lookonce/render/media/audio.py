"""Encoded sound bytes → mono float32 samples at the processor's rate.

WAV, FLAC, Ogg and MP3 only. Rate, channels and duration are read from the header and judged
before a sample is decoded; decoding then goes block by block and stops where the header lied.
Mixing (mean of the channels) and resampling (soxr, "HQ", length rounded up) are librosa's, which
Hugging Face's examples load sound with.
"""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from lookonce.errors import TooLargeError, UnprocessableMediaError

Samples = NDArray[np.float32]

FORMATS = frozenset({"WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG"})
MIN_RATE, MAX_RATE = 4_000, 192_000
"""Hz. A forged rate would turn a small file into an endless one when it is resampled."""
MAX_CHANNELS = 16
BLOCK_FRAMES = 1 << 16


def decode_audio(data: bytes | memoryview, rate: int, max_seconds: float) -> Samples:
    """Mono samples at `rate` Hz, shape [n], n >= 1.

    Raises `UnprocessableMediaError`, or `TooLargeError` for more than `max_seconds`.
    """
    if not _known_magic(bytes(data[:12])):
        raise _unreadable()
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            _judge(file, max_seconds)
            source_rate = int(file.samplerate)
            mono = _read_mono(file, int(max_seconds * source_rate))
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError):
        raise _unreadable() from None
    if mono is None:
        raise _too_long(max_seconds)
    if not len(mono):
        raise UnprocessableMediaError("the audio is empty")
    if not np.isfinite(mono).all():
        raise UnprocessableMediaError("the audio holds samples that are no numbers")
    return _resample(mono, source_rate, rate)


def _known_magic(head: bytes) -> bool:
    """Only four formats ever reach the decoder library, which knows many more."""
    wav = head[:4] == b"RIFF" and head[8:12] == b"WAVE"
    mp3 = head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0)
    return wav or mp3 or head[:4] in (b"fLaC", b"OggS")


def _judge(file: Any, max_seconds: float) -> None:
    if file.format not in FORMATS:
        raise _unreadable()
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise UnprocessableMediaError(
            f"the audio's sample rate is not between {MIN_RATE} and {MAX_RATE} Hz"
        )
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise UnprocessableMediaError(f"the audio has more than {MAX_CHANNELS} channels")
    if file.frames > max_seconds * file.samplerate:
        raise _too_long(max_seconds)


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


def _unreadable() -> UnprocessableMediaError:
    return UnprocessableMediaError("the data is not readable WAV, FLAC, Ogg or MP3 audio")


def _too_long(max_seconds: float) -> TooLargeError:
    return TooLargeError(f"the audio is longer than {max_seconds:g} seconds")
