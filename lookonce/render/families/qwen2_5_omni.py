"""Qwen2.5-Omni's and Qwen3-Omni's thinkers: Qwen2-VL's pictures, and sound as log-mel frames.

Nano is of Qwen2.5-Omni's type. A folder has the thinker alone or, as published, the talker too,
which is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.render.families.arrays import Arrays, check_arrays, float_array, refuse_arrays
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.film import OPTION_NAMES as FILM_OPTIONS
from lookonce.render.families.film import FilmInfo, FilmLayout, QwenFilms
from lookonce.render.families.processor_files import ProcessorFiles, whisper_feature_extractor
from lookonce.render.families.qwen2_5_vl import OPTION_NAMES, QwenImages
from lookonce.render.families.whisper import MelSettings, log_mel, num_frames
from lookonce.types.media import Expansion, Modality, ProcessedItem

LONGEST_SOUND = 2400.0
"""Seconds of sound that Qwen3-Omni is published for; nothing in its folder says it."""
FILM_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""Pixels of a frame of a film: Qwen3-Omni's processor says it, whatever its folder has."""


class Qwen2_5OmniProcessing(ProcessorFamily):  # noqa: N801
    model_types = ("qwen2_5_omni_thinker", "qwen2_5_omni")
    modalities: tuple[Modality, ...] = ("image", "audio")

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        thinker = files.config.get("thinker_config") or files.config
        token = token_id(thinker, "image_token_id", "image_token_index")
        self.images = QwenImages(files.image_processor, token, dtype, self.memory)
        self.audio_token_id = token_id(thinker, "audio_token_id", "audio_token_index")
        sound = files.feature_extractor
        if sound.get("dither"):
            raise ModelLoadError("a feature extractor with dither gives no item an identity")
        self.sampling_rate = int(sound.get("sampling_rate", 16000))
        self.max_audio_seconds = float(sound.get("chunk_length", 30))
        self.hop_length = int(sound.get("hop_length", 160))
        # As published. The silence is cut off again, but the first frame overlaps it.
        self._silence_before = sound.get("padding_side") == "left"

    def placeholder_token_id(self, modality: Modality) -> int:
        return self.images.token_id if modality == "image" else self.audio_token_id

    def option_names(self) -> tuple[str, ...]:
        return OPTION_NAMES

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        return self.images.options(kwargs) if modality == "image" else {}

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        if modality == "image":
            return self.images.expansion(size[0], size[1], options)
        return self._audio_expansion(size[0])

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        """Sounds are `input_features` [mel bins, frames] of their real length, without padding."""
        if modality == "image":
            return self.images.expansion_of_arrays(arrays)
        check_arrays(arrays, {"input_features": (self.dtype, (self._mel_bins, None))})
        frames = arrays["input_features"].shape[1]
        limit = int(self.max_audio_seconds * self.sampling_rate) // self.hop_length
        if frames > limit:
            raise refuse_arrays(f"the sound has {frames} frames; the model takes {limit}")
        return self._frames_expansion(frames)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        if modality == "image":
            return self.images.largest_size(max_tokens)
        longest = int(self.max_audio_seconds * self.sampling_rate)
        frames = min(num_frames(longest, self.hop_length), max_tokens * 4)
        return (min(longest, frames * self.hop_length),) if max_tokens > 0 else None

    @property
    def _mel_bins(self) -> int:
        return int(self.files.feature_extractor.get("feature_size", 80))

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        if isinstance(decoded, Image.Image):
            return self.images.process(decoded, options)
        assert isinstance(decoded, np.ndarray)
        expansion = self._audio_expansion(len(decoded))
        features = self._features(decoded)
        arrays = {"input_features": float_array(features, self.dtype)}
        return ProcessedItem(modality="audio", arrays=arrays, expansion=expansion)

    def _audio_expansion(self, num_samples: int) -> Expansion:
        """About 25 tokens a second, of two strided steps over the frames."""
        return self._frames_expansion(self._num_frames(num_samples))

    def _num_frames(self, num_samples: int) -> int:
        return num_frames(num_samples, self.hop_length, self._silence_before)

    def _features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """[mel bins, frames] without padding."""
        return log_mel(samples, self._mel)

    def _num_tokens(self, frames: int) -> int:
        """Below 1 for a sound that is too short."""
        halved = (frames - 1) // 2 + 1
        return (halved - 2) // 2 + 1

    def _frames_expansion(self, frames: int) -> Expansion:
        tokens = self._num_tokens(frames)
        if tokens < 1:
            raise UnprocessableMediaError("the audio is too short for this model")
        return Expansion(((self.audio_token_id, tokens),), self.audio_token_id)

    @cached_property
    def _mel(self) -> MelSettings:
        extractor = whisper_feature_extractor(self.files.feature_extractor)
        return MelSettings(
            filters=np.asarray(extractor.mel_filters, np.float64),
            n_fft=extractor.n_fft,
            hop_length=extractor.hop_length,
            max_samples=extractor.n_samples,
            silence_before=self._silence_before,
        )


class Qwen3OmniProcessing(Qwen2_5OmniProcessing):
    """Sound without silence around it, in spans of a second that are downsampled eightfold, each by
    itself: 13 tokens a second. Films as Qwen2.5-VL's, without their sound."""

    model_types = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")
    modalities = ("image", "audio", "video")

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        if self._silence_before:
            raise ModelLoadError("a feature extractor that pads on the left is not supported here")
        thinker = files.config.get("thinker_config") or files.config
        sound = thinker.get("audio_config") or {}
        self._span_frames = 2 * int(sound.get("n_window", 50))
        self.max_audio_seconds = LONGEST_SOUND
        bounds = {"min_pixels": None, "max_pixels": None, "size": FILM_SIZE}
        self.films = QwenFilms(
            {**files.video_processor, **bounds},
            token_id(thinker, "video_token_id"),
            dtype,
            self.memory,
            rule="omni",
            tokens_per_second=float(thinker.get("position_id_per_seconds", 25)),
        )

    def placeholder_token_id(self, modality: Modality) -> int:
        video = modality == "video"
        return self.films.token_id if video else super().placeholder_token_id(modality)

    def option_names(self) -> tuple[str, ...]:
        return (*OPTION_NAMES, *FILM_OPTIONS)

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        if modality == "video":
            return self.films.options(kwargs)
        return super().item_options(modality, kwargs)

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout:
        return self.films.layout(info, options, most_frames)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        if modality == "video":
            return self.films.expansion_of_arrays(arrays)
        return super().expansion_of_arrays(modality, arrays)

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        if isinstance(decoded, tuple):
            return self.films.process(decoded, options)
        return super().process(modality, decoded, options)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        if modality == "video":
            return None
        if modality == "image" or max_tokens < 1:
            return super().largest_size(modality, max_tokens)
        frames = int(self.max_audio_seconds * self.sampling_rate) // self.hop_length
        spans = max_tokens // self._num_tokens(self._span_frames)
        frames = min(frames, spans * self._span_frames or 8 * max_tokens)
        return (frames * self.hop_length,)

    def _num_frames(self, num_samples: int) -> int:
        return num_samples // self.hop_length

    def _features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        mel = replace(self._mel, max_samples=len(samples))
        return log_mel(samples, mel)

    def _num_tokens(self, frames: int) -> int:
        spans, rest = divmod(frames, self._span_frames)
        return spans * _eighth(self._span_frames) + _eighth(rest)


def _eighth(frames: int) -> int:
    """Tokens of a span: three convolutions of stride 2."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
