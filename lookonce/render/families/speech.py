"""Encoder-decoder families: sounds that the decoder cross-attends to, none of them in a prompt.

A file of any length is decoded and processed once, as a whole. What the model hears at a time is a
*window* of it, which is cut out of the processed whole and is an item of its own: `window`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import (
    STORAGE,
    check_arrays,
    float_array,
    int64_array,
    refuse_arrays,
)
from lookonce.render.families.base import Decoded, Options, ProcessorFamily
from lookonce.render.families.processor_files import ProcessorFiles
from lookonce.render.families.whisper import WhisperSound
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem

MAX_SECONDS = 24 * 3600.0
NO_TOKEN = 0
"""The token of an expansion whose positions are in no prompt."""


class SpeechProcessing(ProcessorFamily):
    """A family whose processed items are whole files.

    A *frame* is the unit of a window's start: `frames_per_second` of them in a second. An item has
    `num_samples` [1] beside its features.
    """

    modalities = ("audio",)
    encoder_decoder: ClassVar[bool] = True
    max_audio_seconds = MAX_SECONDS
    max_items = 1
    frames_per_second: int
    window_frames: int
    """Frames of the longest window."""

    def placeholder_token_id(self, modality: Modality) -> int:
        raise ModelLoadError("an encoder-decoder's sound has no place in a prompt")

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self._expansion(self.num_rows(size[0]))

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        return (self.window_frames * self.sampling_rate // self.frames_per_second,)

    @abstractmethod
    def num_rows(self, num_samples: int) -> int:
        """Encoder positions of a window of so many samples."""

    @abstractmethod
    def num_frames(self, item: ProcessedItem) -> int:
        """Frames of a processed file, with what pads it."""

    @abstractmethod
    def window(self, item: ProcessedItem, start: int) -> ProcessedItem:
        """The item of frames `[start, start + window_frames)` of a processed file, in memory of its
        own."""

    @abstractmethod
    def features_of(self, num_samples: int) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype and shape of the features of a file of so many samples."""

    def check_processed(self, item: ProcessedItem) -> None:
        """Whoever cuts windows out of a file goes by its number of samples."""
        sizes = item.arrays.get("num_samples")
        if sizes is None or (sizes.dtype, sizes.shape) != ("int64", (1,)):
            raise refuse_arrays("num_samples must be one int64")
        num_samples = self.num_samples(item)
        if not 0 < num_samples <= self.max_audio_seconds * self.sampling_rate:
            raise refuse_arrays(f"a sound of {num_samples} samples")
        name, dtype, shape = self.features_of(num_samples)
        check_arrays(item.arrays, {name: (dtype, shape), "num_samples": ("int64", (1,))})
        if item.expansion != self._expansion_of_file(num_samples):
            raise refuse_arrays("the sound has another number of rows")

    def _expansion_of_file(self, num_samples: int) -> Expansion:
        """Of its first window."""
        longest = self.window_frames * self.sampling_rate // self.frames_per_second
        return self._expansion(self.num_rows(min(num_samples, longest)))

    @staticmethod
    def num_samples(item: ProcessedItem) -> int:
        return int(np.frombuffer(item.arrays["num_samples"].data, np.int64)[0])

    def _expansion(self, rows: int) -> Expansion:
        return Expansion(((NO_TOKEN, rows),), NO_TOKEN)

    def _item(self, features: dict[str, Array], num_samples: int, rows: int) -> ProcessedItem:
        arrays = {**features, "num_samples": int64_array(num_samples)}
        return ProcessedItem("audio", arrays, self._expansion(rows))


