"""LLaVA 1.5 and Mistral 3: square pictures, or pictures of any size with Pixtral's encoder."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class LlavaFamily(ModelFamily):
    """Items: `pixel_values` [3, height, width]; with Pixtral's encoder also `image_sizes` [2]."""

    model_types: ClassVar[tuple[str, ...]] = ("llava", "mistral3")
    modalities = ("image",)
    host_arrays = frozenset({"image_sizes"})

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return None if "image_sizes" in item else item["pixel_values"].shape[-3:]

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        if "image_sizes" in items[0]:
            return [self._encode_sized(item) for item in items]
        pixels = torch.stack([item["pixel_values"].squeeze(0) for item in items])
        return list(self.model.model.get_image_features(pixels).pooler_output)

    def _encode_sized(self, item: Tensors) -> Tensor:
        """The rows of one picture. `get_image_features` computes the same, but then reads sizes
        back from the device, to divide the rows of several pictures."""
        model, sizes = self.model.model, item["image_sizes"].view(1, 2)
        layers = model.config.vision_feature_layer
        found = model.vision_tower(
            item["pixel_values"].view(1, *item["pixel_values"].shape[-3:]),
            image_sizes=sizes,
            output_hidden_states=True,
        ).hidden_states
        chosen = [found[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        if getattr(model.config, "vision_feature_select_strategy", "full") == "default":
            chosen = [hidden[:, 1:] for hidden in chosen]
        hidden = torch.cat(chosen, dim=-1).squeeze(0)
        merges = hasattr(model.multi_modal_projector, "patch_merger")
        rows: Tensor = model.multi_modal_projector(hidden, *([sizes] if merges else ()))
        return rows
