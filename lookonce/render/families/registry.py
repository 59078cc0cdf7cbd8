"""The one table of processor families: `model_type` of a config → family."""

from __future__ import annotations

from pathlib import Path

from lookonce.errors import ModelLoadError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.folder import read_folder
from lookonce.render.families.gemma3 import Gemma3Processing
from lookonce.render.families.llava import LlavaProcessing
from lookonce.render.families.qwen2_5_omni import Qwen2_5OmniProcessing
from lookonce.render.families.qwen2_5_vl import Qwen2_5VLProcessing

FAMILIES: dict[str, type[ProcessorFamily]] = {
    model_type: family
    for family in (LlavaProcessing, Qwen2_5VLProcessing, Gemma3Processing, Qwen2_5OmniProcessing)
    for model_type in family.model_types
}


def load_family(folder: str | Path, dtype: str) -> ProcessorFamily | None:
    """The family of a Hugging Face folder or hub id; None for a text-only model.

    Cheap: reads JSON, imports neither torch nor transformers. `dtype` is the model's. Raises
    `ModelLoadError` for a folder without config or a model with media that no family serves.
    """
    files = read_folder(folder)
    model_type = str(files.config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is not None:
        return family(files, dtype)
    if "vision_config" in files.config or "audio_config" in files.config:
        raise ModelLoadError(
            f"media of models of type {model_type!r} is not supported; supported types: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return None
