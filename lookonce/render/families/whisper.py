"""Sound as Whisper's feature extractor takes it, padded with silence to spans of a fixed length."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import float_array
from lookonce.render.families.folder import Json
from lookonce.render.families.hf import whisper_feature_extractor
from lookonce.render.families.mel import MelSettings, padded_log_mel
from lookonce.types.media import Array


class WhisperSound:
    """A feature extractor's settings, from its JSON, and its features (in workers)."""

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
        """Samples the encoder takes at once."""
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

    @cached_property
    def _mel(self) -> MelSettings:
        extractor = whisper_feature_extractor(self._config)
        return MelSettings(
            filters=np.asarray(extractor.mel_filters, np.float64),
            n_fft=extractor.n_fft,
            hop_length=extractor.hop_length,
            max_samples=extractor.n_samples,
        )
