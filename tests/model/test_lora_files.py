"""Folders of adapters: what is not served is refused by name, and nothing is unpickled."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.errors import BadRequestError
from lookonce.model.lora_files import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from tests.support.model.adapters import make_adapter, read

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def subject(subjects):
    return subjects("qwen3")


@pytest.fixture(scope="module")
def made(subject, folder, tmp_path_factory):
    return make_adapter(folder("qwen3"), subject.loaded, tmp_path_factory.mktemp("made"))


@pytest.fixture
def adapter(made, tmp_path):
    """A copy of a good one, for tests that damage it."""
    return shutil.copytree(made, tmp_path / "adapter")


def configure(adapter, **settings):
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def change(adapter, edit):
    file = adapter / WEIGHTS_FILE
    save_file(edit(load_file(file)), file)


def refusal(adapter, subject, **options) -> str:
    with pytest.raises(BadRequestError) as refused:
        read(adapter, subject.loaded, **options)
    assert str(adapter) not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"target_modules": ["o_proj"]}, "not one of its target_modules"),
        ({"target_modules": r".*(q_proj"}, "no expression"),
        ({"target_modules": r"((.+)\2*)+[!?]"}, "takes too long"),
        ({"rank_pattern": {r"((.+)\4*)+[!?]": 8}}, "takes too long"),
        ({"exclude_modules": ["q_proj"]}, "not one of its target_modules"),
        ({"target_modules": None}, "target_modules"),
        ({"r": 8}, "of rank 8"),
        ({"r": 0}, "r or lora_alpha"),
        ({"lora_alpha": "much"}, "r or lora_alpha"),
    ],
)
def test_a_setting_that_is_not_served_is_named(adapter, subject, settings, said):
    configure(adapter, **settings)
    assert said in refusal(adapter, subject)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda w: {**w, f"{Q_PROJ}.lora_B.bias": torch.zeros(4)}, "lora_B.bias"),
        (lambda w: {**w, f"{Q_PROJ}.lora_magnitude_vector": torch.zeros(4)}, "magnitude"),
        (
            lambda w: {**w, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4)},
            "token embeddings",
        ),
        (lambda w: {k: t for k, t in w.items() if k != f"{Q_PROJ}.lora_A.weight"}, "matrix A"),
        (
            lambda w: {
                k.replace("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"): t
                for k, t in w.items()
            },
            "layers.9.self_attn.q_proj, which is no linear layer",
        ),
        (
            lambda w: {
                k.replace("model.layers.0.self_attn.q_proj", "lm_head"): t for k, t in w.items()
            },
            "it is the output head",
        ),
        (
            lambda w: {
                k: t[:, :3].clone() if k.endswith("q_proj.lora_A.weight") else t
                for k, t in w.items()
            },
            "the matrices of model.layers.0.self_attn.q_proj",
        ),
        (
            lambda w: {k: t * float("nan") for k, t in w.items()},
            "not finite",
        ),
    ],
)
def test_matrices_that_do_not_fit_are_named(adapter, subject, edit, said):
    change(adapter, edit)
    assert said in refusal(adapter, subject)


def test_a_rank_above_the_limit_is_refused(adapter, subject):
    assert "above 3 (--max-lora-rank)" in refusal(adapter, subject, max_rank=3)


def test_a_pickle_is_not_opened(adapter, subject):
    (adapter / WEIGHTS_FILE).unlink()
    (adapter / PICKLE_FILE).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "is a pickle" in refusal(adapter, subject)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_folder_without_its_files_and_with_broken_ones_is_refused(adapter, subject, name):
    (adapter / name).write_bytes(b"{broken")
    assert f"{name} cannot be read" in refusal(adapter, subject)
    (adapter / name).unlink()
    assert f"its folder has no {name}" in refusal(adapter, subject)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_pipe_is_not_waited_for(adapter, subject, name):
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    assert f"{name} is no file" in refusal(adapter, subject)


@pytest.mark.parametrize("alpha", [1e300, 10**400, -1e300, True])
def test_a_scale_that_is_no_number_here_is_refused(adapter, subject, alpha):
    configure(adapter, lora_alpha=alpha)
    assert "lora_alpha" in refusal(adapter, subject)


def test_many_patterns_and_deep_json_are_refused(adapter, subject):
    configure(adapter, rank_pattern={f"a{number}": 4 for number in range(257)})
    assert "rank_pattern" in refusal(adapter, subject)
    (adapter / CONFIG_FILE).write_text("[" * 500_000)
    assert "RecursionError" in refusal(adapter, subject)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool])
def test_matrices_of_other_numbers_are_refused(adapter, subject, dtype):
    change(adapter, lambda tensors: {name: each.to(dtype) for name, each in tensors.items()})
    assert str(dtype) in refusal(adapter, subject)


def test_equal_contents_are_one_adapter_and_any_difference_another(adapter, made, subject):
    identity = read(made, subject.loaded).identity
    assert read(adapter, subject.loaded).identity == identity
    configure(adapter, lora_alpha=9)
    scaled = read(adapter, subject.loaded).identity
    change(adapter, lambda w: {k: t + (k == f"{Q_PROJ}.lora_B.weight") for k, t in w.items()})
    assert len({identity, scaled, read(adapter, subject.loaded).identity}) == 3


def test_names_of_an_older_transformers_are_found(subjects, folder, tmp_path):
    """Qwen2-VL's language model was `model.layers`, and its encoder `visual`, until 4.52."""
    subject = subjects("qwen2_5_vl")
    target = make_adapter(
        folder("qwen2_5_vl"), subject.loaded, tmp_path / "new", target_modules=["q_proj", "qkv"]
    )
    new = read(target, subject.loaded)
    prefix = "base_model.model."
    change(
        target,
        lambda weights: {
            name.replace(f"{prefix}model.language_model.", f"{prefix}model.").replace(
                f"{prefix}model.visual.", f"{prefix}visual."
            ): tensor
            for name, tensor in weights.items()
        },
    )
    assert read(target, subject.loaded).identity == new.identity
