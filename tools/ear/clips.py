"""Writes the clips of `tests/support/speech_clips`: held-out voices and sentences, as Ogg."""

from __future__ import annotations

import sys
from pathlib import Path

import soundfile

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.ear.folder import SAMPLE_RATE
from tools.ear.sentences import is_held_out
from tools.ear.speech import HELD_OUT_VOICES, mouth

TARGET = Path(__file__).parents[2] / "tests" / "support" / "speech_clips"
SPOKEN = (
    ("en-us+m5", "my phone is two seven nine two five zero"),
    ("en+f2", "the blue star is behind the white circle"),
    ("en-us+paul", "the father walks to the market on saturday"),
    ("en-gb-scotland+linda", "the cat is with the driver inside the road"),
    ("en+Lee", "thirty minutes and three hours"),
    ("en-us+steph", "open the letter please"),
)
"""Voice and words."""


def main() -> None:
    for voice, text in SPOKEN:
        words = tuple(text.split())
        if voice not in HELD_OUT_VOICES or not is_held_out(words):
            raise ValueError(f"training may have heard {voice} or {text!r}")
        spoken = mouth().say(words, voice, speed=150, pitch=50)
        file = TARGET / f"{voice}_{'_'.join(words)}.ogg"
        soundfile.write(file, spoken.wave, SAMPLE_RATE, format="OGG", subtype="VORBIS")
        print(file.name, file.stat().st_size)


if __name__ == "__main__":
    main()
