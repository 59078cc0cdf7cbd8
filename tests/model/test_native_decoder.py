"""The native decoder computes what transformers computes, or says that a step is not for it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lookonce.config import ModelConfig
from lookonce.model.attention.backend import AttentionMetadata, ForwardContext
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily, TextFamily
from lookonce.model.fused_modules import FusedDecoder, FusedLayer, plain_positions
from lookonce.model.int8_weights import quantize_linears
from lookonce.model.kv_pages import KVPages
from lookonce.model.loader import load_model
from lookonce.model.lora import (
    LoadedAdapters,
    LoRAAdapter,
    LoRALayer,
    StepLoRA,
    linear_sizes,
)
from lookonce.model.lora_files import adaptable_layers
from lookonce.model.native import compiled
from lookonce.model.native import decoder as native
from lookonce.model.native.decoder import DecodeInputs, NativeDecoder, native_decoder
from lookonce.model.step_inputs import AttentionMetadataBuilder, StepInputs
from lookonce.model.text_model import TextModel, TransformersDecoder, choose_decoder
from lookonce.types.lora import LoRAIdentity
from tests.support.model_folders.make import make_folder, randomise

pytestmark = [
    pytest.mark.skipif(compiled.kernels is None, reason="the decoder is not compiled here"),
    pytest.mark.usefixtures("each_build"),
]

Folder = Callable[..., Path]
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen2_5_omni", "llava")
BLOCK, BLOCKS = 16, 64
LAYER_DOWN = 17
"""Where a layer's `down` weight stands in what `make` is given."""


class Subject(NamedTuple):
    family: ModelFamily
    fused: FusedDecoder
    pages: KVPages
    native: NativeDecoder


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def subject_of(family: ModelFamily, dtype: torch.dtype = torch.float32) -> Subject:
    fused = choose_decoder(family, dtype, torch.device("cpu"))
    assert isinstance(fused, FusedDecoder)
    pages = KVPages(family.kv_layout(BLOCK, dtype), BLOCKS)
    for layer in pages.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    decoder = native_decoder(fused, family, dtype, pages)
    assert decoder is not None
    return Subject(family, fused, pages, decoder)


def from_folder(path: Path, dtype: str = "float32") -> Subject:
    loaded = load_model(ModelConfig(folder=str(path), served_name="test", dtype=dtype))
    return subject_of(loaded.family, loaded.dtype)


def odd_llama() -> ModelFamily:
    """No size is a multiple of a vector's."""
    config = LlamaConfig(
        vocab_size=53, hidden_size=42, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=14, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "lookonce_paged"
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 3)
    return TextFamily(model)


def tied_qwen3() -> ModelFamily:
    config = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "lookonce_paged"
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 4)
    return TextFamily(model)


def decode_metadata(context_lens: list[int]) -> AttentionMetadata:
    """One new token per sequence, each in blocks of its own."""
    count = len(context_lens)
    per_sequence = BLOCKS // count
    tables = np.arange(count * per_sequence, dtype=np.int32).reshape(count, per_sequence)
    buffers = AttentionMetadataBuilder(
        max_num_seqs=count, max_num_tokens=count, max_blocks_per_seq=per_sequence, block_size=BLOCK
    )
    return buffers.build([1] * count, context_lens, tables, num_decodes=count)


def decode_inputs(subject: Subject, context_lens: list[int], seed: int = 0) -> DecodeInputs:
    count = len(context_lens)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, subject.family.vocab_size, (count,), generator=generator)
    positions = plain_positions(count, subject.family.position_axes).clone()
    positions[:] = torch.tensor(context_lens) - 1
    return DecodeInputs(ids, None, positions, None, decode_metadata(context_lens))


def fused_logits(subject: Subject, inputs: DecodeInputs) -> torch.Tensor:
    embeds = inputs.embeds
    if embeds is None:
        embeds = subject.family.embed_tokens(inputs.token_ids)
    step = ForwardContext(inputs.metadata, ReferenceBackend(), subject.pages, lora=inputs.lora)
    hidden = subject.fused(embeds, inputs.position_ids, step, {})
    if inputs.sample_rows is not None:
        hidden = hidden[inputs.sample_rows]
    return subject.family.lm_head(hidden).float()


