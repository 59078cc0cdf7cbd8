"""Pictures, sounds and conversations as the arrays a training step takes.

Bit for bit what Hugging Face's processors make (a test compares), without their padding of every
sound to thirty seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.audio_utils import mel_filter_bank

from tools.nano import folder
from tools.nano.world.conversations import Conversation, Turn
from tools.nano.world.scenes import Scene
from tools.nano.world.sounds import Sound

PATCH, MERGE, TEMPORAL = 14, 2, 2
HOP, WINDOW, BINS = 160, 400, 128
IGNORED = -100
"""Label of a position without a loss."""


@dataclass(slots=True)
class Example:
    """One conversation. `labels[i]` is token i where the model must predict it, else IGNORED."""

    token_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    pictures: list[Scene] = field(default_factory=list)
    sounds: list[Sound] = field(default_factory=list)


class ConversationEncoder:
    """Encodes conversations as token ids, exactly as chat template and processor write them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(
        self, turns: Conversation, *, system: str | None = None, media_last: bool = False
    ) -> Example:
        """`media_last`: pictures and sounds after the question instead of before it."""
        example = Example()
        if system is not None:
            self._add(example, f"<|im_start|>system\n{system}<|im_end|>\n")
        for turn in turns:
            self._add(example, "<|im_start|>user\n")
            if not media_last:
                self._add_media(example, turn)
            self._add(example, turn.asked.question)
            if media_last:
                self._add_media(example, turn)
            self._add(example, "<|im_end|>\n<|im_start|>assistant\n")
            self._add(example, f"{turn.asked.answer}<|im_end|>", said=True)
            self._add(example, "\n")
        return example

    def _add(self, example: Example, text: str, *, said: bool = False) -> None:
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._known[text]
        example.token_ids += ids
        example.labels += ids if said else [IGNORED] * len(ids)

    def _add_media(self, example: Example, turn: Turn) -> None:
        for scene in turn.pictures:
            rows, columns = grid(scene.image)
            tokens = folder.IMAGE * (rows * columns // MERGE**2)
            self._add(example, f"{folder.VISION_START}{tokens}{folder.VISION_END}")
            example.pictures.append(scene)
        for sound in turn.sounds:
            tokens = folder.AUDIO * audio_tokens(num_frames(sound.wave))
            self._add(example, f"{folder.AUDIO_START}{tokens}{folder.AUDIO_END}")
            example.sounds.append(sound)


def grid(image: Image.Image) -> tuple[int, int]:
    """Rows and columns of patches."""
    return image.height // PATCH, image.width // PATCH


def patches(image: Image.Image) -> torch.Tensor:
    """float32 [rows * columns, 3 * TEMPORAL * PATCH**2]: the patches of each merged cell together.

    For pictures of whole cells between the smallest and the largest size, which are not resized.
    """
    mean = np.array(folder.PREPROCESSOR["image_mean"], np.float32)
    deviation = np.array(folder.PREPROCESSOR["image_std"], np.float32)
    pixels = (np.asarray(image, np.float32) / 255 - mean) / deviation
    rows, columns = grid(image)
    cells = pixels.transpose(2, 0, 1).reshape(
        3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH
    )
    cells = cells.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    shape = (*cells.shape[:5], TEMPORAL, PATCH, PATCH)
    flat = np.broadcast_to(cells, shape).reshape(rows * columns, -1)
    return torch.from_numpy(np.ascontiguousarray(flat, np.float32))


def num_frames(wave: np.ndarray) -> int:
    return -(-len(wave) // HOP)


def audio_tokens(frames: int) -> int:
    """Tokens of a sound: two halvings, as the audio tower's convolution and pooling make them."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def mel(wave: np.ndarray) -> torch.Tensor:
    """float32 [BINS, frames]: Whisper's log-mel spectrogram."""
    filters, window = _mel_constants()
    padded = torch.from_numpy(np.concatenate([wave, np.zeros(2 * WINDOW, np.float32)]))
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, return_complex=True)
    energy = filters.T @ spectrum[..., :-1].abs() ** 2
    loudness = torch.clamp(energy, min=1e-10).log10()
    loudness = torch.maximum(loudness, loudness.max() - 8.0)
    return ((loudness + 4) / 4)[:, : num_frames(wave)]


@cache
def _mel_constants() -> tuple[torch.Tensor, torch.Tensor]:
    filters = mel_filter_bank(
        num_frequency_bins=WINDOW // 2 + 1, num_mel_filters=BINS, min_frequency=0.0,
        max_frequency=8000.0, sampling_rate=16_000, norm="slaney", mel_scale="slaney",
    )  # fmt: skip
    return torch.from_numpy(filters).float(), torch.hann_window(WINDOW)
