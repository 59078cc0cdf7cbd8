"""`lookonce bench nano`: how often a model answers right about pictures and sounds it never saw.

Conversations are made from a seed, with fonts, voices and sentences that no training conversation
has (where DejaVu's fonts and espeak-ng are installed; the notes say what was used). Every question
is asked through the whole engine, greedily, after the true answers to the questions before it. An
answer is right when it equals the expected text to the letter.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import wave
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.report import Report, publish
from lookonce.config import NANO
from lookonce.llm import LLM, Message
from lookonce.types.sampling import SamplingParams
from tools.nano.world.conversations import (
    Conversation,
    Materials,
    Turn,
    conversation,
    heldout_materials,
)
from tools.nano.world.picture_questions import QuestionAnswer
from tools.nano.world.speech import SAMPLE_RATE

GREEDY = SamplingParams(temperature=0, max_tokens=128)
AT_ONCE = 32
"""Questions that are asked together."""
SHOWN_MISTAKES = 10


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    asked: QuestionAnswer
    answer: str

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.asked.answer


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("lookonce bench nano", description=__doc__)
    parser.add_argument("--model", default=NANO, help="a folder like nano's (default: nano)")
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=987_654)
    parser.add_argument("--mistakes", action="store_true", help="show some wrong answers")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    with LLM(chosen.model) as llm:
        answered = evaluate(llm, chosen.conversations, chosen.seed)
    report = report_of(answered, heldout_materials())
    if chosen.mistakes:
        report.notes += mistakes(answered)
    publish([report], chosen.json)
    return 0


def evaluate(llm: LLM, conversations: int, seed: int) -> list[GradedAnswer]:
    """Every question of so many held-out conversations, with the model's answer."""
    rng, materials = random.Random(seed), heldout_materials()
    answered = []
    for batch in _batches(rng, materials, conversations):
        outputs = llm.chat([messages for messages, _ in batch], GREEDY)
        answered += [
            GradedAnswer(asked, output.text)
            for (_, asked), output in zip(batch, outputs, strict=True)
        ]
    return answered


def _batches(
    rng: random.Random, materials: Materials, conversations: int
) -> Iterator[list[tuple[list[Message], QuestionAnswer]]]:
    waiting: list[tuple[list[Message], QuestionAnswer]] = []
    for _ in range(conversations):
        waiting += questions(conversation(rng, materials))
        if len(waiting) >= AT_ONCE:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def questions(turns: Conversation) -> list[tuple[list[Message], QuestionAnswer]]:
    """Each question with the conversation before it, which has the true answers."""
    said: list[Message] = []
    found = []
    for turn in turns:
        said.append({"role": "user", "content": _content(turn)})
        found.append((list(said), turn.asked))
        said.append({"role": "assistant", "content": turn.asked.answer})
    return found


def _content(turn: Turn) -> list[Message]:
    pictures = [_picture_part(scene.image) for scene in turn.pictures]
    sounds = [_sound_part(sound.wave) for sound in turn.sounds]
    return [*pictures, *sounds, {"type": "text", "text": turn.asked.question}]


def _picture_part(image: Image.Image) -> Message:
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _sound_part(samples: np.ndarray) -> Message:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def report_of(answered: Sequence[GradedAnswer], materials: Materials) -> Report:
    """One row per kind of question, and one over all."""
    report = Report("nano", ("question", "asked", "right", "share"))
    asked = Counter(one.asked.kind for one in answered)
    right = Counter(one.asked.kind for one in answered if one.right)
    for kind in sorted(asked):
        report.add(kind, asked[kind], right[kind], f"{right[kind] / asked[kind]:.3f}")
    total = max(asked.total(), 1)
    report.add("all", asked.total(), right.total(), f"{right.total() / total:.3f}")
    fonts = "held-out fonts" if materials.fonts else "Pillow's own font (no DejaVu here)"
    voices = "held-out voices" if materials.speaker else "no speech (no espeak-ng here)"
    report.notes.append(f"unseen conversations, {fonts}, {voices}; right: equal to the letter")
    return report


def mistakes(answered: Sequence[GradedAnswer]) -> list[str]:
    wrong = [one for one in answered if not one.right]
    random.Random(0).shuffle(wrong)
    return [
        f"{one.asked.kind}: {one.asked.question} said {one.answer!r}, not {one.asked.answer!r}"
        for one in wrong[:SHOWN_MISTAKES]
    ]
