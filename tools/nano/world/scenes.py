"""What a picture shows: its pixels, and the facts that questions and answers are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from PIL import Image

from tools.nano.world.colours import article

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""

Layout = Literal["one", "side", "stack", "row", "scatter", "number", "collage"]

SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = "0123456789"
CELL = 28
"""Pixels a side of one image token. Pictures consist of whole cells, so they are not resized."""

PLACES = {
    "side": ("on the left", "on the right"),
    "stack": ("at the top", "at the bottom"),
    "row": ("on the left", "in the middle", "on the right"),
}


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape, or one digit of a number."""

    kind: str
    colour: str
    box: Box

    @property
    def noun(self) -> str:
        return f"{article(self.colour)} {self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class Scene:
    """Things in reading order on a plain background. A number's things are its digits."""

    layout: Layout
    background: str
    things: tuple[Thing, ...]
    image: Image.Image

    @property
    def is_number(self) -> bool:
        return self.layout == "number"

    @property
    def number(self) -> str:
        return "".join(thing.kind for thing in self.things)

    def caption(self) -> str:
        """The answer to what the picture shows, in the words that the model learns."""
        first, *others = self.things
        match self.layout:
            case "number":
                return f"the number {self.number}"
            case "one":
                return first.noun
            case "side":
                return f"{first.noun} to the left of {others[0].noun}"
            case "stack":
                return f"{first.noun} above {others[0].noun}"
            case "row":
                return f"{first.noun}, {others[0].noun} and {others[1].noun}"
            case _:
                return f"{len(self.things)} shapes"

    def alone(self, thing: Thing, *, by: tuple[str, ...]) -> bool:
        """Whether `thing` is the only one with its values of `by` ("kind", "colour")."""
        alike = [t for t in self.things if all(getattr(t, f) == getattr(thing, f) for f in by)]
        return len(alike) == 1
