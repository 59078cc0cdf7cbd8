"""Random folders of types with media that have no family of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lookonce.render.families.general import DEFAULT_TEMPLATES
from tests.support.model_folders.base import (
    CHATML,
    HALF_STATS,
    PIXELS,
    QWEN_ROLES,
    SOUND,
    Config,
    FolderKind,
    Json,
    Scale,
)

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'video' %}
                {{- '<video>' }}
            {%- elif part['type'] == 'image' %}
                {{- 'IMAGE' }}
            {%- elif part['type'] == 'audio' %}
                {{- 'AUDIO' }}
            {%- else %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML; IMAGE and AUDIO stand for the placeholder tokens."""

Parts = Callable[[Scale, Mapping[str, int]], Json]


def _kind(
    model_type: str,
    parts: Parts,
    *,
    image: str = "",
    audio: str = "",
    video: str = "<video>",
    films: Json | None = None,
    specials: tuple[str, ...] = (),
    roles: Mapping[str, str] | None = None,
    preprocessor: Json,
    processor: str,
    adapters: Mapping[str, Json] | None = None,
    **processor_fields: Any,
) -> FolderKind:
    """A kind whose config is `model_type`'s, made of `parts`. `processor`: its class' name, without
    `Processor`, with the fields of its file; `films`: that of its video processor."""
    tokens = tuple(token for token in (image, audio) if token)
    return FolderKind(
        specials=(*CHATML, *tokens, *specials),
        roles={**QWEN_ROLES, **(roles or {})},
        template=TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio).replace("<video>", video),
        config=lambda scale, ids: _config(model_type, parts(scale, ids)),
        preprocessor=lambda _: preprocessor,
        video=films or {},
        processor={"processor_class": f"{processor}Processor", **processor_fields},
        adapters=adapters or {},
    )


def _config(model_type: str, parts: Json) -> Config:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {"tie_word_embeddings": False, **parts}
    return CONFIG_MAPPING[model_type](**{name: v for name, v in given.items() if v is not None})


def _text(model_type: str, scale: Scale, ids: Mapping[str, int], **over: Any) -> Json:
    """A small text config of a plain decoder."""
    return {"model_type": model_type, **scale.text(ids, head_dim=scale.head_dim), **over}


def _vision(scale: Scale, **over: Any) -> Json:
    return {
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 2 * scale.vision_hidden,
        "num_hidden_layers": scale.vision_layers,
        "num_attention_heads": 2,
        **over,
    }


def _internvl(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, image_size=[56, 56], patch_size=[14, 14]),
        "text_config": _text("qwen2", scale, ids),
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    }


def _phi4_multimodal(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        **scale.text(ids, original_max_position_embeddings=scale.max_length),
        "vision_config": _vision(
            scale,
            image_size=64,
            crop_size=64,
            patch_size=2,  # a crop always has 256 tokens
            num_hidden_layers=3,
            image_token_id=ids["<|image|>"],
        ),
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 3,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "bias_max_distance": 20,
            "audio_token_id": ids["<|audio|>"],
        },
    }


def _clip(scale: Scale, **over: Any) -> Json:
    return _vision(scale, model_type="clip_vision_model", image_size=28, patch_size=14, **over) | {
        "num_hidden_layers": scale.vision_layers + 1
    }


def _siglip(scale: Scale, **over: Any) -> Json:
    sizes = {"image_size": 28, "patch_size": 14, "vision_use_head": False, **over}
    return _vision(scale, model_type="siglip_vision_model", **sizes)


def _llava_next(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _clip(scale),
        "text_config": _text("mistral", scale, ids, sliding_window=None),
        "image_token_index": ids["<image>"],
        "image_grid_pinpoints": PINPOINTS,
    }


def _llava_onevision(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _siglip(scale),
        "text_config": _text("qwen2", scale, ids),
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": PINPOINTS,
    }


def _aya_vision(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _siglip(scale, image_size=56),
        "text_config": _text("cohere2", scale, ids, sliding_window=12, logit_scale=0.5),
        "image_token_index": ids["<|IMG_PATCH|>"],
        "tie_word_embeddings": True,
    }


def _deepseek_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _siglip(scale),
        "text_config": _text("llama", scale, ids),
        "image_token_id": ids["<image_placeholder>"],
    }


def _janus(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": {
            "hidden_size": scale.vision_hidden,
            "num_hidden_layers": scale.vision_layers,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "projection_dim": scale.hidden,
            "num_image_tokens": 4,
        },
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 16,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 2,
            "projection_dim": scale.hidden,
            "image_token_embed_dim": scale.hidden,
        },
        "text_config": _text("llama", scale, ids),
        "image_token_id": ids["<image_placeholder>"],
    }


def _lighton_ocr(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(
            scale, model_type="pixtral", image_size=128, patch_size=14, head_dim=16
        ),
        "text_config": _text("qwen3", scale, ids),
        "image_token_id": ids["<|image_pad|>"],
    }


def _grid_vision(scale: Scale, **over: Any) -> Json:
    """An encoder of patches in one sequence."""
    return {
        "depth": scale.vision_layers,
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 2 * scale.vision_hidden,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        **over,
    }


def _glm_text(model_type: str, scale: Scale, ids: Mapping[str, int], **over: Any) -> Json:
    mrope = {**scale.mrope(), "partial_rotary_factor": 1.0}
    return _text(model_type, scale, ids, rope_parameters=mrope, **over)


def _glm(vision: str, text: str) -> Parts:
    def parts(scale: Scale, ids: Mapping[str, int]) -> Json:
        sizes = {"image_size": 56, "temporal_patch_size": 2, "out_hidden_size": scale.hidden}
        return {
            "vision_config": _grid_vision(scale, model_type=vision, **sizes),
            "text_config": _glm_text(text, scale, ids),
            "image_token_id": ids["<|image|>"],
            "video_token_id": ids["<|video|>"],
            "image_start_token_id": ids["<|begin_of_image|>"],
            "image_end_token_id": ids["<|end_of_image|>"],
            "video_start_token_id": ids["<|begin_of_video|>"],
            "video_end_token_id": ids["<|end_of_video|>"],
        }

    return parts


def _idefics2(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, image_size=56, patch_size=14),
        "perceiver_config": {
            "hidden_size": scale.hidden,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
        },
        "text_config": _text("mistral", scale, ids, sliding_window=None),
        "image_token_id": ids["<image>"],
    }


