"""The fused decoder replaces transformers' own only if both compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.model.fused_modules import FusedDecoder
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.text_model import TransformersDecoder, choose_decoder

Folder = Callable[..., Path]
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen2_5_omni", "llava")
OTHER = ("gemma2", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_vl")


def loaded_folder(path: Path) -> LoadedModel:
    return load_model(ModelConfig(folder=str(path), served_name="test"))


def chosen(loaded: LoadedModel) -> Any:
    return choose_decoder(loaded.family, loaded.dtype, loaded.device)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_decoder_is_fused(folder: Folder, kind: str) -> None:
    assert isinstance(chosen(loaded_folder(folder(kind))), FusedDecoder)


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_decoder_runs_through_transformers(folder: Folder, kind: str) -> None:
    assert isinstance(chosen(loaded_folder(folder(kind))), TransformersDecoder)


def test_a_layer_that_computes_something_else_is_noticed(folder: Folder) -> None:
    loaded = loaded_folder(folder("llama"))
    mlp = loaded.family.decoder.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: 1.01 * forward(hidden)
    assert isinstance(chosen(loaded), TransformersDecoder)


def test_a_layer_with_a_part_more_is_left_to_transformers(folder: Folder) -> None:
    loaded = loaded_folder(folder("llama"))
    loaded.family.decoder.layers[0].post_mlp_layernorm = torch.nn.Identity()
    assert isinstance(chosen(loaded), TransformersDecoder)


def test_the_window_is_the_one_transformers_asks_for(folder: Folder) -> None:
    decoder = chosen(loaded_folder(folder("mistral")))
    assert decoder.sliding_windows == [8] * len(decoder.sliding_windows)


def test_fused_weights_are_the_model_s_own_memory(folder: Folder) -> None:
    loaded = loaded_folder(folder("qwen2"))
    chosen(loaded)
    attention = loaded.family.decoder.layers[0].self_attn
    storages = {
        module.weight.untyped_storage().data_ptr()
        for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(storages) == 1
