"""ColQwen2: Qwen2-VL without a language head; every token's hidden state becomes a vector."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lookonce.model.families.base import Model
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily


class ColQwen2Family(Qwen2_5VLFamily):
    model_types = ("colqwen2",)
    modalities = ("image",)

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = model.config
        self.text_config = model.config.get_text_config(decoder=True)
        self.decoder = model.vlm.language_model
        embeddings: Any = model.vlm.get_input_embeddings()
        self.embed_tokens: nn.Module = embeddings
        with torch.device("meta"):
            self.lm_head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        self.lm_head.weight = embeddings.weight  # nothing is generated; no weights are made

    @classmethod
    def transformers_class(cls) -> Any:
        return import_module("transformers").ColQwen2ForRetrieval

    @classmethod
    def generating_part(cls, model: Model) -> Model:
        return model.vlm

    @property
    def vocab_size(self) -> int:
        weight = self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[0])

    @property
    def media_model(self) -> Any:
        return self.model.vlm

    def pooling_head(self) -> Any:
        return self.model.embedding_proj_layer
