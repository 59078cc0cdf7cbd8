"""The embedded model's world: what is drawn, sounded and asked is true, and pinned by its seed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tools.nano.world.colours import HARD_TO_SEE, SHADES
from tools.nano.world.conversations import (
    MIX,
    Materials,
    about_several_pictures,
    conversation,
    heldout_materials,
)
from tools.nano.world.numbers import HELDOUT_FONTS, TRAINING_FONTS, number_scene
from tools.nano.world.picture_questions import ask_about
from tools.nano.world.scenes import CELL, Scene
from tools.nano.world.shapes import LAYOUTS, shape_scene
from tools.nano.world.sound_questions import ask_about_sound
from tools.nano.world.sounds import Sound, make_sound
from tools.nano.world.speech import (
    DIGIT_WORDS,
    HELDOUT_VOICES,
    TRAINING_VOICES,
    Segment,
    Utterance,
)
from tools.nano.world.talk import heldout_lines, training_lines

MUTE = Materials(fonts=(), speaker=None, lines=heldout_lines())


def scenes(number: int, **layout) -> list[Scene]:
    rng = random.Random(7)
    return [shape_scene(rng, **layout) for _ in range(number)]


def sounds(number: int) -> list[Sound]:
    rng = random.Random(7)
    return [make_sound(rng, None) for _ in range(number)]


def middle(thing) -> tuple[float, float]:
    left, top, right, bottom = thing.box
    return (left + right) / 2, (top + bottom) / 2


def test_pictures_are_whole_cells_within_what_the_model_takes_unresized():
    rng = random.Random(1)
    for scene in [*scenes(60), *(number_scene(rng, ()) for _ in range(40))]:
        width, height = scene.image.size
        assert width % CELL == height % CELL == 0
        assert 4 <= width * height // CELL**2 <= 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_things_are_inside_the_picture_in_their_colour(layout):
    for scene in scenes(25, layout=layout):
        for thing in scene.things:
            left, top, right, bottom = thing.box
            assert left >= 0
            assert top >= 0
            assert right <= scene.image.width
            assert bottom <= scene.image.height
            seen = scene.image.getpixel((int((left + right) / 2), int(top + (bottom - top) * 0.6)))
            nearest = min(SHADES, key=lambda name: distance(seen, name))
            assert nearest == thing.colour, thing
            assert (thing.colour, scene.background) not in HARD_TO_SEE


def distance(seen, name: str) -> int:
    return min(sum(abs(a - b) for a, b in zip(seen, shade, strict=True)) for shade in SHADES[name])


def test_left_of_and_above_are_what_they_say():
    for scene in scenes(40, layout="side"):
        (x1, y1), (x2, y2) = map(middle, scene.things)
        assert x2 - x1 > abs(y2 - y1)
        assert scene.caption().count("to the left of") == 1
    for scene in scenes(40, layout="stack"):
        (x1, y1), (x2, y2) = map(middle, scene.things)
        assert y2 - y1 > abs(x2 - x1)
    for scene in scenes(20, layout="row"):
        assert all(middle(a)[0] < middle(b)[0] for a, b in pairwise(scene.things))


def test_answers_about_shapes_are_true():
    rng = random.Random(2)
    for scene in scenes(80):
        kinds = {thing.kind: thing.colour for thing in scene.things}
        for _ in range(8):
            asked = ask_about(rng, scene)
            last = asked.question.rstrip("?.").split()[-1]
            match asked.kind:
                case "count":
                    assert asked.answer == str(len(scene.things))
                case "background":
                    assert asked.answer == scene.background
                case "color":
                    assert kinds[last] == asked.answer
                case "absent":
                    assert last not in kinds
                case "exists" if asked.question.startswith(f"Is there a {last}"):
                    assert (asked.answer == "yes") == (last in kinds)


def test_numbers_are_read_digit_by_digit():
    rng = random.Random(3)
    for scene in (number_scene(rng, ()) for _ in range(50)):
        assert scene.caption() == f"the number {int(scene.number)}"
        assert ask_about(rng, scene, what=True).answer == scene.caption()


def test_sounds_are_bounded_and_their_segments_loud():
    for sound in sounds(60):
        assert sound.wave.dtype == np.float32
        assert np.abs(sound.wave).max() <= 1
        assert sound.kind != "speech"
        for segment in sound.segments:
            inside = np.abs(sound.wave[segment.start : segment.end]).mean()
            assert inside > 0.02
    beeps = [sound for sound in sounds(60) if sound.kind == "beeps"]
    assert all(len(sound.segments) == sound.beeps for sound in beeps)


def test_a_rising_tone_rises():
    for sound in sounds(200):
        if sound.tone in ("rising", "falling"):
            (segment,) = sound.segments
            crossings = np.flatnonzero(np.diff(np.signbit(sound.wave[segment.start : segment.end])))
            half = (segment.end - segment.start) / 2
            early, late = (crossings < half).sum(), (crossings >= half).sum()
            assert (late > early) == (sound.tone == "rising")


class Hummer:
    """Says every word as a hum of a tenth of a second."""

    def say(self, rng, words):
        wave = np.tile(np.float32([0.5, -0.5]), 800 * len(words))
        segments = [Segment(i * 1600, (i + 1) * 1600, word) for i, word in enumerate(words)]
        return Utterance(wave, tuple(segments))


def test_spoken_numbers_are_the_words_as_digits():
    rng = random.Random(4)
    for _ in range(200):
        sound = make_sound(rng, Hummer())
        asked = ask_about_sound(rng, sound)
        if asked.kind == "spoken number":
            assert asked.answer == "".join(str(DIGIT_WORDS.index(word)) for word in sound.words)
        if sound.kind == "speech":
            assert [segment.label for segment in sound.segments] == list(sound.words)


@pytest.mark.parametrize("make", MIX)
def test_every_kind_of_conversation_has_its_media_with_the_first_question(make):
    rng = random.Random(5)
    for _ in range(10):
        turns = make(rng, MUTE)
        assert turns
        assert all(turn.asked.question and turn.asked.answer for turn in turns)
        media = [turn for turn in turns if turn.pictures or turn.sounds]
        assert not media or media[0] is turns[0]


def test_which_picture_has_one_answer():
    rng = random.Random(6)
    for _ in range(60):
        turns = about_several_pictures(rng, MUTE)
        for turn in turns:
            if turn.asked.kind == "several: which":
                kind = turn.asked.question.rstrip("?").split()[-1]
                place = ("the first picture", "the second picture", "the third picture")
                scene = turns[0].pictures[place.index(turn.asked.answer)]
                shows = {t.kind for t in scene.things} | ({"number"} if scene.is_number else set())
                assert kind in shows


def test_a_seed_pins_everything():
    def said() -> list[tuple[str, str, bytes]]:
        rng = random.Random(8)
        turns = [turn for _ in range(12) for turn in conversation(rng, MUTE)]
        return [
            (t.asked.question, t.asked.answer, b"".join(p.image.tobytes() for p in t.pictures))
            for t in turns
        ]

    assert said() == said()


def test_evaluation_sees_nothing_of_training():
    assert not set(HELDOUT_FONTS) & set(TRAINING_FONTS)
    assert not set(HELDOUT_VOICES) & set(TRAINING_VOICES)
    assert not set(heldout_lines()) & set(training_lines())
    assert len(heldout_lines()) > 50
    assert replace(heldout_materials(), speaker=None).lines == heldout_lines()
