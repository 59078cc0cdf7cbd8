"""Loading a folder: model information, progress, and the errors of a bad folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model.attention.hf_attention import ATTENTION_NAME
from lookonce.model.loader import load_model
from tests.support.model.copies import copied, edit


def load(folder: Path, progress=None, **options):
    return load_model(ModelConfig(folder=str(folder), served_name="m", **options), progress)


@pytest.fixture
def broken(folder, tmp_path) -> Path:
    """A copy of the llama folder, to be broken."""
    return copied(folder("llama"), tmp_path)


def test_nano_says_what_it_is(folder):
    info = load(folder("nano")).info
    assert info.model_type == "qwen2_5_omni_thinker"
    assert info.modalities == ("image", "audio")
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (1024, 4096, (2,))
    assert info.encoder_row_bytes == 256 * 4
    assert (info.unsplittable, info.largest_unsplittable) == ((), 0)


def test_pictures_of_gemma3_are_unsplittable(folder):
    info = load(folder("gemma3")).info
    assert (info.unsplittable, info.largest_unsplittable) == (("image",), 16)
    assert info.eos_token_ids == (1, 5)


def test_weights_take_the_dtype_asked_for(folder):
    loaded = load(folder("nano"), dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.info.encoder_row_bytes == 256 * 2


def test_float32_is_computed_in_float32_on_a_gpu_too(folder, monkeypatch):
    """cuDNN's convolutions would be computed in TF32 otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load(folder("llama"))
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("kind", ["llama", "llava", "nano"])
def test_only_the_text_model_attends_through_pages(folder, kind):
    config = load(folder(kind)).model.config
    text = config.get_text_config(decoder=True)
    assert text._attn_implementation == ATTENTION_NAME
    encoders = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    assert {encoder._attn_implementation for encoder in encoders if encoder is not None} <= {"sdpa"}


def test_progress_runs_from_nothing_to_all(folder):
    seen: list[tuple[int, int]] = []
    load(folder("llama"), lambda done, total: seen.append((done, total)))
    total = seen[0][1]
    assert seen == [(done, total) for done in range(total + 1)]


def test_the_digest_follows_the_weights(folder):
    first, again = load(folder("llama")).info, load(folder("llama")).info
    other = load(folder("llama", seed=1)).info
    assert first.weights_digest == again.weights_digest
    assert first.weights_digest != other.weights_digest


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"there is no model folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_a_config_that_is_not_json_is_refused(broken):
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(broken)


def test_an_unsupported_type_is_refused_with_the_reason(broken):
    edit(broken / "config.json", model_type="electra")
    with pytest.raises(ModelLoadError, match=r"'electra' are not supported: its decoder cannot be"):
        load(broken)


def test_a_type_that_hears_is_refused_with_the_reason(broken):
    edit(broken / "config.json", model_type="vibevoice_asr")
    with pytest.raises(ModelLoadError, match="it adds random noise to sounds"):
        load(broken)


@pytest.mark.parametrize("name", ["adapter_config.json", "speech-lora/adapter_config.json", ""])
def test_a_model_whose_media_needs_an_adapter_is_refused(folder, tmp_path, name):
    """Without it the answers would be others, and nothing would say so."""
    path = copied(folder("qwen2_audio"), tmp_path)
    if name:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")
    else:
        edit(path / "config.json", has_lora_adapter=True)
    with pytest.raises(ModelLoadError, match="has LoRA adapters for its media"):
        load(path)


def test_pytorch_pickles_are_not_loaded(broken):
    weights = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    torch.save(weights, broken / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(broken)


def test_truncated_weights_are_refused(broken):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="do not load"):
        load(broken)


def test_a_missing_weight_is_named_rather_than_made_up(broken):
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load(broken)


def test_a_weight_the_model_has_no_place_for_is_named_rather_than_left_out(broken):
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has 1 weights .*layers\.0\.self_attn\.q_proj\.bias"):
        load(broken)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.mtp_layers.0.mlp.up_proj.weight",
        "vision_tower.vision_model.head.probe",
    ],
)
def test_published_weights_that_no_family_uses_are_left_out(folder, tmp_path, name):
    kind = "llava" if name.startswith("vision") else "llama"
    copy = copied(folder(kind), tmp_path)
    weights = load_file(copy / "model.safetensors") | {name: torch.ones(8)}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert load(copy).info.model_type == kind


def test_an_output_head_beside_tied_embeddings_is_known(folder, tmp_path):
    copy = copied(folder("gemma3_text"), tmp_path)
    weights = load_file(copy / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert load(copy).info.model_type == "gemma3_text"


def test_weights_of_another_shape_are_refused(broken):
    edit(broken / "config.json", intermediate_size=96)
    with pytest.raises(ModelLoadError, match="do not load"):
        load(broken)


@pytest.mark.parametrize("length", [0, 4097])
def test_a_length_the_model_was_not_made_for_is_refused(folder, length):
    with pytest.raises(ModelLoadError, match="1 to 4096"):
        load(folder("llama"), max_model_len=length)


def test_a_shorter_length_may_be_asked_for(folder):
    assert load(folder("llama"), max_model_len=100).info.max_model_len == 100
