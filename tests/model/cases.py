"""Prompts with pictures and sounds: what the runner gets, and what plain Hugging Face gets.

Both come from the family's own image processor and feature extractor.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem, feature_at

Part = str | Image.Image | np.ndarray


@dataclasses.dataclass
class Case:
    """One prompt, for both sides."""

    token_ids: np.ndarray
    features: tuple[MediaFeature, ...]
    items: dict[bytes, ProcessedItem]
    reference: dict[str, torch.Tensor]
    """Keyword arguments of `generate`."""


def picture(seed: int, width: int = 120, height: int = 80) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), tuple(rng.integers(0, 255, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = rng.integers(0, width - 20), rng.integers(0, height - 20)
        box = [int(x), int(y), int(x) + 20, int(y) + 20]
        draw.ellipse(box, fill=tuple(rng.integers(0, 255, 3).tolist()))
    return image


def sound(seed: int, seconds: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    time = np.arange(int(16000 * seconds)) / 16000
    tone = np.sin(2 * np.pi * rng.integers(200, 2000) * time)
    return (0.5 * tone + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


def array(value: np.ndarray) -> Array:
    value = np.ascontiguousarray(value)
    return Array(value.dtype.name, value.shape, value.tobytes())


class CaseMaker:
    """Makes cases for one folder of a supported kind."""

    def __init__(self, folder: Path, config: Any) -> None:
        self.config = config
        self.kind = config.model_type
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if self.kind in MAKERS:
            self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.hears = self.kind == "qwen2_5_omni_thinker"
        if self.hears:
            self.sounds = AutoFeatureExtractor.from_pretrained(folder)

    def case(self, *parts: Part) -> Case:
        """Text and media in order; equal media get equal keys."""
        ids: list[int] = []
        features, items, processed = [], {}, []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part, add_special_tokens=False)
                continue
            item = self._image(part) if isinstance(part, Image.Image) else self._sound(part)
            key = hashlib.sha256(part.tobytes() + str(np.shape(part)).encode()).digest()
            features.append(feature_at(key, item.modality, item.expansion, len(ids)))
            items[key] = item
            processed.append(item)
            ids += item.expansion.token_ids()
        reference = self._reference(ids, processed)
        return Case(np.array(ids, np.int32), tuple(features), items, reference)

    def _image(self, image: Image.Image) -> ProcessedItem:
        arrays = {
            name: np.asarray(value)[0] if name != "pixel_values" or self.kind in SQUARE else value
            for name, value in self.images(image, return_tensors="np").items()
            if name in ("pixel_values", "image_grid_thw")
        }
        expansion = MAKERS[self.kind](self.config, self.tokenizer, arrays)
        return ProcessedItem("image", {k: array(v) for k, v in arrays.items()}, expansion)

    def _sound(self, wave: np.ndarray) -> ProcessedItem:
        found = self.sounds(
            wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np"
        )
        frames = int(found["attention_mask"].sum())
        mel = found["input_features"][0, :, :frames]
        rows = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        token = self.config.audio_token_id
        start, end = self.config.audio_start_token_id, self.config.audio_end_token_id
        runs = ((start, 1), (token, rows), (end, 1))
        return ProcessedItem("audio", {"input_features": array(mel)}, Expansion(runs, token))

    def _reference(self, ids: list[int], items: list[ProcessedItem]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([ids])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        images = [_tensors(item) for item in items if item.modality == "image"]
        sounds = [_tensors(item) for item in items if item.modality == "audio"]
        if images:
            inputs |= self._reference_images(tokens, images)
        if sounds:
            mels = [item["input_features"] for item in sounds]
            longest = max(mel.shape[1] for mel in mels)
            padded = torch.zeros(len(mels), mels[0].shape[0], longest)
            mask = torch.zeros(len(mels), longest, dtype=torch.long)
            for row, mel in enumerate(mels):
                padded[row, :, : mel.shape[1]] = mel
                mask[row, : mel.shape[1]] = 1
            inputs |= {"input_features": padded, "feature_attention_mask": mask}
        return inputs

    def _reference_images(
        self, tokens: torch.Tensor, images: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        pixels = [item["pixel_values"] for item in images]
        if self.kind in SQUARE:
            found = {"pixel_values": torch.stack(pixels)}
        else:
            grids = torch.stack([item["image_grid_thw"] for item in images])
            found = {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}
        is_image = (tokens == self.config.image_token_id).int()
        if self.kind == "gemma3":
            found["token_type_ids"] = is_image
        if self.kind == "qwen2_5_vl":
            found["mm_token_type_ids"] = is_image
        return found


def _tensors(item: ProcessedItem) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray(a.data), dtype=getattr(torch, a.dtype)).view(a.shape)
        for name, a in item.arrays.items()
    }


def _llava(config: Any, tokenizer: Any, arrays: dict[str, np.ndarray]) -> Expansion:
    return Expansion(((config.image_token_id, config.image_seq_length),), config.image_token_id)


def _gemma3(config: Any, tokenizer: Any, arrays: dict[str, np.ndarray]) -> Expansion:
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    token = config.image_token_id
    runs = (
        (newline, 2),
        (config.boi_token_index, 1),
        (token, config.mm_tokens_per_image),
        (config.eoi_token_index, 1),
        (newline, 2),
    )
    return Expansion(runs, token)


def _qwen(config: Any, tokenizer: Any, arrays: dict[str, np.ndarray]) -> Expansion:
    t, h, w = arrays["image_grid_thw"].tolist()
    grid = (t, h // 2, w // 2)
    token = config.image_token_id
    start, end = config.vision_start_token_id, config.vision_end_token_id
    return Expansion(((start, 1), (token, t * h * w // 4), (end, 1)), token, grid)


SQUARE = ("llava", "gemma3")
MAKERS = {
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen,
    "qwen2_5_omni_thinker": _qwen,
}
