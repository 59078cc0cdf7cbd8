"""Random folders of vision models, without the Qwens."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.model_folders import chat_templates as templates
from tests.support.model_folders.base import (
    CLIP_STATS,
    GEMMA,
    GEMMA_ROLES,
    HALF_STATS,
    MISTRAL_ROLES,
    PIXELS,
    Config,
    ConfigBuilder,
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


def _pixtral_vision(scale: Scale) -> Config:
    from transformers import PixtralVisionConfig

    return PixtralVisionConfig(
        hidden_size=scale.vision_hidden,
        intermediate_size=2 * scale.vision_hidden,
        num_hidden_layers=scale.vision_layers,
        num_attention_heads=2,
        image_size=128,
        patch_size=16,
    )


def _mistral_text(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import MistralConfig

    return MistralConfig(**scale.text(ids, head_dim=scale.head_dim, sliding_window=None))


def _pixtral(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=_pixtral_vision(scale),
        text_config=_mistral_text(scale, ids),
        image_token_index=ids["[IMG]"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _mistral3(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Mistral3Config

    return Mistral3Config(
        vision_config=_pixtral_vision(scale),
        text_config=_mistral_text(scale, ids),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def _gemma3(scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(
        **scale.text(ids, head_dim=scale.head_dim, tie_word_embeddings=True),
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * (scale.layers // 2),
        query_pre_attn_scalar=scale.head_dim // 2,
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


def _idefics(config: str, scale: Scale, ids: Mapping[str, int]) -> Config:
    import transformers

    vision = {
        "hidden_size": scale.vision_hidden,
        "intermediate_size": 2 * scale.vision_hidden,
        "num_hidden_layers": scale.vision_layers,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    text = transformers.LlamaConfig(**scale.text(ids, head_dim=scale.head_dim))
    return getattr(transformers, config)(
        vision_config=vision,
        text_config=text,
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=ids["pad_token_id"],
        tie_word_embeddings=False,
    )


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


def _pixtral_preprocessor(_: Scale) -> Json:
    return {
        "processor_class": "PixtralProcessor",
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 128},
        "patch_size": {"height": 16, "width": 16},
        "resample": 3,
        **PIXELS,
        **CLIP_STATS,
    }


def _pixtral_processor(merge: int) -> Json:
    return {
        "processor_class": "PixtralProcessor",
        "patch_size": 16,
        "spatial_merge_size": merge,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
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


def _idefics_preprocessor(name: str) -> Json:
    return {
        "processor_class": f"{name}Processor",
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        **PIXELS,
        **HALF_STATS,
    }


def _pixtral_kind(config: ConfigBuilder, merge: int) -> FolderKind:
    return FolderKind(
        specials=(
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
            *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ),
        roles=MISTRAL_ROLES,
        template=templates.PIXTRAL,
        adds_bos=True,
        config=config,
        preprocessor=_pixtral_preprocessor,
        processor=_pixtral_processor(merge),
    )


def _idefics_kind(name: str, template: str) -> FolderKind:
    tiles = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    return FolderKind(
        specials=(
            *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>"),
            *("<fake_token_around_image>", "<global-img>", *tiles),
        ),
        roles={
            "pad_token": "<|endoftext|>",
            "bos_token": "<|im_start|>",
            "eos_token": "<end_of_utterance>",
        },
        template=template,
        config=lambda scale, ids: _idefics(f"{name}Config", scale, ids),
        preprocessor=lambda _: _idefics_preprocessor(name),
        processor={"processor_class": f"{name}Processor", "image_seq_len": 4},
    )


VISION_KINDS: dict[str, FolderKind] = {
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
    "pixtral": _pixtral_kind(_pixtral, 1),
    "mistral3": _pixtral_kind(_mistral3, 2),
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
    "idefics3": _idefics_kind("Idefics3", templates.IDEFICS3),
    "smolvlm": _idefics_kind("SmolVLM", templates.SMOLVLM),
}
