"""Text models that have no family of their own: served like transformers computes them, or refused.

A few types here; every type that transformers knows in `make test-models`.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lookonce.config import ModelConfig
from lookonce.errors import ModelLoadError
from lookonce.model.attention.hf_attention import LATENT, in_paged_forward
from lookonce.model.attention.latent import LatentAttention
from lookonce.model.families.general import GeneralTextFamily
from lookonce.model.kv_pages import KVPages
from lookonce.model.loader import load_model
from lookonce.model.proof import prove
from lookonce.types.model import EMBEDDERS, GENERAL_TEXT, SUPPORTED, UNSERVABLE
from tests.support.model.listed import assert_as_listed
from tests.support.model.serving import Subject, assert_parity, blocks_for_preemption, serve

SAMPLE = (
    "cohere2",  # sliding windows in some layers, scaled logits, parallel residuals
    "deepseek_v3",  # keys wider than values, experts
    "gpt2",  # learned positions
    "olmo3",  # sliding windows, norms after the layers
    "phi",  # part of each head rotated, biases
)
REFUSED = {
    "electra": "takes no mask",
    "bloom": "attention interface",
    "mamba": "attention interface",
    "diffllama": "not called once each",
}
ALL = bool(os.environ.get("ALL_MODELS"))
BLOCK = 4


@pytest.fixture(scope="module", params=GENERAL_TEXT if ALL else SAMPLE)
def subject(request, subjects) -> Subject:
    return subjects(f"text:{request.param}")


def test_it_is_what_lookonce_models_says(subject):
    assert_as_listed(subject.loaded)


@pytest.mark.parametrize("budget", [16, 64])
def test_mixed_batches_and_prefix_hits_change_no_token(subject, budget):
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, subject.expected)


def test_forced_preemption_changes_no_token(subject):
    cases, expected = subject.cases[:2], subject.expected[:2]
    num_blocks = blocks_for_preemption(cases, BLOCK)
    served = serve(subject.loaded, cases, budget=32, num_blocks=num_blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, expected)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_paged_is_refused_with_the_reason(folder, model_type):
    with pytest.raises(ModelLoadError, match=REFUSED[model_type]):
        load_unlisted(folder(f"text:{model_type}"))


UNKNOWN = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*SUPPORTED, *EMBEDDERS})


@pytest.mark.parametrize("model_type", UNKNOWN if ALL else ["granite", "electra"])
def test_the_list_of_types_is_what_loading_finds(folder, model_type):
    """A type that is not listed is refused, or its random folder cannot be made."""
    try:
        path = folder(f"text:{model_type}")
    except Exception as error:  # noqa: BLE001  whatever a config says to sizes it does not expect
        assert model_type not in GENERAL_TEXT
        pytest.skip(f"no random folder: {error!r}"[:200])
    if model_type in GENERAL_TEXT:
        load_model(ModelConfig(folder=str(path), served_name="test"))
        return
    reasons = [why for why, types in UNSERVABLE.items() if model_type in types]
    with pytest.raises(ModelLoadError) as refused:
        load_unlisted(path)
    assert reasons
    assert reasons[0] in refused.value.message


def load_unlisted(path) -> None:
    """Load like a type of which nothing is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookonce.types.model.UNSERVABLE", {})
        load_model(ModelConfig(folder=str(path), served_name="test"))


# --- what the comparison at load finds ----------------------------------------------------------


class Shifted(nn.Module):
    """A decoder whose every chunk begins at position 0."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *, position_ids, **arguments):
        return self.decoder(position_ids=position_ids - position_ids[:, :1], **arguments)


class Reversed(nn.Module):
    """An embedding that gives a chunk's tokens in the wrong order."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, token_ids):
        return self.embedding(token_ids).flip(-2)


def test_shifted_positions_are_found(folder):
    family = load(folder, "granite")
    family.decoder = Shifted(family.decoder)
    assert_refused(family)


def test_tokens_in_another_order_are_found(folder):
    family = load(folder, "granite")
    family.embed_tokens = Reversed(family.embed_tokens)
    assert_refused(family)


def test_a_window_that_attention_is_not_told_of_is_found(folder):
    family = load(folder, "olmo3")
    for layer in family.decoder.layers:
        layer.self_attn.__dict__.pop("sliding_window", None)
        layer.self_attn.sliding_window = None
    assert_refused(family)


