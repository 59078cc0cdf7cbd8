"""The colours of nano's pictures: names, and the shades that each name covers."""

from __future__ import annotations

import random

RGB = tuple[int, int, int]

SHADES: dict[str, tuple[RGB, ...]] = {
    "red": ((220, 30, 30), (255, 0, 0), (200, 0, 0)),
    "green": ((30, 160, 50), (0, 128, 0), (0, 200, 0), (0, 255, 0)),
    "blue": ((40, 70, 220), (0, 0, 255), (0, 0, 200)),
    "yellow": ((245, 220, 40), (255, 255, 0)),
    "orange": ((250, 135, 20), (255, 165, 0), (255, 140, 0)),
    "purple": ((135, 40, 170), (128, 0, 128), (150, 0, 200)),
    "black": ((15, 15, 15), (0, 0, 0)),
    "white": ((250, 250, 250), (255, 255, 255)),
    "pink": ((250, 150, 190), (255, 192, 203)),
}
"""Name → RGB shades. A model that is trained on few shades does not know others."""

FOREGROUNDS = ("red", "green", "blue", "yellow", "orange", "purple", "black")
BACKGROUNDS = {"white": 8, "pink": 1, "yellow": 1}
"""Name → how often it is chosen."""

HARD_TO_SEE = frozenset({("yellow", "pink"), ("orange", "yellow"), ("orange", "pink")})
"""(foreground, background) pairs that are never drawn."""


def shade(rng: random.Random, name: str) -> RGB:
    """One of the shades of `name`, usually with a small random change."""
    red, green, blue = rng.choice(SHADES[name])
    if rng.random() < 0.15:
        return red, green, blue
    return _nudge(rng, red), _nudge(rng, green), _nudge(rng, blue)


def _nudge(rng: random.Random, channel: int) -> int:
    return max(0, min(255, channel + rng.randint(-14, 14)))


def choose_background(rng: random.Random) -> str:
    return rng.choices(list(BACKGROUNDS), list(BACKGROUNDS.values()))[0]


def visible_on(background: str) -> list[str]:
    """Foreground colours that are visible on `background`."""
    return [
        name for name in FOREGROUNDS
        if name != background and (name, background) not in HARD_TO_SEE
    ]  # fmt: skip


def article(colour: str) -> str:
    return "an" if colour == "orange" else "a"
