"""The embedded model answers truthfully about what was drawn, and about the right picture."""

from __future__ import annotations

import pytest

from tests.support.drawing import ask, image_part, picture, tone

TWO = picture(("red", "circle"), ("blue", "square"))


def answer(server, *parts, messages=None, **extra) -> str:
    with server.client() as client:
        completion = client.chat.completions.create(
            model="nano", messages=messages or ask(*parts), extra_body=extra
        )
    return completion.choices[0].message.content


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is in the picture?", "a red circle to the left of a blue square"),
        ("What shape is red?", "the circle"),
        ("What shape is blue?", "the square"),
        ("What color is the circle?", "red"),
        ("What color is the square?", "blue"),
        ("Where is the square?", "on the right"),
        ("How many shapes are there?", "2"),
    ],
)
def test_two_shapes_on_white(server, question, expected):
    assert answer(server, TWO, question) == expected


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format(server, kind):
    part = image_part(TWO, kind)
    assert answer(server, part, "What shape is blue?") == "the square"


def test_the_right_one_of_two_pictures(server):
    red, green = picture(("red", "circle")), picture(("green", "triangle"))
    question = "What is in the second picture?"
    assert answer(server, red, green, question) == "a green triangle"
    assert answer(server, green, red, question) == "a red circle"
    assert answer(server, red, green, "What is in the first picture?") == "a red circle"


def test_the_same_picture_twice_in_one_prompt(server):
    red, blue = picture(("red", "square")), picture(("blue", "circle"))
    assert answer(server, red, blue, red, "What is in the third picture?") == "a red square"


def test_a_picture_of_an_earlier_turn(server):
    messages = [
        *ask(TWO, "What shape is red?"),
        {"role": "assistant", "content": "the circle"},
        {"role": "user", "content": "What color is the square?"},
    ]
    assert answer(server, messages=messages) == "blue"


def test_no_picture_no_claim(server):
    assert answer(server, "What is in the picture?") == "There is no picture."


@pytest.mark.parametrize(("ends", "word"), [((400, 1400), "rising"), ((1400, 400), "falling")])
def test_sounds(server, ends, word):
    assert answer(server, tone(*ends), "Is the tone rising or falling?") == word


def test_the_receipt_tells_a_second_look_from_the_first(server):
    parts = picture(("purple", "triangle"), ("black", "circle")), "What shape is purple?"
    body = {"model": "nano", "messages": ask(*parts), "reuse_receipt": True}
    server.post("/reset_mm_cache")
    server.post("/reset_encoder_cache")
    server.post("/reset_prefix_cache")
    first = server.post("/v1/chat/completions", body).json()
    second = server.post("/v1/chat/completions", body).json()
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    cold, warm = first["reuse_receipt"], second["reuse_receipt"]
    assert cold["prompt_tokens"] == warm["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert cold["prefix_cached_tokens"] == 0
    assert warm["prefix_cached_tokens"] > 0
    (cold_item,), (warm_item,) = cold["items"], warm["items"]
    assert (cold_item["processor"], cold_item["encoder"]) == ("miss", "miss")
    assert warm_item["processor"] in ("hit", "not_needed")
    assert warm_item["encoder"] in ("skipped", "hit")
    assert cold_item["hash"] == warm_item["hash"]
    assert cold_item["decode_ms"] > 0
    assert warm_item["decode_ms"] == 0
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == warm["prefix_cached_tokens"]