def test_a_long_window_is_compared_as_well(folder, tmp_path):
    """The window of a published model exceeds any prompt that could be compared at load."""
    family = load(folder, "olmo3")
    for holder in (family.config, *(layer.self_attn for layer in family.decoder.layers)):
        if getattr(holder, "sliding_window", None):
            holder.sliding_window = 4096
    assert prove(family, torch.float32, torch.device("cpu")) < 1e-4
    assert family.config.sliding_window == 4096
    for layer in family.decoder.layers:
        layer.self_attn.sliding_window = None
    assert_refused(family)


def test_queries_are_not_scaled_by_their_index_in_a_step(folder, monkeypatch):
    """Llama 4 scales them by it from `floor_scale` on, which sequences end before."""
    path = folder("text:llama4_text")
    loaded = load_model(ModelConfig(folder=str(path), served_name="test"))
    family = loaded.family
    assert loaded.info.max_model_len == family.config.floor_scale - 1 == 87
    monkeypatch.setattr("lookonce.model.proof.LENGTHS", (80, 80))
    monkeypatch.setattr("lookonce.model.proof.CUTS", ((0, 80), (0, 80)))
    assert prove(family, torch.float32, torch.device("cpu")) < 1e-4
    for layer in family.decoder.layers:
        layer.self_attn.attn_temperature_tuning = True
    assert_refused(family)


def test_sequences_end_before_an_index_of_blocks_leaves_keys_out(folder, monkeypatch):
    """MiniMax M3."""
    path = folder("text:minimax_m3_vl_text")
    loaded = load_model(ModelConfig(folder=str(path), served_name="test"))
    limit = loaded.info.max_model_len
    assert limit == 4 * 48
    monkeypatch.setattr("lookonce.model.proof.LENGTHS", (limit, 9))
    monkeypatch.setattr("lookonce.model.proof.CUTS", ((0, 50, limit), (0, 5, 9)))
    assert prove(loaded.family, torch.float32, torch.device("cpu")) < 1e-4
    monkeypatch.setattr("lookonce.model.proof.LENGTHS", (limit + 8, 9))
    monkeypatch.setattr("lookonce.model.proof.CUTS", ((0, 50, limit + 8), (0, 5, 9)))
    assert_refused(loaded.family)


def test_attention_in_both_directions_is_found(folder):
    family = load(folder, "granite")
    for layer in family.decoder.layers:
        layer.self_attn.is_causal = False
    assert_refused(family)


def test_the_factor_of_the_logits_is_the_configs_own(folder):
    family = load(folder, "granite")
    assert family.logit_scale == 1 / family.config.logits_scaling


# --- latent attention ---------------------------------------------------------------------------


@pytest.fixture
def latents(subjects, monkeypatch) -> GeneralTextFamily:
    family = subjects("text:deepseek_v3").loaded.family
    monkeypatch.setattr(family, "logit_scale", family.logit_scale)  # comparing sets it
    return family


def test_latent_attention_keeps_one_compressed_row_for_a_token(latents):
    """As DeepSeek-V2's paper says (table 1): the latent and the rotated key, whatever the heads."""
    config, layout = latents.text_config, latents.kv_layout(16, torch.float32)
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    assert layout.block_bytes == 16 * config.num_hidden_layers * numbers * 4
    pages = KVPages(layout, 3)
    assert pages.num_bytes == 3 * layout.block_bytes
    whole = 2 * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    assert numbers < whole / 4


@pytest.mark.parametrize("which", [0, 1])
def test_matrices_of_other_heads_are_found(latents, monkeypatch, which):
    matrices = LatentAttention._matrices

    def swapped(latent):
        found = list(matrices(latent))
        found[which] = found[which].flip(0)
        return tuple(found)

    monkeypatch.setattr(LatentAttention, "_matrices", swapped)
    assert_refused(latents)


def test_rotated_keys_that_are_dropped_are_found(latents, monkeypatch):
    def without(expand):
        return lambda row, rotated: expand(row, rotated * (not in_paged_forward()))

    for module in latents.decoder.modules():
        if hasattr(module, LATENT):
            monkeypatch.setattr(module, "expand_kv", without(module.expand_kv))
    assert_refused(latents)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes(folder, dtype):
    load(folder, "granite", dtype=dtype)


def load(folder, model_type: str, **options) -> GeneralTextFamily:
    path = folder(f"text:{model_type}")
    config = ModelConfig(folder=str(path), served_name="test", **options)
    family = load_model(config).family
    assert isinstance(family, GeneralTextFamily)
    return family


def assert_refused(family: GeneralTextFamily) -> None:
    with pytest.raises(ModelLoadError):
        prove(family, torch.float32, torch.device("cpu"))
