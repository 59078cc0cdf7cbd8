"""The table of supported models: `model_type` of a config → family."""

from __future__ import annotations

from collections.abc import Mapping

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lookonce.model.families.base import ModelFamily, TextFamily
from lookonce.model.families.colqwen2 import ColQwen2Family
from lookonce.model.families.encoder_decoder import (
    MoonshineFamily,
    MoonshineStreamingFamily,
    WhisperFamily,
)
from lookonce.model.families.encoder_only import (
    BertFamily,
    BidirectionalFamily,
    TwoTowerFamily,
)
from lookonce.model.families.gemma3 import Gemma3Family
from lookonce.model.families.general import GeneralMediaFamily, GeneralTextFamily
from lookonce.model.families.idefics3 import Idefics3Family
from lookonce.model.families.llava import LlavaFamily
from lookonce.model.families.qwen2_5_omni import Qwen2_5OmniFamily, Qwen3OmniFamily
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily
from lookonce.model.families.qwen2_audio import Qwen2AudioFamily
from lookonce.model.families.qwen3_5 import Qwen3_5Family
from lookonce.model.families.qwen3_vl import Qwen3VLFamily
from lookonce.model.families.voxtral import VoxtralFamily
from lookonce.model.families.voxtral_realtime import VoxtralRealtimeFamily
from lookonce.types.model import check_known, check_served, general_modalities
from lookonce.types.transformers_types import KnownTypes

FAMILIES: dict[str, type[ModelFamily]] = {
    model_type: family
    for family in (
        TextFamily,
        LlavaFamily,
        Gemma3Family,
        Idefics3Family,
        Qwen2_5VLFamily,
        Qwen3VLFamily,
        Qwen3_5Family,
        Qwen2_5OmniFamily,
        Qwen3OmniFamily,
        Qwen2AudioFamily,
        VoxtralFamily,
        VoxtralRealtimeFamily,
        WhisperFamily,
        MoonshineFamily,
        MoonshineStreamingFamily,
        ColQwen2Family,
        BertFamily,
        TwoTowerFamily,
    )
    for model_type in family.model_types
}


KNOWN = KnownTypes(
    transformers.__version__, CONFIG_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)


def family_for(config: Mapping[str, object]) -> type[ModelFamily]:
    """The family of a Hugging Face config. Raises `ModelLoadError` that lists what is supported."""
    model_type = str(config.get("model_type", ""))
    if config.get("use_bidirectional_attention") is True and model_type == "gemma3_text":
        return BidirectionalFamily
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    check_served(config)
    check_known(config, KNOWN)
    return GeneralMediaFamily if general_modalities(config) else GeneralTextFamily