def agree(subject: Subject, inputs: DecodeInputs, tolerance: float = 1e-5) -> None:
    found = subject.native.logits(inputs)
    expected = fused_logits(subject, inputs)
    assert found is not None
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", PLAIN)
def test_every_plain_family_decodes_natively(folder: Folder, kind: str) -> None:
    subject = from_folder(folder(kind))
    agree(subject, decode_inputs(subject, [1, 40, 17, 9]))


@pytest.mark.parametrize("make", [odd_llama, tied_qwen3])
def test_sizes_that_no_vector_divides(make: Callable[[], ModelFamily]) -> None:
    subject = subject_of(make())
    for count in (1, 2, 3, 4, 5, 8, 11):
        agree(subject, decode_inputs(subject, list(range(3, 3 + count))))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, BLOCK), min_size=1, max_size=BLOCKS), st.integers(0, 2**16))
def test_any_batch_agrees_with_the_fused_decoder(context_lens: list[int], seed: int) -> None:
    with torch.inference_mode():
        subject = subject_of(tied_qwen3())
        agree(subject, decode_inputs(subject, context_lens, seed))


def test_bf16_weights_and_pages(folder: Folder) -> None:
    subject = from_folder(folder("qwen2_5_vl"), "bfloat16")
    agree(subject, decode_inputs(subject, [3, 20, 31]), tolerance=3e-2)


@pytest.mark.parametrize("make", [odd_llama, tied_qwen3])
def test_bf16_of_sizes_that_no_vector_divides(make: Callable[[], ModelFamily]) -> None:
    family = make()
    family.model.to(torch.bfloat16)
    subject = subject_of(family, torch.bfloat16)
    for count in (1, 2, 3, 8):
        agree(subject, decode_inputs(subject, [5] * count), tolerance=3e-2)


