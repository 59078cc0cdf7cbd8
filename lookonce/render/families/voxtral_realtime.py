"""Voxtral Realtime: silence, the sound and silence again, in frames of 80 ms, one for each token.

    tokens    <s> [STREAMING_PAD] …                       1 + left pad + delay: the whole prompt
    sound     silence (left pad) │ the sound │ silence    of which a clip or a session is made

The prompt is the same for every sound: no text goes into it. It is as mistral_common writes it,
which is not needed for that; `tekken.json`, where there is one, says how long the silence before
the sound is.

Levels are relative to a fixed maximum, and a frame depends on samples near it alone. So a live
sound has the frames of the whole clip, whatever pieces it comes in (`LiveSound`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import Arrays, check_arrays, float_array
from lookonce.render.families.base import Decoded, Options, ProcessorFamily
from lookonce.render.families.processor_files import ProcessorFiles, read_file
from lookonce.render.families.whisper import MelSettings, log_spectrum
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem

Content = TypeVar("Content")
PAD = "[STREAMING_PAD]"
BEGIN = "<s>"
LEFT_PAD = 32
"""Frames of silence before a sound, where no tekken.json says another number."""
BUFFER = 10
"""Frames of silence after a sound beside those of the delay: no word takes longer to be written."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that names special tokens."""

    added_tokens: list[_AddedToken] = []


