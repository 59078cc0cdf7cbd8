"""Gemma 3: pictures of a fixed number of tokens that attend to themselves in both directions."""

from __future__ import annotations

from lookonce.model.families.llava import LlavaFamily


class Gemma3Family(LlavaFamily):
    """Items as LLaVA's. The attention backend masks for both directions."""

    model_types = ("gemma3",)
    unsplittable = ("image",)

    @property
    def largest_unsplittable(self) -> int:
        return int(self.config.mm_tokens_per_image)
