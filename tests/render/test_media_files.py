"""One picture is one prompt, and one sound, whatever kind of file it comes in.

From a client's message to ids and arrays, through the renderer and a worker's own code. What
Hugging Face makes of the same samples is asked from its processors directly.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image

from lookonce.errors import BadRequestError
from lookonce.types.request import RenderedPrompt
from tests.support.model.chats import render_content
from tests.support.render import hugging_face
from tests.support.render.samples import numpy_of, picture, sound

FolderMaker = Callable[..., Path]
Json = dict[str, Any]

KEEPING = ("qwen2_5_vl", "pixtral", "idefics3")
"""Kinds whose prompts show whether a picture is wide or high."""
UPRIGHT = picture(150, 60)
UNDONE_BY = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation → how to lay the picture so that a viewer turns it upright."""


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def image_part(data: bytes) -> Json:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def look(folder: Path, data: bytes, **options: Any) -> RenderedPrompt:
    content = [{"type": "text", "text": "See "}, image_part(data), {"type": "text", "text": "?"}]
    return render_content(folder, content, options=options)


def arrays(prompt: RenderedPrompt) -> dict[str, Any]:
    (rendered,) = prompt.items
    assert rendered.item is not None
    return {name: numpy_of(value).tolist() for name, value in rendered.item.arrays.items()}


class TestPictures:
    @pytest.mark.parametrize("orientation", UNDONE_BY)
    @pytest.mark.parametrize("kind", KEEPING)
    def test_a_picture_lying_by_its_exif_is_the_upright_one(
        self, folder: FolderMaker, kind: str, orientation: int
    ) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        lying = saved(UPRIGHT.transpose(UNDONE_BY[orientation]), exif=exif)
        seen, upright = look(folder(kind), lying), look(folder(kind), saved(UPRIGHT))
        assert seen.token_ids == upright.token_ids
        assert arrays(seen) == arrays(upright)

    def test_without_its_exif_it_is_another_prompt(self, folder: FolderMaker) -> None:
        """The control: the test above would see a picture left lying."""
        lying = saved(UPRIGHT.transpose(Image.Transpose.ROTATE_90))
        seen, upright = look(folder("pixtral"), lying), look(folder("pixtral"), saved(UPRIGHT))
        assert seen.token_ids != upright.token_ids

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_an_animation_is_its_first_frame(self, folder: FolderMaker, kind: str) -> None:
        frames = [Image.new("RGB", (90, 60), colour) for colour in ("red", "lime", "blue")]
        moving = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert Image.open(io.BytesIO(moving)).n_frames == 3
        seen, still = look(folder("llava"), moving), look(folder("llava"), saved(frames[0]))
        assert seen.token_ids == still.token_ids
        assert arrays(seen) == arrays(still)

    def test_options_of_the_processor_reach_it(self, folder: FolderMaker) -> None:
        chosen = {"size": {"longest_edge": 64}}
        small = look(folder("pixtral"), saved(UPRIGHT), mm_processor_kwargs=chosen)
        whole = look(folder("pixtral"), saved(UPRIGHT))
        assert np.shape(arrays(small)["pixel_values"]) == (3, 32, 64)
        assert np.shape(arrays(whole)["pixel_values"]) == (3, 64, 128)
        assert small.items[0].key != whole.items[0].key


RATE = 44_100
FILES = {
    "wav": ("WAV", "PCM_16"),
    "wav of floats": ("WAV", "FLOAT"),
    "mp3": ("MP3", None),
    "flac": ("FLAC", None),
    "ogg": ("OGG", "VORBIS"),
    "ogg of opus": ("OGG", "OPUS"),
}


def stereo_file(name: str) -> bytes:
    """Half a second of two channels at a rate that must be resampled."""
    kind, subtype = FILES[name]
    # Opus knows no 44.1 kHz.
    rate = 48_000 if subtype == "OPUS" else RATE
    left = sound(0.5 * rate / 16_000)
    stereo = np.stack([left, np.roll(left, 300)], axis=1)
    # In 16 bits here: the library rounds otherwise for one kind of file than for another.
    samples = (stereo * 20_000).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def sound_part(kind: str, name: str, data: bytes) -> Json:
    encoded = base64.b64encode(data).decode()
    if kind == "input_audio":
        return {"type": kind, kind: {"data": encoded, "format": name.split()[0]}}
    return {"type": kind, kind: {"url": f"data:audio/{name.split()[0]};base64,{encoded}"}}


def heard_elsewhere(data: bytes) -> np.ndarray:
    """Mono at 16 kHz by soundfile and soxr alone, as librosa's `load` does it."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return soxr.resample(samples.mean(axis=1), rate, 16_000, quality="HQ")


class TestSounds:
    @pytest.mark.parametrize("part", ["input_audio", "audio_url"])
    @pytest.mark.parametrize("name", FILES)
    def test_every_kind_of_file_is_heard_as_hugging_face_hears_its_samples(
        self, folder: FolderMaker, name: str, part: str
    ) -> None:
        data = stereo_file(name)
        content = [{"type": "text", "text": "Hear "}, sound_part(part, name, data)]
        prompt = render_content(folder("qwen2_audio"), content)
        samples = heard_elsewhere(data)
        expected = hugging_face.feature_extractor(folder("qwen2_audio"))(
            samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
        )
        ours = arrays(prompt)
        assert ours["feature_attention_mask"] == expected["attention_mask"][0].tolist()
        theirs = expected["input_features"][0]
        np.testing.assert_allclose(ours["input_features"], theirs, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("part", ["input_audio", "audio_url"])
    def test_lossless_files_of_one_sound_are_one_prompt(
        self, folder: FolderMaker, part: str
    ) -> None:
        prompts = [
            render_content(folder("voxtral"), [sound_part(part, name, stereo_file(name))])
            for name in ("wav", "flac")
        ]
        assert prompts[0].token_ids == prompts[1].token_ids
        assert arrays(prompts[0]) == arrays(prompts[1])

    def test_another_kind_of_file_is_refused_by_name(self, folder: FolderMaker) -> None:
        body = {"data": base64.b64encode(stereo_file("wav")).decode(), "format": "aiff"}
        with pytest.raises(BadRequestError, match="wav, mp3, flac, ogg") as raised:
            render_content(folder("voxtral"), [{"type": "input_audio", "input_audio": body}])
        assert raised.value.param == "messages[0].content[0]"
