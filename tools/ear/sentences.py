"""What is said: sentences over a small vocabulary, and rows of words without a sentence."""

from __future__ import annotations

import random
from zlib import crc32

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = (
    *DIGITS[1:], "ten", "eleven", "twelve", "twenty", "thirty", "forty", "fifty", "hundred",
    "thousand",
)  # fmt: skip
COLOURS = (
    "red", "green", "blue", "yellow", "orange", "purple", "black", "white", "brown", "grey",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "line", "box", "ball")
SIZES = ("small", "big", "little", "large", "long", "short", "new", "old", "good", "warm", "cold")
ANIMALS = ("dog", "cat", "horse", "bird", "fish", "cow", "mouse", "sheep", "lion", "bear")
THINGS = (
    "book", "table", "chair", "door", "window", "house", "car", "train", "letter", "paper",
    "picture", "camera", "phone", "computer", "light", "water", "coffee", "bread", "apple",
    "music", "garden", "river", "road", "bridge", "key", "clock", "bottle", "ticket", "map",
)  # fmt: skip
PEOPLE = (
    "man", "woman", "boy", "girl", "teacher", "doctor", "driver", "friend", "mother", "father",
)  # fmt: skip
PLACES = ("kitchen", "office", "school", "station", "market", "hotel", "city", "park", "room")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS = ("january", "march", "april", "june", "july", "october", "december")
TIMES = ("today", "tomorrow", "yesterday", "now", "later", "soon", "never", "always", "again")
SEEN = ("see", "find", "open", "close", "bring", "buy", "take", "want", "need", "like", "hear")
WENT = ("goes", "walks", "runs", "comes", "drives")
SIDES = ("left", "right", "up", "down", "inside", "outside", "behind", "above", "under", "near")
REPLIES = ("yes", "no", "stop", "hello", "please", "thanks", "maybe", "wait", "start", "help")
PRONOUNS = ("i", "you", "we", "they")
SMALL = (
    "the", "a", "and", "is", "in", "on", "to", "of", "at", "with", "it", "my", "your", "for",
    "are", "this", "that", "what", "where", "how", "many", "not", "can", "do", "there", "from",
    "very", "o'clock", "minutes", "hours",
)  # fmt: skip

VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *DIGITS, *NUMBERS, *COLOURS, *SHAPES, *SIZES, *ANIMALS, *THINGS, *PEOPLE, *PLACES,
            *DAYS, *MONTHS, *TIMES, *SEEN, *WENT, *SIDES, *REPLIES, *PRONOUNS, *SMALL,
        )
    )
)  # fmt: skip
"""Every word that can be heard, once each."""

KINDS: dict[str, tuple[str, ...]] = {
    "DIGIT": DIGITS, "NUMBER": NUMBERS, "COLOUR": COLOURS, "SHAPE": SHAPES, "SIZE": SIZES,
    "ANIMAL": ANIMALS, "THING": THINGS, "PERSON": PEOPLE, "PLACE": PLACES, "DAY": DAYS,
    "MONTH": MONTHS, "TIME": TIMES, "SEE": SEEN, "GOES": WENT, "SIDE": SIDES,
    "REPLY": REPLIES, "WHO": PRONOUNS,
}  # fmt: skip
PATTERNS = (
    "the COLOUR SHAPE is SIDE the COLOUR SHAPE",
    "there is a SIZE ANIMAL in the PLACE",
    "WHO SEE the SIZE THING TIME",
    "WHO can not SEE my THING",
    "REPLY REPLY",
    "REPLY WHO SEE a COLOUR THING",
    "the PERSON GOES to the PLACE on DAY",
    "the PERSON and the PERSON are in the PLACE",
    "where is your THING",
    "how many THING do WHO SEE",
    "what is SIDE the THING",
    "it is NUMBER o'clock TIME",
    "the train GOES from the PLACE at NUMBER NUMBER",
    "my phone is DIGIT DIGIT DIGIT DIGIT DIGIT DIGIT",
    "DIGIT DIGIT DIGIT DIGIT",
    "on DAY NUMBER MONTH at NUMBER",
    "this is a very SIZE THING for my PERSON",
    "that ANIMAL is SIZE and COLOUR",
    "SEE the THING please",
    "REPLY the THING is not SIDE the PLACE",
    "NUMBER minutes and NUMBER hours",
    "WHO need NUMBER hundred THING TIME",
    "the ANIMAL is with the PERSON SIDE the THING",
)
CONTENT = tuple(word for word in VOCABULARY if word not in SMALL)
"""Words that are said alone. Others sound as "two" or "four" do unless a sentence holds them."""
WITHOUT_PATTERN = 0.4
"""Share of rows of words that no sentence helps to guess."""
HELD_OUT = 16
"""One of so many sentences is never trained on."""


def sentence(rng: random.Random, *, held_out: bool) -> tuple[str, ...]:
    """The words of one sentence, 1 to 12. Held-out ones and others have none in common."""
    while True:
        if rng.random() < WITHOUT_PATTERN:
            words = tuple(rng.choice(CONTENT) for _ in range(rng.randint(1, 8)))
        else:
            pattern = rng.choice(PATTERNS).split()
            words = tuple(rng.choice(KINDS[p]) if p in KINDS else p for p in pattern)
        if is_held_out(words) == held_out:
            return words


def is_held_out(words: tuple[str, ...]) -> bool:
    return crc32(" ".join(words).encode()) % HELD_OUT == 0
