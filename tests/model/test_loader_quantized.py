"""Quantized weights are dequantized or refused; they are never loaded without their scales."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.llama_cpp_peer import write_gguf
from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model import quantized_weights
from lookonce.model.loader import load_model
from tests.support.model.copies import copied, edit, load
from tests.support.model.quantized import (
    GPTQ,
    KINDS,
    ROWS,
    Weights,
    compressed,
    packed_folder,
    rewrite,
)
from tests.support.model.serving import compare, make_subject, serve

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate (the extra 'quantized') is not installed"
)

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture
def mxfp4(folder, tmp_path) -> tuple[Path, Weights]:
    """A folder as gpt-oss is published, and what its experts stand for."""
    copy = copied(folder("gpt_oss"), tmp_path)
    generator = torch.Generator().manual_seed(0)
    packed, meant = {}, {}
    for name, weight in load_file(copy / "model.safetensors").items():
        if not name.endswith(EXPERTS):
            packed[name] = weight.to(torch.bfloat16)
            continue
        experts, wide, rows = weight.shape
        blocks = torch.randint(
            256, (experts, rows, wide // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = FP4[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
        values = values * torch.exp2(scales.float() - 127)[..., None]
        meant[name] = values.flatten(-2).transpose(1, 2)
    not_packed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    rewrite(copy, packed, quant_method="mxfp4", modules_to_not_convert=not_packed)
    return copy, meant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_dequantized_without_accelerate(mxfp4, dtype, monkeypatch):
    module = "transformers.quantizers.quantizer_mxfp4"
    monkeypatch.setattr(f"{module}.is_accelerate_available", lambda: False)
    copy, meant = mxfp4
    loaded = load(copy, dtype=dtype).model.state_dict()
    assert meant
    for name, weight in meant.items():
        assert loaded[name].dtype == getattr(torch, dtype)
        assert torch.equal(loaded[name].float(), weight)


@needs_accelerate  # by the reference
def test_answers_from_mxfp4_are_hugging_face_s(mxfp4):
    subject = make_subject(mxfp4[0])
    difference = compare(serve(subject.loaded, subject.cases, budget=23).answers, subject.expected)
    assert difference.wrong == 0


# --- checkpoints of plain tensors -----------------------------------------------------------------


def same_weights(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], weight, rtol=1e-6, atol=1e-7) for name, weight in theirs.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_what_they_stand_for(
    folder, tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(quantized_weights, "BLOCK", 0)  # so that a matrix is several blocks
    copy, plain = packed_folder(folder("llama"), tmp_path, kind)
    ours, theirs = load(copy).model.state_dict(), load(plain).model.state_dict()
    assert same_weights(ours, theirs)
    assert not same_weights(ours, load(folder("llama")).model.state_dict())


@pytest.mark.parametrize("kind", ["gptq", "fp8-blocks", "compressed-int8"])
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_vl"])
def test_experts_and_models_with_media_are_unpacked(folder, tmp_path, model, kind) -> None:
    copy, plain = packed_folder(folder(model), tmp_path, kind)
    assert same_weights(load(copy).model.state_dict(), load(plain).model.state_dict())


@pytest.mark.parametrize("kind", ["fp8-blocks", "compressed-int8"])
def test_answers_of_quantized_weights_are_hugging_face_s(folder, tmp_path, kind: str) -> None:
    copy, plain = packed_folder(folder("llama"), tmp_path, kind)
    subject = make_subject(plain)
    ours = load(copy)
    assert ours.info.eos_token_ids == subject.loaded.info.eos_token_ids
    answers = serve(ours, subject.cases, budget=23).answers
    assert compare(answers, subject.expected).wrong == 0


def test_bf16_is_what_is_asked_for(folder, tmp_path) -> None:
    copy, plain = packed_folder(folder("llama"), tmp_path, "awq")
    ours = load(copy, dtype="bfloat16").model.state_dict()
    assert {weight.dtype for weight in ours.values()} == {torch.bfloat16}
    assert same_weights(ours, load(plain, dtype="bfloat16").model.state_dict())


def test_shards_are_read(folder, tmp_path) -> None:
    copy, plain = packed_folder(folder("llama"), tmp_path, "gptq")
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)  # every other one: the tensors of a matrix are in both
    shards = {f"model-{part}.safetensors": names[part::2] for part in range(2)}
    for file, own in shards.items():
        save_file({name: weights[name] for name in own}, copy / file, metadata={"format": "pt"})
    index = {name: file for file, own in shards.items() for name in own}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (copy / "model.safetensors.index.json").write_text(text)
    assert same_weights(load(copy).model.state_dict(), load(plain).model.state_dict())


def test_progress_is_told(folder, tmp_path) -> None:
    copy, _ = packed_folder(folder("llama"), tmp_path, "awq")
    told: list[tuple[int, int]] = []
    config = ModelConfig(folder=str(copy), served_name="m")
    load_model(config, lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 10


@pytest.mark.parametrize("lost", ["scales", "qzeros"])
def test_a_matrix_without_one_of_its_tensors_is_named(folder, tmp_path, lost: str) -> None:
    copy, _ = packed_folder(folder("llama"), tmp_path, "gptq")
    weights = load_file(copy / "model.safetensors")
    del weights[f"model.layers.1.mlp.up_proj.{lost}"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"layers\.1\.mlp\.up_proj\.weight.*{lost}"):
        load(copy)


@pytest.mark.parametrize("method", ["modelopt", "hqq", "torchao", None])
def test_another_method_is_refused_with_those_that_are_supported(folder, tmp_path, method):
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelLoadError, match=f"{method}.* not supported.*awq.*gptq, mxfp4"):
        load(copy)


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"quant_method": "gptq", "bits": 3}, "'gptq' in 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'gptq' as 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq' as 'gemv'"),
        (compressed("nvfp4-pack-quantized"), "as 'nvfp4-pack-quantized'"),
        ({**ROWS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_a_kind_that_is_not_unpacked_is_refused(folder, tmp_path, declared, why: str) -> None:
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "config.json", quantization_config=declared)
    with pytest.raises(ModelLoadError, match=f"{why}.* not supported"):
        load(copy)


# --- GGUF -----------------------------------------------------------------------------------------

needs_gguf = pytest.mark.skipif(
    not all(map(find_spec, ("gguf", "accelerate"))), reason="the extra 'gguf' is not installed"
)


def gguf_folder(source: Path, target: Path, kind: str) -> Path:
    copy = copied(source, target)
    write_gguf(copy, copy / "model.gguf", kind)
    (copy / "model.safetensors").unlink()
    return copy


@needs_gguf
def test_gguf_is_read_beside_its_config(folder, tmp_path) -> None:
    copy = gguf_folder(folder("llama"), tmp_path, "F32")
    ours, theirs = load(copy), load(folder("llama"))
    assert same_weights(ours.model.state_dict(), theirs.model.state_dict())
    assert ours.info.eos_token_ids == theirs.info.eos_token_ids


@needs_gguf
def test_quantized_gguf_is_unpacked(folder, tmp_path) -> None:
    copy = gguf_folder(folder("llama"), tmp_path, "Q8_0")
    ours, plain = load(copy).model.state_dict(), load(folder("llama")).model.state_dict()
    for name, weight in plain.items():
        assert (ours[name] - weight).abs().max() <= weight.abs().max() / 127
    assert not same_weights(ours, plain)


def test_gguf_without_its_packages_names_the_extra(folder, tmp_path, monkeypatch) -> None:
    copy = copied(folder("llama"), tmp_path)
    (copy / "model.safetensors").rename(copy / "model.gguf")
    monkeypatch.setattr("lookonce.model.loader.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install 'lookonce\[gguf\]'"):
        load(copy)


def test_gguf_alone_says_what_is_missing(folder, tmp_path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"put config\.json and the tokenizer"):
        load(tmp_path)


def test_the_method_of_the_text_config_counts(folder, tmp_path):
    copy = copied(folder("llava"), tmp_path)
    text = json.loads((copy / "config.json").read_text())["text_config"]
    text["quantization_config"] = {"quant_method": "modelopt"}
    edit(copy / "config.json", text_config=text)
    with pytest.raises(ModelLoadError, match="modelopt"):
        load(copy)


def test_scales_that_no_config_mentions_are_refused(folder, tmp_path):
    """As where the method stands in a file of its own beside config.json."""
    copy = copied(folder("llama"), tmp_path)
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    packed = {**weights, f"{name}_scale": torch.ones(1)}
    save_file(packed, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no place for.*weight_scale"):
        load(copy)
