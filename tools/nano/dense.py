"""Dense supervision of the towers: what every cell of a picture and every moment of a sound is.

Answers alone teach a tower slowly: a few tokens per picture. Throwaway linear heads on the tower's
outputs learn class, colour and reading order of every cell, and the word or tone of every 40 ms.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from tools.nano.encoding import HOP, IGNORED, audio_tokens, num_frames
from tools.nano.world.colours import SHADES
from tools.nano.world.scenes import CELL, DIGITS, SHAPES, Scene
from tools.nano.world.sounds import LABELS, Sound

CLASSES = {kind: number for number, kind in enumerate((*SHAPES, *DIGITS), 1)}
"""0: nothing there."""
COLOURS = {name: number for number, name in enumerate(SHADES)}
HEARD = {label: number for number, label in enumerate(LABELS, 1)}
MOST_THINGS = 6
SAMPLES_PER_TOKEN = 4 * HOP
LEAST_SHARE = 0.2
"""Of a cell, or of the thing where that is smaller: below it, the cell does not show the thing."""


class Heads(nn.Module):
    """Linear heads on tower outputs of width `width`; thrown away after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Linear(width, 1 + len(CLASSES))
        self.colour = nn.Linear(width, len(COLOURS))
        self.order = nn.Linear(width, MOST_THINGS)
        self.heard = nn.Linear(width, 1 + len(HEARD))

    def picture_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[cells, width] and `cell_targets`. Cells that show something count twice."""
        kind, colour, order = targets.unbind(1)
        shows = kind > 0
        losses = [
            _cross_entropy(head(outputs).float()[rows], target[rows])
            for head, target in ((self.kind, kind), (self.colour, colour), (self.order, order))
            for rows in (slice(None), shows)
        ]
        return torch.stack(losses).sum() / 2

    def sound_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[tokens, width] and `token_targets`. Sounds of unknown timing count nothing."""
        return _cross_entropy(self.heard(outputs).float(), targets)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """0 instead of NaN where nothing counts."""
    total = functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
    return total / (target != IGNORED).sum().clamp(min=1)


def cell_targets(scene: Scene) -> np.ndarray:
    """int64 [cells, 3]: class, colour and reading order of the thing each cell shows most of."""
    columns, rows = scene.image.width // CELL, scene.image.height // CELL
    targets = np.zeros((rows, columns, 3), np.int64)
    targets[..., 1] = COLOURS[scene.background]
    most = np.zeros((rows, columns))
    for order, thing in enumerate(scene.things, 1):
        left, top, right, bottom = thing.box
        shared = _overlap(rows, top, bottom)[:, None] * _overlap(columns, left, right)[None]
        least = LEAST_SHARE * min(CELL**2, (right - left) * (bottom - top))
        here = (shared > most) & (shared > least)
        most[here] = shared[here]
        place = IGNORED if scene.layout == "collage" else order
        targets[here] = CLASSES[thing.kind], COLOURS[thing.colour], place
    if scene.layout == "collage":
        targets[..., 2] = IGNORED
    return targets.reshape(-1, 3)


def _overlap(cells: int, start: float, end: float) -> np.ndarray:
    """Pixels that [start, end) shares with each cell along one side."""
    edges = np.arange(cells) * float(CELL)
    return np.clip(np.minimum(edges + CELL, end) - np.maximum(edges, start), 0, None)


def token_targets(sound: Sound) -> np.ndarray:
    """int64 [tokens]: what sounds during each token's 40 ms."""
    count = audio_tokens(num_frames(sound.wave))
    if sound.segments is None:
        return np.full(count, IGNORED, np.int64)
    targets = np.zeros(count, np.int64)
    for segment in sound.segments:
        first = segment.start // SAMPLES_PER_TOKEN
        last = max(first + 1, math.ceil(segment.end / SAMPLES_PER_TOKEN))
        targets[first:last] = HEARD[segment.label]
    return targets
