"""Random folders of models that see or hear."""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.bench import folder_templates as templates
from lookonce.bench.folder_base import (
    CHATML,
    CLIP_STATS,
    GEMMA,
    GEMMA_ROLES,
    PIXELS,
    QWEN_ROLES,
    Config,
    FolderKind,
    Json,
    Scale,
)


def _llava(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=scale.vision_hidden,
        intermediate_size=2 * scale.vision_hidden,
        num_hidden_layers=scale.vision_layers + 1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**scale.text(ids, head_dim=scale.head_dim)),
        image_token_index=ids["<image>"],
        image_seq_length=16,
        tie_word_embeddings=False,
        pad_token_id=ids["pad_token_id"],
    )


def _qwen2_5_vl(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=scale.text(ids, rope_parameters=scale.mrope()),
        vision_config=scale.qwen_vision(),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _gemma3(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(
        **scale.text(ids, head_dim=scale.head_dim, tie_word_embeddings=True),
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * (scale.layers // 2),
        query_pre_attn_scalar=scale.head_dim,
    )
    vision = SiglipVisionConfig(
        hidden_size=scale.vision_hidden,
        intermediate_size=2 * scale.vision_hidden,
        num_hidden_layers=scale.vision_layers,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        vision_use_head=False,
    )
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        eos_token_id=[ids["<eos>"], ids["<end_of_turn>"]],
        tie_word_embeddings=True,
    )


def _qwen2_5_omni(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Qwen2_5OmniThinkerConfig

    audio = {
        "d_model": scale.vision_hidden,
        "encoder_layers": scale.vision_layers,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * scale.vision_hidden,
        "num_mel_bins": 32,
        "max_source_positions": 1500,
        "n_window": 50,
        "output_dim": scale.hidden,
    }
    return Qwen2_5OmniThinkerConfig(
        text_config=scale.text(ids, rope_parameters=scale.mrope()),
        vision_config=scale.qwen_vision(),
        audio_config=audio,
        audio_token_index=ids["<|AUDIO|>"],
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        vision_start_token_id=ids["<|vision_bos|>"],
        vision_end_token_id=ids["<|vision_eos|>"],
        position_id_per_seconds=25,
        eos_token_id=ids["eos_token_id"],
        tie_word_embeddings=False,
    )


def _qwen_pixels(scale: Scale) -> Json:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": scale.max_pixels},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "resample": 3,
        **PIXELS,
        **CLIP_STATS,
    }


def _omni_preprocessor(scale: Scale) -> Json:
    return {
        "processor_class": "Qwen2_5OmniProcessor",
        **_qwen_pixels(scale),
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 32,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }


def _llava_preprocessor(_: Scale) -> Json:
    return {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "do_center_crop": True,
        "resample": 3,
        **PIXELS,
        **CLIP_STATS,
    }


def _gemma3_preprocessor(_: Scale) -> Json:
    return {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 64, "width": 64},
        "image_seq_length": 16,
        "do_pan_and_scan": None,
        "resample": 2,
        **PIXELS,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


MEDIA_KINDS: dict[str, FolderKind] = {
    "llava": FolderKind(
        specials=("<unk>", "<s>", "</s>", "<image>", "<pad>"),
        roles={
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "image_token": "<image>",
        },
        template=templates.LLAVA,
        adds_bos=True,
        config=_llava,
        preprocessor=_llava_preprocessor,
        processor={
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
        },
    ),
    "qwen2_5_vl": FolderKind(
        specials=(
            *CHATML,
            "<|vision_start|>",
            "<|vision_end|>",
            "<|vision_pad|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ),
        roles=QWEN_ROLES,
        template=templates.QWEN2_5_VL,
        config=_qwen2_5_vl,
        preprocessor=lambda scale: {
            "processor_class": "Qwen2_5_VLProcessor",
            **_qwen_pixels(scale),
        },
    ),
    "gemma3": FolderKind(
        specials=(
            *GEMMA,
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ),
        roles={
            **GEMMA_ROLES,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        template=templates.GEMMA3,
        adds_bos=True,
        config=_gemma3,
        preprocessor=_gemma3_preprocessor,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
    ),
    "qwen2_5_omni": FolderKind(
        specials=(
            *CHATML,
            "<|AUDIO|>",
            "<|audio_bos|>",
            "<|audio_eos|>",
            "<|vision_bos|>",
            "<|vision_eos|>",
            "<|IMAGE|>",
            "<|VIDEO|>",
        ),
        roles={
            **QWEN_ROLES,
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        template=templates.QWEN2_5_OMNI,
        config=_qwen2_5_omni,
        preprocessor=_omni_preprocessor,
    ),
}