def _vipllava(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _clip(scale),
        "text_config": _text("llama", scale, ids),
        "image_token_index": ids["<image>"],
        "vision_feature_layers": [-1, -2],
        "image_seq_length": 4,
    }


def _video_llama_3(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, patch_size=14),
        "text_config": _text("qwen2", scale, ids),
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _paddleocr_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, image_size=56, patch_size=14, spatial_merge_size=2),
        "text_config": _text("paddleocr_vl_text", scale, ids, rope_parameters=scale.mrope()),
        "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|IMAGE_START|>"],
        "vision_end_token_id": ids["<|IMAGE_END|>"],
    }


def _exaone(scale: Scale, ids: Mapping[str, int]) -> Json:
    vision = _grid_vision(
        scale,
        num_key_value_heads=1,
        window_size=56,
        out_hidden_size=scale.hidden,
        fullatt_block_indexes=[scale.vision_layers - 1],
    )
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    return {
        "vision_config": vision,
        "text_config": _text("exaone4", scale, ids, sliding_window=12, layer_types=layers),
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _hyperclovax(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": {"model_type": "qwen2_5_vl_vision", **scale.qwen_vision()},
        "text_config": _text("hyperclovax", scale, ids, logits_scaling=0.5),
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _qwen3_asr(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": scale.hidden,
            "downsample_hidden_size": 16,
        },
        "text_config": _text("qwen3", scale, ids),
        "audio_token_id": ids["<|audio_pad|>"],
        "timestamp_token_id": ids["<timestamp>"],
    }


def _hearing(**over: Any) -> Json:
    """A small encoder of sound."""
    sizes = {"num_mel_bins": 128, "hidden_size": 32, "intermediate_size": 64}
    return {**sizes, "num_hidden_layers": 2, "num_attention_heads": 2, **over}


def _flamingo(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "audio_config": _hearing(model_type="audioflamingo3_encoder"),
        "text_config": _text("qwen2", scale, ids),
        "audio_token_id": ids["<sound>"],
        "tie_word_embeddings": None,  # as the text model has it
    }


def _glmasr(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "audio_config": _hearing(num_key_value_heads=2, intermediate_size=128),
        "text_config": _text("llama", scale, ids),
        "audio_token_id": ids["<|pad|>"],
    }


def _glm4v_moe(scale: Scale, ids: Mapping[str, int]) -> Json:
    parts = _glm("glm4v_moe_vision", "glm4v_moe_text")(scale, ids)
    experts = {
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
    }
    return {**parts, "text_config": {**parts["text_config"], **experts}}


def _ernie(scale: Scale, ids: Mapping[str, int]) -> Json:
    layers = ["dense", *["sparse"] * (scale.layers - 1)]
    text = {
        "rope_parameters": {**scale.mrope(), "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [32, 16],
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": layers,
    }
    return {
        "vision_config": _grid_vision(scale, temporal_merge_size=2),
        "text_config": _text("ernie4_5_vl_moe_text", scale, ids, **text),
        "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "image_start_token_id": ids["<|IMAGE_START|>"],
        "image_end_token_id": ids["<|IMAGE_END|>"],
        "video_token_id": ids["<|VIDEO_PLACEHOLDER|>"],
        "video_start_token_id": ids["<|VIDEO_START|>"],
        "video_end_token_id": ids["<|VIDEO_END|>"],
    }


def _qianfan(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {**_internvl(scale, ids), "text_config": _text("qwen3", scale, ids)}


def _llava_next_video(scale: Scale, ids: Mapping[str, int]) -> Json:
    parts = _llava_next(scale, ids)
    return {**parts, "text_config": _text("llama", scale, ids), "video_token_index": ids["<video>"]}


def _video_llava(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _clip(scale),
        "text_config": _text("llama", scale, ids),
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_seq_length": 4,
    }


def _musicflamingo(scale: Scale, ids: Mapping[str, int]) -> Json:
    markers = {
        "audio_bos_token_id": ids["<|sound_bos|>"],
        "audio_eos_token_id": ids["<|sound_eos|>"],
        "head_dim": 32,
    }
    return {**_flamingo(scale, ids), **markers}


def _moss(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "audio_config": _hearing(),
        "text_config": _text("qwen3", scale, ids),
        "audio_token_id": ids["<|audio_pad|>"],
    }


def _cohere2_vision(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _siglip(scale, image_size=56),
        "text_config": _text("cohere2", scale, ids, sliding_window=12, logit_scale=0.5),
        "image_token_id": ids["<|IMG_PATCH|>"],
        "alignment_intermediate_size": 64,
        "tie_word_embeddings": True,
    }


def _llama4(scale: Scale, ids: Mapping[str, int]) -> Json:
    text = {
        "intermediate_size_mlp": scale.ffn,
        "num_local_experts": 4,
        "moe_layers": list(range(1, scale.layers, 2)),
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 512,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    }
    return {
        "vision_config": _vision(
            scale,
            image_size=56,
            patch_size=14,
            intermediate_size=4 * scale.vision_hidden,
            vision_output_dim=scale.hidden,
            projector_input_dim=64,
            projector_output_dim=64,
        ),
        "text_config": _text("llama4_text", scale, ids, **text),
        "image_token_index": ids["<|patch|>"],
        "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"],
    }


def _sam(scale: Scale, **over: Any) -> Json:
    """A vision encoder of SAM's shape, whose attention stays inside windows."""
    return {
        "hidden_size": scale.vision_hidden,
        "output_channels": 16,
        "num_hidden_layers": scale.vision_layers,
        "num_attention_heads": 2,
        "mlp_dim": 2 * scale.vision_hidden,
        "window_size": 8,
        **over,
    }


def _got_ocr(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _sam(scale, image_size=256, patch_size=4, global_attn_indexes=[]),
        "text_config": _text("qwen2", scale, ids),
        "image_token_index": ids["<imgpad>"],
    }


def _aria(scale: Scale, ids: Mapping[str, int]) -> Json:
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    return {
        "vision_config": _vision(
            scale, model_type="idefics3_vision", image_size=980, patch_size=140
        ),
        "text_config": _text("aria_text", scale, ids, **experts),
        "image_token_index": ids["<image>"],
        "projector_patch_to_query_dict": {49: 4},
    }


def _deepseek_vl_hybrid(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        **_deepseek_vl(scale, ids),
        "high_res_vision_config": _sam(
            scale, image_size=64, patch_size=8, global_attn_indexes=[scale.vision_layers - 1]
        ),
    }


def _deepseek_ocr2(scale: Scale, ids: Mapping[str, int]) -> Json:
    sam = _sam(scale, image_size=192, patch_size=16, global_attn_indexes=[1])
    encoder = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    text = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", *["sparse"] * (scale.layers - 1)],
    }
    return {
        "vision_config": {
            "sam_config": {**sam, "downsample_channels": [24, 32]},
            "encoder_config": encoder,
        },
        "text_config": _text("deepseek_ocr2_text", scale, ids, **text),
        "image_token_id": ids["<image>"],
    }


def _glmga(scale: Scale, ids: Mapping[str, int]) -> Json:
    return _glm("glm4v_vision", "glm4v_text")(scale, ids)


def _cosmos3_edge(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, patch_size=14, num_patches=16, spatial_merge_size=2),
        "text_config": _text("cosmos3_edge_text", scale, ids, rope_parameters=scale.mrope()),
        "projector_hidden_size": 64,
        **_qwen_tokens(ids),
    }


