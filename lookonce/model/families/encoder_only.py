"""Models that compute a whole input at once and keep nothing of it: BERT and its kin, and pairs of
towers (CLIP, SigLIP) that give a text and a picture vectors of one space."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from lookonce.errors import ModelLoadError
from lookonce.model.attention.backend import AttentionFeatures
from lookonce.model.families.base import Model, ModelFamily, Tensors
from lookonce.types.media import Modality
from lookonce.types.pooling import has_classifier

PADDED_TOKENS = 16_384
"""Most tokens of one call, padding included."""


class EncoderOnlyFamily(ModelFamily):
    """A subclass gives hidden states of padded inputs. KV blocks are as small as blocks can be:
    nothing is read from them."""

    encoder_only = True

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = model.config
        self.text_config = self._text_config()
        self.decoder = model
        self.embed_tokens: nn.Module = self._embeddings()
        pad = getattr(self.text_config, "pad_token_id", None)
        self._pad = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0

    @classmethod
    def generating_part(cls, model: Model) -> Model | None:
        return None

    @property
    def vocab_size(self) -> int:
        weight = self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[0])

    @property
    def head_dim(self) -> int:
        return 64

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def num_layers(self) -> int:
        return 1

    def attention_features(self, dtype: torch.dtype) -> AttentionFeatures:
        return AttentionFeatures(dtype=dtype, head_dim=self.head_dim)

    def encode_prompts(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token ids [T] of whole prompts, one after the other → hidden states [T, H]."""
        prompts = torch.split(token_ids, list(lengths))
        hidden: list[Tensor | None] = [None] * len(prompts)
        for group in _groups(lengths):
            longest = self._padded_length(max(lengths[index] for index in group))
            ids = token_ids.new_full((len(group), longest), self._pad)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(group):
                ids[row, : lengths[index]] = prompts[index]
                mask[row, : lengths[index]] = 1
            states = self._hidden_states(ids.long(), mask.long())
            for row, index in enumerate(group):
                hidden[index] = states[row, : lengths[index]]
        return torch.cat([states for states in hidden if states is not None])

    def _padded_length(self, longest: int) -> int:
        return longest

    def _text_config(self) -> Any:
        return self.config

    def _embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def _hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Padded ids and mask [B, L] → [B, L, H]."""
        raise NotImplementedError


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of similar lengths, so that few tokens are padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        group = groups[-1] if groups else []
        fits = (len(group) + 1) * lengths[index] <= PADDED_TOKENS
        if group and fits and lengths[index] <= 2 * lengths[group[0]]:
            group.append(index)
        else:
            groups.append([index])
    return groups


WITH_POOLER = ("bert", "mpnet", "roberta", "xlm-roberta")
"""Types whose plain model has a pooling layer that no embedding uses."""


class AnyBert:
    """Reads a model of BERT's kin with its classification head, where the config names one."""

    @staticmethod
    def from_pretrained(folder: str, **options: Any) -> Any:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        options.pop("trust_remote_code", None)
        if has_classifier(config.to_dict()):
            return AutoModelForSequenceClassification.from_pretrained(
                folder, trust_remote_code=False, **options
            )
        if config.model_type in WITH_POOLER:
            options["add_pooling_layer"] = False
        return AutoModel.from_pretrained(folder, trust_remote_code=False, **options)


