"""While an answer is made, the API process does not keep media that the engine holds."""

from __future__ import annotations

import base64
import gc
import io

import numpy as np
from PIL import Image

from lookonce import LLM, SamplingParams

ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3000)


def noise() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def question(media: bytes) -> list[dict[str, object]]:
    url = "data:image/png;base64," + base64.b64encode(media).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return [{"role": "user", "content": parts}]


def num_kept(size: int) -> int:
    """The number of bytes objects of exactly this length that are still referenced."""
    gc.collect()
    tracked = gc.get_objects()
    inside = gc.get_referents(*tracked)
    inside += gc.get_referents(*(one for one in inside if not gc.is_tracked(one)))
    return len({id(one) for one in inside if type(one) is bytes and len(one) == size})


def test_a_picture_is_let_go_once_the_engine_has_it():
    media = [noise()]
    size = len(media[0])
    assert num_kept(size) == 1
    with LLM("nano") as llm:
        stream = llm.stream_chat(question(media.pop()), ENDLESS)
        next(stream)
        assert num_kept(size) == 0
        stream.close()
