"""What every process must know about the served model, without loading its weights."""

from __future__ import annotations

import msgspec

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
