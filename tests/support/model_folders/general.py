"""Random folders of any text-only type that transformers knows, from the defaults of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.model_folders import chat_templates as templates
from tests.support.model_folders.base import CHATML, QWEN_ROLES, Config, FolderKind, Scale

WINDOW = 8
MAX_WEIGHTS = 20_000_000
SHARED_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
OWN_EMBEDDINGS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
"""Embeddings of each layer."""
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "falcon_h1": {
        **MAMBA,
        "mamba_d_ssm": 128,
        "num_hidden_layers": 2,
    },
    "gemma3n_text": {**SHARED_LAYERS, **OWN_EMBEDDINGS, "laurel_rank": 8, "intermediate_size": 128},
    "gemma4_text": {**SHARED_LAYERS, **OWN_EMBEDDINGS, "global_head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **MAMBA,
        "num_local_experts": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "longcat_flash": {
        "num_layers": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
        "num_experts": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
    },
    "llama4_text": {"floor_scale": 88, "no_rope_layers": [1, 0, 1, 0]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 48,
    },
    "ministral": {"head_dim": 16},
    "nemotron_h": {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "qwen3_5_text": {**DELTA_NET},
    "qwen3_next": {**DELTA_NET},
}
"""Sizes that some types need beside those that all have."""
PER_LAYER = ("layer_types", "mlp_layer_types", "attention_types")


def general_kind(model_type: str) -> FolderKind:
    """The kind of folder whose config is `model_type`'s with every size made small."""
    return FolderKind(
        specials=CHATML,
        roles=QWEN_ROLES,
        template=templates.CHATML,
        config=lambda scale, ids: small_config(model_type, scale, ids),
    )


def small_config(model_type: str, scale: Scale, ids: Mapping[str, int]) -> Config:
    """Raises `ValueError` for a config whose size has names that are not known here."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _small_config(model_type, scale, ids)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(weight.numel() for weight in model.parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"a small {model_type} has {weights} weights")
    return config


def _small_config(model_type: str, scale: Scale, ids: Mapping[str, int]) -> Config:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    default: dict[str, Any] = config_class().to_dict()
    known = {*default, *config_class.attribute_map}
    chosen = {name: value for name, value in _sizes(scale, ids, default).items() if name in known}
    chosen |= OWN_SIZES.get(model_type, {})
    layered = [name for name in PER_LAYER if default.get(name)]
    given = {name: chosen.pop(name, default[name][: scale.layers]) for name in layered}
    try:
        return config_class(**chosen, **given)
    except Exception:  # noqa: BLE001  some configs want to make their lists by layer themselves
        return config_class(**chosen, **dict.fromkeys(layered))


def _sizes(scale: Scale, ids: Mapping[str, int], default: Mapping[str, Any]) -> dict[str, Any]:
    latent = bool(default.get("kv_lora_rank"))
    kv_heads = scale.heads if latent else scale.kv_heads
    sizes: dict[str, Any] = {
        # the names of Llama and of GPT-2
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), scale.hidden),
        **dict.fromkeys(("word_embed_proj_dim",), scale.hidden),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), scale.ffn),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), scale.layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), scale.heads),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
        "num_key_value_heads": kv_heads,
        "vocab_size": scale.vocab,
        "rotary_dim": scale.head_dim // 2,
        "num_experts_per_tok": 2,
        "moe_k": 2,
        "moe_intermediate_size": scale.ffn // 2,
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
        ),
        **dict.fromkeys(("n_group", "topk_group"), 1),
        **{name: ids[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    if default.get("head_dim") is not None or "head_dim" not in default:
        sizes["head_dim"] = scale.head_dim
    if default.get("sliding_window") is not None:
        sizes["sliding_window"] = WINDOW
    if latent:
        sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        sizes |= {"v_head_dim": 16, "qk_head_dim": 24}
        if default.get("head_dim"):
            sizes["head_dim"] = default["head_dim"] and 8
        if default.get("q_lora_rank"):
            sizes["q_lora_rank"] = 32
    return sizes
