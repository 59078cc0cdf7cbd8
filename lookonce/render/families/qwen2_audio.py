"""Qwen2-Audio: up to half a minute of sound, 25 tokens a second."""

from __future__ import annotations

import numpy as np

from lookonce.errors import UnprocessableMediaError
from lookonce.render.families.arrays import Arrays, check_arrays, refuse_arrays, stored_array
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.processor_files import ProcessorFiles
from lookonce.render.families.whisper import WhisperSound, num_frames
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem


class Qwen2AudioProcessing(ProcessorFamily):
    model_types = ("qwen2_audio",)
    modalities = ("audio",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._token = token_id(files.config, "audio_token_id", "audio_token_index")
        self._sound = WhisperSound(files.feature_extractor, dtype)
        self.sampling_rate = self._sound.sampling_rate
        self.max_audio_seconds = self._sound.span_seconds

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._token

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self._expansion(num_frames(size[0], self._sound.hop_length))

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        frames = self._sound.span_frames
        expected = {
            "input_features": (self.dtype, (self._sound.num_bins, frames)),
            "feature_attention_mask": ("int32", (frames,)),
        }
        check_arrays(arrays, expected)
        mask = np.frombuffer(arrays["feature_attention_mask"].data, "<i4")
        real = int(np.count_nonzero(mask))
        if not np.array_equal(mask, np.arange(frames) < real):
            raise refuse_arrays("feature_attention_mask must be ones and then zeros")
        return self._expansion(real)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        samples = min(4 * max_tokens * self._sound.hop_length, self._sound.span)
        return (samples,) if max_tokens > 0 else None

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`input_features` [mel bins, frames] of a whole span, `feature_attention_mask` [frames]:
        1 for sound, 0 for the silence that pads it."""
        assert isinstance(decoded, np.ndarray)
        frames = num_frames(len(decoded), self._sound.hop_length)
        expansion = self._expansion(frames)
        features = self._sound.features(decoded, 1)
        mask = (np.arange(self._sound.span_frames) < frames).astype(np.int32)
        arrays = {
            "input_features": Array(self.dtype, features.shape[1:], features.data),
            "feature_attention_mask": stored_array(mask, "int32"),
        }
        return ProcessedItem("audio", arrays, expansion)

    def _expansion(self, frames: int) -> Expansion:
        """A convolution of stride 2, then pooling by 2."""
        tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if tokens < 1:
            raise UnprocessableMediaError("the audio is too short for this model")
        return Expansion(((self._token, tokens),), self._token)
