"""Models without a family of their own: what they need is seen when they run once.

A decoder of transformers is served this way if its attention goes through transformers' attention
interface. `proof.prove` then compares it with the model's own forward, and refuses it if they
differ. Pictures and sounds are encoded by the model's own `get_image_features` and
`get_audio_features`; `proof.prove_media` compares prompts with them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from lookonce.errors import ModelLoadError
from lookonce.model.attention.backend import (
    AttentionCall,
    AttentionFeatures,
    AttentionMetadata,
    ForwardContext,
)
from lookonce.model.attention.hf_attention import paged_forward_context
from lookonce.model.attention.probe import PROBE_TOKENS, probe_metadata, probe_positions
from lookonce.model.families.base import Model, ModelFamily, Tensors
from lookonce.types.media import Modality
from lookonce.types.model import unsupported

FORWARD_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the forward of a model raises that cannot be run the way it is called."""


class GeneralTextFamily(ModelFamily):
    """A text-only decoder whose attention is observed: its layers, heads, windows, softcap, sinks.

    Raises `ModelLoadError` for a model whose attention cannot be paged.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if self.decoder is model:
            self.decoder = getattr(model, "model", model)
        elif isinstance(self.decoder, PreTrainedModel) and self.decoder.get_output_embeddings():
            self.decoder = getattr(self.decoder, "model", self.decoder)  # a whole text model
        if self.decoder is model or self.lm_head is None or self.embed_tokens is None:
            raise self.unservable("it has no decoder with embeddings and an output head apart")
        self._attention = self._observe()

    @property
    def reserved_tokens(self) -> frozenset[int]:
        """Ids of tokens that stand for media."""
        return frozenset()

    @property
    def head_dim(self) -> int:
        return self._attention[0].head_dim

    @property
    def num_kv_heads(self) -> int:
        return self._attention[0].num_kv_heads

    @property
    def num_layers(self) -> int:
        return len(self._attention)

    @property
    def hidden_size(self) -> int:
        return int(self._embedding.shape[1])

    def attention_features(self, dtype: torch.dtype) -> AttentionFeatures:
        calls = [layer.call for layer in self._attention]
        return AttentionFeatures(
            dtype=dtype,
            head_dim=self.head_dim,
            sliding_window=any(call.sliding_window is not None for call in calls),
            softcap=any(call.softcap is not None for call in calls),
            sinks=any(call.sinks is not None for call in calls),
        )

    @property
    def _embedding(self) -> Tensor:
        """The weights [V, H] of the token embeddings."""
        weight = self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return weight

    def unservable(self, reason: str) -> ModelLoadError:
        return unsupported(self.config.model_type, reason)

    @torch.inference_mode()
    def _observe(self) -> list[LayerAttention]:
        """Run the decoder once on a few tokens; what each layer's attention was called with."""
        device = self._embedding.device
        recorder = _Recorder()
        pages: Any = _LayerNumbers()
        ids = torch.arange(PROBE_TOKENS, device=device) % self.vocab_size
        try:
            with paged_forward_context(ForwardContext(probe_metadata(device), recorder, pages)):
                self.decoder(
                    inputs_embeds=self.embed_tokens(ids)[None],
                    position_ids=probe_positions(self.position_axes).to(device),
                    attention_mask=None,
                    use_cache=False,
                )
        except FORWARD_ERRORS as error:
            raise self.unservable(f"its decoder cannot be run ({error})") from error
        return self._checked(recorder)

    def _checked(self, recorder: _Recorder) -> list[LayerAttention]:
        layers = recorder.layers
        if not layers:
            raise self.unservable("its attention does not use transformers' attention interface")
        if len(layers) < int(self.text_config.num_hidden_layers):
            raise self.unservable("some of its layers keep another state than keys and values")
        if sorted(recorder.calls.elements()) != list(range(len(layers))):
            raise self.unservable("its attention layers are not called once each")
        if len({(layer.num_kv_heads, layer.head_dim) for layer in layers.values()}) > 1:
            raise self.unservable("its layers have keys of different shapes")
        return [layers[index] for index in range(len(layers))]


