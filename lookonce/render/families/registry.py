"""The one table of processor families: `model_type` of a config → family."""

from __future__ import annotations

from pathlib import Path

from lookonce.errors import ModelLoadError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.folder import Json, read_folder
from lookonce.render.families.gemma3 import Gemma3Processing
from lookonce.render.families.idefics3 import Idefics3Processing
from lookonce.render.families.llava import LlavaProcessing
from lookonce.render.families.pixtral import PixtralProcessing
from lookonce.render.families.qwen2_5_omni import Qwen2_5OmniProcessing
from lookonce.render.families.qwen2_5_vl import Qwen2_5VLProcessing
from lookonce.render.families.qwen2_audio import Qwen2AudioProcessing
from lookonce.render.families.voxtral import VoxtralProcessing

FAMILIES: dict[str, type[ProcessorFamily]] = {
    model_type: family
    for family in (
        LlavaProcessing,
        PixtralProcessing,
        Gemma3Processing,
        Idefics3Processing,
        Qwen2_5VLProcessing,
        Qwen2_5OmniProcessing,
        Qwen2AudioProcessing,
        VoxtralProcessing,
    )
    for model_type in family.model_types
}

TEXT_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Models that take no media. `model.families` serves them and must list the same."""


def load_family(folder: str | Path, dtype: str) -> ProcessorFamily | None:
    """The family of a Hugging Face folder or hub id; None for a text-only model.

    Cheap: reads JSON, imports neither torch nor transformers. `dtype` is the model's. Raises
    `ModelLoadError` for a folder without config, or of a type that is not supported, with those
    that are.
    """
    files = read_folder(folder)
    model_type = str(files.config.get("model_type", ""))
    family = _family_class(model_type, files.config)
    if family is not None:
        return family(files, dtype)
    if model_type in TEXT_TYPES:
        return None
    supported = ", ".join(sorted((*FAMILIES, *TEXT_TYPES)))
    raise ModelLoadError(
        f"models of type {model_type!r} are not supported; supported types: {supported}"
    )


def _family_class(model_type: str, config: Json) -> type[ProcessorFamily] | None:
    tower = (config.get("vision_config") or {}).get("model_type")
    if model_type == "llava" and tower == "pixtral":
        return PixtralProcessing
    return FAMILIES.get(model_type)
