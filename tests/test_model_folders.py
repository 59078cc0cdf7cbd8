"""Random folders are complete: everything loads from them offline and without torchvision."""

import warnings
from pathlib import Path

import pytest

from lookonce.errors import ConfigError
from tests.support.model_folders.make import KINDS, make_folder
from tests.support.model_folders.qwen import QWEN_KINDS
from tests.support.model_folders.vision import VISION_KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_round_trips_text_and_knows_its_special_tokens(folder, kind):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(kind))
    text = "a red circle 你 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(list(KINDS[kind].specials)) == list(
        range(len(KINDS[kind].specials))
    )


@pytest.mark.parametrize("kind", {**VISION_KINDS, **QWEN_KINDS})
def test_image_processor_loads_with_the_pil_backend(folder, kind):
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder(kind), backend="pil")
    assert "pixel_values" in processor(Image.new("RGB", (90, 60), "red"), return_tensors="np")


def test_equal_seeds_give_equal_bytes(folder, tmp_path):
    again = make_folder("llama", tmp_path / "again")
    first = Path(folder("llama"))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_unknown_kind_is_refused_with_what_exists(tmp_path):
    with pytest.raises(ConfigError, match="qwen2_5_vl"):
        make_folder("gpt5", tmp_path)


def test_building_a_folder_warns_about_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_folder("llava", tmp_path / "quiet", seed=1)
