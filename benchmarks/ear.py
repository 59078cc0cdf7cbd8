"""`lookonce bench ear`: the word error rate of nano-ear on voices and sentences it never heard.

Sentences are made from a seed and spoken by espeak-ng in voices that no training has, some in a
room, some in noise. Each is transcribed through the whole engine. Wrong words are those replaced,
left out and added; their share is of the words said. Without espeak-ng the few clips of the
checkout are heard.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from benchmarks.report import Report, publish
from lookonce.config import NANO_EAR
from lookonce.llm import LLM, Message
from lookonce.types.sampling import SamplingParams
from tests.support.speech_clips import speech_clips
from tools.ear.folder import SAMPLE_RATE
from tools.ear.hearing import edits
from tools.ear.sentences import sentence
from tools.ear.speech import HELD_OUT_VOICES, heard, mouth, said_by

GREEDY = SamplingParams(temperature=0.0)
AT_ONCE = 32
"""Clips that are transcribed together."""
SHOWN_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class Clip:
    voice: str
    words: tuple[str, ...]
    wave: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeardClip:
    clip: Clip
    written: tuple[str, ...]

    @property
    def wrong(self) -> int:
        return edits(self.clip.words, self.written)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("lookonce bench ear", description=__doc__)
    parser.add_argument("--model", default=NANO_EAR, help="a folder like nano-ear's")
    parser.add_argument("--sentences", type=int, default=20, help="of each voice")
    parser.add_argument("--seed", type=int, default=987_654)
    parser.add_argument("--mistakes", action="store_true", help="show some sentences misheard")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    try:
        mouth()
    except OSError:
        clips, source = committed(), "the clips of the checkout (no espeak-ng here)"
    else:
        clips = list(held_out(chosen.sentences, chosen.seed))
        source = "held-out voices and sentences, by espeak-ng"
    with LLM(chosen.model) as llm:
        found = evaluate(llm, clips)
    report = report_of(found, source)
    if chosen.mistakes:
        report.notes += mistakes(found)
    publish([report], chosen.json)
    return 0


def held_out(sentences: int, seed: int) -> Iterator[Clip]:
    """So many sentences of each held-out voice."""
    rng = random.Random(seed)
    for voice in HELD_OUT_VOICES:
        for _ in range(sentences):
            spoken = said_by(rng, sentence(rng, held_out=True), voice)
            wave = heard(rng, spoken, before=0.3, after=0.3).wave
            yield Clip(voice, spoken.words, wave)


def committed() -> list[Clip]:
    return [Clip(clip.voice, clip.words, clip.wave()) for clip in speech_clips()]


def evaluate(llm: LLM, clips: Sequence[Clip]) -> list[HeardClip]:
    found = []
    for start in range(0, len(clips), AT_ONCE):
        some = clips[start : start + AT_ONCE]
        outputs = llm.chat([_message(clip) for clip in some], GREEDY)
        found += [
            HeardClip(clip, tuple(output.text.split()))
            for clip, output in zip(some, outputs, strict=True)
        ]
    return found


def _message(clip: Clip) -> list[Message]:
    file = io.BytesIO()
    soundfile.write(file, clip.wave, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    data = base64.b64encode(file.getvalue()).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return [{"role": "user", "content": [sound]}]


def report_of(found: Sequence[HeardClip], source: str) -> Report:
    """One row per voice, and one over all."""
    report = Report("ear", ("voice", "sentences", "words", "wrong", "word error rate"))
    for voice in sorted({each.clip.voice for each in found}):
        report.add(voice, *_figures([each for each in found if each.clip.voice == voice]))
    report.add("all", *_figures(found))
    report.notes.append(f"{source}; wrong: replaced, left out or added")
    return report


def _figures(found: Sequence[HeardClip]) -> tuple[int, int, int, str]:
    words = sum(len(each.clip.words) for each in found)
    wrong = sum(each.wrong for each in found)
    return len(found), words, wrong, f"{wrong / max(words, 1):.3f}"


def mistakes(found: Sequence[HeardClip]) -> list[str]:
    return [
        f"{each.clip.voice}: {' '.join(each.clip.words)!r} heard as {' '.join(each.written)!r}"
        for each in found
        if each.wrong
    ][:SHOWN_MISTAKES]
