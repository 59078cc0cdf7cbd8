"""Questions about one picture, and their true answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.nano.world.colours import FOREGROUNDS, article
from tools.nano.world.scenes import PLACES, SHAPES, Scene, Thing


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question and its true answer. Accuracy is counted by `kind`."""

    kind: str
    question: str
    answer: str


WHAT = (
    "What is in the picture?", "What is in the image?", "What do you see?",
    "Describe the picture.", "Describe this image.", "What does the picture show?",
    "What's in this image?", "What is shown in the picture?", "What is this?",
    "Describe the image.",
)  # fmt: skip
READ = (
    "What number is shown?", "What is the number?", "Read the number.",
    "Which number is in the picture?", "What number do you see?", "What does it say?",
    "Read the text.", "What is written in the picture?",
)  # fmt: skip
COUNT = (
    "How many shapes are there?", "How many shapes are in the picture?", "Count the shapes.",
)  # fmt: skip


def ask_about(rng: random.Random, scene: Scene, *, what: bool = False) -> QuestionAnswer:
    """A question that fits `scene`; with `what`, the question what the picture shows."""
    if what:
        return _what(rng, scene)
    asks = NUMBER_ASKS if scene.is_number else SHAPE_ASKS
    chosen = rng.choices(list(asks), list(asks.values()))[0]
    return chosen(rng, scene) or _what(rng, scene)


def _what(rng: random.Random, scene: Scene) -> QuestionAnswer:
    return QuestionAnswer(f"what: {scene.layout}", rng.choice(WHAT), scene.caption())


def _read(rng: random.Random, scene: Scene) -> QuestionAnswer:
    return QuestionAnswer("read number", rng.choice(READ), scene.number)


def _number_colour(rng: random.Random, scene: Scene) -> QuestionAnswer:
    return QuestionAnswer("color", f"What {_colour(rng)} is the number?", scene.things[0].colour)


def _background(rng: random.Random, scene: Scene) -> QuestionAnswer:
    return QuestionAnswer("background", f"What {_colour(rng)} is the background?", scene.background)


def _no_shapes(rng: random.Random, scene: Scene) -> QuestionAnswer:
    if rng.random() < 0.5:
        return QuestionAnswer("absent", rng.choice(COUNT[:2]), "0")
    return QuestionAnswer("exists", f"Is there a {rng.choice(SHAPES)}?", "no")


def _shape_colour(rng: random.Random, scene: Scene) -> QuestionAnswer | None:
    thing = _one_alone(rng, scene, "kind")
    if thing is None:
        return None
    return QuestionAnswer("color", f"What {_colour(rng)} is the {thing.kind}?", thing.colour)


def _shape(rng: random.Random, scene: Scene) -> QuestionAnswer | None:
    thing = _one_alone(rng, scene, "colour")
    if thing is None:
        return None
    question = rng.choice(("What", "Which"))
    return QuestionAnswer("shape", f"{question} shape is {thing.colour}?", f"the {thing.kind}")


def _count(rng: random.Random, scene: Scene) -> QuestionAnswer:
    return QuestionAnswer("count", rng.choice(COUNT), str(len(scene.things)))


def _exists(rng: random.Random, scene: Scene) -> QuestionAnswer:
    if rng.random() < 0.5:
        kinds = [thing.kind for thing in scene.things]
        kind = rng.choice(SHAPES) if rng.random() < 0.5 else rng.choice(kinds)
        return QuestionAnswer("exists", f"Is there a {kind}?", _yes(kind in kinds))
    thing = rng.choice(scene.things)
    kind, colour = thing.kind, thing.colour
    if rng.random() < 0.6:
        if rng.random() < 0.5:
            kind = rng.choice(SHAPES)
        else:
            colour = rng.choice(FOREGROUNDS)
    there = any(t.kind == kind and t.colour == colour for t in scene.things)
    return QuestionAnswer("exists", f"Is there {article(colour)} {colour} {kind}?", _yes(there))


def _where(rng: random.Random, scene: Scene) -> QuestionAnswer | None:
    thing = _one_alone(rng, scene, "kind", "colour")
    if thing is None or scene.layout not in PLACES:
        return None
    named = f"{thing.colour} {thing.kind}"
    if scene.alone(thing, by=("kind",)) and rng.random() < 0.5:
        named = thing.kind
    place = PLACES[scene.layout][scene.things.index(thing)]
    return QuestionAnswer("where", f"Where is the {named}?", place)


def _absent(rng: random.Random, scene: Scene) -> QuestionAnswer:
    missing = sorted(set(SHAPES) - {thing.kind for thing in scene.things})
    if missing and rng.random() < 0.6:
        kind = rng.choice(missing)
        return QuestionAnswer(
            "absent", f"What {_colour(rng)} is the {kind}?", f"There is no {kind}."
        )
    return QuestionAnswer("absent", rng.choice(READ[:2]), "There is no number.")


def _one_alone(rng: random.Random, scene: Scene, *by: str) -> Thing | None:
    things = [thing for thing in scene.things if scene.alone(thing, by=by)]
    return rng.choice(things) if things else None


def _colour(rng: random.Random) -> str:
    return rng.choice(("color", "color", "colour"))


def _yes(true: bool) -> str:
    return "yes" if true else "no"


Ask = Callable[[random.Random, Scene], QuestionAnswer | None]
SHAPE_ASKS: dict[Ask, float] = {
    _what: 4, _shape_colour: 2, _shape: 2, _count: 1.5, _exists: 2, _where: 2, _background: 1,
    _absent: 0.6,
}  # fmt: skip
NUMBER_ASKS: dict[Ask, float] = {
    _what: 2, _read: 5, _number_colour: 1, _background: 1, _no_shapes: 0.6,
}  # fmt: skip
"""Question → relative frequency. A question that does not fit the picture returns None."""
