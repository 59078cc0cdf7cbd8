"""Which models are served: the `model_type` of a folder's config.json, and what those models take.

Both floors that implement families, `render` and `model`, list exactly these.
"""

from __future__ import annotations

from lookonce.errors import ModelLoadError
from lookonce.types.media import Modality

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
