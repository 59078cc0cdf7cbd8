"""Sound of a session: wire formats, the input buffer, and what voice detection hears of it.

base64 ─▶ bytes of the session's format ─▶ AudioBuffer ─▶ a committed Clip ─▶ WAV for the model
                                     └─▶ VoiceFeed ─▶ 16 kHz frames for voice detection
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import soxr

from lookonce.render.media.vad import FRAME_SAMPLES, VOICE_RATE

Samples: TypeAlias = npt.NDArray[np.int16]
Encoding = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
WAV_HEAD_BYTES = 44
FEED_FRAMES = 32
"""Frames that are detected at a time: a second, so that sessions take turns."""


def _mu_law() -> Samples:
    """ITU-T G.711: the sample of each of the 256 codes."""
    code = ~np.arange(256, dtype=np.uint8)
    magnitude = (((code & 0x0F).astype(np.int32) << 3) + 0x84) << ((code & 0x70) >> 4)
    return np.where(code & 0x80, 0x84 - magnitude, magnitude - 0x84).astype(np.int16)


def _a_law() -> Samples:
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    segment = ((code & 0x70) >> 4).astype(np.int32)
    low = (code & 0x0F).astype(np.int32) << 4
    magnitude = np.where(segment == 0, low + 8, (low + 0x108) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.int16)


G711 = {"audio/pcmu": _mu_law(), "audio/pcma": _a_law()}


@dataclass(frozen=True)
class AudioFormat:
    """How the client's bytes are read; mono. 16-bit little-endian samples, or G.711 at 8 kHz."""

    encoding: Encoding
    rate: int

    @cached_property
    def sample_bytes(self) -> int:
        return 2 if self.encoding == "audio/pcm" else 1

    def num_samples(self, nbytes: int) -> int:
        return nbytes // self.sample_bytes

    def milliseconds(self, samples: int) -> int:
        return samples * 1000 // self.rate

    def samples_of(self, milliseconds: float) -> int:
        return int(milliseconds * self.rate / 1000)

    def decode(self, data: bytes | memoryview) -> Samples:
        if self.encoding == "audio/pcm":
            return np.frombuffer(data, "<i2")
        return G711[self.encoding][np.frombuffer(data, np.uint8)]


PCM_24K = AudioFormat("audio/pcm", 24_000)


@dataclass(frozen=True, slots=True)
class Clip:
    """Committed or sent sound, as the client sent it."""

    format: AudioFormat
    data: bytes

    @property
    def milliseconds(self) -> int:
        return self.format.milliseconds(self.format.num_samples(len(self.data)))

    @property
    def wav_bytes(self) -> int:
        """Of the file that `wav` makes."""
        return WAV_HEAD_BYTES + 2 * self.format.num_samples(len(self.data))

    def wav(self) -> bytes:
        """A WAV file of 16-bit samples."""
        samples = self.format.decode(self.data).astype("<i2").tobytes()
        rate = self.format.rate
        head = struct.pack("<4sI4s", b"RIFF", 36 + len(samples), b"WAVE")
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
        return head + form + struct.pack("<4sI", b"data", len(samples)) + samples


class AudioBuffer:
    """What was appended and is not committed yet.

    Positions are samples since the session began, of what was appended in all:

        0 ······ dropped or committed ······ begin ═══ held ═══ end
    """

    def __init__(self, format: AudioFormat, begin: int = 0) -> None:
        self.format = format
        self.begin = begin
        self._data = bytearray()

    @property
    def nbytes(self) -> int:
        return len(self._data)

    @property
    def end(self) -> int:
        return self.begin + self.format.num_samples(len(self._data))

    @property
    def milliseconds(self) -> int:
        return self.format.milliseconds(self.end - self.begin)

    def append(self, data: bytes) -> None:
        self._data += data

    def drop_before(self, position: int) -> int:
        """Forget what is older; the number of bytes that were dropped."""
        samples = min(max(position - self.begin, 0), self.end - self.begin)
        nbytes = samples * self.format.sample_bytes
        if nbytes:
            del self._data[:nbytes]
        self.begin += samples
        return nbytes

    def take_until(self, position: int) -> Clip:
        """Remove and return what lies before `position`."""
        samples = min(max(position - self.begin, 0), self.end - self.begin)
        data = bytes(memoryview(self._data)[: samples * self.format.sample_bytes])
        self.drop_before(position)
        return Clip(self.format, data)


class VoiceFeed:
    """Appended sound on its way to voice detection, resampled to 16 kHz a second at a time."""

    def __init__(self, format: AudioFormat, begin: int) -> None:
        """`begin` is the position of the first sample that comes."""
        self.format = format
        self._begin = begin
        self._waiting: deque[memoryview] = deque()
        self._rest = np.zeros(0, np.int16)
        self._num_heard = 0
        self._resampler: soxr.ResampleStream | None = None
        if format.rate != VOICE_RATE:
            self._resampler = soxr.ResampleStream(
                format.rate, VOICE_RATE, 1, dtype="int16", quality="LQ"
            )

    def push(self, data: bytes) -> None:
        step = self.format.rate * self.format.sample_bytes
        view = memoryview(data)
        self._waiting.extend(view[at : at + step] for at in range(0, len(data), step))

    def next_frames(self) -> bytes:
        """Whole frames of 16-bit samples, at most `FEED_FRAMES`; empty where there is none."""
        while len(self._rest) < FRAME_SAMPLES and self._waiting:
            samples = self.format.decode(self._waiting.popleft())
            if self._resampler is not None:
                samples = self._resampler.resample_chunk(samples)
            self._rest = np.concatenate([self._rest, samples])
        count = min(len(self._rest) // FRAME_SAMPLES, FEED_FRAMES) * FRAME_SAMPLES
        frames, self._rest = self._rest[:count], self._rest[count:]
        return frames.tobytes()

    def heard(self) -> int:
        """Count one more frame as detected; the position of its end."""
        self._num_heard += 1
        return self._begin + self._num_heard * FRAME_SAMPLES * self.format.rate // VOICE_RATE
