"""How long a model's sequences may be by its rotary embedding, and which of these are served."""

from __future__ import annotations

from typing import Any

from lookonce.errors import ModelLoadError

CHANGING = ("dynamic", "longrope")
"""transformers turns all sequences of a batch by the longest one's frequencies, so a prompt's keys
would depend on its neighbours, and held ones would be wrong for the next."""
STRETCHING = ("linear", "yarn")
"""They make positions of a shorter training reach further. `llama3` does too, but configs that have
it state the length that it reaches."""


def refuse_changing_rope(text_config: Any) -> None:
    """Raises `ModelLoadError` for a kind that depends on what else is in a batch."""
    rope = _rope_parameters(text_config)
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for kind in kinds:
        if kind.get("rope_type") in CHANGING:
            raise ModelLoadError(f"models with rope_type {kind['rope_type']!r} are not supported")


def longest_sequence(text_config: Any) -> int:
    """Positions of one sequence: what the config states, or further where its rope is stretched.

    Some configs state the length before stretching (Qwen's with YaRN), others the one after
    (gpt-oss); Gemma 3, whose layers have ropes of their own, states the one after.
    """
    stated = int(text_config.max_position_embeddings)
    rope = _rope_parameters(text_config)
    if rope.get("rope_type") not in STRETCHING:
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * (rope.get("factor") or 1.0)))


def _rope_parameters(text_config: Any) -> dict[str, Any]:
    return getattr(text_config, "rope_parameters", None) or {}
