"""Conversations: pictures and sounds, and one to five questions about them.

`Materials` decide what is seen and heard. Training and evaluation share everything but those:
other fonts, other voices, other sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tools.nano.world.numbers import heldout_fonts, number_scene
from tools.nano.world.picture_questions import QuestionAnswer, ask_about
from tools.nano.world.scenes import Scene
from tools.nano.world.shapes import shape_scene
from tools.nano.world.sound_questions import ask_about_sound
from tools.nano.world.sounds import Sound, make_sound
from tools.nano.world.speech import Speaker, heldout_speaker
from tools.nano.world.talk import aside, heldout_lines, talk

ORDINALS = ("first", "second", "third")
ASIDES = 0.12
"""Share of conversations about media that end with a question about something else."""


@dataclass(frozen=True, slots=True)
class Materials:
    fonts: Sequence[str]
    """Fonts of numbers; empty: Pillow's own font."""
    speaker: Speaker | None
    """None: no speech."""
    lines: Sequence[str]
    """Sentences about things that the model does not know."""

    def scene(self, rng: random.Random) -> Scene:
        return shape_scene(rng) if rng.random() < 0.6 else number_scene(rng, self.fonts)

    def sound(self, rng: random.Random) -> Sound:
        return make_sound(rng, self.speaker)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question; its media come before it."""

    asked: QuestionAnswer
    pictures: tuple[Scene, ...] = ()
    sounds: tuple[Sound, ...] = ()


Conversation = list[Turn]


def heldout_materials() -> Materials:
    return Materials(heldout_fonts(), heldout_speaker(), heldout_lines())


def conversation(rng: random.Random, materials: Materials) -> Conversation:
    makers = list(MIX)
    return rng.choices(makers, [MIX[maker] for maker in makers])[0](rng, materials)


def about_a_picture(rng: random.Random, materials: Materials) -> Conversation:
    scene = materials.scene(rng)
    asked = _different(lambda: ask_about(rng, scene), rng.randint(3, 5))
    return _with_aside(rng, materials, _turns(asked, pictures=(scene,)))


def about_several_pictures(rng: random.Random, materials: Materials) -> Conversation:
    scenes = tuple(materials.scene(rng) for _ in range(rng.choice((2, 2, 3))))
    asked = [_about_one_of(rng, scenes) for _ in range(rng.randint(3, 5))]
    return _with_aside(rng, materials, _turns(asked, pictures=scenes))


def about_an_earlier_picture(rng: random.Random, materials: Materials) -> Conversation:
    """Questions about a picture, about another, and about the first again."""
    scenes = [materials.scene(rng) for _ in range(2)]
    turns: Conversation = []
    for scene in scenes:
        count = rng.randint(1, 2)
        asked = [ask_about(rng, scene, what=rng.random() < 0.4) for _ in range(count)]
        turns += _turns(asked, pictures=(scene,))
    question = rng.choice(("What was in the first picture?", "What is in the first picture?"))
    turns.append(Turn(QuestionAnswer("earlier picture", question, scenes[0].caption())))
    return _with_aside(rng, materials, turns)


def about_a_sound(rng: random.Random, materials: Materials) -> Conversation:
    sound = materials.sound(rng)
    asked = _different(lambda: ask_about_sound(rng, sound), rng.randint(2, 3))
    return _with_aside(rng, materials, _turns(asked, sounds=(sound,)))


def about_picture_and_sound(rng: random.Random, materials: Materials) -> Conversation:
    scene, sound = materials.scene(rng), materials.sound(rng)
    asked = []
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.5:
            asked.append(replace(ask_about(rng, scene), kind="picture, with a sound"))
        else:
            asked.append(replace(ask_about_sound(rng, sound), kind="sound, with a picture"))
    return _with_aside(rng, materials, _turns(asked, pictures=(scene,), sounds=(sound,)))


def about_nothing(rng: random.Random, materials: Materials) -> Conversation:
    rounds = [talk(rng, materials.lines) for _ in range(rng.randint(1, 3))]
    return [Turn(asked) for exchange in rounds for asked in exchange]


MIX: dict[Callable[[random.Random, Materials], Conversation], float] = {
    about_a_picture: 34,
    about_several_pictures: 22,
    about_an_earlier_picture: 9,
    about_a_sound: 18,
    about_picture_and_sound: 6,
    about_nothing: 11,
}
"""Kind of conversation → relative frequency."""


def _about_one_of(rng: random.Random, scenes: Sequence[Scene]) -> QuestionAnswer:
    match rng.choices(["what", "which shape", "number", "how many"], [4, 4, 3, 1])[0]:
        case "which shape":
            asked = _which_shape(rng, scenes)
        case "number":
            asked = _the_number(rng, scenes)
        case "how many":
            question = rng.choice(("How many pictures are there?", "How many images do you see?"))
            asked = QuestionAnswer("several: how many", question, str(len(scenes)))
        case _:
            asked = None
    return asked or _what_of_one(rng, scenes)


def _what_of_one(rng: random.Random, scenes: Sequence[Scene]) -> QuestionAnswer:
    index = rng.randrange(len(scenes))
    nth = ORDINALS[index]
    question = rng.choice((
        f"What is in the {nth} picture?", f"Describe the {nth} picture.",
        f"What does the {nth} image show?", f"What is in picture {index + 1}?",
    ))  # fmt: skip
    return QuestionAnswer("several: what", question, scenes[index].caption())


def _which_shape(rng: random.Random, scenes: Sequence[Scene]) -> QuestionAnswer | None:
    """Asks for a shape that only one of the pictures has."""
    kinds = [{t.kind for t in scene.things} if not scene.is_number else set() for scene in scenes]
    only = [
        (index, kind) for index, mine in enumerate(kinds) for kind in sorted(mine)
        if sum(kind in other for other in kinds) == 1
    ]  # fmt: skip
    if not only:
        return None
    index, kind = rng.choice(only)
    question = rng.choice((f"Which picture shows a {kind}?", f"Which image has a {kind}?"))
    return QuestionAnswer("several: which", question, f"the {ORDINALS[index]} picture")


def _the_number(rng: random.Random, scenes: Sequence[Scene]) -> QuestionAnswer | None:
    """Asks about the only picture that shows a number."""
    numbers = [index for index, scene in enumerate(scenes) if scene.is_number]
    if len(numbers) != 1:
        return None
    if rng.random() < 0.5:
        answer = f"the {ORDINALS[numbers[0]]} picture"
        return QuestionAnswer("several: which", "Which picture shows a number?", answer)
    return QuestionAnswer("several: number", "What number is shown?", scenes[numbers[0]].number)


def _different(ask: Callable[[], QuestionAnswer], tries: int) -> list[QuestionAnswer]:
    """At most `tries` different questions."""
    asked = {one.question: one for one in (ask() for _ in range(tries))}
    return list(asked.values())


def _turns(
    asked: Sequence[QuestionAnswer],
    pictures: tuple[Scene, ...] = (),
    sounds: tuple[Sound, ...] = (),
) -> Conversation:
    """The media come with the first question."""
    first, *others = asked
    return [Turn(first, pictures, sounds), *map(Turn, others)]


def _with_aside(rng: random.Random, materials: Materials, turns: Conversation) -> Conversation:
    if rng.random() >= ASIDES:
        return turns
    extra = aside(
        rng, materials.lines,
        has_picture=any(turn.pictures for turn in turns),
        has_sound=any(turn.sounds for turn in turns),
    )  # fmt: skip
    return [*turns, *map(Turn, extra)]
