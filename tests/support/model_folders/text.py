"""Random folders of text-only models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.model_folders import chat_templates as templates
from tests.support.model_folders.base import (
    CHATML,
    GEMMA,
    GEMMA_ROLES,
    MISTRAL_ROLES,
    QWEN_ROLES,
    Config,
    ConfigBuilder,
    FolderKind,
    Scale,
)

WINDOW = 8
"""Tokens a sliding window spans: small, so that short prompts pass it."""


def _config(
    name: str, scale: Scale, ids: Mapping[str, int], *, widen: int = 1, **over: Any
) -> Config:
    """The transformers config class `name` at a scale.

    Heads are `widen` times the hidden size over their number; 0: the config has no such field.
    """
    import transformers

    own = {"head_dim": widen * scale.head_dim} if widen else {}
    return getattr(transformers, name)(**scale.text(ids, **own, **over))


def _of(name: str, **over: Any) -> ConfigBuilder:
    return lambda scale, ids: _config(name, scale, ids, **over)


def _gemma2(scale: Scale, ids: Mapping[str, int]) -> Config:
    return _config(
        "Gemma2Config",
        scale,
        ids,
        widen=2,
        tie_word_embeddings=True,
        sliding_window=WINDOW,
        query_pre_attn_scalar=scale.head_dim // 2,
        # Small enough to bend scores and logits of random weights.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    )


def _gemma3_text(scale: Scale, ids: Mapping[str, int]) -> Config:
    return _config(
        "Gemma3TextConfig",
        scale,
        ids,
        tie_word_embeddings=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (scale.layers // 2),
        query_pre_attn_scalar=scale.head_dim // 2,
    )


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

TEXT_KINDS: dict[str, FolderKind] = {
    "llama": FolderKind(
        specials=(
            "<|finetune_right_pad_id|>",
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        roles={
            "pad_token": "<|finetune_right_pad_id|>",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
        },
        template=templates.LLAMA,
        adds_bos=True,
        config=_of("LlamaConfig"),
    ),
    "mistral": FolderKind(
        specials=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
        roles=MISTRAL_ROLES,
        template=templates.MISTRAL,
        adds_bos=True,
        config=_of("MistralConfig", sliding_window=WINDOW),
    ),
    "qwen2": FolderKind(
        specials=CHATML,
        roles=QWEN_ROLES,
        template=templates.CHATML,
        config=_of("Qwen2Config", widen=0),
    ),
    "qwen3": FolderKind(
        specials=CHATML,
        roles=QWEN_ROLES,
        template=templates.CHATML,
        config=_of("Qwen3Config", widen=2),
    ),
    "qwen3_moe": FolderKind(
        specials=CHATML,
        roles=QWEN_ROLES,
        template=templates.CHATML,
        config=_of("Qwen3MoeConfig", widen=2, num_experts=4, moe_intermediate_size=32, **EXPERTS),
    ),
    "gemma2": FolderKind(
        specials=GEMMA,
        roles=GEMMA_ROLES,
        template=templates.GEMMA2,
        adds_bos=True,
        config=_gemma2,
    ),
    "gemma3_text": FolderKind(
        specials=GEMMA,
        roles=GEMMA_ROLES,
        template=templates.GEMMA3,
        adds_bos=True,
        config=_gemma3_text,
    ),
    "gpt_oss": FolderKind(
        specials=(
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
        ),
        roles={
            "pad_token": "<|endoftext|>",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
        },
        template=templates.GPT_OSS,
        config=_of("GptOssConfig", sliding_window=WINDOW, num_local_experts=4, **EXPERTS),
    ),
}
