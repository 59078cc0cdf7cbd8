"""`lookonce bench nano`: conversations as messages, answers judged to the letter."""

from __future__ import annotations

import base64
import io
import random
import wave
from types import SimpleNamespace

from PIL import Image

from benchmarks.nano import GradedAnswer, evaluate, mistakes, questions, report_of
from tools.nano.world.conversations import Turn, heldout_materials
from tools.nano.world.picture_questions import QuestionAnswer
from tools.nano.world.shapes import shape_scene
from tools.nano.world.sounds import make_sound

RED = QuestionAnswer("color", "What color is the circle?", "red")
TWO = QuestionAnswer("count", "How many shapes are there?", "2")


class Oracle:
    """Knows the answers it was told, in order, and says the last one wrong."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.seen: list[object] = []

    def chat(self, conversations, sampling):
        self.seen += conversations
        assert sampling.temperature == 0
        return [SimpleNamespace(text=self.answers.pop(0)) for _ in conversations]


def test_each_question_follows_the_true_answers_before_it():
    rng = random.Random(0)
    scene, sound = shape_scene(rng), make_sound(rng, None)
    (first, asked), (second, _) = questions([Turn(RED, (scene,), (sound,)), Turn(TWO)])
    assert asked is RED
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:1] == first
    assert second[1]["content"] == "red"
    picture, clip, text = first[0]["content"]
    assert text == {"type": "text", "text": RED.question}
    shown = Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].split(",")[1])))
    assert shown.tobytes() == scene.image.tobytes()
    with wave.open(io.BytesIO(base64.b64decode(clip["input_audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnframes()) == (16_000, len(sound.wave))


def test_the_table_counts_by_kind_and_over_all():
    answered = [GradedAnswer(RED, "red"), GradedAnswer(RED, "Red"), GradedAnswer(TWO, "2\n")]
    report = report_of(answered, heldout_materials())
    assert report.rows == [
        ("color", 2, 1, "0.500"), ("count", 1, 1, "1.000"), ("all", 3, 2, "0.667"),
    ]  # fmt: skip
    assert mistakes(answered) == ["color: What color is the circle? said 'Red', not 'red'"]


def test_evaluation_asks_every_question_once():
    oracle = Oracle(["nonsense"] * 500)
    answered = evaluate(oracle, conversations=12, seed=1)  # type: ignore[arg-type]
    assert len(answered) == len(oracle.seen) > 12
    assert not any(one.right for one in answered)
