"""Families that never generate: ColQwen2, and two towers (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lookonce.errors import ModelLoadError
from lookonce.render.families.llava import LlavaProcessing
from lookonce.render.families.processor_files import ProcessorFiles
from lookonce.render.families.qwen2_5_vl import Qwen2_5VLProcessing

DEFAULT_TEXT_VOCABULARY = {"clip": 49408, "siglip": 32000}
"""`vocab_size` of transformers' text configs, which published ones may leave out."""


class ColQwen2Processing(Qwen2_5VLProcessing):
    """Qwen2-VL's pictures; its config is a part of ColQwen2's."""

    model_types = ("colqwen2",)
    modalities = ("image",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        part: Any = files.config.get("vlm_config")
        if not isinstance(part, Mapping):
            raise ModelLoadError("config.json has no vlm_config")
        tokens = {"image_token_id": 151_655, **part}
        super().__init__(msgspec.structs.replace(files, config={**files.config, **tokens}), dtype)


class TwoTowerProcessing(LlavaProcessing):
    """A picture alone is a prompt of one placeholder, whose id is behind the text's vocabulary."""

    model_types = ("clip", "siglip")
    item_alone = True

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        model_type = str(files.config.get("model_type"))
        text = files.config.get("text_config") or {}
        token = int(text.get("vocab_size") or DEFAULT_TEXT_VOCABULARY[model_type])
        stated = {**files.image_processor}
        if not stated:
            raise ModelLoadError("the model has no preprocessor_config.json")
        kind = "SiglipImageProcessor" if model_type == "siglip" else "CLIPImageProcessor"
        stated.setdefault("image_processor_type", kind)
        config = {**files.config, "image_token_id": token}
        named = msgspec.structs.replace(files, config=config, preprocessor=stated, processor={})
        super().__init__(named, dtype)

    @property
    def _num_tokens(self) -> int:
        return 1
