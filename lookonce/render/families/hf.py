"""Hugging Face processors, built from a folder's JSON: the one place that imports transformers.

Only PIL image processors are named, because torchvision's, which transformers prefers where it is
installed, give other pixels. Imports happen on use: they take a second, which only workers pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lookonce.errors import ModelLoadError
from lookonce.render.families.folder import Json

IMAGE_PROCESSORS = {
    "CLIPImageProcessor": "transformers.models.clip.image_processing_pil_clip",
    "SiglipImageProcessor": "transformers.models.siglip.image_processing_pil_siglip",
    "Qwen2VLImageProcessor": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "Gemma3ImageProcessor": "transformers.models.gemma3.image_processing_pil_gemma3",
    "PixtralImageProcessor": "transformers.models.pixtral.image_processing_pil_pixtral",
    "Idefics3ImageProcessor": "transformers.models.idefics3.image_processing_pil_idefics3",
    "SmolVLMImageProcessor": "transformers.models.smolvlm.image_processing_pil_smolvlm",
}
"""`image_processor_type` (without "Fast") → module of its PIL class."""

OLD_NAMES = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}


def image_processor(config: Json, *allowed: str) -> Any:
    """The image processor the folder asks for. Raises `ModelLoadError` unless it is `allowed`."""
    name = str(config.get("image_processor_type", allowed[0])).removesuffix("Fast")
    name = OLD_NAMES.get(name, name)
    if name not in allowed:
        raise ModelLoadError(f"image processor {name} is not supported with this model type")
    return getattr(import_module(IMAGE_PROCESSORS[name]), f"{name}Pil").from_dict(dict(config))


def whisper_feature_extractor(config: Json) -> Any:
    """The extractor, of which only the settings and mel filters are used (see `mel`)."""
    module = import_module("transformers.models.whisper.feature_extraction_whisper")
    return module.WhisperFeatureExtractor.from_dict(dict(config))
