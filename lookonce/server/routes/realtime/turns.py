"""Turns by server VAD: from the probabilities of speech to where speech begins and ends.

frames      . . . # # # . # # . . . . . . . . . .
speech            started                   stopped, after silence_duration_ms without speech
committed     [prefix_padding_ms ═══════════════]
"""

from __future__ import annotations

from typing import Literal

from lookonce.render.media.vad import FRAME_MILLISECONDS
from lookonce.server.routes.realtime.options import TurnDetection

HYSTERESIS = 0.15
"""Speech goes on while its probability is so much below the threshold, as Silero's own iterator
has it: a word's weak end is no pause."""

Turn = Literal["started", "stopped"]


class TurnDetector:
    """Reads one probability per frame of 32 ms."""

    def __init__(self, settings: TurnDetection) -> None:
        self._begin = settings.threshold
        self._go_on = max(settings.threshold - HYSTERESIS, 0.01)
        self._silence = -(-settings.silence_duration_ms // FRAME_MILLISECONDS)
        self.speaking = False
        self._silent_frames = 0

    def push(self, probability: float) -> Turn | None:
        if not self.speaking:
            if probability < self._begin:
                return None
            self.speaking, self._silent_frames = True, 0
            return "started"
        if probability >= self._go_on:
            self._silent_frames = 0
            return None
        self._silent_frames += 1
        if self._silent_frames < self._silence:
            return None
        self.speaking = False
        return "stopped"

    def reset(self) -> None:
        self.speaking = False
