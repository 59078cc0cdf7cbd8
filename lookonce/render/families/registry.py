"""The table of processor families: `model_type` of a config → family."""

from __future__ import annotations

import logging
from pathlib import Path

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.embedders import ColQwen2Processing, TwoTowerProcessing
from lookonce.render.families.gemma3 import Gemma3Processing
from lookonce.render.families.general import GeneralProcessing
from lookonce.render.families.idefics3 import Idefics3Processing
from lookonce.render.families.llava import LlavaProcessing
from lookonce.render.families.pixtral import PixtralProcessing
from lookonce.render.families.processor_files import Json, read_processor_files
from lookonce.render.families.qwen2_5_omni import Qwen2_5OmniProcessing, Qwen3OmniProcessing
from lookonce.render.families.qwen2_5_vl import Qwen2_5VLProcessing
from lookonce.render.families.qwen2_audio import Qwen2AudioProcessing
from lookonce.render.families.speech import (
    MoonshineProcessing,
    MoonshineStreamingProcessing,
    WhisperProcessing,
)
from lookonce.render.families.voxtral import VoxtralProcessing
from lookonce.render.families.voxtral_realtime import VoxtralRealtimeProcessing
from lookonce.types.media import MediaExample
from lookonce.types.model import check_served, general_modalities, unsupported

logger = logging.getLogger(__name__)

FAMILIES: dict[str, type[ProcessorFamily]] = {
    model_type: family
    for family in (
        LlavaProcessing,
        PixtralProcessing,
        Gemma3Processing,
        Idefics3Processing,
        Qwen2_5VLProcessing,
        Qwen2_5OmniProcessing,
        Qwen3OmniProcessing,
        Qwen2AudioProcessing,
        VoxtralProcessing,
        VoxtralRealtimeProcessing,
        WhisperProcessing,
        MoonshineProcessing,
        MoonshineStreamingProcessing,
        ColQwen2Processing,
        TwoTowerProcessing,
    )
    for model_type in family.model_types
}


def load_family(folder: str | Path, dtype: str) -> ProcessorFamily | None:
    """The family of a Hugging Face folder or hub id; None for a text-only model.

    Cheap: reads JSON, imports neither torch nor transformers. `dtype` is the model's. Raises
    `ModelLoadError` for a folder without config, or of an unsupported type; the message lists the
    supported ones.
    """
    files = read_processor_files(folder)
    model_type = str(files.config.get("model_type", ""))
    family = _family_class(model_type, files.config)
    if family is not None:
        return family(files, dtype)
    check_served(files.config)
    return GeneralProcessing(files, dtype) if general_modalities(files.config) else None


def media_examples(folder: str | Path, dtype: str) -> tuple[MediaExample, ...]:
    """Prompts on which loading compares a model of a type that has no family of its own.

    Raises `ModelLoadError` where transformers cannot build or run the model's processor.
    """
    family = load_family(folder, dtype)
    if not isinstance(family, GeneralProcessing):
        return ()
    try:
        return _examples_of(family)
    except ModelLoadError as error:
        if not family.gives_up_films():
            raise
        found = _examples_of(family)
        logger.warning("films are not served: %s", error.message)
        return found


def _examples_of(family: GeneralProcessing) -> tuple[MediaExample, ...]:
    """Raises `ModelLoadError`."""
    model_type = str(family.files.config["model_type"])
    try:
        return family.examples()
    except UnprocessableMediaError as error:
        reason = f"{error.message}: {error.__cause__}" if error.__cause__ else error.message
        raise unsupported(model_type, reason[:300]) from error
    except ModelLoadError as error:
        raise unsupported(model_type, error.message) from error
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"its processor takes no prompt with several items ({error})"
        raise unsupported(model_type, reason[:300]) from error


def _family_class(model_type: str, config: Json) -> type[ProcessorFamily] | None:
    tower = (config.get("vision_config") or {}).get("model_type")
    if model_type == "llava" and tower == "pixtral":
        return PixtralProcessing
    return FAMILIES.get(model_type)
