"""Whisper's log-mel features, computed on the real length of a sound, and padded to spans.

`WhisperFeatureExtractor` pads every clip to its chunk length (30 s and more) and works on all of
it, with torch or with a Python loop over frames. `log_mel` works only on the frames that contain
sound, in double precision. It agrees with the extractor's NumPy path to 2e-7, with torch's to 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import float_array
from lookonce.render.families.processor_files import Json, whisper_feature_extractor
from lookonce.types.media import Array

BLOCK_FRAMES = 2048
"""Frames transformed at once; bounds the memory for long clips."""
SILENCE, RANGE = -10.0, 8.0
"""log10 of the power of silence, and the largest distance of a level from the loudest one."""


@dataclass(frozen=True, slots=True)
class MelSettings:
    """`filters` is [n_fft // 2 + 1, mel bins]; lengths are in samples."""

    filters: NDArray[np.float64]
    n_fft: int
    hop_length: int
    max_samples: int
    silence_before: bool = False
    """Whether the silence that pads to `max_samples` comes before the sound, not after it."""


class WhisperSound:
    """Sound in spans of a fixed length, padded with silence, by the settings in a folder's JSON."""

    def __init__(self, config: Json, dtype: str) -> None:
        if config.get("dither"):
            raise ModelLoadError("a feature extractor with dither gives no item an identity")
        if config.get("padding_side", "right") != "right":
            raise ModelLoadError("a feature extractor that pads on the left is not supported here")
        self.sampling_rate = int(config.get("sampling_rate", 16000))
        self.hop_length = int(config.get("hop_length", 160))
        self.num_bins = int(config.get("feature_size", 80))
        self.span_seconds = float(config.get("chunk_length", 30))
        self._config = config
        self._dtype = dtype

    @property
    def span(self) -> int:
        """Samples of one span, which the encoder takes at once."""
        return int(self.span_seconds * self.sampling_rate)

    @property
    def span_frames(self) -> int:
        return self.span // self.hop_length

    def features(self, samples: NDArray[np.float32], num_spans: int) -> Array:
        """[spans, mel bins, frames of one span] of a clip and the silence after it."""
        settings = replace(self._mel, max_samples=num_spans * self.span)
        mel = padded_log_mel(samples, settings)
        spans = mel.reshape(self.num_bins, num_spans, self.span_frames).swapaxes(0, 1)
        return float_array(spans, self._dtype)

    def log_mel_of_file(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """[mel bins, frames] of a whole file: padded with silence to one span, or as long as it is.

        The extractor's results with its default padding, and with `truncation=False,
        padding="longest"` for a file longer than a span.
        """
        settings = replace(self._mel, max_samples=max(self.span, len(samples)))
        return padded_log_mel(samples, settings)

    @cached_property
    def _mel(self) -> MelSettings:
        extractor = whisper_feature_extractor(self._config)
        return MelSettings(
            filters=np.asarray(extractor.mel_filters, np.float64),
            n_fft=extractor.n_fft,
            hop_length=extractor.hop_length,
            max_samples=extractor.n_samples,
        )


def log_mel(samples: NDArray[np.float32], settings: MelSettings) -> NDArray[np.float32]:
    """Features [mel bins, frames] of mono `samples` [n], n in 1..max; frames as `num_frames`."""
    frames = num_frames(len(samples), settings.hop_length, settings.silence_before)
    if settings.silence_before:
        levels = _levels_at_the_end(samples, settings)
        return _scaled(levels[len(levels) - frames :])
    return _scaled(_levels(samples, settings)[:frames])


def padded_log_mel(samples: NDArray[np.float32], settings: MelSettings) -> NDArray[np.float32]:
    """The same with the silence that pads the clip: [mel bins, max_samples // hop]."""
    levels = _levels(samples, settings)
    shape = (settings.max_samples // settings.hop_length, levels.shape[1])
    padded = np.full(shape, max(SILENCE, levels.max() - RANGE))
    padded[: len(levels)] = levels
    return _scaled(padded)


def num_frames(num_samples: int, hop_length: int, silence_before: bool = False) -> int:
    """Frames that begin within the sound; with `silence_before`, those that end within it."""
    return num_samples // hop_length if silence_before else -(-num_samples // hop_length)


def _levels(samples: NDArray[np.float32], settings: MelSettings) -> NDArray[np.float64]:
    """log10 mel power of every frame that overlaps the sound, [frames, mel bins], floored."""
    # Frames after the clip's last one still overlap it, and their level counts for the maximum.
    tail = -(-settings.n_fft // (2 * settings.hop_length))
    frames = num_frames(len(samples), settings.hop_length) + tail
    spectrum = _log_spectrum(_padded(samples, settings), settings)
    spectrum = spectrum[: min(frames, settings.max_samples // settings.hop_length)]
    return _floored(spectrum)


def _levels_at_the_end(samples: NDArray[np.float32], settings: MelSettings) -> NDArray[np.float64]:
    """The same for a sound after silence: the frames with sound, and some before them."""
    hop = settings.hop_length
    # The silence that frames with sound overlap, and as much again for the mirrored end.
    before = num_frames(len(samples) + 2 * settings.n_fft, hop) * hop
    signal = np.zeros(min(before, settings.max_samples))
    signal[len(signal) - len(samples) :] = samples
    mirrored = np.pad(signal, settings.n_fft // 2, mode="reflect")
    return _floored(_log_spectrum(mirrored, settings)[: len(signal) // hop])


def _floored(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    floored: NDArray[np.float64] = np.maximum(levels, levels.max() - RANGE)
    return floored


def _scaled(levels: NDArray[np.float64]) -> NDArray[np.float32]:
    """[frames, mel bins] → [mel bins, frames], as the encoder takes them."""
    return np.ascontiguousarray(((levels + 4.0) / 4.0).T, np.float32)


def _padded(samples: NDArray[np.float32], settings: MelSettings) -> NDArray[np.float64]:
    """The clip, silence for the length of a frame, and both ends mirrored by half a frame."""
    silent = np.zeros(min(settings.max_samples, len(samples) + settings.n_fft))
    silent[: len(samples)] = samples
    return np.pad(silent, settings.n_fft // 2, mode="reflect")


def _log_spectrum(signal: NDArray[np.float64], settings: MelSettings) -> NDArray[np.float64]:
    """log10 of the mel power of every frame, [frames, mel bins]."""
    n_fft = settings.n_fft
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)
    frames = np.lib.stride_tricks.sliding_window_view(signal, n_fft)[:: settings.hop_length]
    blocks = []
    for start in range(0, len(frames), BLOCK_FRAMES):
        wave = np.fft.rfft(frames[start : start + BLOCK_FRAMES] * window, axis=1)
        blocks.append((wave.real**2 + wave.imag**2) @ settings.filters)
    return np.log10(np.maximum(np.concatenate(blocks), 10**SILENCE))
