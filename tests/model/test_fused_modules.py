"""Replaced norms and vision modules give the results of the modules in transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForMultimodalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lookonce.model import fused_modules
from lookonce.model.fused_modules import fuse_norms, patch_vision_modules

PATCHES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
REPLACED_PARTS = {"qwen2_vl": 1, "qwen2_5_vl": 4, "qwen3_vl": 1}
"""Of a block: its attention, and in Qwen2.5 two RMS norms and a gated product."""
GRIDS = [[1, 12, 12], [1, 6, 10], [1, 2, 2], [1, 18, 8]]


def encoder_output(model: nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(list(model.model.get_image_features(patches, grids).pooler_output))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", PATCHES)
def test_pictures_of_many_shapes_are_encoded_alike(folder, kind, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(fused_modules, "attends_windows", lambda like: False)
    model = AutoModelForMultimodalLM.from_pretrained(folder(kind), dtype=torch.float32).eval()
    grids = torch.tensor(GRIDS)
    rows = int(grids.prod(1).sum())
    patches = torch.randn(rows, 3 * 2 * PATCHES[kind] ** 2, generator=torch.manual_seed(1))
    theirs = encoder_output(model, patches, grids)
    num_blocks = len(model.model.visual.blocks)
    assert patch_vision_modules(model) == 1 + num_blocks * REPLACED_PARTS[kind]
    torch.testing.assert_close(encoder_output(model, patches, grids), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(theirs, torch.zeros_like(theirs))


class OddVisionAttention(nn.Module):
    """Looks like a vision attention, but scales its result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.num_heads, self.scaling = 2, 0.5

    def forward(self, hidden, cu_seqlens, position_embeddings):
        return 3 * self.proj(self.qkv(hidden)[:, :8])


def test_an_attention_that_computes_otherwise_is_left_alone():
    assert patch_vision_modules(OddVisionAttention().eval()) == 0


@pytest.mark.parametrize("options", [{"stride": 1}, {"padding": 1}, {"groups": 2}])
def test_a_true_convolution_is_left_alone(options):
    convolution = nn.Conv3d(2, 4, 2, **{"stride": 2, **options}).eval()
    assert patch_vision_modules(convolution) == 0


def test_a_patch_embedding_still_takes_more_than_a_patch():
    torch.manual_seed(0)
    convolution = nn.Conv3d(2, 4, 2, stride=2).eval()
    wide = torch.randn(1, 2, 4, 4, 4)
    theirs = convolution(wide)
    assert patch_vision_modules(convolution) == 1
    assert torch.equal(convolution(wide), theirs)


def norm_model(kind: type[nn.Module]) -> nn.Module:
    model = nn.Sequential(kind(24, eps=1e-5))
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(1))
    return model.eval().requires_grad_(False)


def test_a_plain_norm_is_replaced_and_gives_the_same_bits():
    model = norm_model(LlamaRMSNorm)
    sample = torch.randn(1, 7, 24)
    before = model(sample)
    assert fuse_norms(model) == 1
    assert torch.equal(model(sample), before)


def test_a_norm_that_scales_by_one_plus_weight_is_left_alone():
    model = norm_model(Gemma3RMSNorm)
    sample = torch.randn(1, 7, 24)
    before = model(sample)
    assert fuse_norms(model) == 0
    assert torch.equal(model(sample), before)


class WrongEpsilonRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.001


def test_a_norm_that_only_looks_alike_is_left_alone():
    assert fuse_norms(norm_model(WrongEpsilonRMSNorm)) == 0


def test_weights_stay_where_they_were():
    model = norm_model(LlamaRMSNorm)
    names = list(model.state_dict())
    fuse_norms(model)
    assert list(model.state_dict()) == names
