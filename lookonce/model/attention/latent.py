"""Multi-head latent attention over its compressed keys and values.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C. A layer computes one latent c of
R numbers and one rotated key k of D numbers for a token, whatever its number of heads H. Keys and
values of head h are U_h c (with k after it) and V_h c. Only c and k are kept, R + D numbers:

    score = q · (U_h c) + r · k = (Uᵀ_h q) · c + r · k          query [Uᵀ_h q, r], key [c, k]
    output = Σ weight · V_h c = V_h (Σ weight · c)              value [c, k], of which c is used

So attention has H query heads over one head of keys, which are the values as well. transformers'
modules with `expand_kv` give c and k to that method, and what it returns to attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lookonce.model.attention.hf_attention import LATENT, in_paged_forward


class LatentAttention:
    """One layer's matrices, and what takes the place of its `expand_kv`."""

    def __init__(self, module: Any) -> None:
        self._expand_kv = module.expand_kv
        self._rank = int(module.kv_lora_rank)
        self._key_width = int(module.qk_nope_head_dim)
        self._value_width = int(module.v_head_dim)
        self._linear: nn.Linear = module.kv_b_proj

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """U [H, key width, R] and V [H, value width, R], views of the layer's weight."""
        widths = [self._key_width, self._value_width]
        heads = self._linear.weight.view(-1, sum(widths), self._rank)
        keys, values = torch.split(heads, widths, dim=1)
        return keys, values

    def expand_kv(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """`latent` [1, 1, T, R] and `rotated` [1, 1, T, D] → key and value, both [1, 1, T, R + D];
        outside of paged attention what transformers makes of them."""
        if not in_paged_forward():
            expanded: tuple[Tensor, Tensor] = self._expand_kv(latent, rotated)
            return expanded
        row = torch.cat((latent, rotated), dim=-1)
        return row, row

    def query(self, query: Tensor) -> Tensor:
        """[1, H, T, key width + D] → [1, H, T, R + D]."""
        keys, _ = self._matrices()
        plain, rotated = query[..., : self._key_width], query[..., self._key_width :]
        return torch.cat((plain @ keys, rotated), dim=-1)

    def output(self, output: Tensor) -> Tensor:
        """[1, T, H, R + D] → [1, T, H, value width]."""
        _, values = self._matrices()
        heads = output[..., : self._rank].transpose(1, 2) @ values.transpose(1, 2)
        return heads.transpose(1, 2)


def keep_latents(decoder: nn.Module) -> bool:
    """Let all attention layers of a decoder keep latents; False, and nothing is changed, where one
    of them has none."""
    layers: list[Any] = [module for module in decoder.modules() if hasattr(module, "expand_kv")]
    attention = [module for module in decoder.modules() if hasattr(module, "o_proj")]
    if not layers or len(layers) != len(attention) or not all(map(_has_latents, layers)):
        return False
    for module in layers:
        latent = LatentAttention(module)
        setattr(module, LATENT, latent)
        module.expand_kv = latent.expand_kv
    return True


def _has_latents(module: Any) -> bool:
    """Whether keys and values are one linear map, without a bias, of the layer's latent."""
    sizes = [getattr(module, name, None) for name in ("kv_lora_rank", *WIDTHS)]
    linear = getattr(module, "kv_b_proj", None)
    if not all(isinstance(size, int) for size in sizes) or not isinstance(linear, nn.Linear):
        return False
    rows = getattr(module, "num_heads", 0) * sum(getattr(module, name) for name in WIDTHS)
    has_bias = getattr(linear, "bias", None) is not None
    return not has_bias and tuple(linear.weight.shape) == (rows, module.kv_lora_rank)


WIDTHS = ("qk_nope_head_dim", "v_head_dim")
"""Attributes: the widths of a head's key, without what is rotated, and of its value."""
