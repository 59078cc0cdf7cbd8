"""`--quantize int8`: answers are those of the same rounded weights in plain Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lookonce.config import Options, resolve
from lookonce.errors import ConfigError, ModelLoadError
from lookonce.model import int8_weights
from lookonce.model.int8_weights import Int8Linear, Int8Weight, linear, quantize
from lookonce.model.native import compiled
from lookonce.model.native.decoder import DecodeInputs, NativeDecoder
from tests.support.model.builds import VARIANTS, in_use
from tests.support.model.cases import ALL_MODELS
from tests.support.model.copies import copied, load
from tests.support.model.serving import (
    answers_of,
    compare,
    make_subject,
    reference_model,
    serve,
)

needs_kernels = pytest.mark.skipif(compiled.kernels is None, reason="kernels are not compiled here")


@pytest.fixture(params=(*VARIANTS, "torch"))
def product_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of each build, and of torch."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "kernels", None)
        yield
        return
    with in_use(request.param):
        assert int8_weights._is_compiled()
        yield


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.usefixtures("product_of")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-4), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("inputs", [1, 40, 576, 1601])
def test_products_are_those_of_dequantized_weights(
    inputs: int, dtype: torch.dtype, most: float
) -> None:
    weight, bias = quantize(noise(67, inputs)), noise(67, seed=1).to(dtype)
    for count in (1, 2, 3, 8, 9, 33):
        rows = noise(count, inputs, seed=count).to(dtype)
        expected = rows.float() @ weight.dequantized().t() + bias.float()
        found = linear(rows, weight, bias)
        assert found.dtype == dtype
        assert error(found, expected) <= most


@needs_kernels
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**16))
def test_products_of_any_sizes(outputs: int, inputs: int, count: int, seed: int) -> None:
    weight, rows = quantize(noise(outputs, inputs, seed=seed)), noise(count, inputs, seed=seed + 1)
    expected = rows @ weight.dequantized().t()
    scale = rows.norm(dim=1, keepdim=True) * weight.dequantized().norm(dim=1)
    assert ((linear(rows, weight) - expected).abs() <= 1e-4 * scale + 1e-6).all()


@pytest.mark.usefixtures("product_of")
@pytest.mark.parametrize("inputs", [4096, 40_000])
def test_the_largest_sums_do_not_overflow(inputs: int) -> None:
    weight = Int8Weight(torch.full((3, inputs), 127, dtype=torch.int8), torch.ones(3))
    for count in (1, 8):
        found = linear(torch.full((count, inputs), 3.0), weight)
        assert error(found, torch.full((count, 3), 3.0 * 127 * inputs)) <= 1e-3


@pytest.mark.usefixtures("product_of")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(wrong: float) -> None:
    rows = noise(9, 70)
    rows[4, 33] = wrong
    found = linear(rows, quantize(noise(20, 70)))
    finite = torch.arange(9) != 4
    assert found[finite].isfinite().all()
    assert not found[4].isfinite().any()


def test_each_row_is_rounded_to_its_own_scale() -> None:
    weight = noise(50, 64) * torch.logspace(-3, 3, 50).unsqueeze(1)
    weight[7] = 0.0
    found = quantize(weight)
    assert ((found.dequantized() - weight).abs() <= 0.51 * found.scales.unsqueeze(1)).all()
    assert (found.values.abs().amax(1)[weight.abs().amax(1) > 0] == 127).all()


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2_5_vl", *(["gemma2", "text:lfm2"] if ALL_MODELS else [])]
)
def test_answers_are_hugging_face_s_with_the_same_weights(folder, kind: str) -> None:
    subject = make_subject(folder(kind))
    ours = load(folder(kind), quantize="int8")
    quantized = {
        name: module.quantized
        for name, module in ours.model.named_modules()
        if isinstance(module, Int8Linear)
    }
    assert any(name.endswith("q_proj") for name in quantized)
    assert any(name.endswith("lm_head") for name in quantized)
    assert not any("visual" in name for name in quantized)
    plain = reference_model(folder(kind), ours.info)
    for name, weight in quantized.items():
        plain.get_submodule(name).weight = torch.nn.Parameter(weight.dequantized())
    served = serve(ours, subject.cases, budget=23).answers
    assert compare(served, answers_of(plain, subject.cases)).wrong == 0
    # Control: the weights before they were rounded give other logits.
    first, rounded = subject.expected[0].logits[0], served[0].logits[0]
    assert error(rounded, first) > 1e-3


@needs_kernels
def test_decode_steps_read_int8(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    run = NativeDecoder.logits

    def logits(decoder: NativeDecoder, inputs: DecodeInputs) -> torch.Tensor | None:
        found = run(decoder, inputs)
        computed.append(found is not None)
        return found

    monkeypatch.setattr(NativeDecoder, "logits", logits)
    subject = make_subject(folder("llama"))
    serve(load(folder("llama"), quantize="int8"), subject.cases[:1], budget=23)
    assert any(computed)


def test_kv_of_quantized_weights_is_another_s(folder) -> None:
    path = folder("llama")
    plain, first, again = (load(path, quantize=how).info for how in (None, "int8", "int8"))
    assert first.weights_digest == again.weights_digest != plain.weights_digest


def test_memory_is_a_quarter(folder) -> None:
    def matrices(quantize: str | None) -> int:
        model = load(folder("llama"), quantize=quantize).model
        return sum(w.nbytes for n, w in model.named_parameters() if n.endswith("_proj.weight"))

    assert 4 * matrices("int8") == matrices(None)


def test_an_embedding_that_is_also_the_head_stays(folder, tmp_path) -> None:
    copy = copied(folder("llama"), tmp_path)
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    family = load(copy, quantize="int8").family
    assert isinstance(family.lm_head, Int8Linear)
    assert family.embed_tokens.weight.dtype is torch.float32


def test_a_model_that_generates_nothing_is_refused(embedder) -> None:
    with pytest.raises(ModelLoadError, match="leave out --quantize"):
        load(embedder("bert"), quantize="int8")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"quantize": "int4"}, "--quantize is int8"), ({"device": "cuda"}, "--device cpu")],
)
def test_options_that_cannot_be_had_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(Options(**{"quantize": "int8", **options}))
