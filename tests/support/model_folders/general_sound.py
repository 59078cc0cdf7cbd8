"""Random folders of types that hear and have no family of their own, whose processors need
torchaudio."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.model_folders.base import FolderKind, Json, Scale
from tests.support.model_folders.general_media import _kind, _text


def _granite_speech(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "encoder_config": {
            "input_dim": 160,
            "num_layers": 2,
            "hidden_dim": 32,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 8,
            "context_size": 20,
            "max_pos_emb": 32,
            "conv_kernel_size": 5,
        },
        "projector_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "encoder_hidden_size": 32,
            "vocab_size": 8,
        },
        "text_config": _text("granite", scale, ids, logits_scaling=0.5, residual_multiplier=0.5),
        "audio_token_index": ids["<|audio|>"],
        "has_lora_adapter": False,
    }


def _granite_speech_plus(scale: Scale, ids: Mapping[str, int]) -> Json:
    parts = _granite_speech(scale, ids)
    encoder = {**parts["encoder_config"], "cat_hidden_layers": [1]}
    projector = {**parts["projector_config"], "encoder_hidden_size": 64}
    return {**parts, "encoder_config": encoder, "projector_config": projector}


def _fun_asr_nano(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "audio_config": {
            "model_type": "fun_asr_nano_encoder",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_timestamp_prediction_layers": 1,
        },
        "adaptor_config": {
            "hidden_size": scale.hidden,
            "num_attention_heads": 2,
            "intermediate_size": scale.hidden // 4,
            "num_hidden_layers": 1,
            "projector_hidden_size": 48,
        },
        "text_config": _text("qwen3", scale, ids),
        "audio_token_id": ids["<|object_ref_start|>"],
    }


GRANITE: Json = {
    "feature_extractor_type": "GraniteSpeechFeatureExtractor",
    "sampling_rate": 16000,
    "projector_window_size": 15,
    "projector_downsample_rate": 5,
}
SOUND_KINDS: dict[str, FolderKind] = {
    "granite_speech": _kind(
        "granite_speech",
        _granite_speech,
        audio="<|audio|>",
        preprocessor=GRANITE,
        processor="GraniteSpeech",
    ),
    "granite_speech_plus": _kind(
        "granite_speech_plus",
        _granite_speech_plus,
        audio="<|audio|>",
        preprocessor=GRANITE,
        processor="GraniteSpeech",
    ),
    "fun_asr_nano": _kind(
        "fun_asr_nano",
        _fun_asr_nano,
        audio="<|object_ref_start|>",
        preprocessor={
            "feature_extractor_type": "FunAsrNanoFeatureExtractor",
            "sampling_rate": 16000,
        },
        processor="FunAsrNano",
    ),
}
"""By `model_type`."""
