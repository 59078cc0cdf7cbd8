"""Sentences said once, kept as mel levels, so that training does not wait for a voice.

A corpus is a folder of shards. Each is a safetensors file of `SHARD` sentences, one after the
other, with the lengths of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import VoxtralRealtimeFeatureExtractor

from tools.ear import folder
from tools.ear.sentences import VOCABULARY, sentence
from tools.ear.speech import VOICES, Spoken, any_voice, loudness

SHARD = 1000
LEVELS = 10.0**-10
"""The least power of a mel bin, as the extractor has it."""
PHONEMES = (
    "_", "n", "t", "I", "d", "r", "k", "s", "D", "@", "l", "m", "eI", "z", "0", "f", "E", "b", "w",
    "aI", "V", "a", "u", "v", "i", "oU", "3", "aU", "g", "p", "h", "A@", "j", "O@", "@L", "e@",
    "dZ", "S", "O", "N", "T", "tS", "U", "o@", "A", "i@3", "i@", "IR", "OI", "aI@",
)  # fmt: skip
"""What espeak-ng says in the accents used; the first is silence. Others count as unknown, -1."""

Say = Callable[[random.Random, Sequence[str], Sequence[str]], Spoken]
"""Speaks words in one of the voices."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One sentence at a peak of 1. Times in seconds from its start."""

    mel: NDArray[np.float16]
    """[mel frames, bins]: log10 of the power."""
    loudness: float
    words: NDArray[np.int16]
    """[words], numbers of `VOCABULARY`."""
    ends: NDArray[np.float32]
    """[words]"""
    phonemes: NDArray[np.int16]
    """[phonemes], numbers of `PHONEMES`."""
    begins: NDArray[np.float32]
    """[phonemes]"""


def extractor() -> VoxtralRealtimeFeatureExtractor:
    options = {k: v for k, v in folder.FEATURES.items() if k != "feature_extractor_type"}
    return VoxtralRealtimeFeatureExtractor(**options)


def power(wave: NDArray[np.float32], filters: NDArray[np.float64]) -> NDArray[np.float32]:
    """Mel power [mel frames, bins] of a sound, as the extractor has it before the logarithm."""
    window = torch.hann_window(folder.WINDOW)
    spectrum = torch.stft(
        torch.from_numpy(wave), folder.WINDOW, folder.HOP, window=window, return_complex=True
    )
    mel = torch.from_numpy(filters).float().T @ (spectrum[:, :-1].abs() ** 2)
    return mel.T.contiguous().numpy()


def utterance(spoken: Spoken, filters: NDArray[np.float64]) -> Utterance:
    wave = spoken.wave / max(1e-3, float(np.abs(spoken.wave).max()))
    wave = np.pad(wave, (0, -len(wave) % folder.HOP)).astype(np.float32)
    numbers = {name: number for number, name in enumerate(PHONEMES)}
    return Utterance(
        mel=np.log10(np.maximum(power(wave, filters), LEVELS)).astype(np.float16),
        loudness=loudness(wave),
        words=np.array([VOCABULARY.index(word) for word in spoken.words], np.int16),
        ends=np.array(spoken.ends, np.float32),
        phonemes=np.array([numbers.get(name, -1) for _, name in spoken.phonemes], np.int16),
        begins=np.array([begin for begin, _ in spoken.phonemes], np.float32),
    )


def write_shard(target: Path, seed: str, *, size: int = SHARD, say: Say = any_voice) -> None:
    """Makes the shard of this seed, unless it is there."""
    if target.exists():
        return
    rng, filters = random.Random(seed), extractor().mel_filters
    said = [
        utterance(say(rng, sentence(rng, held_out=False), VOICES), filters) for _ in range(size)
    ]
    made = {
        "mel": np.concatenate([each.mel for each in said]),
        "words": np.concatenate([each.words for each in said]),
        "ends": np.concatenate([each.ends for each in said]),
        "phonemes": np.concatenate([each.phonemes for each in said]),
        "begins": np.concatenate([each.begins for each in said]),
        "loudness": np.array([each.loudness for each in said], np.float32),
        "lengths": np.array(
            [(len(each.mel), len(each.words), len(each.phonemes)) for each in said], np.int32
        ),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    save_file(made, partial)
    partial.rename(target)


def read_shard(source: Path) -> list[Utterance]:
    held = load_file(source)
    places = np.cumsum(held["lengths"], axis=0)[:-1]
    mels, words, phonemes = (places[:, column] for column in range(3))
    return [
        Utterance(mel, float(loud), *rest)
        for mel, loud, *rest in zip(
            np.split(held["mel"], mels), held["loudness"], np.split(held["words"], words),
            np.split(held["ends"], words), np.split(held["phonemes"], phonemes),
            np.split(held["begins"], phonemes), strict=True,
        )
    ]  # fmt: skip
