"""Pictures of a number of one to four digits, and their fonts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.nano.world.colours import choose_background, shade, visible_on
from tools.nano.world.scenes import CELL, DIGITS, Scene, Thing
from tools.nano.world.shapes import picture_size

FONT_FOLDERS = (Path("/usr/share/fonts/truetype/dejavu"), Path("/usr/share/fonts/TTF"))
PILLOW_FONT = "Pillow's own"
TRAINING_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf")
HELDOUT_FONTS = ("DejaVuSansCondensed.ttf", "DejaVuSansMono-Bold.ttf")
LENGTHS = {1: 2, 2: 3, 3: 4, 4: 2}
"""Count of digits → relative frequency."""

POINT_SIZES = (34, 66)


def training_fonts() -> list[str]:
    return [PILLOW_FONT, *_installed(TRAINING_FONTS)]


def heldout_fonts() -> list[str]:
    """Fonts that no training picture uses; empty where they are not installed."""
    return _installed(HELDOUT_FONTS)


def _installed(names: Sequence[str]) -> list[str]:
    paths = [folder / name for name in names for folder in FONT_FOLDERS]
    return [str(path) for path in paths if path.exists()]


@cache
def font(path: str, size: int) -> ImageFont.FreeTypeFont:
    if path == PILLOW_FONT:
        default = ImageFont.load_default(size)
        assert isinstance(default, ImageFont.FreeTypeFont)
        return default
    return ImageFont.truetype(path, size)


def number_scene(rng: random.Random, fonts: Sequence[str]) -> Scene:
    """A picture of a number in one of `fonts`, or in Pillow's own font where `fonts` is empty."""
    text = _number(rng)
    background = choose_background(rng)
    colour = rng.choice(visible_on(background))
    chosen, width, height = _fit(rng, text, fonts or [PILLOW_FONT])
    left, top, right, bottom = chosen.getbbox(text)
    x = rng.randint(2, max(2, int(width - (right - left) - 2)))
    y = rng.randint(2, max(2, int(height - (bottom - top) - 2)))
    image = Image.new("RGB", (width, height), shade(rng, background))
    origin = (x - left, y - top)
    ImageDraw.Draw(image).text(origin, text, font=chosen, fill=shade(rng, colour))
    things = []
    for index, digit in enumerate(text):
        start, end = chosen.getlength(text[:index]), chosen.getlength(text[: index + 1])
        things.append(
            Thing(digit, colour, (origin[0] + start, y, origin[0] + end, y + bottom - top))
        )
    return Scene("number", background, tuple(things), image)


def _number(rng: random.Random) -> str:
    length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
    text = "".join(rng.choice(DIGITS) for _ in range(length))
    return rng.choice("123456789") + text[1:] if length > 1 and text[0] == "0" else text


def _fit(
    rng: random.Random, text: str, fonts: Sequence[str]
) -> tuple[ImageFont.FreeTypeFont, int, int]:
    """A font and a picture size, in pixels, that holds `text`."""
    for _ in range(100):
        width, height = picture_size(rng)
        chosen = font(rng.choice(fonts), rng.randint(*POINT_SIZES))
        left, top, right, bottom = chosen.getbbox(text)
        if right - left <= width - 4 and bottom - top <= height - 4:
            return chosen, width, height
    chosen = font(fonts[0], POINT_SIZES[0])
    left, _, right, _ = chosen.getbbox(text)
    return chosen, math.ceil((right - left + 4) / CELL) * CELL, 2 * CELL
