"""Pictures of one to five shapes."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from PIL import Image, ImageDraw

from tools.nano.world.colours import RGB, choose_background, shade, visible_on
from tools.nano.world.scenes import CELL, SHAPES, Box, Layout, Scene, Thing

LAYOUTS: dict[Layout, float] = {"one": 3, "side": 3.5, "stack": 3, "row": 1.5, "scatter": 1.5}
"""Layout → relative frequency."""

LEAST_SIZE: dict[Layout, tuple[int, int]] = {
    "one": (56, 56), "side": (84, 56), "stack": (56, 84), "row": (140, 56), "scatter": (112, 84),
}  # fmt: skip
"""Layout → smallest width and height in pixels."""

LARGEST_SHAPE = 110
STAR_WAIST = 0.42
CROSS_WIDTH = 0.34


def shape_scene(rng: random.Random, layout: Layout | None = None) -> Scene:
    """A picture of shapes; `layout` None: any."""
    layout = layout or rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]
    count = {"one": 1, "side": 2, "stack": 2, "row": 3}.get(layout) or rng.randint(3, 5)
    width, height = picture_size(rng, *LEAST_SIZE[layout])
    background = choose_background(rng)
    boxes = _boxes(rng, layout, count, width, height)
    things = tuple(
        Thing(kind, colour, box)
        for kind, colour, box in zip(
            _kinds(rng, count), _colours(rng, count, background), boxes, strict=True
        )
    )
    return Scene(layout, background, things, paint(rng, width, height, background, things))


def picture_size(
    rng: random.Random, least_width: int = 56, least_height: int = 56
) -> tuple[int, int]:
    """A size in whole cells: at most 36 of them, half of the time at most 64, the model's limit."""
    most = 64 if rng.random() < 0.5 else 36
    longest = 9 if rng.random() < 0.2 else 6
    while True:
        columns, rows = rng.randint(2, longest), rng.randint(2, longest)
        size = columns * CELL, rows * CELL
        if columns * rows <= most and size[0] >= least_width and size[1] >= least_height:
            return size


def paint(
    rng: random.Random, width: int, height: int, background: str, things: tuple[Thing, ...]
) -> Image.Image:
    """Half of the pictures have smooth edges, as if they had been scaled."""
    scale = 2 if rng.random() < 0.5 else 1
    image = Image.new("RGB", (width * scale, height * scale), shade(rng, background))
    draw = ImageDraw.Draw(image)
    for thing in things:
        left, top, right, bottom = (edge * scale for edge in thing.box)
        draw_shape(draw, thing.kind, (left, top, right, bottom), shade(rng, thing.colour))
    return image.resize((width, height), Image.Resampling.LANCZOS) if scale > 1 else image


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, box: Box, colour: RGB) -> None:
    left, top, right, bottom = box
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    match kind:
        case "circle":
            draw.ellipse(box, fill=colour)
        case "square":
            draw.rectangle(box, fill=colour)
        case "triangle":
            draw.polygon([(middle_x, top), (right, bottom), (left, bottom)], fill=colour)
        case "cross":
            half = (right - left) * CROSS_WIDTH / 2
            draw.rectangle((middle_x - half, top, middle_x + half, bottom), fill=colour)
            draw.rectangle((left, middle_y - half, right, middle_y + half), fill=colour)
        case "star":
            draw.polygon(_star(middle_x, middle_y, (right - left) / 2), fill=colour)
        case _:
            raise ValueError(f"no such shape: {kind}")


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    points = []
    for index in range(10):
        reach = radius * (STAR_WAIST if index % 2 else 1)
        angle = index * math.pi / 5 - math.pi / 2
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def _kinds(rng: random.Random, count: int) -> list[str]:
    if rng.random() < 0.7:
        return rng.sample(SHAPES, count)
    return [rng.choice(SHAPES) for _ in range(count)]


def _colours(rng: random.Random, count: int, background: str) -> list[str]:
    pool = visible_on(background)
    if rng.random() < 0.75 and count <= len(pool):
        return rng.sample(pool, count)
    return [rng.choice(pool) for _ in range(count)]


def _boxes(rng: random.Random, layout: Layout, count: int, width: int, height: int) -> list[Box]:
    """Positions of the shapes, drawn again until "left of" and "above" are unambiguous."""
    slots = _slots(rng, layout, count, width, height)
    for _ in range(50):
        boxes = [_box_in(rng, slot) for slot in slots]
        if _plain(layout, boxes):
            break
    return boxes


def _slots(rng: random.Random, layout: Layout, count: int, width: int, height: int) -> list[Box]:
    """The part of the picture for each shape, in reading order."""
    if layout in ("one", "side", "row"):
        return [(i * width / count, 0, (i + 1) * width / count, height) for i in range(count)]
    if layout == "stack":
        return [(0, i * height / count, width, (i + 1) * height / count) for i in range(count)]
    columns, rows = (3, 2) if width >= height else (2, 3)
    fields = [(row, column) for row in range(rows) for column in range(columns)]
    w, h = width / columns, height / rows
    return [(c * w, r * h, (c + 1) * w, (r + 1) * h) for r, c in sorted(rng.sample(fields, count))]


def _box_in(rng: random.Random, slot: Box) -> Box:
    left, top, right, bottom = slot
    room = min(right - left, bottom - top)
    size = rng.uniform(max(22, 0.5 * room), max(23, 0.92 * room))
    size = min(size, room - 2, LARGEST_SHAPE)
    x = rng.uniform(left + 1, right - size - 1)
    y = rng.uniform(top + 1, bottom - size - 1)
    return x, y, x + size, y + size


def _plain(layout: Layout, boxes: list[Box]) -> bool:
    if layout not in ("side", "stack", "row"):
        return True
    middles = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(middles)]
    if layout == "stack":
        steps = [(down, across) for across, down in steps]
    return all(along >= 1.4 * abs(off) for along, off in steps)
