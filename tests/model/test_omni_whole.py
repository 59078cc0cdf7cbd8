"""A published Omni folder holds a thinker and a talker: the thinker is served, and is the same."""

from __future__ import annotations

import shutil

import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.model.families.qwen2_5_omni import Qwen2_5OmniFamily
from lookonce.model.loader import load_model
from tests.support.model.cases import picture, sound
from tests.support.model.chats import render

BESIDE_THE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "chat_template.jinja"),
)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The random thinker inside the whole model, as transformers saves it."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    thinker = Qwen2_5OmniFamily.transformers_class().from_pretrained(folder("qwen2_5_omni"))
    # Its other parts cannot be made small; their weights only lie beside.
    config = Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    model = Qwen2_5OmniForConditionalGeneration(config)
    model.thinker.load_state_dict(thinker.state_dict())
    target = tmp_path_factory.mktemp("omni")
    model.save_pretrained(target)
    for name in BESIDE_THE_WEIGHTS:
        shutil.copy(folder("qwen2_5_omni") / name, target)
    return target


def test_the_thinker_is_found_in_the_whole_folder(whole, folder):
    inside, alone = (
        load_model(ModelConfig(folder=str(path), served_name="omni"))
        for path in (whole, folder("qwen2_5_omni"))
    )
    assert inside.info.modalities == alone.info.modalities == ("image", "audio")
    assert inside.info.eos_token_ids == alone.info.eos_token_ids
    weights = zip(inside.model.state_dict().items(), alone.model.state_dict().items(), strict=True)
    for (name, ours), (other, theirs) in weights:
        assert name == other
        assert torch.equal(ours, theirs), name


def test_prompts_are_the_thinkers(whole, folder):
    parts = ("See ", picture(4, 64, 48), " hear ", sound(3, 0.7), " well?")
    inside, alone = render(whole, parts), render(folder("qwen2_5_omni"), parts)
    assert inside.token_ids == alone.token_ids
    assert [i.item for i in inside.items] == [i.item for i in alone.items]
