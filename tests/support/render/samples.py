"""Pictures and sounds for processors to work on, and what families make of them as NumPy arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.types.media import Array

SIZES = [(1, 1), (28, 28), (64, 64), (65, 64), (300, 200), (37, 211), (1000, 30), (20, 1000)]
"""Widths and heights: tiny, square, one pixel more than whole tiles, wide, high, and very thin."""
PICTURE_KINDS = (
    *("llava", "pixtral", "mistral3", "gemma3", "idefics3", "smolvlm"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_omni", "nano"),
)
SOUND_KINDS = ("qwen2_5_omni", "nano", "qwen2_audio", "voxtral")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """A rising tone that comes and goes, with a little noise."""
    time = np.arange(round(16000 * seconds)) / 16000
    tone = np.sin(2 * np.pi * (200 + 300 * time) * time) * np.exp(-6 * (time % 0.5))
    noise = np.random.default_rng(seed).normal(size=len(time)) * 1e-3
    return (tone + noise).astype(np.float32)


def numpy_of(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)


def load(folder: Path, dtype: str = "float32") -> ProcessorFamily:
    family = load_family(folder, dtype)
    assert family is not None
    return family
