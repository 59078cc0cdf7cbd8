"""Rows of one length to train on: sentences behind each other, in a room, with noise.

All this happens to the power of mel bins, where it costs little: sound of two sources adds up but
for a random part, an echo is a decay from frame to frame, a voice's throat a shift along the bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tools.ear import folder
from tools.ear.corpus import LEVELS, Utterance, extractor, power

IGNORED = -100
SECOND = folder.SAMPLE_RATE / folder.HOP
"""Mel frames of a second."""
NOISE_SECONDS = 120
LAG = 1.5
"""Positions by which the encoder's phoneme is behind the sound."""
WRONG_WORD = 0.05
"""Share of words that are heard as another one, so that a mistake is not believed in."""


@dataclass(frozen=True, slots=True)
class EarBatch:
    mel: torch.Tensor
    """float32 [rows, mel bins, mel frames]."""
    token_ids: torch.Tensor
    """int64 [rows, frames]: what was said until each frame."""
    targets: torch.Tensor
    """int64 [rows, frames]: what to say after it; `IGNORED` inside the prompt."""
    phonemes: torch.Tensor
    """int64 [rows, encoder positions]: numbers of `PHONEMES`; `IGNORED` for unknown ones."""

    def to(self, device: torch.device) -> EarBatch:
        parts = (self.mel, self.token_ids, self.targets, self.phonemes)
        return EarBatch(*(part.to(device) for part in parts))


