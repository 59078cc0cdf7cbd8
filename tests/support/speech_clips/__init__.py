"""A few spoken sentences, for tests of what hears: espeak-ng's, in voices held out in training.

A file's name is its voice and its words.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True)
class SpeechClip:
    file: Path

    @property
    def voice(self) -> str:
        return self.file.stem.partition("_")[0]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.file.stem.partition("_")[2].split("_"))

    def wave(self, rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
        """[samples], mono."""
        samples, from_rate = soundfile.read(io.BytesIO(self.file.read_bytes()), dtype="float32")
        return np.asarray(soxr.resample(samples, from_rate, rate), np.float32)


def speech_clips() -> list[SpeechClip]:
    """In the order of their names."""
    return [SpeechClip(file) for file in sorted(Path(__file__).parent.glob("*.ogg"))]