class AnyMediaModel:
    """Reads a model by whichever of transformers' automatic classes knows its type."""

    @staticmethod
    def from_pretrained(folder: str, **options: Any) -> Any:
        """Raises `ValueError` where none does, and what they raise."""
        kind = type(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        known = next((auto for auto in AUTO_CLASSES if kind in auto._model_mapping), None)
        if known is None:
            raise ValueError("transformers knows no model with media of this type")
        return known.from_pretrained(folder, **options)


AUTO_CLASSES = (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
"""Audio Flamingo and its kin, which are decoders, too, are known to the second one alone."""
ENCODERS: dict[Modality, str] = {
    "image": "get_image_features",
    "audio": "get_audio_features",
    "video": "get_image_features",
}
"""Films are taken as pictures here (`FILMS_AS_PICTURES`)."""
PROJECTED_LATER = ("llama4",)
"""Types whose forward applies the projector to what `get_image_features` gives."""
TOKEN_NAME = re.compile(r"\w*token_(id|index)")


class GeneralMediaFamily(GeneralTextFamily):
    """Items have whatever arrays the model's processor gives for one item.

    `prove_media` sets `modalities` and, where items attend to themselves in both directions,
    `unsplittable` and `largest_unsplittable`.
    """

    def __init__(self, model: Model) -> None:
        self._largest_unsplittable = 0
        text = model.config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        self.position_axes = 3 if "mrope_section" in rope else 1
        super().__init__(model)

    @classmethod
    def transformers_class(cls) -> Any:
        return AnyMediaModel

    def attention_features(self, dtype: torch.dtype) -> AttentionFeatures:
        features = super().attention_features(dtype)
        return dataclasses.replace(features, bidirectional=bool(self.unsplittable))

    @property
    def largest_unsplittable(self) -> int:
        return self._largest_unsplittable

    def attend_both_ways(self, modalities: tuple[Modality, ...], num_tokens: int) -> None:
        """Items of these modalities attend to themselves in both directions; none of them has more
        than `num_tokens`. The default is that none does."""
        self.unsplittable, self._largest_unsplittable = modalities, num_tokens

    @property
    def reserved_tokens(self) -> frozenset[int]:
        """Ids that the config names, among them those of placeholders."""
        return frozenset(
            value
            for name, value in self.config.to_dict().items()
            if TOKEN_NAME.fullmatch(name) and type(value) is int
        )

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        """Each item in a call of its own, which gets the arrays that it has parameters for."""
        encoder = self._encoder(modality)
        named = inspect.signature(encoder).parameters
        rows = []
        for item in items:
            known = {name: value for name, value in item.items() if name in named}
            output = _rows(encoder(**known))
            if self.config.model_type in PROJECTED_LATER:
                output = self.model.multi_modal_projector(output)
            rows.append(output)
        return rows

    def _encoder(self, modality: Modality) -> Any:
        name = ENCODERS[modality]
        for holder in (getattr(self.model, "model", None), self.model):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise self.unservable(f"it has no {name}")


def _rows(output: Any) -> Tensor:
    """Encoder rows [N, W] out of what a model's `get_..._features` returns."""
    if isinstance(output, Tensor):
        return output.reshape(-1, output.shape[-1])
    if isinstance(output, list | tuple) and not hasattr(output, "keys"):
        return torch.cat([_rows(part) for part in output])
    pooled = getattr(output, "pooler_output", None)
    return _rows(output.last_hidden_state if pooled is None else pooled)


class LayerAttention(NamedTuple):
    """What one layer's attention was called with."""

    num_kv_heads: int
    head_dim: int
    """Of query and key; values may be narrower."""
    call: AttentionCall


class _Recorder:
    """An attention backend that computes nothing and keeps what each layer asks for."""

    name = "recorder"
    default_block_size = block_size_multiple = 1

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}
        self.calls: Counter[int] = Counter()

    def supports(self, features: AttentionFeatures) -> bool:
        return True

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        """`layer` is the layer's number."""
        self.calls[layer] += 1
        self.layers[layer] = LayerAttention(key.shape[1], key.shape[2], call)
        return torch.zeros_like(query)


class _LayerNumbers:
    """Stands in for KV pages: the pages of layer i are the number i."""

    @property
    def layers(self) -> _LayerNumbers:
        return self

    def __getitem__(self, layer: int) -> int:
        return layer