class _TekkenToken(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenAudio(msgspec.Struct):
    streaming_n_left_pad_tokens: int = LEFT_PAD


class _TekkenFile(msgspec.Struct):
    """The part of tekken.json that names special tokens and says how sound is padded."""

    special_tokens: list[_TekkenToken] = []
    audio: _TekkenAudio | None = None


class VoxtralRealtimeProcessing(ProcessorFamily):
    model_types = ("voxtral_realtime",)
    modalities = ("audio",)
    max_items = 1

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        config, sound = files.config, files.feature_extractor
        self._hop_length = int(sound.get("hop_length", 160))
        self._n_fft = int(sound.get("n_fft", 400))
        self._num_bins = int(sound.get("feature_size", 128))
        self._loudest = float(sound.get("global_log_mel_max") or 1.5)
        self.sampling_rate = int(sound.get("sampling_rate", 16000))
        self._mel_per_frame = int(config.get("audio_length_per_tok", 8))
        tekken = _decoded(files, "tekken.json", _TekkenFile)
        ids = {token.token_str: token.rank for token in tekken.special_tokens}
        tokenizer = _decoded(files, "tokenizer.json", _TokenizerFile)
        ids |= {token.content: token.id for token in tokenizer.added_tokens}
        self._pad = _named(ids, PAD)
        self._delay = int(config.get("default_num_delay_tokens", 6))
        self.left_pad = LEFT_PAD if tekken.audio is None else _left_pad(tekken.audio)
        self.right_pad = self._delay + 1 + BUFFER
        self.whole_prompt: tuple[int, ...] = (
            _named(ids, BEGIN),
            *[self._pad] * (self.left_pad + self._delay),
        )
        text = config.get("text_config") or {}
        longest = int(text.get("max_position_embeddings", 131072))
        room = longest - self.left_pad - self.right_pad
        self.max_audio_seconds = room * self.frame_samples / self.sampling_rate

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return self._mel_per_frame * self._hop_length

    @property
    def samples_around(self) -> int:
        """Samples of a frame and of the windows that reach beyond it, less the frame's own."""
        return self._n_fft - self._hop_length

    @property
    def samples_before(self) -> int:
        """Samples by which the first window begins before its frame."""
        return self._n_fft // 2

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._pad

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self._expansion(self.left_pad + -(-size[0] // self.frame_samples) + self.right_pad)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        shape = (None, self._num_bins, self._mel_per_frame)
        check_arrays(arrays, {"input_features": (self.dtype, shape)})
        return self._expansion(arrays["input_features"].shape[0])

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        frames = max_tokens - self.left_pad - self.right_pad
        return (frames * self.frame_samples,) if frames > 0 else None

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`input_features` [frames, mel bins, mel frames of a frame]."""
        assert isinstance(decoded, np.ndarray)
        expansion = self.expansion_of_size("audio", (len(decoded),), options)
        length = expansion.length * self.frame_samples
        signal = np.zeros(length + 2 * self.samples_before, np.float32)
        start = self.samples_before + self.left_pad * self.frame_samples
        signal[start : start + len(decoded)] = decoded
        return ProcessedItem(
            "audio", {"input_features": self.frames(signal, expansion.length)}, expansion
        )

    def fingerprint(self) -> bytes:
        return blake3(
            super().fingerprint() + f"|{self.left_pad}|{self.right_pad}".encode()
        ).digest()

    def frames(self, signal: NDArray[np.float32], count: int) -> Array:
        """The first `count` frames [count, mel bins, mel frames] of a signal that begins half a
        window before them."""
        num_mel = count * self._mel_per_frame
        needed = (num_mel - 1) * self._hop_length + self._n_fft
        levels = log_spectrum(signal[:needed].astype(np.float64), self._mel)
        scaled = (np.maximum(levels, self._loudest - 8.0) + 4.0) / 4.0
        grouped = scaled.reshape(count, self._mel_per_frame, self._num_bins)
        return float_array(grouped.swapaxes(1, 2).astype(np.float32), self.dtype)

    @cached_property
    def _mel(self) -> MelSettings:
        from transformers.audio_utils import mel_filter_bank

        filters = mel_filter_bank(
            num_frequency_bins=1 + self._n_fft // 2,
            num_mel_filters=self._num_bins,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=self.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        return MelSettings(np.asarray(filters, np.float64), self._n_fft, self._hop_length, 0)

    def _expansion(self, frames: int) -> Expansion:
        return Expansion(((self._pad, frames),), self._pad)


class LiveSound:
    """Turns the samples of a live sound into frames, as they come.

    All frames together are those of the same sound as a clip.
    """

    def __init__(self, family: VoxtralRealtimeProcessing) -> None:
        self._family = family
        silence = family.samples_before + family.left_pad * family.frame_samples
        self._waiting = np.zeros(silence, np.float32)
        """From half a window before the next frame on."""
        self._num_samples = 0

    def push(self, samples: NDArray[np.float32]) -> Array | None:
        """The frames [n, mel bins, mel frames] that mono samples at the family's sampling rate
        complete; None for none."""
        self._num_samples += len(samples)
        return self._push(samples)

    def finish(self) -> Array | None:
        """The frames of the silence after the sound, in which its last words are written.

        Samples may follow, from the beginning of a frame on.
        """
        family = self._family
        missing = -self._num_samples % family.frame_samples
        self._num_samples = 0
        silence = missing + family.right_pad * family.frame_samples
        return self._push(np.zeros(silence, np.float32))

    def _push(self, samples: NDArray[np.float32]) -> Array | None:
        signal = np.concatenate((self._waiting, samples))
        step = self._family.frame_samples
        count = max(0, (len(signal) - self._family.samples_around) // step)
        self._waiting = signal[count * step :]
        return self._family.frames(signal, count) if count else None


def _decoded(files: ProcessorFiles, name: str, kind: type[Content]) -> Content:
    """The file's content; empty if there is no such file. Raises `ModelLoadError`."""
    content = read_file(files.folder, name)
    try:
        return msgspec.json.decode(content or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"the model's {name} cannot be read: {error}") from None


def _left_pad(audio: _TekkenAudio) -> int:
    if not 1 <= audio.streaming_n_left_pad_tokens <= 1024:
        raise ModelLoadError("tekken.json: streaming_n_left_pad_tokens is 1 to 1024")
    return audio.streaming_n_left_pad_tokens


def _named(ids: dict[str, int], text: str) -> int:
    if text not in ids:
        raise ModelLoadError(f"the tokenizer has no token {text}")
    return ids[text]
