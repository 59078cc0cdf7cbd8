"""Random folders of the Qwen vision models and of the Omnis' thinkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.model_folders import chat_templates as templates
from tests.support.model_folders.base import (
    CHATML,
    CLIP_STATS,
    PIXELS,
    QWEN_ROLES,
    SOUND,
    Config,
    ConfigBuilder,
    FolderKind,
    Json,
    Scale,
)

VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def _vision_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _vl(name: str, text: Json, vision: Callable[[Scale], Json]) -> ConfigBuilder:
    """Builds the config class `name` from a scale; `text` is added to the text config."""

    def build(scale: Scale, ids: Mapping[str, int]) -> Config:
        import transformers

        rope = {**scale.mrope(), **text.get("rope_parameters", {})}
        return getattr(transformers, name)(
            text_config=scale.text(ids, **{**text, "rope_parameters": rope}),
            vision_config=vision(scale),
            tie_word_embeddings=False,
            **_vision_ids(ids),
        )

    return build


def _qwen2_vision(scale: Scale) -> Json:
    return {
        "depth": scale.vision_layers,
        "embed_dim": scale.vision_hidden,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "hidden_size": scale.hidden,
    }


def _qwen3_vision(scale: Scale) -> Json:
    return {
        "depth": scale.vision_layers + 1,
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 2 * scale.vision_hidden,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": scale.hidden,
        "deepstack_visual_indexes": list(range(scale.vision_layers)),
        "num_position_embeddings": 64,
    }


def _qwen3_5_vision(scale: Scale) -> Json:
    vision = _qwen3_vision(scale)
    del vision["deepstack_visual_indexes"]
    return vision


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


def _qwen3_omni(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Qwen3OmniMoeThinkerConfig

    audio = {
        "d_model": scale.vision_hidden,
        "encoder_layers": scale.vision_layers,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * scale.vision_hidden,
        "num_mel_bins": 32,
        "n_window_infer": 200,
        "output_dim": scale.hidden,
        "downsample_hidden_size": 16,
    }
    rope = {**scale.mrope(), "mrope_interleaved": True}
    return Qwen3OmniMoeThinkerConfig(
        text_config=scale.text(ids, rope_parameters=rope, **EXPERTS),
        vision_config=_qwen3_vision(scale),
        audio_config=audio,
        audio_token_id=ids["<|audio_pad|>"],
        audio_start_token_id=ids["<|audio_start|>"],
        audio_end_token_id=ids["<|audio_end|>"],
        position_id_per_seconds=13,
        eos_token_id=ids["eos_token_id"],
        tie_word_embeddings=False,
        **_vision_ids(ids),
    )


def _pixels(scale: Scale, patch_size: int = 14) -> Json:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 16 * patch_size**2, "longest_edge": scale.max_pixels},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "resample": 3,
        **PIXELS,
        **CLIP_STATS,
    }


def _preprocessor(name: str, patch_size: int = 14) -> Callable[[Scale], Json]:
    return lambda scale: {"processor_class": name, **_pixels(scale, patch_size)}


def _omni_preprocessor(scale: Scale) -> Json:
    return {
        "processor_class": "Qwen2_5OmniProcessor",
        **_pixels(scale),
        **SOUND,
        "feature_size": 32,
        "chunk_length": 30,
    }


def _qwen3_omni_preprocessor(scale: Scale) -> Json:
    return {
        **_pixels(scale, 16),
        "processor_class": "Qwen3OmniMoeProcessor",
        **SOUND,
        "feature_size": 32,
        "chunk_length": 30,
    }


def _vl_kind(name: str, template: str, config: ConfigBuilder, patch_size: int = 14) -> FolderKind:
    return FolderKind(
        specials=(*CHATML, *VISION_TOKENS),
        roles=QWEN_ROLES,
        template=template,
        config=config,
        preprocessor=_preprocessor(name, patch_size),
    )


INTERLEAVED: Json = {"rope_parameters": {"mrope_interleaved": True}, "head_dim": 16}
EXPERTS: Json = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DELTA_NET: Json = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
    "head_dim": 16,
}
SHARED: Json = {"shared_expert_intermediate_size": 32}

QWEN_KINDS: dict[str, FolderKind] = {
    "qwen2_vl": _vl_kind(
        "Qwen2VLProcessor", templates.QWEN2_5_VL, _vl("Qwen2VLConfig", {}, _qwen2_vision)
    ),
    "qwen2_5_vl": _vl_kind(
        "Qwen2_5_VLProcessor",
        templates.QWEN2_5_VL,
        _vl("Qwen2_5_VLConfig", {}, Scale.qwen_vision),
    ),
    "qwen3_vl": _vl_kind(
        "Qwen3VLProcessor",
        templates.QWEN3_VL,
        _vl("Qwen3VLConfig", INTERLEAVED, _qwen3_vision),
        patch_size=16,
    ),
    "qwen3_vl_moe": _vl_kind(
        "Qwen3VLProcessor",
        templates.QWEN3_VL,
        _vl("Qwen3VLMoeConfig", {**INTERLEAVED, **EXPERTS}, _qwen3_vision),
        patch_size=16,
    ),
    "qwen3_5": _vl_kind(
        "Qwen3VLProcessor",
        templates.QWEN3_VL,
        _vl("Qwen3_5Config", DELTA_NET, _qwen3_5_vision),
        patch_size=16,
    ),
    "qwen3_5_moe": _vl_kind(
        "Qwen3VLProcessor",
        templates.QWEN3_VL,
        _vl("Qwen3_5MoeConfig", {**DELTA_NET, **EXPERTS, **SHARED}, _qwen3_5_vision),
        patch_size=16,
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
    "qwen3_omni": FolderKind(
        specials=(*CHATML, *VISION_TOKENS, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        roles={
            **QWEN_ROLES,
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        template=templates.QWEN3_OMNI,
        config=_qwen3_omni,
        preprocessor=_qwen3_omni_preprocessor,
    ),
}