class BertFamily(EncoderOnlyFamily):
    """BERT's kin, with or without a classification head."""

    model_types = ("bert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
    dropped_weights = (
        *ModelFamily.dropped_weights,
        r"(^|\.)pooler\.",
        r"^(cls|lm_head|head|decoder|vocab_\w+)\.",
        r"\.position_ids$",
    )

    @classmethod
    def transformers_class(cls) -> Any:
        return AnyBert

    @property
    def longest_sequence(self) -> int | None:
        """The positions of RoBERTa and MPNet begin behind the padding token's id."""
        positions = int(self.config.max_position_embeddings)
        offset = self.config.model_type in ("mpnet", "roberta", "xlm-roberta")
        return positions - self._pad - 1 if offset else positions

    def _hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        types = self._token_types(ids)
        given = {} if types is None else {"token_type_ids": types}
        output = self.model.base_model(input_ids=ids, attention_mask=mask, **given)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _token_types(self, ids: Tensor) -> Tensor | None:
        """0 up to the first separator, 1 behind it: the second text of a pair. None: 0 for all."""
        if getattr(self.config, "type_vocab_size", 0) < 2 or self.separator_id is None:
            return None
        separators = (ids == self.separator_id).long()
        behind = separators.cumsum(-1) - separators
        types: Tensor = (behind > 0).long()
        return types

    def pooling_head(self) -> Any:
        """Of a model that classifies: applied to pooled hidden states [n, H]. Of one that writes
        masked tokens: hidden states → logits [n, vocabulary]."""
        model = self.model
        if not hasattr(model, "classifier"):
            return self._masked_lm_head()
        match self.config.model_type:
            case "modernbert":
                return nn.Sequential(model.head, model.classifier)
            case "distilbert":
                return nn.Sequential(model.pre_classifier, nn.ReLU(), model.classifier)
            case "bert":
                return lambda hidden: model.classifier(model.bert.pooler(hidden.unsqueeze(1)))
        return lambda hidden: model.classifier(hidden.unsqueeze(1))

    def _masked_lm_head(self) -> Any:
        model = self.model
        if hasattr(model, "cls"):
            return model.cls.predictions
        if hasattr(model, "lm_head"):
            return model.lm_head
        if hasattr(model, "vocab_projector"):
            return nn.Sequential(
                model.vocab_transform,
                model.activation,
                model.vocab_layer_norm,
                model.vocab_projector,
            )
        if hasattr(model, "decoder") and hasattr(model, "head"):
            return nn.Sequential(model.head, model.decoder)
        return None


class BidirectionalFamily(EncoderOnlyFamily):
    """A decoder's layers whose tokens attend to all others, as EmbeddingGemma's."""

    dropped_weights = (*ModelFamily.dropped_weights, r"^lm_head\.")

    @classmethod
    def transformers_class(cls) -> Any:
        return AutoModel

    def _hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden


class TwoTowerFamily(EncoderOnlyFamily):
    """CLIP and SigLIP: an input is one text or one picture.

    A picture's encoder row is its vector, and its prompt is one placeholder. A text's vector stands
    in the row of its last token.
    """

    model_types = ("clip", "siglip")
    modalities = ("image",)
    dropped_weights = (r"(^|\.)position_ids$",)

    @classmethod
    def transformers_class(cls) -> Any:
        return AutoModel

    def _text_config(self) -> Any:
        return self.config.text_config

    def _embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.text_model.get_input_embeddings()
        return embeddings

    @property
    def hidden_size(self) -> int:
        """Of the vectors."""
        if self.config.model_type == "clip":
            return int(self.config.projection_dim)
        return int(self.config.vision_config.hidden_size)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return item["pixel_values"].shape

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        pixels = torch.stack([item["pixel_values"].squeeze(0) for item in items])
        rows: Tensor = self.model.get_image_features(pixels).pooler_output
        return list(rows.unsqueeze(1))

    def _padded_length(self, longest: int) -> int:
        """SigLIP was trained on texts of one length, padding included."""
        if self.config.model_type == "siglip":
            return int(self.text_config.max_position_embeddings)
        return longest

    def _hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        given = None if self.config.model_type == "siglip" else mask
        vectors = self.model.get_text_features(ids, attention_mask=given).pooler_output
        hidden: Tensor = vectors.new_zeros(*ids.shape, vectors.shape[-1])
        hidden[torch.arange(len(ids)), mask.sum(-1) - 1] = vectors
        return hidden

    def check_kind(self, kind: str) -> None:
        if kind != "last":
            raise ModelLoadError(f"{self.config.model_type} pools by itself: leave out --pooling")