@pytest.mark.parametrize("make", [odd_llama, tied_qwen3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_chunk_beside_decodes(
    make: Callable[[], ModelFamily], dtype: torch.dtype, tolerance: float
) -> None:
    family = make()
    family.model.to(dtype)
    subject = subject_of(family, dtype)
    ids = torch.arange(43) % family.vocab_size
    positions = torch.cat((torch.tensor([8, 80]), torch.arange(50, 91))).unsqueeze(0)
    tables = np.arange(BLOCKS, dtype=np.int32)[:18].reshape(3, 6)
    buffers = AttentionMetadataBuilder(
        max_num_seqs=3, max_num_tokens=43, max_blocks_per_seq=6, block_size=BLOCK
    )
    metadata = buffers.build([1, 1, 41], [9, 81, 91], tables, num_decodes=2)
    agree(subject, DecodeInputs(ids, None, positions, None, metadata), tolerance)


@pytest.mark.parametrize("make", [odd_llama, tied_qwen3])
@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_prompts_of_any_length_where_torch_does_not_multiply_the_weights(
    make: Callable[[], ModelFamily], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_multiplies_bf16", lambda: False)
    family = make()
    if weights == "int8":
        quantize_linears(family.model)
        family = TextFamily(family.model)
    else:
        family.model.to(torch.bfloat16)
    subject = subject_of(family, next(family.embed_tokens.parameters()).dtype)
    for count in (native.MAX_TOKENS + 1, 600):
        inputs = prompt_inputs(subject, count)
        agree(subject, inputs._replace(sample_rows=torch.tensor([0, count - 1])), 3e-2)


def prompt_inputs(subject: Subject, count: int) -> DecodeInputs:
    ids = torch.arange(count) % subject.family.vocab_size
    buffers = AttentionMetadataBuilder(
        max_num_seqs=1, max_num_tokens=count, max_blocks_per_seq=BLOCKS, block_size=BLOCK
    )
    metadata = buffers.build([count], [count], np.arange(BLOCKS, dtype=np.int32)[None])
    return DecodeInputs(ids, None, plain_positions(count, 1), None, metadata)


# --- LoRA adapters ------------------------------------------------------------------------------


def some_adapters(family: ModelFamily, dtype: torch.dtype) -> LoadedAdapters:
    """One changes every layer with 11 ranks, the other queries with 3 and a last product with 8."""
    layers, generator = adaptable_layers(family), torch.Generator().manual_seed(7)
    names = list(layers.decoder)
    queries = [name for name in names if name.endswith("q_proj")]

    def adapter(digest: bytes, ranks: dict[str, int]) -> LoRAAdapter:
        made = {}
        for name, rank in ranks.items():
            sizes = linear_sizes(layers.decoder[name])
            assert sizes is not None
            a, b = (torch.randn(rank, size, generator=generator).to(dtype) for size in sizes)
            made[name] = LoRALayer(0.2 * a, 0.2 * b, 0.5)
        return LoRAAdapter(LoRAIdentity(digest), max(ranks.values()), made)

    first = adapter(b"1", dict.fromkeys(names, 11))
    second = adapter(b"2", dict.fromkeys(queries, 3) | {names[-1]: 8})
    return LoadedAdapters(layers, [first, second])


OWNERS = (b"1", b"", b"2", b"1", b"2")


@pytest.mark.parametrize("make", [odd_llama, tied_qwen3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_each_token_takes_its_own_adapter(
    make: Callable[[], ModelFamily], dtype: torch.dtype, tolerance: float
) -> None:
    family = make()
    family.model.to(dtype)
    subject, loaded = subject_of(family, dtype), some_adapters(family, dtype)
    plain = decode_inputs(subject, [5, 9, 3, 30, 17])
    adapted = plain._replace(lora=StepLoRA(loaded, [1] * 5, OWNERS))
    agree(subject, plain, tolerance)
    agree(subject, adapted, tolerance)
    without, found = subject.native.logits(plain), subject.native.logits(adapted)
    assert without is not None
    assert found is not None
    differs = (found - without).abs().amax(1) > 0.05 * without.abs().max()
    assert differs.tolist() == [bool(owner) for owner in OWNERS], "negative control"
    fewer = loaded.without(b"1")
    agree(
        subject,
        plain._replace(lora=StepLoRA(fewer, [1] * 5, [b"", b"", b"2", b"", b""])),
        tolerance,
    )


def test_adapters_of_encoders_alone_change_nothing_of_the_decoder() -> None:
    family = odd_llama()
    subject, layers = subject_of(family), adaptable_layers(family)
    elsewhere = LoadedAdapters(layers, [LoRAAdapter(LoRAIdentity(b"1"), 4, {})])
    plain = decode_inputs(subject, [5, 9])
    found = subject.native.logits(plain._replace(lora=StepLoRA(elsewhere, [1, 1], [b"1", b""])))
    assert found is not None
    assert found.equal(subject.native.logits(plain))


def test_a_chunk_with_an_adapter_beside_decodes() -> None:
    family = odd_llama()
    subject, loaded = subject_of(family), some_adapters(family, torch.float32)
    ids = torch.arange(43) % family.vocab_size
    positions = torch.cat((torch.tensor([8, 80]), torch.arange(50, 91))).unsqueeze(0)
    tables = np.arange(BLOCKS, dtype=np.int32)[:18].reshape(3, 6)
    buffers = AttentionMetadataBuilder(
        max_num_seqs=3, max_num_tokens=43, max_blocks_per_seq=6, block_size=BLOCK
    )
    metadata = buffers.build([1, 1, 41], [9, 81, 91], tables, num_decodes=2)
    lora = StepLoRA(loaded, [1, 1, 41], [b"2", b"", b"1"])
    agree(subject, DecodeInputs(ids, None, positions, None, metadata, lora))


def test_adapters_of_another_decoder_or_that_are_not_loaded_are_errors() -> None:
    family = odd_llama()
    subject, loaded = subject_of(family), some_adapters(family, torch.float32)
    inputs = decode_inputs(subject, [5])
    step = StepLoRA(loaded, [1], [b"1"])
    bound = subject.native._bound(loaded)
    spans, scales = step.spans(bound.layouts)
    run = subject.native._run

    def with_spans(changed: torch.Tensor) -> DecodeInputs:
        step.spans = lambda _: (changed, scales)  # type: ignore[method-assign]
        return inputs._replace(lora=step)

    for wrong in (spans + 1000, spans - 1, spans.flip(-1)):
        with pytest.raises(ValueError, match="outside of those that are loaded"):
            run(with_spans(wrong), torch.empty(1, family.vocab_size))
    with pytest.raises(ValueError, match="sizes do not fit"):
        run(with_spans(spans[:, :0]), torch.empty(1, family.vocab_size))
    subject.native._adapters = bound._replace(
        handle=subject_of(family).native._bound(loaded).handle
    )
    with pytest.raises(ValueError, match="another decoder"):
        run(with_spans(spans), torch.empty(1, family.vocab_size))


def test_adapters_that_are_unloaded_leave_no_memory() -> None:
    subject = subject_of(odd_llama())
    loaded = some_adapters(subject.family, torch.float32)
    held = weakref.ref(next(iter(loaded.decoder.values())).a)
    subject.native.logits(decode_inputs(subject, [5])._replace(lora=StepLoRA(loaded, [1], [b"1"])))
    assert held() is not None
    del loaded
    assert held() is None


def test_steps_with_adapters_are_computed_by_compiled_code(
    monkeypatch: pytest.MonkeyPatch, folder: Folder
) -> None:
    subject = from_folder(folder("qwen3"))
    loaded = some_adapters(subject.family, torch.float32)
    model = TextModel(
        subject.family, torch.float32, torch.device("cpu"), KernelBackend(), subject.pages
    )
    monkeypatch.setattr(model, "_decode", None)
    given = decode_inputs(subject, [5, 6])
    lora = StepLoRA(loaded, [1, 1], [b"1", b"2"])
    inputs = StepInputs(
        token_ids=given.token_ids,
        position_ids=given.position_ids,
        metadata=given.metadata,
        embeds=(),
        embed_at=None,
        sample_rows=None,
        lora=lora,
    )
    expected = fused_logits(subject, given._replace(lora=lora))
    assert (model(inputs, None) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bf16_numbers_are_read_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_folder("qwen3", tmp_path, dtype="bfloat16")
    halved = from_folder(path)
    monkeypatch.setattr(native, "MAX_HALVED_BYTES", 0)
    whole = from_folder(path)
    assert (halved.native.reads_bf16, whole.native.reads_bf16) == (True, False)
    inputs = decode_inputs(halved, [5, 6, 7, 8, 9])
    agree(halved, inputs)
    first, second = halved.native.logits(inputs), whole.native.logits(inputs)
    assert first is not None
    assert second is not None
    # The same products, added in another order.
    assert (first - second).abs().max() <= 1e-5 * second.abs().max()


def test_other_numbers_are_not_rounded(folder: Folder) -> None:
    assert not from_folder(folder("llama")).native.reads_bf16


def test_more_threads_compute_the_same() -> None:
    config = LlamaConfig(
        vocab_size=640, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "lookonce_paged"
    subject = subject_of(TextFamily(LlamaForCausalLM(config).eval().requires_grad_(False)))
    inputs = decode_inputs(subject, [5] * 16)  # products large enough to be shared out
    alone = subject.native.logits(inputs)
    torch.set_num_threads(2)
    try:
        together = subject.native.logits(inputs)
    finally:
        torch.set_num_threads(1)
    assert alone is not None
    assert together is not None
    assert torch.equal(alone, together)


def test_only_sampled_rows_are_predicted(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    rows = torch.tensor([3, 1])
    inputs = decode_inputs(subject, [5, 6, 7, 8])._replace(sample_rows=rows)
    agree(subject, inputs)
    none = inputs._replace(sample_rows=torch.empty(0, dtype=torch.int64))
    assert subject.native.logits(none).shape == (0, subject.family.vocab_size)  # type: ignore[union-attr]


def test_given_embeddings_take_the_place_of_ids(folder: Folder) -> None:
    subject = from_folder(folder("llava"))
    inputs = decode_inputs(subject, [5, 6])
    embeds = torch.randn(2, subject.family.hidden_size)
    agree(subject, inputs._replace(embeds=embeds, token_ids=torch.tensor([-5, 10**9])))


def test_positions_far_out_make_the_tables_grow(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    inputs = decode_inputs(subject, [5, 6])
    for position in (3, 2000, 70_000, 9):
        inputs.position_ids[:] = position
        agree(subject, inputs, tolerance=1e-4)


def test_a_step_whose_axes_differ_is_left_to_others(folder: Folder) -> None:
    subject = from_folder(folder("qwen2_5_vl"))
    inputs = decode_inputs(subject, [5, 6])
    inputs.position_ids[1, 0, 1] += 1
    assert subject.native.logits(inputs) is None


def test_a_step_of_many_tokens_is_left_to_others(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    assert subject.native.logits(prompt_inputs(subject, native.MAX_TOKENS + 1)) is None


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_an_error(folder: Folder, token: int) -> None:
    subject = from_folder(folder("llama"))
    inputs = decode_inputs(subject, [5, 6])
    inputs.token_ids[1] = token
    with pytest.raises(IndexError, match="vocabulary"):
        subject.native.logits(inputs)


def test_a_block_outside_the_pages_is_an_error(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    inputs = decode_inputs(subject, [5, 6])
    inputs.metadata.block_tables[1, 0] = BLOCKS
    with pytest.raises(ValueError, match="block outside the pages"):
        subject.native.logits(inputs)


def test_a_sample_row_outside_the_step_is_an_error(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    inputs = decode_inputs(subject, [5, 6])._replace(sample_rows=torch.tensor([2]))
    with pytest.raises(ValueError, match="sample row outside the step"):
        subject.native.logits(inputs)


def test_what_is_not_a_number_stays_so_and_stays_where_it_is(folder: Folder) -> None:
    subject = from_folder(folder("llama"))
    inputs = decode_inputs(subject, [5, 6])
    embeds = subject.family.embed_tokens(inputs.token_ids)
    embeds[0] = float("nan")
    logits = subject.native.logits(inputs._replace(embeds=embeds))
    assert logits is not None
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize("wrong", [slice(0, 1), slice(1, None)], ids=["decode", "prompt"])
def test_compiled_code_wrong_for_some_rows_alone_is_noticed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, wrong: slice
) -> None:
    loaded = load_model(ModelConfig(folder=str(folder("llama")), served_name="test"))
    family = loaded.family
    fused = choose_decoder(family, loaded.dtype, loaded.device)
    assert isinstance(fused, FusedDecoder)
    pages = loaded.kv_pages(1, 16)
    compute, sizes = NativeDecoder.logits, []

    def logits(decoder: NativeDecoder, inputs: DecodeInputs) -> torch.Tensor | None:
        found = compute(decoder, inputs)
        assert found is not None
        found[wrong] *= 1.01
        sizes.extend(inputs.metadata.query_lens)
        return found

    monkeypatch.setattr(NativeDecoder, "logits", logits)
    assert native_decoder(fused, family, loaded.dtype, pages) is None
    assert sizes == [1, 21]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_compiled_code_wrong_in_one_layer_alone_is_noticed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    family = load_model(ModelConfig(folder=str(folder("llama")), served_name="test")).family
    fused = choose_decoder(family, torch.float32, torch.device("cpu"))
    assert isinstance(fused, FusedDecoder)
    layers = len(fused.layers)
    read, count = NativeDecoder._layer_weights, itertools.count()

    def weights(decoder: NativeDecoder, layer: FusedLayer) -> tuple[object, ...]:
        found = list(read(decoder, layer))
        if next(count) == wrong:
            found[LAYER_DOWN] = found[LAYER_DOWN] * 1.05  # type: ignore[operator]
        return tuple(found)

    monkeypatch.setattr(NativeDecoder, "_layer_weights", weights)
    pages = KVPages(family.kv_layout(BLOCK, torch.float32), BLOCKS)
    found = native_decoder(fused, family, torch.float32, pages)
    assert (found is None) == (wrong < layers)


def chaotic_llama(dtype: torch.dtype) -> ModelFamily:
    """SmolLM2-135M's sizes, few layers: logits of 30, and each layer amplifies its rounding.

    Sharp attention does that: one rounding more or less, and another key has the most weight.
    """
    config = LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "lookonce_paged"
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            sharper = 8.0 if "q_proj" in name or "k_proj" in name else 1.5
            spread = 1.3 if "embed" in name else sharper * weight.shape[1] ** -0.5
            weight.normal_(0.0, spread, generator=generator)
    model.to(torch.bfloat16).to(dtype)
    return TextFamily(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_amplifies_rounding_decodes_natively(dtype: torch.dtype) -> None:
    """Over its whole depth two correct ways differ, so they are compared layer by layer."""
    subject = subject_of(chaotic_llama(dtype), dtype)
    inputs = decode_inputs(subject, [5, 9, 13, 16])
    found, theirs = subject.native.logits(inputs), fused_logits(subject, inputs)
    exact = exact_logits(chaotic_llama(torch.float32), inputs, subject.pages)
    assert found is not None
    assert exact.abs().max() > 20
    ours, torchs = (found - exact).abs().max(), (theirs - exact).abs().max()
    if dtype is torch.float32:
        assert ours <= 1e-3 * exact.abs().max()
    else:
        assert ours <= 2 * torchs
        # Control: over the whole depth correct arithmetic is beyond what a layer may differ by.
        assert torchs > native.TOLERANCE[dtype] * exact.abs().max()


def test_a_model_that_amplifies_rounding_and_computes_something_else_is_left_to_transformers() -> (
    None
):
    for part in ("self_attn", "mlp"):
        family = chaotic_llama(torch.bfloat16)
        module = getattr(family.decoder.layers[2], part)  # type: ignore[index, union-attr]
        forward = module.forward

        def changed(*args: object, forward: Callable[..., object] = forward, **kwargs: object):
            output = forward(*args, **kwargs)
            return (output[0] * 1.2, output[1]) if isinstance(output, tuple) else output * 1.2

        module.forward = changed
        decoder = choose_decoder(family, torch.bfloat16, torch.device("cpu"))
        assert isinstance(decoder, TransformersDecoder)


def exact_logits(family: ModelFamily, inputs: DecodeInputs, pages: KVPages) -> torch.Tensor:
    """The same weights, pages and tokens in float32, by torch."""
    fused = choose_decoder(family, torch.float32, torch.device("cpu"))
    assert isinstance(fused, FusedDecoder)
    wide = KVPages(family.kv_layout(BLOCK, torch.float32), BLOCKS)
    for target, source in zip(wide.layers, pages.layers, strict=True):
        target.keys.copy_(source.keys)
        target.values.copy_(source.values)
    step = ForwardContext(inputs.metadata, ReferenceBackend(), wide)
    embeds = family.embed_tokens(inputs.token_ids)
    return family.lm_head(fused(embeds, inputs.position_ids, step, {})).float()


def test_a_model_that_computes_something_else_is_noticed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(ModelConfig(folder=str(folder("llama")), served_name="test"))
    family = loaded.family
    fused = choose_decoder(family, loaded.dtype, loaded.device)
    assert isinstance(fused, FusedDecoder)
    add = FusedLayer.__call__
    monkeypatch.setattr(
        FusedLayer,
        "__call__",
        lambda layer, hidden, *step: hidden + 1.01 * add(layer, hidden, *step),
    )
    pages = loaded.kv_pages(1, 16)
    assert native_decoder(fused, family, loaded.dtype, pages) is None


def test_without_compiled_code_steps_run_in_torch(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "kernels", None)
    loaded = load_model(ModelConfig(folder=str(folder("llama")), served_name="test"))
    family = loaded.family
    pages = loaded.kv_pages(BLOCKS, BLOCK)
    fused = choose_decoder(family, loaded.dtype, loaded.device)
    assert isinstance(fused, FusedDecoder)
    assert native_decoder(fused, family, loaded.dtype, pages) is None
    model = TextModel(family, loaded.dtype, loaded.device, ReferenceBackend(), pages)
    assert not model.is_native
    metadata = decode_metadata([1, 1])
    ids = torch.tensor([5, 6])
    inputs = StepInputs(ids, plain_positions(2, 1), metadata, (), None, None)
    assert model(inputs, None).shape == (2, family.vocab_size)


def test_a_model_of_another_activation_is_left_to_torch(folder: Folder) -> None:
    loaded = load_model(ModelConfig(folder=str(folder("llama")), served_name="test"))
    for layer in loaded.family.decoder.layers:  # type: ignore[union-attr]
        layer.mlp.act_fn = torch.nn.GELU()  # type: ignore[union-attr]
    family = loaded.family
    fused = choose_decoder(family, loaded.dtype, loaded.device)
    assert isinstance(fused, FusedDecoder)
    pages = loaded.kv_pages(1, 16)
    assert native_decoder(fused, family, loaded.dtype, pages) is None
