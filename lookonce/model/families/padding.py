"""Attention masks of encoders that see padding beside what is encoded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from lookonce.model.device import to_device


def padding_mask(config: Any, real: Tensor, like: Tensor) -> Tensor | None:
    """The mask with which a position attends to those that are `real` [B, S]; None where all are.

    `config` is the encoder's, `real` is on the host, where transformers looks whether all are: the
    mask is made there, of the dtype and for the device of `like`.
    """
    mask: Tensor | None = create_bidirectional_mask(
        config=config,
        inputs_embeds=torch.zeros(*real.shape, 1, dtype=like.dtype),
        attention_mask=real.long(),
    )
    return None if mask is None else to_device(mask, like.device)
