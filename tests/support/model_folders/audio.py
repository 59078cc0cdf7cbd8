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
}
