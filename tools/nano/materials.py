"""The fonts, voices and sentences of training, which differ from those of evaluation."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from tools.nano.world.colours import choose_background, shade, visible_on
from tools.nano.world.conversations import Materials
from tools.nano.world.numbers import PILLOW_FONT, font, training_fonts
from tools.nano.world.scenes import CELL, DIGITS, SHAPES, Scene, Thing
from tools.nano.world.shapes import draw_shape
from tools.nano.world.sounds import join
from tools.nano.world.speech import (
    ESPEAK,
    SAMPLE_RATE,
    TRAINING_VOICES,
    WORDS,
    Espeak,
    Segment,
    Speaker,
    Utterance,
    espeak,
)
from tools.nano.world.talk import training_lines


def training_materials(*, seed: int, recordings_per_word: int) -> Materials:
    """Training materials; without speech where espeak-ng is missing or no recordings are wanted."""
    speaker: Speaker | None = None
    if recordings_per_word and shutil.which(ESPEAK):
        speaker = WordBank.record(random.Random(seed), recordings_per_word)
    return Materials(training_fonts(), speaker, training_lines())


@dataclass(frozen=True, slots=True)
class WordBank:
    """Single words one after another, whose times are known, among sentences said whole."""

    words: dict[str, list[np.ndarray]]
    sentences: Speaker

    @classmethod
    def record(cls, rng: random.Random, recordings_per_word: int) -> WordBank:
        def one(word: str) -> np.ndarray:
            voice, speed = rng.choice(TRAINING_VOICES), rng.randint(110, 210)
            return espeak(word, voice, speed=speed, pitch=rng.randint(25, 75))

        bank = {word: [one(word) for _ in range(recordings_per_word)] for word in WORDS}
        return cls(bank, Espeak(TRAINING_VOICES))

    def say(self, rng: random.Random, words: Sequence[str]) -> Utterance:
        if rng.random() < 0.45:
            return self.sentences.say(rng, words)
        parts = []
        for word in words:
            wave = rng.choice(self.words[word])
            parts.append(Utterance(wave, (Segment(0, len(wave), word),)))
        return join(parts, [int(rng.uniform(0.01, 0.2) * SAMPLE_RATE) for _ in words])


def collage(rng: random.Random, fonts: Sequence[str]) -> Scene:
    """A picture with lines of many digits and shapes, from which each pixel teaches more."""
    width, height = rng.randint(4, 6) * CELL, rng.randint(4, 6) * CELL
    background = choose_background(rng)
    image = Image.new("RGB", (width, height), shade(rng, background))
    draw, things, top = ImageDraw.Draw(image), [], rng.uniform(0, 8)
    while top < height - 24:
        tall = min(rng.uniform(32, 58) if rng.random() < 0.85 else rng.uniform(54, 100),
                   height - top - 1)  # fmt: skip
        line = _digit_line if rng.random() < 0.7 else _shape_line
        things += line(rng, draw, (rng.uniform(0, 14), top, width, top + tall), background, fonts)
        top += tall + rng.uniform(2, 10)
    return Scene("collage", background, tuple(things), image)


Area = tuple[float, float, float, float]


def _digit_line(
    rng: random.Random, draw: ImageDraw.ImageDraw, area: Area, background: str,
    fonts: Sequence[str],
) -> list[Thing]:  # fmt: skip
    x, top, end, bottom = area
    chosen = font(rng.choice(fonts or [PILLOW_FONT]), int((bottom - top) * 1.3))
    colour, things = rng.choice(visible_on(background)), []
    while x < end - 14:
        digit = rng.choice(DIGITS)
        left, above, right, below = chosen.getbbox(digit)
        if x + right - left > end:
            break
        draw.text((x - left, top - above), digit, font=chosen, fill=shade(rng, colour))
        things.append(Thing(digit, colour, (x, top, x + right - left, top + below - above)))
        x += chosen.getlength(digit) + (rng.uniform(0, 30) if rng.random() < 0.1 else 0)
    return things


def _shape_line(
    rng: random.Random, draw: ImageDraw.ImageDraw, area: Area, background: str,
    fonts: Sequence[str],
) -> list[Thing]:  # fmt: skip
    x, top, end, bottom = area
    things: list[Thing] = []
    while x < end - 14:
        size = (bottom - top) * rng.uniform(0.7, 1)
        if x + size > end:
            break
        y = top + rng.uniform(0, bottom - top - size)
        thing = Thing(rng.choice(SHAPES), rng.choice(visible_on(background)),
                      (x, y, x + size, y + size))  # fmt: skip
        draw_shape(draw, thing.kind, thing.box, shade(rng, thing.colour))
        things.append(thing)
        x += size + rng.uniform(2, 16)
    return things
