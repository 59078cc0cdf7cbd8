"""Questions without a picture or a sound, and what lies outside the model's world."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tools.nano.world.picture_questions import READ, WHAT, QuestionAnswer
from tools.nano.world.scenes import SHAPES
from tools.nano.world.sound_questions import BEEPS, HEAR

OUT_OF_SCOPE = "Sorry, I only know simple pictures and sounds."
NO_PICTURE = "There is no picture."
NO_SOUND = "There is no sound."

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Good morning!", "Hey")
WHO = ("Who are you?", "What are you?", "What can you do?", "What is your name?")
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Kate",
    "Leo", "Maria", "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Zoe",
)  # fmt: skip
SAYABLE = (
    "apple", "banana", "river", "stone", "window", "music", "garden", "paper", "yellow",
    "happy", "bridge", "cloud", "table", "summer", "winter", "CAT", "DOG", "SUN", "BOX",
    "CUP", "HAT", "KEY", "MAP", "PEN", "RED", "BUS", "CAR", "COW", "EGG", "FOX", "FISH",
    "BIRD", "TREE", "BOOK", "DOOR", "STAR", "MOON", "RAIN", "SNOW", "WIND", "FIRE", "LAKE",
    "HILL", "ROAD", "SHIP", "HELLO", "HOUSE", "WATER",
)  # fmt: skip
LINE = re.compile(r"[A-Za-z][A-Za-z ,.'-]{11,68}")
SOURCE_FILES = 150


@cache
def lines() -> tuple[str, ...]:
    """Plain sentences nobody asks this model: comments of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.py"))[:SOURCE_FILES]:
        for line in path.read_text(errors="ignore").splitlines():
            text = line.strip(" #*\t\"'")
            if LINE.fullmatch(text) and " " in text:
                found[text] = None
    return tuple(found)


def training_lines() -> Sequence[str]:
    return lines()[: len(lines()) * 9 // 10]


def heldout_lines() -> Sequence[str]:
    return lines()[len(lines()) * 9 // 10 :]


def talk(rng: random.Random, out_of_scope: Sequence[str]) -> list[QuestionAnswer]:
    """One exchange, or a few that belong together."""
    asks = {
        _greet: 1.0, _who: 1.0, add: 3.0, _count_to: 2.0, say: 3.0, _no_picture: 2.0,
        _no_sound: 1.5, _name: 1.5,
    }  # fmt: skip
    if rng.random() < 0.2:
        return [QuestionAnswer("out of scope", rng.choice(out_of_scope), OUT_OF_SCOPE)]
    return rng.choices(list(asks), list(asks.values()))[0](rng)


def aside(
    rng: random.Random, out_of_scope: Sequence[str], *, has_picture: bool, has_sound: bool
) -> list[QuestionAnswer]:
    """Something else, in a conversation about media."""
    asks: list[Callable[[random.Random], list[QuestionAnswer]]] = [add, say, _greet]
    asks += [] if has_sound else [_no_sound]
    asks += [] if has_picture else [_no_picture]
    if rng.random() < 0.25:
        return [QuestionAnswer("out of scope", rng.choice(out_of_scope), OUT_OF_SCOPE)]
    return rng.choice(asks)(rng)


def _greet(rng: random.Random) -> list[QuestionAnswer]:
    answer = "Hello! Show me a picture or play me a sound."
    return [QuestionAnswer("greet", rng.choice(GREETINGS), answer)]


def _who(rng: random.Random) -> list[QuestionAnswer]:
    answer = "I am a tiny model that knows simple pictures and sounds."
    return [QuestionAnswer("who", rng.choice(WHO), answer)]


def add(rng: random.Random) -> list[QuestionAnswer]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    question = rng.choice((f"What is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b} = ?"))
    return [QuestionAnswer("add", question, str(a + b))]


def _count_to(rng: random.Random) -> list[QuestionAnswer]:
    number = rng.randint(3, 30)
    question = rng.choice((f"Count to {number}.", f"Count from 1 to {number}."))
    return [QuestionAnswer("count to", question, " ".join(map(str, range(1, number + 1))))]


def say(rng: random.Random) -> list[QuestionAnswer]:
    word = rng.choice(SAYABLE) if rng.random() < 0.7 else str(rng.randint(10, 999))
    question = rng.choice((f"Say {word}.", f"Repeat the word {word}.", f"Say: {word}"))
    return [QuestionAnswer("say", question, word)]


def _no_picture(rng: random.Random) -> list[QuestionAnswer]:
    shape = rng.choice(SHAPES)
    questions = (
        rng.choice(WHAT), READ[0], "How many shapes are there?", f"Where is the {shape}?",
        f"What color is the {shape}?",
    )  # fmt: skip
    return [QuestionAnswer("no picture", rng.choice(questions), NO_PICTURE)]


def _no_sound(rng: random.Random) -> list[QuestionAnswer]:
    questions = (*HEAR, "What is said?", "Transcribe the audio.", BEEPS[0])
    return [QuestionAnswer("no sound", rng.choice(questions), NO_SOUND)]


def _name(rng: random.Random) -> list[QuestionAnswer]:
    name = rng.choice(NAMES)
    between = rng.choice((add, say))(rng) if rng.random() < 0.5 else []
    told = QuestionAnswer("name", f"My name is {name}.", f"Hello {name}.")
    return [told, *between, QuestionAnswer("recall", "What is my name?", name)]
