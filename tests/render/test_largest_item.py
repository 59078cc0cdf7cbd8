"""The largest item of every modality, of every family, within the limits."""

from __future__ import annotations

import pytest

from lookonce.config import MediaConfig
from lookonce.render.families.base import largest_media
from lookonce.render.families.registry import load_family
from lookonce.render.media.processing import MediaJob, Processing, ProcessingSettings
from tests.support.model_folders.make import KINDS

MEDIA_KINDS = [kind for kind, made in KINDS.items() if made.preprocessor is not None]


def sizes(family, max_tokens, **limits):
    media = MediaConfig(**limits)
    return {each.modality: each.size for each in largest_media(family, media, max_tokens)}


@pytest.mark.parametrize("kind", ["nano", *MEDIA_KINDS])
def test_no_larger_item_exists_than_the_one_that_is_warmed(folder, kind):
    """Processed for real, it has the placeholder it was chosen for, and of any size tried none
    has more."""
    family = load_family(folder(kind), "float32")
    processing = Processing(ProcessingSettings(str(folder(kind)), "float32", 1 << 24, 600.0))
    made = list(largest_media(family, MediaConfig(), 2000))
    # Films are encoded by the encoder of pictures, which is warm then.
    assert {each.modality for each in made} == set(family.modalities) - {"video"}
    for each in made:
        item = processing.run(MediaJob(each.modality, each.encoded())).item
        assert item.expansion == family.expansion_of_size(each.modality, each.size, {})
        assert item.expansion.length <= 2000
        if each.modality == "image":
            others = [(32, 32), (64, 48), (640, 480), (500, 1000)]
            lengths = [family.expansion_of_size("image", size, {}).length for size in others]
            assert item.expansion.length >= max(lengths)


def test_a_modality_with_limit_zero_is_left_out(folder):
    family = load_family(folder("qwen2_5_omni"), "float32")
    assert sizes(family, 900, limit_per_prompt={"image": 0, "audio": 1}).keys() == {"audio"}
    assert sizes(family, 900, limit_per_prompt={}) == {}


def test_an_item_with_more_tokens_than_fit_is_left_out(folder):
    assert sizes(load_family(folder("llava"), "float32"), 1) == {}


def test_pixels_and_seconds_are_limited_too(folder):
    family = load_family(folder("qwen2_5_omni"), "float32")
    wide = sizes(family, 900)
    small = sizes(family, 900, max_image_pixels=8000, max_audio_seconds=1.0)
    assert small["image"][0] * small["image"][1] <= 8000 < wide["image"][0] * wide["image"][1]
    assert small["audio"] == (family.sampling_rate,)
