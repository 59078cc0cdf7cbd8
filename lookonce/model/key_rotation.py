"""Rotates cached keys to other rotary positions, so that a session's positions can begin again.

A rotary key at position p is the key turned by an angle of p times a frequency, for each pair of
its dimensions. Attention scores depend on differences of positions alone. Turning all keys of a
sequence back by r, and computing its later tokens at positions that are smaller by r, gives equal
scores up to rounding (RoFormer, Su et al., 2021, equation 16).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily
from lookonce.model.kv_pages import KVPages
from lookonce.types.model import SUPPORTED

CONSTANT_FREQUENCIES = ("default", "linear", "llama3", "yarn", "mrope")
"""Kinds of rope whose frequencies do not depend on the length of the sequence."""
TOLERANCE = 1e-4
"""Largest difference between a rotated key and the same key computed at the other position."""
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class KeyRotation:
    """Turns keys as the model does: by transformers' own functions of the model."""

    def __init__(self, rotary: Any, rotate: Rotate, axes: int) -> None:
        self._rotary = rotary
        self._rotate = rotate
        self._axes = axes
        self._scaling = float(getattr(rotary, "attention_scaling", 1.0))

    def at(self, heads: Tensor, position: int) -> Tensor:
        """heads [..., D] float32 turned to a position, as the model turns queries and keys."""
        flat = heads.reshape(1, 1, -1, heads.shape[-1])
        shape = (1, 1) if self._axes == 1 else (3, 1, 1)
        positions = torch.full(shape, position, device=heads.device)
        cos, sin = self._rotary(flat, positions)
        width = cos.shape[-1]
        turned, _ = self._rotate(flat[..., :width], flat[..., :width], cos, sin)
        return torch.cat((turned, flat[..., width:]), dim=-1).view(heads.shape)

    def back(self, keys: Tensor, positions: int) -> Tensor:
        """Cached keys [..., D] as they were, had all positions been smaller by `positions`."""
        turned = self.at(keys.float(), -positions)
        if self._scaling != 1.0:  # cosines and sines are scaled, and the keys were before
            turned /= self._scaling
        return turned.to(keys.dtype)

    def move(self, pages: KVPages, moved: Sequence[tuple[int, int]], positions: int) -> None:
        """Copy blocks, (from, to), with their keys turned back by so many positions."""
        if not moved:
            return
        device = pages.layers[0].keys.device
        sources = torch.tensor([source for source, _ in moved], device=device)
        targets = torch.tensor([target for _, target in moved], device=device)
        for keys, values in pages.layers:
            keys[targets] = self.back(keys[sources], positions)
            values[targets] = values[sources]


@torch.inference_mode()
def key_rotation(family: ModelFamily) -> KeyRotation | None:
    """None where attention depends on more than distances, or that cannot be told."""
    rotary = getattr(family.decoder, "rotary_emb", None)
    layers = getattr(family.decoder, "layers", None)
    if family.states or family.config.model_type not in SUPPORTED or rotary is None or not layers:
        return None
    if getattr(rotary, "rope_type", None) not in CONSTANT_FREQUENCIES:
        return None
    if not isinstance(getattr(rotary, "inv_freq", None), Tensor):  # layers have different ones
        return None
    module = sys.modules[type(layers[0].self_attn).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        return None
    rotation = KeyRotation(rotary, rotate, family.position_axes)
    return rotation if _turns_back(rotation, family.head_dim, rotary.inv_freq.device) else None


def _turns_back(rotation: KeyRotation, head_dim: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(4, head_dim, generator=generator).to(device)
    try:
        found = rotation.back(rotation.at(keys, 19), 12)
    except (RuntimeError, TypeError, ValueError):
        return False
    return bool((found - rotation.at(keys, 7)).abs().max() <= TOLERANCE * keys.abs().max())
