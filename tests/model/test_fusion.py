"""Norms are replaced only where that changes no bit."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lookonce.model.fusion import fuse_norms


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
