"""Questions about one sound, and their true answers."""

from __future__ import annotations

import random

from tools.nano.world.picture_questions import QuestionAnswer
from tools.nano.world.sounds import Sound
from tools.nano.world.speech import DIGIT_WORDS

HEAR = (
    "What do you hear?", "What is in the audio?", "Describe the sound.", "What is this sound?",
    "Describe the audio.", "What does the recording contain?",
)  # fmt: skip
SAY = (
    "What is said?", "Transcribe the audio.", "What does the voice say?", "What did they say?",
    "Transcribe this recording.", "Write down the words.",
)  # fmt: skip
NUMBER = ("What number is spoken?", "What number do you hear?", "Write the digits.")
BEEPS = ("How many beeps are there?", "How many beeps do you hear?", "Count the beeps.")
HIGH_OR_LOW = ("Is the tone high or low?", "Is the sound high or low?")


def ask_about_sound(rng: random.Random, sound: Sound) -> QuestionAnswer:
    if sound.kind == "speech":
        return _about_speech(rng, sound)
    asks = {"hear": 3.0, "speaking": 0.7}
    if sound.kind in ("beeps", "silence"):
        asks["beeps"] = 3
    if sound.kind == "tone":
        asks["pitch"] = 2
    match rng.choices(list(asks), list(asks.values()))[0]:
        case "beeps":
            return QuestionAnswer("beeps", rng.choice(BEEPS), str(sound.beeps))
        case "pitch" if sound.tone in ("low", "high"):
            return QuestionAnswer("pitch", rng.choice(HIGH_OR_LOW), sound.tone)
        case "pitch":
            return QuestionAnswer("pitch", "Is the tone rising or falling?", sound.tone)
        case "speaking":
            return QuestionAnswer("is speech", "Is someone speaking?", "no")
        case _:
            return _hear(rng, sound)


def _about_speech(rng: random.Random, sound: Sound) -> QuestionAnswer:
    is_number = all(word in DIGIT_WORDS for word in sound.words)
    match rng.choice(("hear", "say", "say", "number" if is_number else "say", "speaking")):
        case "say":
            return QuestionAnswer("transcribe", rng.choice(SAY), " ".join(sound.words))
        case "number":
            digits = "".join(str(DIGIT_WORDS.index(word)) for word in sound.words)
            return QuestionAnswer("spoken number", rng.choice(NUMBER), digits)
        case "speaking":
            return QuestionAnswer("is speech", "Is someone speaking?", "yes")
        case _:
            return _hear(rng, sound)


def _hear(rng: random.Random, sound: Sound) -> QuestionAnswer:
    return QuestionAnswer(f"hear: {sound.kind}", rng.choice(HEAR), sound.caption())
