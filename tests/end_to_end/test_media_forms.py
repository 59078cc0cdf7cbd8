"""Pictures and sounds over HTTP in all forms that clients send, and processor options."""

from __future__ import annotations

import base64
import io

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from tests.support.drawing import SAMPLE_RATE, ask, picture, tone

TWO = picture(("red", "circle"), ("blue", "square"))
RATE = 44_100
SOUND_FILES = ("wav", "mp3", "flac", "ogg")
ORIENTATION = 0x0112


def complete(server, *parts, **extra):
    with server.client() as client:
        return client.chat.completions.create(
            model="nano", messages=ask(*parts), temperature=0, extra_body=extra
        )


def answer(server, *parts) -> str:
    return complete(server, *parts).choices[0].message.content


def picture_part(data: bytes) -> dict[str, object]:
    url = f"data:image/*;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rising_tone(kind: str) -> str:
    """A sound with two channels at another rate than the model's, in base64."""
    faster = RATE / SAMPLE_RATE
    samples = tone(400 / faster, 1400 / faster, faster)
    file = io.BytesIO()
    soundfile.write(file, np.stack([samples, samples], axis=1), RATE, format=kind.upper())
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", SOUND_FILES)
def test_sounds_in_every_kind_of_file(server, kind):
    inline = {"type": "input_audio", "input_audio": {"data": rising_tone(kind), "format": kind}}
    url = f"data:audio/{kind};base64,{rising_tone(kind)}"
    by_url = {"type": "audio_url", "audio_url": {"url": url}}
    for part in (inline, by_url):
        assert answer(server, part, "Is the tone rising or falling?") == "rising"


def test_a_photo_taken_sideways(server):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = saved(TWO.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)
    told = answer(server, picture_part(data), "What is in the picture?")
    assert told == "a red circle to the left of a blue square"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_answered_by_its_first_frame(server, kind):
    frames = [picture((colour, "circle")) for colour in ("red", "green", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert answer(server, picture_part(data), "What color is the circle?") == "red"


def test_options_of_the_processor_change_what_the_model_sees(server):
    large = picture(("red", "circle"), side=224)
    question = "What color is the circle?"
    whole = complete(server, large, question)
    small = complete(server, large, question, mm_processor_kwargs={"max_pixels": 84 * 84})
    tokens = [seen.usage.prompt_tokens_details.image_tokens for seen in (whole, small)]
    assert tokens == [8 * 8, 3 * 3]
    assert small.choices[0].message.content == "red"


@pytest.mark.parametrize(
    ("option", "value"), [("do_resize", False), ("max_pixels", 0), ("min_pixels", "low")]
)
def test_other_options_are_refused_by_name(server, option, value):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(server, TWO, "What?", mm_processor_kwargs={option: value})
    assert raised.value.param == f"mm_processor_kwargs.{option}"
    assert option in raised.value.message
