"""Which models are served, and what every process knows about the loaded one."""

from __future__ import annotations

import msgspec

from lookonce.errors import ModelLoadError
from lookonce.types.media import Modality


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """Facts of the loaded model, resolved once by the engine process and sent to its clients."""

    name: str
    """Path or id the engine loaded."""
    model_type: str
    """`model_type` of the Hugging Face config, the key of both family tables."""
    vocab_size: int
    max_model_len: int
    """Prompt plus generated tokens of one sequence."""
    eos_token_ids: tuple[int, ...]
    modalities: tuple[Modality, ...]
    dtype: str
    """dtype name of weights and activations; processors cast floating arrays to it."""
    encoder_row_bytes: int
    """Bytes one row (one embed token) of encoder output takes in the encoder cache."""
    unsplittable: tuple[Modality, ...] = ()
    """Modalities whose items attend to themselves in both directions: never cut by a chunk."""
    largest_unsplittable: int = 0
    """Prompt tokens of the largest such item; a token budget below it is refused at start-up."""
    weights_digest: str = ""
    """Hex digest of what determines the weights: part of every external KV namespace."""
    encoder_decoder: bool = False
    """Items are inputs that cross-attention reads at every step; they take no prompt positions, and
    `unsplittable` is empty. No family of ours is one."""


SUPPORTED: dict[str, tuple[Modality, ...]] = {
    "gemma2": (),
    "gemma3": ("image",),
    "gemma3_text": (),
    "gpt_oss": (),
    "idefics3": ("image",),
    "llama": (),
    "llava": ("image",),
    "mistral": (),
    "mistral3": ("image",),
    "qwen2": (),
    "qwen2_5_omni": ("image", "audio"),
    "qwen2_5_omni_thinker": ("image", "audio"),
    "qwen2_5_vl": ("image",),
    "qwen2_audio": ("audio",),
    "qwen2_vl": ("image",),
    "qwen3": (),
    "qwen3_moe": (),
    "qwen3_vl": ("image",),
    "qwen3_vl_moe": ("image",),
    "smolvlm": ("image",),
    "voxtral": ("audio",),
}


def unsupported(model_type: str) -> ModelLoadError:
    """What to raise for a type that is not served: it names those that are."""
    return ModelLoadError(
        f"models of type {model_type[:40]!r} are not supported; supported types: "
        + ", ".join(sorted(SUPPORTED))
    )
