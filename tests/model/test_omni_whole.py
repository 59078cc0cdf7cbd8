"""A published Omni folder holds a thinker and a talker: the thinker is served, and is the same."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from lookonce.config import ModelConfig
from lookonce.model.families.qwen2_5_omni import Qwen2_5OmniFamily, Qwen3OmniFamily
from lookonce.model.loader import load_model
from tests.support.model.cases import picture, sound
from tests.support.model.chats import render

BESIDE_THE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "chat_template.jinja"),
)


WHOLE = {
    "qwen2_5_omni": (Qwen2_5OmniFamily, "Qwen2_5Omni", {"enable_audio_output": False}),
    "qwen3_omni": (Qwen3OmniFamily, "Qwen3OmniMoe", {"enable_audio_output": False}),
}


@pytest.fixture(scope="module", params=WHOLE)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def whole(kind, folder, tmp_path_factory):
    """The random thinker inside the whole model, as transformers saves it."""
    family, name, parts = WHOLE[kind]
    thinker = family.transformers_class().from_pretrained(folder(kind))
    # Its other parts cannot be made small; their weights only lie beside.
    config = getattr(transformers, f"{name}Config")(
        thinker_config=thinker.config.to_dict(), **parts
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.thinker.load_state_dict(thinker.state_dict())
    target = tmp_path_factory.mktemp("omni")
    model.save_pretrained(target)
    for file in BESIDE_THE_WEIGHTS:
        shutil.copy(folder(kind) / file, target)
    return target


def test_the_thinker_is_found_in_the_whole_folder(whole, kind, folder):
    inside, alone = (
        load_model(ModelConfig(folder=str(path), served_name="omni"))
        for path in (whole, folder(kind))
    )
    assert inside.info.modalities == alone.info.modalities == inside.family.modalities
    assert inside.info.eos_token_ids == alone.info.eos_token_ids
    weights = zip(inside.model.state_dict().items(), alone.model.state_dict().items(), strict=True)
    for (name, ours), (other, theirs) in weights:
        assert name == other
        assert torch.equal(ours, theirs), name


def test_prompts_are_the_thinkers(whole, kind, folder):
    parts = ("See ", picture(4, 64, 48), " hear ", sound(3, 0.7), " well?")
    inside, alone = render(whole, parts), render(folder(kind), parts)
    assert inside.token_ids == alone.token_ids
    assert [i.item for i in inside.items] == [i.item for i in alone.items]