def _qwen_tokens(ids: Mapping[str, int]) -> Json:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _deepstack_vision(scale: Scale, **over: Any) -> Json:
    """Qwen3-VL's encoder, with features for two layers of the decoder."""
    return _grid_vision(
        scale,
        temporal_patch_size=2,
        out_hidden_size=scale.hidden,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
        **over,
    )


def _cosmos3_omni(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _deepstack_vision(scale),
        "text_config": _text("qwen3_vl_text", scale, ids, rope_parameters=scale.mrope()),
        **_qwen_tokens(ids),
    }


def _cohere_compass(scale: Scale, ids: Mapping[str, int]) -> Json:
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    rope = dict.fromkeys(("sliding_attention", "full_attention"), scale.mrope())
    text = {"rope_parameters": rope, "sliding_window": 12, "layer_types": layers}
    return {
        "vision_config": _deepstack_vision(scale),
        "text_config": _text("cohere_compass_text", scale, ids, logit_scale=0.5, **text),
        "image_token_id": ids["<|IMAGE_PAD|>"],
        "video_token_id": ids["<|VIDEO_PAD|>"],
        "vision_start_token_id": ids["<|VISION_START|>"],
        "vision_end_token_id": ids["<|VISION_END|>"],
    }


def _granite_docling(scale: Scale, ids: Mapping[str, int]) -> Json:
    scales = {
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    }
    return {
        "vision_config": _vision(
            scale,
            image_size=64,
            patch_size=8,
            out_hidden_size=scale.hidden,
            deepstack_visual_indexes=[0, 1],
            use_fine_route=False,
        ),
        "text_config": _text("granite_docling_text", scale, ids, **scales),
        "image_token_id": ids["<image>"],
        "pad_token_id": ids["pad_token_id"],
    }


def _granite4_vision(scale: Scale, ids: Mapping[str, int]) -> Json:
    parts = _llava_next(scale, ids)
    qformer = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "encoder_hidden_size": 64,
    }
    return {
        **parts,
        "vision_config": {**_clip(scale), "image_size": 56, "hidden_size": 64},
        "text_config": _text("granite4_vision_text", scale, ids, residual_multiplier=0.5),
        "qformer_config": qformer,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [1, 2, 3, 3],
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    }


def _hunyuan_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    # With a larger base the last axis, a picture's number, would turn keys by next to nothing.
    rope = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 2, 2, 2]}
    return {
        "vision_config": _vision(
            scale,
            patch_size=14,
            spatial_merge_size=2,
            out_hidden_size=scale.hidden,
            text_hidden_size=scale.hidden,
            max_image_size=112,
        ),
        "text_config": _text("hunyuan_vl_text", scale, ids, rope_parameters=rope),
        "image_token_id": ids["<image>"],
        "im_start_id": ids["<im_start>"],
        "im_end_id": ids["<im_end>"],
        "im_newline_id": ids["<im_newline>"],
        "tie_word_embeddings": True,
    }


def _ovis2(scale: Scale, ids: Mapping[str, int]) -> Json:
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return {
        "vision_config": _vision(
            scale, image_size=28, patch_size=14, vocab_size=16, num_visual_indicator_tokens=5
        ),
        "text_config": _text("qwen2", scale, ids),
        "image_token_id": ids["<IMG_ATOM>"],
        "visual_indicator_token_ids": [ids[mark] for mark in marks],
        "vocab_size": scale.vocab,
        "hidden_size": scale.hidden,
    }


def _paligemma(scale: Scale, ids: Mapping[str, int], text: str = "gemma2") -> Json:
    over = {"sliding_window": 64} if text == "gemma2" else {}
    return {
        "vision_config": _siglip(scale, image_size=56, projection_dim=scale.hidden),
        "text_config": _text(text, scale, ids, hidden_activation="gelu_pytorch_tanh", **over),
        "image_token_id": ids["<image>"],
        "projection_dim": scale.hidden,
        "hidden_size": scale.hidden,
        "tie_word_embeddings": True,
    }


def _molmo2(scale: Scale, ids: Mapping[str, int]) -> Json:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return {
        "vision_config": _vision(
            scale, image_size=[28, 28], patch_size=14, num_hidden_layers=2, **heads
        )
        | heads,
        "adapter_config": {
            "vision_feature_layer": [1, 0],
            "hidden_size": scale.vision_hidden,
            "intermediate_size": scale.ffn,
            "text_hidden_size": scale.hidden,
            **heads,
        },
        "text_config": _text("molmo2_text", scale, ids, additional_vocab_size=8),
        "image_patch_id": ids["<im_patch>"],
        "image_start_token_id": ids["<im_start>"],
        "image_end_token_id": ids["<im_end>"],
        "low_res_image_start_token_id": ids["<low_res_im_start>"],
        "frame_start_token_id": ids["<frame_start>"],
        "frame_end_token_id": ids["<frame_end>"],
    }


def _emu3(scale: Scale, ids: Mapping[str, int]) -> Json:
    codes = {f"<|visual token {code:06}|>": scale.vocab - 32 + code for code in range(16)}
    return {
        "vq_config": {
            "codebook_size": 16,
            "embed_dim": 4,
            "latent_channels": 4,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [3],
            "hidden_size": 32,
        },
        "text_config": _text("emu3_text_model", scale, ids),
        "vocabulary_map": {
            **codes,
            "<|extra_200|>": ids["<|extra_200|>"],
            "<image>": ids["<image>"],
        },
        "image_token_id": ids["<image>"],
    }


