"""Prompts with pictures and sounds: what the runner gets, and what plain Hugging Face gets.

Both come from the family's own image processor and feature extractor; how they become items and
arguments of `generate` is written here a second time, independently of the renderer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

from lookonce.types.media import Array, Expansion, MediaFeature, Modality, ProcessedItem, feature_at
from tests.support.device import ON_CUDA

Part = str | Image.Image | np.ndarray
Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Case:
    """One prompt, for both sides."""

    token_ids: np.ndarray
    features: tuple[MediaFeature, ...]
    items: dict[bytes, ProcessedItem]
    reference: Tensors
    """Keyword arguments of `generate`."""

    def keys(self, modality: Modality) -> list[bytes]:
        return [feature.key for feature in self.features if feature.modality == modality]


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


class Processing:
    """How one family's media become items and arguments of `generate`; the default takes none."""

    sees = hears = False
    short_among_long = True
    """Whether transformers encodes a sound shorter than a second as it does alone when a longer one
    is in the same prompt."""

    def __init__(self, folder: Path, config: Any) -> None:
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if self.sees:
            self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        if self.hears:
            self.sounds = AutoFeatureExtractor.from_pretrained(folder)

    def image(self, image: Image.Image) -> tuple[Arrays, Expansion]:
        raise NotImplementedError

    def sound(self, wave: np.ndarray) -> tuple[Arrays, Expansion]:
        raise NotImplementedError

    def reference_images(self, tokens: torch.Tensor, items: list[Tensors]) -> Tensors:
        return {"pixel_values": torch.stack([item["pixel_values"] for item in items])}

    def reference_sounds(self, items: list[Tensors]) -> Tensors:
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def runs(self, text: str) -> tuple[tuple[int, int], ...]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return tuple((token, len(list(same))) for token, same in groupby(ids))

    def mel(self, wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [mel bins, frames] padded to the extractor's chunk, and their mask [frames]."""
        found = self.sounds(
            wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np"
        )
        return found["input_features"][0], found["attention_mask"][0].astype(np.int64)


class Llava(Processing):
    sees = True

    def image(self, image):
        pixels = self.images(image, return_tensors="np")["pixel_values"][0]
        token = self.config.image_token_id
        return {"pixel_values": pixels}, Expansion(((token, self.config.image_seq_length),), token)


class Gemma3(Llava):
    def image(self, image):
        pixels = self.images(image, return_tensors="np")["pixel_values"][0]
        rows = "<image_soft_token>" * self.config.mm_tokens_per_image
        runs = self.runs(f"\n\n<start_of_image>{rows}<end_of_image>\n\n")
        return {"pixel_values": pixels}, Expansion(runs, self.config.image_token_id)

    def reference_images(self, tokens, items):
        types = (tokens == self.config.image_token_id).int()
        return {**super().reference_images(tokens, items), "token_type_ids": types}


class Pixtral(Processing):
    sees = True

    def image(self, image):
        merge = getattr(self.config, "spatial_merge_size", 1)
        patch = self.config.vision_config.patch_size * merge
        found = self.images(
            image, patch_size={"height": patch, "width": patch}, return_tensors="np"
        )
        height, width = (int(side) for side in found["image_sizes"][0])
        arrays = {
            "pixel_values": found["pixel_values"][0][:, :height, :width],
            "image_sizes": np.array([height, width]),
        }
        lines = ["[IMG]" * (width // patch)] * (height // patch)
        return arrays, Expansion(
            self.runs("[IMG_BREAK]".join(lines) + "[IMG_END]"), self.config.image_token_id
        )

    def reference_images(self, tokens, items):
        sizes = torch.stack([item["image_sizes"] for item in items])
        pixels = torch.zeros(len(items), 3, *sizes.max(0).values.tolist())
        for row, item in zip(pixels, items, strict=True):
            height, width = item["image_sizes"].tolist()
            row[:, :height, :width] = item["pixel_values"]
        return {"pixel_values": pixels, "image_sizes": sizes}


class Idefics3(Processing):
    sees = True

    def image(self, image):
        found = self.images([[image]], return_row_col_info=True, return_tensors="np")
        arrays = {name: found[name][0] for name in ("pixel_values", "pixel_attention_mask")}
        return arrays, Expansion(
            self.runs(self._text(found["rows"][0][0], found["cols"][0][0])),
            self.config.image_token_id,
        )

    def _text(self, rows: int, columns: int) -> str:
        tile = "<image>" * 4
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"<fake_token_around_image><row_{row}_col_{column}>{tile}"
            text += "\n"
        text += "\n" if rows else ""
        return f"{text}<fake_token_around_image><global-img>{tile}<fake_token_around_image>"

    def reference_images(self, tokens, items):
        return {name: torch.cat([item[name] for item in items])[None] for name in items[0]}


class QwenVL(Processing):
    sees = True

    def image(self, image):
        found = self.images(image, return_tensors="np")
        grid = found["image_grid_thw"][0]
        t, height, width = grid.tolist()
        token = self.config.image_token_id
        start, end = self.config.vision_start_token_id, self.config.vision_end_token_id
        runs = ((start, 1), (token, t * height * width // 4), (end, 1))
        arrays = {"pixel_values": found["pixel_values"], "image_grid_thw": grid}
        return arrays, Expansion(runs, token, (t, height // 2, width // 2))

    def reference_images(self, tokens, items):
        return {
            "pixel_values": torch.cat([item["pixel_values"] for item in items]),
            "image_grid_thw": torch.stack([item["image_grid_thw"] for item in items]),
            "mm_token_type_ids": (tokens == self.config.image_token_id).int(),
        }


class QwenOmni(QwenVL):
    hears = True

    def reference_images(self, tokens, items):
        found = super().reference_images(tokens, items)
        del found["mm_token_type_ids"]
        return found

    def sound(self, wave):
        mel, mask = self.mel(wave)
        frames = int(mask.sum())
        token = self.config.audio_token_id
        start, end = self.config.audio_start_token_id, self.config.audio_end_token_id
        runs = ((start, 1), (token, _whisper_rows(frames)), (end, 1))
        return {"input_features": mel[:, :frames]}, Expansion(runs, token)

    def reference_sounds(self, items):
        mels = [item["input_features"] for item in items]
        longest = max(mel.shape[1] for mel in mels)
        padded = torch.zeros(len(mels), mels[0].shape[0], longest)
        mask = torch.zeros(len(mels), longest, dtype=torch.long)
        for row, mel in enumerate(mels):
            padded[row, :, : mel.shape[1]] = mel
            mask[row, : mel.shape[1]] = 1
        return {"input_features": padded, "feature_attention_mask": mask}


class Qwen3Omni(QwenOmni):
    short_among_long = False

    def sound(self, wave):
        found = self.sounds(
            wave, sampling_rate=16000, padding=True, truncation=False,
            return_attention_mask=True, return_tensors="np",
        )  # fmt: skip
        mel = found["input_features"][0]
        assert mel.shape[1] == found["attention_mask"].sum()
        spans, rest = divmod(mel.shape[1], 100)
        token = self.config.audio_token_id
        start, end = self.config.audio_start_token_id, self.config.audio_end_token_id
        runs = ((start, 1), (token, 13 * spans + -(-rest // 8)), (end, 1))
        return {"input_features": mel}, Expansion(runs, token)


class QwenAudio(Processing):
    hears = True

    def sound(self, wave):
        mel, mask = self.mel(wave)
        token = self.config.audio_token_id
        arrays = {"input_features": mel, "feature_attention_mask": mask}
        return arrays, Expansion(((token, _whisper_rows(int(mask.sum()))),), token)


class Voxtral(Processing):
    hears = True

    def sound(self, wave):
        span = self.sounds.n_samples
        padded = np.pad(wave, (0, -len(wave) % span))
        chunks = [self.mel(chunk)[0] for chunk in padded.reshape(-1, span)]
        rows = self.config.audio_config.max_source_positions // 4
        token = self.config.audio_token_id
        return {"input_features": np.stack(chunks)}, Expansion(
            ((token, rows * len(chunks)),), token
        )

    def reference_sounds(self, items):
        return {"input_features": torch.cat([item["input_features"] for item in items])}


def _whisper_rows(frames: int) -> int:
    """Rows after a convolution of stride 2 and pooling by 2."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


PROCESSING: dict[str, type[Processing]] = {
    "llava": Llava,
    "mistral3": Pixtral,
    "gemma3": Gemma3,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "qwen2_5_omni_thinker": QwenOmni,
    "qwen3_omni_moe_thinker": Qwen3Omni,
    "qwen2_audio": QwenAudio,
    "voxtral": Voxtral,
}


def processing_for(folder: Path, config: Any) -> Processing:
    chosen = PROCESSING.get(config.model_type, Processing)
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        chosen = Pixtral
    return chosen(folder, config)


class CaseMaker:
    """Makes cases for one folder of a supported kind."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._processing = processing_for(folder, config)
        self.sees, self.hears = self._processing.sees, self._processing.hears
        self.short_among_long = self._processing.short_among_long

    def case(self, *parts: Part) -> Case:
        """Text and media in order; equal media get equal keys."""
        ids: list[int] = []
        features, items, processed = [], {}, []
        for part in parts:
            if isinstance(part, str):
                ids += self._processing.tokenizer.encode(part, add_special_tokens=False)
                continue
            item = self._item(part)
            key = hashlib.sha256(part.tobytes() + str(np.shape(part)).encode()).digest()
            features.append(feature_at(key, item.modality, item.expansion, len(ids)))
            items[key] = item
            processed.append(item)
            ids += item.expansion.token_ids()
        reference = self._reference(ids, processed)
        return Case(np.array(ids, np.int32), tuple(features), items, reference)

    def _item(self, part: Image.Image | np.ndarray) -> ProcessedItem:
        is_image = isinstance(part, Image.Image)
        process = self._processing.image if is_image else self._processing.sound
        arrays, expansion = process(part)
        stored = {name: array(np.asarray(value)) for name, value in arrays.items()}
        return ProcessedItem("image" if is_image else "audio", stored, expansion)

    def _reference(self, ids: list[int], items: list[ProcessedItem]) -> Tensors:
        tokens = torch.tensor([ids])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        images = [_tensors(item) for item in items if item.modality == "image"]
        sounds = [_tensors(item) for item in items if item.modality == "audio"]
        if images:
            inputs |= self._processing.reference_images(tokens, images)
        if sounds:
            inputs |= self._processing.reference_sounds(sounds)
        return inputs


def _tensors(item: ProcessedItem) -> Tensors:
    return {
        name: torch.frombuffer(bytearray(a.data), dtype=getattr(torch, a.dtype)).view(a.shape)
        for name, a in item.arrays.items()
    }


KINDS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss"),
    *("llava", "pixtral", "mistral3", "gemma3", "idefics3", "smolvlm"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "nano", "qwen3_omni"),
    *("qwen3_5", "qwen3_5_moe", "qwen2_audio", "voxtral"),
)
ALL_MODELS = bool(os.environ.get("ALL_MODELS"))
"""Set by `make test-models`: each test with every type of model it is for."""
COMPARED = (
    KINDS
    if ALL_MODELS
    else (
        *("qwen3_moe", "gemma2", "gpt_oss", "pixtral", "gemma3", "idefics3"),
        *("qwen3_vl", "nano", "qwen2_audio", "voxtral"),
    )
)
"""The kinds that are compared now: each way to attend, to place media and to count positions. Those
of Qwen2.5-VL and Qwen3-Omni are compared with films, and with adapters."""
MAX_LOGIT_ERROR = 1e-3 if ON_CUDA else 1e-4  # against a CPU: a GPU adds in another order