class Rows:
    """Batches of rows made of utterances, from a seed."""

    def __init__(
        self, tokens: folder.TokenNumbers, *, seed: int, frames: int, noise_seconds: float
    ) -> None:
        self._tokens, self._frames = tokens, frames
        self._rng = np.random.default_rng(seed)
        samples = self._rng.standard_normal(int(noise_seconds * folder.SAMPLE_RATE))
        filters = extractor().mel_filters
        self._noise = power(samples.astype(np.float32), filters)
        hertz = np.linspace(0, folder.SAMPLE_RATE / 2, len(filters))
        self._bins = (filters * hertz[:, None]).sum(0) / filters.sum(0)
        """The middle of each bin in Hz."""
        self._hertz = np.maximum(1, hertz / 60)
        """The frequency of noise, relative to where its power begins to fall."""

    def batch(self, utterances: Sequence[Utterance], size: int) -> EarBatch:
        """`size` rows of randomly chosen utterances."""
        made = [self._row(utterances) for _ in range(size)]
        mel, token_ids, targets, phonemes = (np.stack(part) for part in zip(*made, strict=True))
        return EarBatch(
            torch.from_numpy(mel), torch.from_numpy(token_ids), torch.from_numpy(targets),
            torch.from_numpy(phonemes),
        )  # fmt: skip

    def _row(self, utterances: Sequence[Utterance]) -> tuple[NDArray, ...]:
        rng, tokens, frames = self._rng, self._tokens, self._frames
        length = frames * folder.MEL_PER_TOKEN
        heard = np.zeros((length, folder.MEL_BINS), np.float32)
        phonemes = np.zeros(frames * folder.ENCODER_PER_TOKEN, np.int64)
        said: list[int] = []
        ends: list[float] = []
        from_start = rng.random() < 0.5
        left = int(rng.choice((1, 2, 4, 8, 32), p=(0.3, 0.3, 0.2, 0.15, 0.05))) if from_start else 0
        at = left * folder.MEL_PER_TOKEN + int(rng.integers(0, 12))
        loud, gain = 0.0, 10 ** rng.uniform(-1.0, 0.0)
        while at < length:
            one = utterances[rng.integers(len(utterances))]
            near = gain * 10 ** rng.uniform(-0.15, 0.15)
            mel = self._spoken(one)[: length - at] * near**2
            heard[at : at + len(mel)] += mel
            loud = max(loud, near * one.loudness)
            said += one.words.tolist()
            ends += (one.ends + at / SECOND).tolist()
            self._mark(phonemes, one, at)
            gap = rng.uniform(0, 0.5) if rng.random() < 0.75 else rng.uniform(0.5, 2.5)
            at += len(one.mel) + int(gap * SECOND)
        levels = self._levels(heard, loud)
        targets = np.full(frames, tokens.pad)
        for place, word in zip(emitted_at(ends, left=0, delay=folder.DELAY), said, strict=True):
            if place < frames:
                targets[place] = tokens.first_word + word
        token_ids = np.concatenate(([tokens.begin if from_start else tokens.pad], targets[:-1]))
        wrong = (token_ids >= tokens.first_word) & (rng.random(frames) < WRONG_WORD)
        words = token_ids[token_ids >= tokens.first_word]
        if len(words):
            token_ids[wrong] = rng.choice(words, int(wrong.sum()))
        if from_start:
            targets[: left + folder.DELAY] = IGNORED
        return levels, token_ids, targets, phonemes

    def _spoken(self, one: Utterance) -> NDArray[np.float32]:
        """The power of each bin, often of another throat and through another microphone."""
        rng, mel = self._rng, one.mel.astype(np.float32)
        if rng.random() < 0.5:
            places = np.clip(np.arange(folder.MEL_BINS) * rng.uniform(0.92, 1.09), 0, 62.999)
            below = places.astype(int)
            share = (places - below).astype(np.float32)
            mel = mel[:, below] * (1 - share) + mel[:, below + 1] * share
        if rng.random() < 0.5:
            knots = rng.uniform(-0.35, 0.35, 5)
            tone = np.interp(np.arange(folder.MEL_BINS), np.linspace(0, 63, 5), knots)
            mel = mel + tone.astype(np.float32)
        return np.exp(mel * np.float32(math.log(10)))

    def _mark(self, phonemes: NDArray[np.int64], one: Utterance, at: int) -> None:
        """What sounds at each position of the encoder while this one speaks."""
        places = np.ceil((at + one.begins * SECOND) / 2 + LAG).astype(int)
        last = math.ceil((at + len(one.mel)) / 2 + LAG)
        for start, end, number in zip(places, [*places[1:], last], one.phonemes, strict=True):
            phonemes[start:end] = IGNORED if number < 0 else number

    def _levels(self, heard: NDArray[np.float32], loud: float) -> NDArray[np.float32]:
        """[mel bins, mel frames], scaled as the extractor scales them."""
        rng = self._rng
        if rng.random() < 0.4:
            heard = _echoed(heard, rng.uniform(0.05, 0.35), rng.uniform(0.1, 0.5))
        if rng.random() < 0.65:
            start = rng.integers(len(self._noise) - len(heard))
            noise = self._noise[start : start + len(heard)] * self._colour(rng.random())
            noise = noise * np.float32((loud * 10 ** (-rng.uniform(7, 42) / 20)) ** 2)
            mixed = np.cos(rng.random(heard.shape, np.float32) * np.float32(2 * math.pi))
            heard = heard + noise + np.sqrt(2 * heard * noise) * mixed
        levels = np.log10(np.maximum(heard, np.float32(LEVELS)))
        levels = np.maximum(levels, folder.FEATURES["global_log_mel_max"] - 8.0)
        return np.ascontiguousarray(((levels + 4.0) / 4.0).T.astype(np.float32))

    def _colour(self, colour: float) -> NDArray[np.float32]:
        """Factor of each bin from white noise, 0, to one whose power falls with the frequency
        squared, 1. The whole keeps its loudness."""
        whole = np.mean(self._hertz ** (-2 * colour))
        return (np.maximum(1, self._bins / 60) ** (-2 * colour) / whole).astype(np.float32)


def _echoed(heard: NDArray[np.float32], seconds: float, share: float) -> NDArray[np.float32]:
    """Echoes that fall by 60 dB in `seconds`, of `share` of the sound's amplitude in all."""
    decay = 10 ** (-6 / (SECOND * seconds))
    first = share**2 * (1 - decay)
    tail, made = np.zeros(heard.shape[1], np.float32), heard.copy()
    for now, frame in zip(made, heard, strict=True):
        now += tail
        tail = tail * np.float32(decay) + frame * np.float32(first)
    return made


def emitted_at(ends: Sequence[float], *, left: int, delay: int) -> list[int]:
    """The frame after which each word is said: `delay` after its end, one word for each frame."""
    places: list[int] = []
    for end in ends:
        frame = left + int(end * folder.SAMPLE_RATE / folder.FRAME) + delay
        places.append(max(frame, places[-1] + 1 if places else 0))
    return places
