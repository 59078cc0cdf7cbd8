"""Quantized weights are dequantized or refused; they are never loaded without their scales."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lookonce.errors import ModelLoadError
from tests.support.model.copies import copied, edit, load
from tests.support.model.serving import compare, make_subject, serve

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate (the extra 'quantized') is not installed"
)

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
BLOCK = 32

Weights = dict[str, Tensor]


def rewrite(folder: Path, weights: Weights, **quantization: object) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config=quantization)


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


def fp8(weights: Weights, scale: str = "weight_scale_inv") -> tuple[Weights, Weights]:
    """Linear layers of the decoder in blocks of float8, and what they stand for."""
    packed, meant = dict(weights), {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") or "visual" in name:
            continue
        rows, wide = weight.shape
        tiles = weight.view(rows // BLOCK, BLOCK, wide // BLOCK, BLOCK)
        scales = tiles.abs().amax((1, 3)) / 448
        float8 = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        packed[name] = float8.view(rows, wide)
        packed[name.replace("weight", scale)] = scales
        meant[name] = (float8.float() * scales[:, None, :, None]).view(rows, wide)
    return packed, meant


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


@needs_accelerate
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "qwen3_vl"])
def test_fp8_is_dequantized(folder, tmp_path, kind):
    """A folder of the unpacked weights loads as the same model."""
    plain, copy = copied(folder(kind), tmp_path / "plain"), copied(folder(kind), tmp_path)
    packed, meant = fp8(load_file(copy / "model.safetensors"))
    assert meant
    rewrite(copy, packed, **FP8)
    weights = load_file(plain / "model.safetensors") | meant
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = load(copy).model.state_dict(), load(plain).model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def test_fp8_without_accelerate_names_the_extra(folder, tmp_path, monkeypatch):
    copy = copied(folder("llama"), tmp_path)
    rewrite(copy, fp8(load_file(copy / "model.safetensors"))[0], **FP8)
    monkeypatch.setattr("lookonce.model.loader.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install 'lookonce\[quantized\]'"):
        load(copy)


@needs_accelerate
def test_fp8_whose_scales_transformers_does_not_know_is_refused(folder, tmp_path):
    copy = copied(folder("llama"), tmp_path)
    rewrite(copy, fp8(load_file(copy / "model.safetensors"), "weight_scale")[0], **FP8)
    with pytest.raises(ModelLoadError, match=r"no place for.*weight_scale"):
        load(copy)


@pytest.mark.parametrize("method", ["modelopt", "awq", "gptq", "compressed-tensors", None])
def test_another_method_is_refused_with_those_that_are_supported(folder, tmp_path, method):
    copy = copied(folder("llama"), tmp_path)
    edit(copy / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelLoadError, match=f"{method}.* not supported.*fp8, mxfp4"):
        load(copy)


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
    packed, _ = fp8(load_file(copy / "model.safetensors"), "weight_scale")
    save_file(packed, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no place for.*weight_scale"):
        load(copy)
