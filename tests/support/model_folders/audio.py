"""Random folders of audio models."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.model_folders import chat_templates as templates
from tests.support.model_folders.base import (
    CHATML,
    MISTRAL_ROLES,
    QWEN_ROLES,
    SOUND,
    Config,
    FolderKind,
    Json,
    Scale,
)

SECONDS = 2
"""Seconds of sound in one chunk of these encoders; real ones take 30."""


def _whisper(scale: Scale) -> Json:
    """Arguments of an encoder of Whisper's shape: 100 mel frames and 50 positions a second."""
    return {"num_mel_bins": 32, "max_source_positions": 50 * SECONDS, "scale_embedding": False}


def _qwen2_audio(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Qwen2AudioConfig, Qwen2Config

    audio = {
        "d_model": scale.vision_hidden,
        "encoder_layers": scale.vision_layers,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * scale.vision_hidden,
        **_whisper(scale),
    }
    return Qwen2AudioConfig(
        audio_config=audio,
        text_config=Qwen2Config(**scale.text(ids)),
        audio_token_index=ids["<|AUDIO|>"],
    )


def _voxtral(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import LlamaConfig, VoxtralConfig

    audio = {
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 4 * scale.vision_hidden,
        "num_hidden_layers": scale.vision_layers,
        "num_attention_heads": 2,
        **_whisper(scale),
    }
    return VoxtralConfig(
        audio_config=audio,
        text_config=LlamaConfig(**scale.text(ids, head_dim=scale.head_dim)),
        audio_token_id=ids["[AUDIO]"],
    )


def _voxtral_realtime(scale: Scale, ids: Mapping[str, int]) -> Config:
    """A text window shorter than the prompts, an encoder's of 5 frames, and heads wider than hidden
    size over heads."""
    from transformers import VoxtralRealtimeConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    audio = {
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 2 * scale.vision_hidden,
        "num_hidden_layers": scale.vision_layers,
        "num_attention_heads": 2,
        "head_dim": scale.vision_hidden,
        "num_mel_bins": 32,
        "sliding_window": 20,
        "rope_parameters": rope,
    }
    text = {
        **scale.text(ids, head_dim=scale.head_dim),
        "sliding_window": 24,
        "rope_parameters": rope,
    }
    # Published models tie their embeddings; random ones would repeat the last token for ever.
    return VoxtralRealtimeConfig(
        audio_config=audio, text_config=text, default_num_delay_tokens=4, tie_word_embeddings=False
    )


def _realtime_preprocessor(_: Scale) -> Json:
    return {
        "feature_extractor_type": "VoxtralRealtimeFeatureExtractor",
        "processor_class": "VoxtralRealtimeProcessor",
        "feature_size": 32,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "win_length": 400,
        "global_log_mel_max": 1.5,
    }


def _preprocessor(name: str) -> Json:
    return {"processor_class": name, **SOUND, "feature_size": 32, "chunk_length": SECONDS}


VOXTRAL_AUDIO_ID = 24
"""Fixed in transformers' processor of this family."""

VOXTRAL_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")
VOXTRAL_FILLER = tuple(f"<SPECIAL_{i}>" for i in range(len(VOXTRAL_TOKENS), VOXTRAL_AUDIO_ID))

SOUND_KINDS: dict[str, FolderKind] = {
    "qwen2_audio": FolderKind(
        specials=(*CHATML, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        roles={
            **QWEN_ROLES,
            "audio_token": "<|AUDIO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        template=templates.QWEN2_AUDIO,
        config=_qwen2_audio,
        preprocessor=lambda _: _preprocessor("Qwen2AudioProcessor"),
    ),
    "voxtral": FolderKind(
        specials=(*VOXTRAL_TOKENS, *VOXTRAL_FILLER, "[AUDIO]", "[BEGIN_AUDIO]"),
        roles=MISTRAL_ROLES,
        template=templates.VOXTRAL,
        adds_bos=True,
        config=_voxtral,
        preprocessor=lambda _: _preprocessor("VoxtralProcessor"),
    ),
    "voxtral_realtime": FolderKind(
        specials=(*VOXTRAL_TOKENS, *VOXTRAL_FILLER, "[AUDIO]", "[STREAMING_PAD]"),
        roles=MISTRAL_ROLES,
        template=templates.VOXTRAL,
        adds_bos=True,
        config=_voxtral_realtime,
        preprocessor=_realtime_preprocessor,
    ),
}
