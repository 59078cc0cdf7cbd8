"""Random folders of types with media that have no family of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.model_folders.base import (
    CHATML,
    HALF_STATS,
    PIXELS,
    QWEN_ROLES,
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
            {%- if part['type'] == 'image' %}
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
    specials: tuple[str, ...] = (),
    roles: Mapping[str, str] | None = None,
    preprocessor: Json,
    processor: Json | None = None,
) -> FolderKind:
    """A kind whose config is `model_type`'s, made of `parts`."""
    tokens = tuple(token for token in (image, audio) if token)
    return FolderKind(
        specials=(*CHATML, *tokens, *specials),
        roles={**QWEN_ROLES, **(roles or {})},
        template=TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio),
        config=lambda scale, ids: _config(model_type, parts(scale, ids)),
        preprocessor=lambda _: preprocessor,
        processor=processor or {},
    )


def _config(model_type: str, parts: Json) -> Config:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**parts)


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
        "tie_word_embeddings": False,
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
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        "tie_word_embeddings": False,
    }


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
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "size": {"height": 56, "width": 56},
            **PIXELS,
            **HALF_STATS,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "llava_next": _kind(
        "llava_next",
        _llava_next,
        image="<image>",
        roles={"image_token": "<image>"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
            "do_center_crop": True,
            "do_pad": True,
            **PIXELS,
            **HALF_STATS,
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
}
"""By `model_type`. Every size is tiny, and every picture takes several tiles."""
