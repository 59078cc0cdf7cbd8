"""What every family makes of a picture is what Hugging Face's own processors make, bit for bit.

Arrays against the image processor as the full processor calls it, prompts against the full one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

from lookonce.errors import LookOnceError, UnprocessableMediaError
from lookonce.render.families.qwen2_5_vl import enlarged_at_most, smart_size
from lookonce.types.media import Expansion
from tests.support.render import hugging_face
from tests.support.render.samples import PICTURE_KINDS, SIZES, load, numpy_of, picture

FolderMaker = Callable[..., Path]
SOME_SIZES = [(64, 64), (300, 200), (37, 211)]
KEEPING_KINDS = ("pixtral", "mistral3", "idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")
"""Families whose pictures keep their shape: the number of tokens depends on it."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_arrays_equal_hugging_faces_bit_for_bit(
    folder: FolderMaker, kind: str, size: tuple[int, int]
) -> None:
    image = picture(*size)
    item = load(folder(kind)).process("image", image, {})
    expected = hugging_face.image_arrays(folder(kind), image)
    for name, array in item.arrays.items():
        ours, theirs = numpy_of(array), np.asarray(expected[name])
        assert ours.dtype == theirs.dtype, name
        # A batch of one picture, and for tiles one of prompts: the model's side has no batch.
        assert ours.shape == theirs.shape[-ours.ndim :], name
        assert np.array_equal(ours.ravel(), theirs.ravel()), name


@pytest.mark.parametrize("size", SOME_SIZES)
@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_the_expanded_prompt_equals_the_full_processors(
    folder: FolderMaker, kind: str, size: tuple[int, int]
) -> None:
    family, image = load(folder(kind)), picture(*size)
    token = hugging_face.token(folder(kind), family.placeholder_token_id("image"))
    expected = hugging_face.prompt_ids(folder(kind), f"one {token} two", images=[[image]])
    before, after = family.text_around_placeholder("image")
    ids = hugging_face.token_ids(folder(kind), f"one {before}{token}{after} two")
    at = ids.index(family.placeholder_token_id("image"))
    expansion = family.process("image", image, {}).expansion
    assert ids[:at] + expansion.token_ids() + ids[at + 1 :] == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_the_expansion_is_known_from_the_size_alone(
    folder: FolderMaker, kind: str, size: tuple[int, int]
) -> None:
    family = load(folder(kind))
    known = family.expansion_of_size("image", size, {})
    assert known == family.process("image", picture(*size), {}).expansion


@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_the_arrays_of_an_item_tell_its_expansion(folder: FolderMaker, kind: str) -> None:
    """An item processed elsewhere is checked by its arrays alone; our own items pass."""
    family = load(folder(kind))
    for size in SOME_SIZES:
        item = family.process("image", picture(*size), {})
        assert family.expansion_of_arrays("image", item.arrays) == item.expansion
        family.check_processed(item)
        with pytest.raises(LookOnceError, match="another expansion"):
            family.check_processed(replace(item, expansion=Expansion(((7, 3),), 7)))
        with pytest.raises(LookOnceError, match="no others"):
            family.check_processed(replace(item, arrays={}))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "nano"])
def test_the_grid_counts_merged_patches(folder: FolderMaker, kind: str) -> None:
    item = load(folder(kind)).process("image", picture(300, 200), {})
    frames, height, width = numpy_of(item.arrays["image_grid_thw"]).tolist()
    assert item.expansion.grid == (frames, height // 2, width // 2)
    assert item.expansion.num_embeds == frames * height * width // 4


@pytest.mark.parametrize("kind", ["llava", "pixtral", "idefics3", "nano"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_floats_are_cast_to_the_models_dtype_as_torch_casts_them(
    folder: FolderMaker, kind: str, dtype: str
) -> None:
    import torch

    image = picture(90, 70)
    exact = numpy_of(load(folder(kind)).process("image", image, {}).arrays["pixel_values"])
    array = load(folder(kind), dtype).process("image", image, {}).arrays["pixel_values"]
    expected = torch.from_numpy(exact.copy()).to(getattr(torch, dtype))
    assert array.dtype == dtype
    assert bytes(array.data) == expected.view(torch.uint8).numpy().tobytes()


def test_an_older_llava_folder_takes_the_count_from_the_models_config(
    folder: FolderMaker, tmp_path: Path
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder("llava") / name).read_bytes())
    expansion = load(tmp_path).expansion_of_size("image", (10, 10), {})
    assert expansion == load(folder("llava")).expansion_of_size("image", (10, 10), {})


@settings(deadline=None)
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    low=st.integers(1, 1 << 16),
    extra=st.integers(0, 1 << 22),
)
def test_qwen_sizes_follow_smart_resize(width: int, height: int, low: int, extra: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    bounds = {"factor": 28, "min_pixels": low, "max_pixels": low + extra}
    try:
        expected = smart_resize(height, width, **bounds)
    except ValueError:
        with pytest.raises(UnprocessableMediaError):
            smart_size(width, height, **bounds)
    else:
        assert smart_size(width, height, **bounds) == expected[::-1]
        assert math.prod(expected) <= enlarged_at_most(low + extra, 28)


@settings(deadline=None, max_examples=60)
@given(width=st.integers(4, 500), height=st.integers(4, 500), kind=st.sampled_from(KEEPING_KINDS))
def test_any_size_is_written_as_the_full_processor_writes_it(
    folder: FolderMaker, width: int, height: int, kind: str
) -> None:
    family, image = load(folder(kind)), Image.new("RGB", (width, height))
    token = hugging_face.token(folder(kind), family.placeholder_token_id("image"))
    expected = hugging_face.prompt_ids(folder(kind), token, images=[[image]])
    expansion = family.expansion_of_size("image", (width, height), {}).token_ids()
    assert expected[-len(expansion) :] == expansion
    assert len(expected) - len(expansion) <= 1  # the tokenizer's own first token