class WhisperProcessing(SpeechProcessing):
    """Whisper's: log-mel features of 10 ms frames; windows of 30 seconds.

    As transformers does, a file of at most one window is padded with silence to it, and in a longer
    one levels are relative to the loudest of the whole file; windows that reach beyond the end are
    padded with zeros.
    """

    model_types = ("whisper",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._sound = WhisperSound(files.feature_extractor, dtype)
        self.sampling_rate = self._sound.sampling_rate
        self.frames_per_second = self._sound.sampling_rate // self._sound.hop_length
        self._rows = int(files.config.get("max_source_positions", 1500))
        self.window_frames = 2 * self._rows
        if self._sound.span_frames != self.window_frames:
            raise ModelLoadError(
                f"the feature extractor's windows have {self._sound.span_frames} frames; the "
                f"encoder takes {self.window_frames}"
            )

    def num_rows(self, num_samples: int) -> int:
        return self._rows

    def features_of(self, num_samples: int) -> tuple[str, str, tuple[int, ...]]:
        frames = max(self._sound.span, num_samples) // self._sound.hop_length
        return "input_features", self.dtype, (self._sound.num_bins, frames)

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`input_features` [mel bins, frames]."""
        assert isinstance(decoded, np.ndarray)
        mel = self._sound.log_mel_of_file(decoded)
        return self._item(
            {"input_features": float_array(mel, self.dtype)}, len(decoded), self._rows
        )

    def num_frames(self, item: ProcessedItem) -> int:
        return item.arrays["input_features"].shape[1]

    def window(self, item: ProcessedItem, start: int) -> ProcessedItem:
        whole = item.arrays["input_features"]
        bins, frames = whole.shape
        stored = np.frombuffer(whole.data, STORAGE[self.dtype]).reshape(bins, frames)
        cut = np.zeros((bins, self.window_frames), stored.dtype)  # the bits of 0.0 are 0
        part = stored[:, start : start + self.window_frames]
        cut[:, : part.shape[1]] = part
        array = Array(self.dtype, cut.shape, cut.reshape(-1).view(np.uint8).data)
        return ProcessedItem("audio", {"input_features": array}, self._expansion(self._rows))


class MoonshineProcessing(SpeechProcessing):
    """Moonshine's: the samples themselves; windows of 30 seconds, the last one as long as it is."""

    model_types = ("moonshine",)
    frames_per_second = 100
    window_frames = 3000
    least_samples = 1600
    """A shorter window is padded with silence: the encoder's convolutions need some 900 samples."""

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self.sampling_rate = int(files.feature_extractor.get("sampling_rate", 16000))
        self._normalizes = bool(files.feature_extractor.get("do_normalize", False))
        self._frame = self.sampling_rate // self.frames_per_second

    def num_rows(self, num_samples: int) -> int:
        """Of three convolutions: kernels 127, 7 and 3, strides 64, 3 and 2."""
        length = max(num_samples, self.least_samples)
        for kernel, stride in ((127, 64), (7, 3), (3, 2)):
            length = (length - kernel) // stride + 1
        return length

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`input_values` [samples] of the whole file, in float32."""
        assert isinstance(decoded, np.ndarray)
        rows = self.num_rows(min(len(decoded), self.window_frames * self._frame))
        return self._item({"input_values": float_array(decoded, "float32")}, len(decoded), rows)

    def features_of(self, num_samples: int) -> tuple[str, str, tuple[int, ...]]:
        return "input_values", "float32", (num_samples,)

    def num_frames(self, item: ProcessedItem) -> int:
        return -(-self.num_samples(item) // self._frame)

    def window(self, item: ProcessedItem, start: int) -> ProcessedItem:
        """`input_values` [samples]."""
        part = self._part(item, start)
        wave = np.zeros(max(len(part), self.least_samples), np.float32)
        wave[: len(part)] = part
        arrays = {"input_values": float_array(wave, self.dtype)}
        return ProcessedItem("audio", arrays, self._expansion(self.num_rows(len(part))))

    def _part(self, item: ProcessedItem, start: int) -> NDArray[np.float32]:
        whole = np.frombuffer(item.arrays["input_values"].data, np.float32)
        first = start * self._frame
        part = whole[first : first + self.window_frames * self._frame]
        if self._normalizes:  # as Wav2Vec2FeatureExtractor does
            part = (part - part.mean()) / np.sqrt(part.var() + 1e-7)
        return part


class MoonshineStreamingProcessing(MoonshineProcessing):
    """Moonshine Streaming's: samples padded to whole frames of 5 ms, and how many they are."""

    model_types = ("moonshine_streaming",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        encoder = files.config.get("encoder_config") or {}
        rate, milliseconds = encoder.get("sample_rate", 16000), encoder.get("frame_ms", 5.0)
        self._encoder_frame: int = round(float(rate) * float(milliseconds) / 1000)

    def num_rows(self, num_samples: int) -> int:
        """Of two causal convolutions of stride 2 over the frames."""
        frames = -(-num_samples // self._encoder_frame)
        half = -(-frames // 2)
        return -(-half // 2)

    def window(self, item: ProcessedItem, start: int) -> ProcessedItem:
        """`input_values` [samples], `num_samples` [1]."""
        part = self._part(item, start)
        wave = np.zeros(-(-len(part) // self._encoder_frame) * self._encoder_frame, np.float32)
        wave[: len(part)] = part
        features = {"input_values": float_array(wave, self.dtype)}
        return self._item(features, len(part), self.num_rows(len(part)))