def _kimi_k25(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": _vision(scale, patch_size=14, pos_emb_height=8, pos_emb_width=8),
        "text_config": _latent_text("deepseek_v3", scale, ids),
        "projection_hidden_size": scale.vision_hidden,
        "image_token_id": ids["<|media_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _latent_text(model_type: str, scale: Scale, ids: Mapping[str, int], **over: Any) -> Json:
    """A text config with latent attention (MLA) and experts."""
    sizes = {
        "num_key_value_heads": scale.heads,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    text = {**_text(model_type, scale, ids), **sizes, **over}
    del text["head_dim"]
    return text


def _muse_glimmer(scale: Scale, ids: Mapping[str, int]) -> Json:
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    text = {
        "sliding_window": 12,
        "layer_types": layers,
        "layer_rope_theta": [10000.0, 0] * (scale.layers // 2),
        "final_logit_softcapping": 20.0,
    }
    return {
        "vision_config": _vision(
            scale,
            patch_size=14,
            pos_emb_height=8,
            pos_emb_width=8,
            max_position_embeddings=64,
            layer_types=["window_attention", "full_attention"],
        ),
        "text_config": _text("muse_glimmer_text", scale, ids, **text),
        "image_token_id": ids["<|patch|>"],
        "video_token_id": ids["<|video|>"],
        "out_hidden_size": 4 * scale.vision_hidden,
        "projector_hidden_size": 64,
    }


def _minimax_m3_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    text = {
        "intermediate_size": 32,
        "dense_intermediate_size": scale.ffn,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": scale.head_dim // 2,
        "mlp_layer_types": ["dense", *["sparse"] * (scale.layers - 1)],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * (scale.layers - 1)],
        "index_n_heads": scale.kv_heads,
        "index_head_dim": scale.head_dim,
        "index_block_size": 4,
        "index_topk_blocks": 512,
    }
    return {
        "vision_config": _vision(scale, image_size=112, patch_size=14),
        "text_config": _text("minimax_m3_vl_text", scale, ids, **text),
        "image_token_index": ids["]<]image[>["],
        "video_token_index": ids["]<]video[>["],
        "projector_hidden_size": 64,
        "merged_hidden_size": 4 * scale.hidden,
    }


def _step3p7(scale: Scale, ids: Mapping[str, int]) -> Json:
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    text = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "share_expert_dim": 32,
        "mlp_layer_types": ["dense", *["sparse"] * (scale.layers - 1)],
        "layer_types": layers,
        "sliding_window": 12,
        "num_sliding_attention_heads": scale.heads,
        "query_pre_attn_scalar": 16,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    return {
        "vision_config": _vision(
            scale, image_size=112, patch_size=14, max_position_embeddings=64, mlp_ratio=2.0
        ),
        "text_config": _text("step3p5", scale, ids, **text),
        "image_token_id": ids["<im_patch>"],
    }


def _delta_net(scale: Scale) -> Json:
    """Text sizes of Qwen3.5: gated delta nets, and attention in each second layer."""
    layers = ["linear_attention", "full_attention"] * (scale.layers // 2)
    rope = {**scale.mrope(), "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": layers,
        "rope_parameters": rope,
    }


CONVOLUTIONS: Json = {"layer_types": ["conv", "full_attention"] * 2}


def _lfm2_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    vision = {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14}
    return {
        "vision_config": _vision(scale, **vision),
        "text_config": _text("lfm2", scale, ids, **CONVOLUTIONS),
        "image_token_id": ids["<image>"],
        "projector_hidden_size": 64,
    }


def _lfm3_vl(scale: Scale, ids: Mapping[str, int]) -> Json:
    vision = {"num_key_value_heads": 1, "patch_size": 14, "temporal_patch_size": 2}
    layers = ["conv", "full_attention", "conv", "sliding_attention"]
    return {
        "vision_config": _vision(scale, **vision, layer_types=["conv", "full_attention"]),
        "text_config": _text("lfm3", scale, ids, layer_types=layers, sliding_window=12),
        "projector_hidden_size": 64,
        **_qwen_tokens(ids),
    }


def _minicpmv4_6(scale: Scale, ids: Mapping[str, int]) -> Json:
    vision = {"image_size": 56, "patch_size": 14}
    return {
        "vision_config": _vision(scale, **vision),
        "text_config": _text(
            "qwen3_5_text", scale, ids, **{**_delta_net(scale), "rope_parameters": None}
        ),
        "insert_layer_id": 0,
        "image_size": 56,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _minicpm_ocr(scale: Scale, ids: Mapping[str, int]) -> Json:
    parts = _minicpmv4_6(scale, ids)
    del parts["image_size"]
    return parts


def _nemotron_h_omni(scale: Scale, ids: Mapping[str, int]) -> Json:
    layers = ["linear_attention", "full_attention", "moe", "full_attention"]
    text = {
        "layers_block_type": layers,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
    }
    return {
        "vision_config": {
            "model_type": "radio",
            "hidden_size": scale.vision_hidden,
            "num_hidden_layers": scale.vision_layers,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 56,
            "max_img_size": 112,
            "video_temporal_patch_size": 2,
        },
        "text_config": _text("nemotron_h", scale, ids, **text),
        "audio_config": _hearing(
            num_mel_bins=80,
            subsampling_conv_channels=8,
            projection_hidden_size=64,
            projection_bias=False,
        ),
        "vision_hidden_size": scale.vision_hidden,
        "projector_hidden_size": 64,
        "image_token_id": ids["<image>"],
        "video_token_id": ids["<video>"],
        "audio_token_id": ids["<so_embedding>"],
    }


def _nemotron_h_omni_deaf(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {**_nemotron_h_omni(scale, ids), "audio_config": None}


def _nemotron_kind(parts: Parts) -> FolderKind:
    return _kind(
        "nemotron_h_omni",
        parts,
        image="<image>",
        audio="<so_embedding>",
        specials=("<video>", "<img>", "</img>", "<so_start>", "<so_end>"),
        preprocessor={
            **_pixels(
                "NemotronH_Omni_Reasoning_V3",
                do_resize=False,
                patch_size=14,
                min_num_patches=8,
                max_num_patches=32,
            ),
            "feature_extractor_type": "ParakeetFeatureExtractor",
        },
        processor="NemotronH_Omni_Reasoning_V3",
    )


def _gemma3n(scale: Scale, ids: Mapping[str, int]) -> Json:
    """The vocabularies of pictures and sounds lie behind that of the text."""
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    text = {
        "layer_types": layers,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": scale.vocab,
        "vocab_size": scale.vocab + len(GEMMA3N_TOKENS),
        "laurel_rank": 8,
        "sliding_window": 96,
        "activation_sparsity_pattern": [0.0] * scale.layers,
        "tie_word_embeddings": True,
    }
    return {
        "vision_config": {
            "architecture": "mobilenetv5_300m_enc",
            "model_args": {"channel_multiplier": 0.0625, "stem_size": 16},
            "hidden_size": 2048,
            "vocab_size": 3,
            "vocab_offset": scale.vocab,
        },
        "text_config": _text("gemma3n_text", scale, ids, **text),
        "audio_config": {
            "hidden_size": 32,
            "vocab_size": 3,
            "vocab_offset": scale.vocab + 3,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [16, 8],
        },
        "vision_soft_tokens_per_image": 256,
        "audio_soft_tokens_per_image": 20,
        "boi_token_id": ids["<start_of_image>"],
        "eoi_token_id": ids["<end_of_image>"],
        "image_token_id": ids["<image_soft_token>"],
        "boa_token_id": ids["<start_of_audio>"],
        "eoa_token_id": ids["<end_of_audio>"],
        "audio_token_id": ids["<audio_soft_token>"],
        "tie_word_embeddings": True,
    }


def _gemma4_text(model_type: str, scale: Scale, ids: Mapping[str, int], **over: Any) -> Json:
    """Full layers have wider heads."""
    layers = ["sliding_attention", "full_attention"] * (scale.layers // 2)
    sizes = {
        "sliding_window": 12,
        "layer_types": layers,
        "global_head_dim": 2 * scale.head_dim,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    }
    return _text(model_type, scale, ids, **{**sizes, **over})


def _gemma4(scale: Scale, ids: Mapping[str, int]) -> Json:
    """The smaller sizes, which hear: embeddings of each layer's own, and layers that share keys and
    values."""
    text = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": scale.vocab,
        "num_kv_shared_layers": 2,
    }
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 4],
        "output_proj_dims": 48,
    }
    return _gemma4_parts(scale, ids, text, audio)


def _gemma4_large(scale: Scale, ids: Mapping[str, int]) -> Json:
    """The larger sizes: experts, and pictures that attend to themselves in both directions in
    layers with a window."""
    text = {
        "hidden_size_per_layer_input": 0,
        "sliding_window": 96,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    return _gemma4_parts(scale, ids, text)


def _gemma4_parts(
    scale: Scale, ids: Mapping[str, int], text: Json, audio: Json | None = None
) -> Json:
    return {
        "vision_config": _vision(
            scale,
            head_dim=scale.vision_hidden // 2,
            num_key_value_heads=2,
            patch_size=14,
            pooling_kernel_size=2,
            position_embedding_size=64,
        ),
        "text_config": _gemma4_text("gemma4_text", scale, ids, **text),
        "audio_config": audio,
        "tie_word_embeddings": True,
        **_gemma4_tokens(ids),
    }


def _gemma4_tokens(ids: Mapping[str, int]) -> Json:
    return {
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
    }


def _gemma4_unified(scale: Scale, ids: Mapping[str, int]) -> Json:
    """Pictures attend to themselves in both directions."""
    return {
        "vision_config": {
            "patch_size": 14,
            "pooling_kernel_size": 2,
            "mm_embed_dim": scale.hidden,
            "mm_posemb_size": 64,
            "output_proj_dims": scale.hidden,
        },
        "text_config": _gemma4_text(
            "gemma4_unified_text",
            scale,
            ids,
            sliding_window=96,
            use_bidirectional_attention="vision",
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        "audio_config": None,
        "tie_word_embeddings": True,
        **_gemma4_tokens(ids),
    }


def _fast_vlm(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_t8",
            "do_pooling": True,
            "model_args": {"inference_mode": True, "embed_dims": [8, 8, 16, 32]},
            "hidden_size": 64,
        },
        "text_config": _text("qwen2", scale, ids),
        "image_token_index": ids["<image>"],
        "image_seq_length": 4,
    }


def _perception_lm(scale: Scale, ids: Mapping[str, int]) -> Json:
    return {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_lang_large_patch14_448",
            "do_pooling": True,
            "model_args": {
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "img_size": [56, 56],
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [4, 4],
            },
        },
        "text_config": _text("llama", scale, ids),
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "projector_pooling_ratio": 2,
    }


def _pixels(kind: str, **over: Any) -> Json:
    return {"image_processor_type": f"{kind}ImageProcessor", **PIXELS, **HALF_STATS, **over}


def _square(side: int) -> Json:
    return {"height": side, "width": side}


def _grid_pixels(kind: str, **over: Any) -> Json:
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 28224, **over.pop("size", {})}
    given = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **over}
    return _pixels(kind, size=sizes, **given)


PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
TILES = _pixels("GotOcr2", size=_square(56), crop_to_patches=True, min_patches=1, max_patches=4)
LLAVA_NEXT = _pixels(
    "LlavaNext", size={"shortest_edge": 28}, crop_size=_square(28),
    image_grid_pinpoints=PINPOINTS, do_center_crop=True, do_pad=True,
)  # fmt: skip
WHISPER: Json = {**SOUND, "feature_size": 128, "chunk_length": 30, "nb_max_frames": 3000}
QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GEMMA3N_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
"""Roles of tokens that lie behind the vocabulary of the text."""
MINICPM_MARKS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
"""Roles of the tokens around pictures and their slices."""
GLM_VISION = (
    *("<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)


def _glm_kind(model_type: str, parts: Parts, name: str) -> FolderKind:
    """`name`: of its image processor and of its processor."""
    return _kind(
        model_type,
        parts,
        image="<|image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
        specials=GLM_VISION,
        preprocessor=_grid_pixels(name),
        processor=name,
    )


def _gemma4_kind(parts: Parts) -> FolderKind:
    return _kind(
        "gemma4",
        parts,
        image="<|image|>",
        audio="<|audio|>",
        video="<|video|>",
        specials=("<|image>", "<image|>", "<|video|>", "<|audio>", "<audio|>"),
        roles={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        preprocessor={
            **_pixels("Gemma4", patch_size=14, pooling_kernel_size=2, max_soft_tokens=70),
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        },
        processor="Gemma4",
        image_seq_length=70,
    )


def _paligemma_kind(parts: Parts) -> FolderKind:
    """The picture and the text alone, as transformers' processor takes them."""
    kind = _kind(
        "paligemma",
        parts,
        image="<image>",
        specials=("<bos>",),
        roles={"bos_token": "<bos>", "image_token": "<image>"},
        preprocessor=_pixels("Siglip", size=_square(56), image_seq_length=16),
        processor="PaliGemma",
    )
    return replace(kind, template=DEFAULT_TEMPLATES["paligemma"])


PHI4_LAYERS = r"model\.layers\.\d+\.(self_attn\.(qkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
MEDIA_KINDS: dict[str, FolderKind] = {
    "internvl": _kind(
        "internvl",
        _internvl,
        image="<IMG_CONTEXT>",
        specials=("<img>", "</img>", "<video>"),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        preprocessor=TILES,
        processor="InternVL",
        image_seq_length=4,
    ),
    "llava_next": _kind(
        "llava_next",
        _llava_next,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=LLAVA_NEXT,
        processor="LlavaNext",
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    ),
    "llava_onevision": _kind(
        "llava_onevision",
        _llava_onevision,
        image="<image>",
        specials=("<video>",),
        preprocessor=_pixels(
            "LlavaOnevision", size=_square(28), image_grid_pinpoints=PINPOINTS, do_pad=True
        ),
        processor="LlavaOnevision",
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    ),
    "aya_vision": _kind(
        "aya_vision",
        _aya_vision,
        image="<image>",
        specials=(
            *("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
            *("TILE_GLOBAL", "TILE_1", "TILE_2", "TILE_3", "TILE_4"),
        ),
        preprocessor=TILES,
        processor="AyaVision",
        patch_size=14,
        img_size=56,
        downsample_factor=2,
        image_token="<image>",
    ),
    "deepseek_vl": _kind(
        "deepseek_vl",
        _deepseek_vl,
        image="<image_placeholder>",
        roles={"image_token": "<image_placeholder>"},
        preprocessor=_pixels("DeepseekVL", size=_square(28), min_size=14),
        processor="DeepseekVL",
        num_image_tokens=4,
    ),
    "janus": _kind(
        "janus",
        _janus,
        image="<image_placeholder>",
        specials=("<begin_of_image>", "<end_of_image>"),
        roles={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        preprocessor=_pixels("Janus", size=_square(28), min_size=14),
        processor="Janus",
        num_image_tokens=4,
    ),
    "lighton_ocr": _kind(
        "lighton_ocr",
        _lighton_ocr,
        image="<|image_pad|>",
        specials=("<|vision_pad|>", "<|vision_end|>"),
        roles={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        preprocessor=_pixels("Pixtral", size={"longest_edge": 112}, patch_size=14),
        processor="LightOnOcr",
        patch_size=14,
    ),
    "glm4v": _glm_kind("glm4v", _glm("glm4v_vision", "glm4v_text"), "Glm4v"),
    "glm46v": _glm_kind("glm46v", _glm("glm4v_vision", "glm4v_text"), "Glm46V"),
    "glm_ocr": _glm_kind("glm_ocr", _glm("glm_ocr_vision", "glm_ocr_text"), "Glm46V"),
    "idefics2": _kind(
        "idefics2",
        _idefics2,
        image="<image>",
        specials=("<fake_token_around_image>", "<end_of_utterance>"),
        roles={"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
        preprocessor=_pixels(
            "Idefics2", size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False
        ),
        processor="Idefics2",
        image_seq_len=4,
    ),
    "vipllava": _kind(
        "vipllava",
        _vipllava,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=_pixels(
            "CLIP", size={"shortest_edge": 28}, crop_size=_square(28), do_center_crop=True
        ),
        processor="Llava",
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    ),
    "video_llama_3": _kind(
        "video_llama_3",
        _video_llama_3,
        video="<|video_pad|>",
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("VideoLlama3", temporal_patch_size=1),
        processor="VideoLlama3",
    ),
    "paddleocr_vl": _kind(
        "paddleocr_vl",
        _paddleocr_vl,
        image="<|IMAGE_PLACEHOLDER|>",
        specials=("<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
        roles={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        preprocessor=_grid_pixels("PaddleOCRVL", temporal_patch_size=1),
        processor="PaddleOCRVL",
    ),
    "exaone4_5": _kind(
        "exaone4_5",
        _exaone,
        video="<|video_pad|>",
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("Qwen2VL"),
        processor="Exaone4_5_",
    ),
    "hyperclovax_vision_v2": _kind(
        "hyperclovax_vision_v2",
        _hyperclovax,
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("Qwen2VL"),
        processor="HyperCLOVAXVisionV2",
    ),
    "got_ocr2": _kind(
        "got_ocr2",
        _got_ocr,
        image="<imgpad>",
        specials=("<img>", "</img>"),
        preprocessor=_pixels("GotOcr2", size=_square(256)),
        processor="GotOcr2",
    ),
    "pp_chart2table": _kind(
        "pp_chart2table",
        _got_ocr,
        image="<imgpad>",
        specials=("<img>", "</img>"),
        preprocessor=_pixels("PPChart2Table", size=_square(256)),
        processor="PPChart2Table",
    ),
    "aria": _kind(
        "aria",
        _aria,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=_pixels("Aria", max_image_size=980, min_image_size=336, do_resize=False),
        processor="Aria",
        size_conversion={"980": 4},
    ),
    "deepseek_vl_hybrid": _kind(
        "deepseek_vl_hybrid",
        _deepseek_vl_hybrid,
        image="<image_placeholder>",
        roles={"image_token": "<image_placeholder>"},
        preprocessor=_pixels(
            "DeepseekVLHybrid", size=_square(28), high_res_size=_square(64), min_size=14
        ),
        processor="DeepseekVLHybrid",
        num_image_tokens=4,
    ),
    "deepseek_ocr2": _kind(
        "deepseek_ocr2",
        _deepseek_ocr2,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=_pixels("DeepseekOcr2", size=_square(192), tile_size=192),
        processor="DeepseekOcr2",
        patch_size=4,
        downsample_ratio=4,
    ),
    "glmga": _kind(
        "glmga",
        _glmga,
        image="<|image|>",
        specials=GLM_VISION,
        preprocessor=_grid_pixels("Glmga"),
        processor="Glm46V",
    ),
    "cosmos3_edge": _kind(
        "cosmos3_edge",
        _cosmos3_edge,
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("Cosmos3Edge", temporal_patch_size=1),
        processor="Cosmos3Edge",
    ),
    "cosmos3_omni": _kind(
        "cosmos3_omni",
        _cosmos3_omni,
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("Qwen2VL"),
        processor="Qwen3VL",
    ),
    "cohere_compass": _kind(
        "cohere_compass",
        _cohere_compass,
        image="<|IMAGE_PAD|>",
        specials=("<|VISION_START|>", "<|VISION_END|>", "<|VIDEO_PAD|>"),
        preprocessor=_grid_pixels("CohereCompass"),
        processor="CohereCompass",
    ),
    "granite_docling": _kind(
        "granite_docling",
        _granite_docling,
        image="<image>",
        specials=(
            *("<fake_token_around_image>", "<global-img>"),
            *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
        ),
        roles={"image_token": "<image>"},
        preprocessor=_pixels("GraniteDocling", size=_square(64), max_patches=4),
        processor="GraniteDocling",
        image_seq_len=4,
    ),
    "granite4_vision": _kind(
        "granite4_vision",
        _granite4_vision,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=_pixels(
            "LlavaNext",
            size={"shortest_edge": 56},
            crop_size=_square(56),
            image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
            do_center_crop=True,
            do_pad=True,
        ),
        processor="Granite4Vision",
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        downsample_rate="1/2",
    ),
    "paligemma": _paligemma_kind(_paligemma),
    "molmo2": replace(
        _kind(
            "molmo2",
            _molmo2,
            image="<|image|>",
            preprocessor=_pixels(
                "Molmo2",
                size=_square(28),
                max_crops=4,
                overlap_margins=[0, 0],
                patch_size=14,
                pooling_size=[2, 2],
            ),
            processor="Molmo2",
        ),
        last_specials=(
            *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>"),
            *("<frame_start>", "<im_end>", "<frame_end>", "<im_low>"),
        ),
    ),
    "hunyuan_vl": replace(
        _kind(
            "hunyuan_vl",
            _hunyuan_vl,
            image="<image>",
            specials=("<im_start>", "<im_end>", "<im_newline>"),
            roles={
                "image_token": "<image>",
                "image_start_token": "<im_start>",
                "image_end_token": "<im_end>",
            },
            preprocessor=_grid_pixels("HunYuanVL", temporal_patch_size=1),
            processor="HunYuanVL",
        ),
        template=TEMPLATE.replace("IMAGE", "<im_start><image><im_end>"),
    ),
    "ovis2": _kind(
        "ovis2",
        _ovis2,
        image="<image>",
        specials=(
            *("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        ),
        preprocessor=_pixels("Ovis2", size=_square(28), crop_to_patches=True, max_patches=4),
        processor="Ovis2",
        image_token="<image>",
        image_seq_length=4,
    ),
    "emu3": _kind(
        "emu3",
        _emu3,
        image="<image>",
        specials=("<boi>", "<eoi>", "<wrap>", "<eof>", "<|extra_200|>"),
        roles={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "image_wrapper_token": "<wrap>",
            "eof_token": "<eof>",
        },
        preprocessor=_pixels("Emu3", min_pixels=28 * 28, max_pixels=64 * 64),
        processor="Emu3",
    ),
    "kimi_k25": _kind(
        "kimi_k25",
        _kimi_k25,
        image="<|media_pad|>",
        specials=("<|media_begin|>", "<|video_pad|>"),
        preprocessor=_pixels(
            "Kimi_K25", size={"max_height": 16, "max_width": 16}, max_patches=64, patch_size=14
        ),
        processor="Kimi_K25",
    ),
    "muse_glimmer": _kind(
        "muse_glimmer",
        _muse_glimmer,
        image="<|patch|>",
        specials=("<|video|>", "<|image_start|>", "<|image_end|>"),
        preprocessor=_pixels("MuseGlimmer", max_image_tokens=12),
        processor="MuseGlimmer",
    ),
    "minimax_m3_vl": _kind(
        "minimax_m3_vl",
        _minimax_m3_vl,
        image="]<]image[>[",
        specials=("]<]start of image[>[", "]<]end of image[>[", "]<]video[>["),
        preprocessor=_grid_pixels("MiniMaxM3VL"),
        processor="MiniMaxM3VL",
    ),
    "step3p7": _kind(
        "step3p7",
        _step3p7,
        image="<im_patch>",
        specials=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        preprocessor=_pixels("Step3p7", size=_square(112), patch_size=56, vision_patch_size=14),
        processor="Step3p7",
    ),
    "phi4_multimodal": _kind(
        "phi4_multimodal",
        _phi4_multimodal,
        image="<|image|>",
        audio="<|audio|>",
        roles={"image_token": "<|image|>", "audio_token": "<|audio|>"},
        preprocessor={
            **PIXELS,
            **HALF_STATS,
            "image_processor_type": "Phi4MultimodalImageProcessor",
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
            "size": {"height": 64, "width": 64},
            "patch_size": 2,
            "dynamic_hd": 2,
        },
        processor="Phi4Multimodal",
        adapters={
            "vision-lora": {"r": 8, "lora_alpha": 16, "target_modules": PHI4_LAYERS},
            "speech-lora": {"r": 4, "lora_alpha": 8, "target_modules": PHI4_LAYERS},
        },
    ),
    "perception_lm": _kind(
        "perception_lm",
        _perception_lm,
        video="<|video|>",
        image="<|image|>",
        specials=("<|video|>",),
        roles={"image_token": "<|image|>", "video_token": "<|video|>"},
        preprocessor=_pixels("PerceptionLM", size=_square(56), tile_size=56, max_num_tiles=4),
        processor="PerceptionLM",
        patch_size=14,
        pooling_ratio=2,
    ),
    "fast_vlm": _kind(
        "fast_vlm",
        _fast_vlm,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor=_pixels("CLIP", size={"shortest_edge": 128}, crop_size=_square(128)),
        processor="Llava",
        patch_size=32,
        vision_feature_select_strategy="full",
    ),
    "lfm2_vl": _kind(
        "lfm2_vl",
        _lfm2_vl,
        image="<image>",
        specials=(
            *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{col}|>" for row in (1, 2) for col in (1, 2)),
        ),
        preprocessor=_pixels(
            "Lfm2Vl",
            encoder_patch_size=14,
            tile_size=56,
            min_image_tokens=2,
            max_image_tokens=6,
            max_tiles=4,
        ),
        processor="Lfm2Vl",
    ),
    "lfm3_vl": _kind(
        "lfm3_vl",
        _lfm3_vl,
        video="<|video_pad|>",
        image="<|image_pad|>",
        specials=QWEN_VISION,
        preprocessor=_grid_pixels("Qwen2VL"),
        processor="Lfm3Vl",
    ),
    "minicpmv4_6": _kind(
        "minicpmv4_6",
        _minicpmv4_6,
        video="<|video_pad|>",
        image="<|image_pad|>",
        specials=("<|video_pad|>", *MINICPM_MARKS.values()),
        roles={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            **MINICPM_MARKS,
        },
        preprocessor=_pixels("MiniCPMV4_6", max_slice_nums=4, scale_resolution=56, patch_size=14),
        processor="MiniCPMV4_6",
    ),
    "minicpm_ocr": _kind(
        "minicpm_ocr",
        _minicpm_ocr,
        video="<|video_pad|>",
        image="<|image_pad|>",
        specials=("<|video_pad|>", *MINICPM_MARKS.values()),
        roles={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            **MINICPM_MARKS,
        },
        preprocessor=_pixels("MiniCPMOcr", max_slice_nums=4, scale_resolution=56, patch_size=14),
        processor="MiniCPMOcr",
    ),
    "nemotron_h_omni": _nemotron_kind(_nemotron_h_omni),
    "gemma3n": FolderKind(
        specials=CHATML,
        last_specials=tuple(GEMMA3N_TOKENS.values()),
        roles={**QWEN_ROLES, **GEMMA3N_TOKENS},
        template=TEMPLATE.replace("IMAGE", GEMMA3N_TOKENS["image_token"]).replace(
            "AUDIO", GEMMA3N_TOKENS["audio_token"]
        ),
        config=lambda scale, ids: _config("gemma3n", _gemma3n(scale, ids)),
        preprocessor=lambda _: {
            **_pixels("Siglip", size=_square(64), do_normalize=False),
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
        },
        processor={
            "processor_class": "Gemma3nProcessor",
            "audio_seq_length": 20,
            "image_seq_length": 256,
        },
    ),
    "gemma4": _gemma4_kind(_gemma4),
    "gemma4_unified": _kind(
        "gemma4_unified",
        _gemma4_unified,
        video="<|video|>",
        image="<|image|>",
        specials=(*("<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),),
        roles={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        preprocessor={
            **_pixels("Gemma4Unified", patch_size=14, pooling_kernel_size=2, max_soft_tokens=70),
            "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
        },
        processor="Gemma4Unified",
        image_seq_length=70,
    ),
    "qwen3_asr": _kind(
        "qwen3_asr",
        _qwen3_asr,
        audio="<|audio_pad|>",
        specials=("<|audio_start|>", "<|audio_end|>", "<timestamp>"),
        roles={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        preprocessor={**WHISPER, "feature_extractor_type": "Qwen3ASRFeatureExtractor"},
        processor="Qwen3ASR",
    ),
    "audioflamingo3": _kind(
        "audioflamingo3",
        _flamingo,
        audio="<sound>",
        preprocessor=WHISPER,
        processor="AudioFlamingo3",
    ),
    "glmasr": _kind(
        "glmasr",
        _glmasr,
        audio="<|pad|>",
        preprocessor=WHISPER,
        processor="GlmAsr",
    ),
    "glm4v_moe": _glm_kind("glm4v_moe", _glm4v_moe, "Glm4v"),
    "ernie4_5_vl_moe": _kind(
        "ernie4_5_vl_moe",
        _ernie,
        image="<|IMAGE_PLACEHOLDER|>",
        specials=(
            *("<|IMAGE_START|>", "<|IMAGE_END|>"),
            *("<|VIDEO_PLACEHOLDER|>", "<|VIDEO_START|>", "<|VIDEO_END|>"),
        ),
        roles={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        preprocessor=_grid_pixels("Ernie4_5_VLMoe", temporal_patch_size=1),
        processor="Ernie4_5_VLMoe",
    ),
    "qianfan_ocr": _kind(
        "qianfan_ocr",
        _qianfan,
        image="<image>",
        specials=("<img>", "</img>", "<IMG_CONTEXT>"),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        preprocessor=TILES,
        processor="QianfanOCR",
        image_seq_length=4,
    ),
    "llava_next_video": _kind(
        "llava_next_video",
        _llava_next_video,
        image="<image>",
        specials=("<video>",),
        roles={"image_token": "<image>", "video_token": "<video>"},
        preprocessor=LLAVA_NEXT,
        films={
            "video_processor_type": "LlavaNextVideoVideoProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": _square(28),
            **HALF_STATS,
        },
        processor="LlavaNextVideo",
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    ),
    "video_llava": _kind(
        "video_llava",
        _video_llava,
        image="<image>",
        specials=("<video>",),
        roles={"image_token": "<image>", "video_token": "<video>"},
        preprocessor=_pixels(
            "VideoLlava", size={"shortest_edge": 28}, crop_size=_square(28), do_center_crop=True
        ),
        processor="VideoLlava",
        patch_size=14,
    ),
    "musicflamingo": _kind(
        "musicflamingo",
        _musicflamingo,
        audio="<sound>",
        specials=("<|sound_bos|>", "<|sound_eos|>"),
        preprocessor=WHISPER,
        processor="MusicFlamingo",
    ),
    "moss_transcribe_diarize": _kind(
        "moss_transcribe_diarize",
        _moss,
        audio="<|audio_pad|>",
        specials=("<|audio_start|>", "<|audio_end|>"),
        preprocessor={
            **WHISPER,
            "feature_extractor_type": "MossTranscribeDiarizeFeatureExtractor",
        },
        processor="MossTranscribeDiarize",
    ),
    "cohere2_vision": _kind(
        "cohere2_vision",
        _cohere2_vision,
        image="<|IMG_PATCH|>",
        specials=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        roles={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        preprocessor=_pixels("Cohere2Vision", size=_square(56), max_patches=4, patch_size=2),
        processor="Cohere2Vision",
    ),
    "llama4": _kind(
        "llama4",
        _llama4,
        image="<|image|>",
        specials=(
            *("<|image_start|>", "<|image_end|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        preprocessor=_pixels("Llama4", size=_square(56), max_patches=4),
        processor="Llama4",
        patch_size=14,
        pixel_shuffle_ratio=0.5,
        image_token="<|image|>",
    ),
}
"""By `model_type`. Every size is tiny, and every picture takes several tiles."""
VARIANTS: dict[str, FolderKind] = {
    "paligemma-gemma": _paligemma_kind(partial(_paligemma, text="gemma")),
    "gemma4-large": _gemma4_kind(_gemma4_large),
    "nemotron_h_omni-deaf": _nemotron_kind(_nemotron_h_omni_deaf),
}
"""Other sizes of these types, which differ in more than size."""
