"""Voxtral: sound of any length, padded with silence to whole spans of the encoder.

mistral_common, which writes Voxtral's prompts, counts a token for every `audio_length_per_tok` (8)
frames of the padded sound after `[BEGIN_AUDIO]`: 375 for each span of 30 seconds. The encoder
gives as many for a span, and they are counted so here.
"""

from __future__ import annotations

import numpy as np

from lookonce.render.families.arrays import Arrays, check_arrays
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.processor_files import ProcessorFiles
from lookonce.render.families.whisper import WhisperSound
from lookonce.types.media import Expansion, Modality, ProcessedItem

MAX_SECONDS = 40 * 60.0
"""40 minutes, as Mistral states."""


class VoxtralProcessing(ProcessorFamily):
    """Levels are relative to the loudest of the whole sound, so it is processed as one."""

    model_types = ("voxtral",)
    modalities = ("audio",)
    max_audio_seconds = MAX_SECONDS

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._token = token_id(files.config, "audio_token_id", "audio_token_index")
        self._sound = WhisperSound(files.feature_extractor, dtype)
        self.sampling_rate = self._sound.sampling_rate
        audio = files.config.get("audio_config") or {}
        positions = int(audio.get("max_source_positions", 1500))
        joined = int(audio.get("intermediate_size", 5120)) // int(audio.get("hidden_size", 1280))
        self._tokens_per_span = positions // joined

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._token

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self._expansion(self._num_spans(size[0]))

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        span = (None, self._sound.num_bins, self._sound.span_frames)
        check_arrays(arrays, {"input_features": (self.dtype, span)})
        return self._expansion(arrays["input_features"].shape[0])

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        longest = int(self.max_audio_seconds / self._sound.span_seconds)
        spans = min(max_tokens // self._tokens_per_span, longest)
        return (spans * self._sound.span,) if spans else None

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`input_features` [spans, mel bins, frames]."""
        assert isinstance(decoded, np.ndarray)
        spans = self._num_spans(len(decoded))
        arrays = {"input_features": self._sound.features(decoded, spans)}
        return ProcessedItem("audio", arrays, self._expansion(spans))

    def _num_spans(self, num_samples: int) -> int:
        return -(-num_samples // self._sound.span)

    def _expansion(self, spans: int) -> Expansion:
        return Expansion(((self._token, spans * self._tokens_per_span),), self._token)
