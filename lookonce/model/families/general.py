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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
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
from lookonce.model.attention.hf_attention import (
    CAUSAL_LAYER,
    in_paged_forward,
    paged_forward_context,
)
from lookonce.model.attention.latent import keep_latents
from lookonce.model.attention.probe import PROBE_TOKENS, probe_metadata, probe_positions
from lookonce.model.families.base import Model, ModelFamily, Tensors
from lookonce.model.state import StateObserver, has_states
from lookonce.types.media import MediaExample, Modality
from lookonce.types.model import FILMS_AS_PICTURES, MEDIA_TOKENS, media_token, num_axes, unsupported

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
OTHER_STATES = "some of its layers keep another state than keys and values"


class GeneralTextFamily(ModelFamily):
    """A text-only decoder whose attention is observed: its layers, heads, windows, softcap, sinks.

    Raises `ModelLoadError` for a model whose attention cannot be paged.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        head: Any = self.lm_head
        if head is None and isinstance(self.decoder, PreTrainedModel):
            self.lm_head = self.decoder.get_output_embeddings()  # of a whole text model
        if self.decoder is model:
            self.decoder = getattr(model, "model", model)
        elif isinstance(self.decoder, PreTrainedModel) and self.decoder.get_output_embeddings():
            self.decoder = getattr(self.decoder, "model", self.decoder)
        if self.decoder is model or self.lm_head is None or self.embed_tokens is None:
            raise self.unservable("it has no decoder with embeddings and an output head apart")
        _attend_plainly(self.decoder)
        self.keeps_latents = keep_latents(self.decoder)
        observer = StateObserver(self.text_config) if has_states(self.text_config) else None
        layers = self._observe(observer)
        self._attention = list(layers.values())
        if observer is not None:
            if observer.missed:
                raise self.unservable(OTHER_STATES)
            self.layer_numbers = tuple(layers)
            self.states = observer.split_steps()

    @property
    def reserved_tokens(self) -> frozenset[int]:
        """Ids of tokens that stand for media."""
        return frozenset()

    @property
    def head_dim(self) -> int:
        """Of the layer with the widest heads; those of other layers are padded."""
        return max(layer.head_dim for layer in self._attention)

    @property
    def num_kv_heads(self) -> int:
        """Of the layer with the most heads; those of other layers are repeated."""
        return max(layer.num_kv_heads for layer in self._attention)

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

    def step_arguments(self, token_ids: Tensor, at: Tensor | None) -> dict[str, Any]:
        """Embeddings that each layer has of its own, if the decoder has them (Gemma 3n and 4)."""
        if not getattr(self.text_config, "hidden_size_per_layer_input", None):
            return {}
        if at is not None:
            token_ids = token_ids.index_fill(0, at, int(self.text_config.pad_token_id))
        inputs = self.decoder.get_per_layer_inputs(token_ids[None])
        return {"per_layer_inputs": inputs}

    def unservable(self, reason: str) -> ModelLoadError:
        return unsupported(self.config.model_type, reason)

    @torch.inference_mode()
    def _observe(self, observer: StateObserver | None) -> dict[int, LayerAttention]:
        """Run the decoder once on a few tokens; what each layer's attention was called with, by the
        layer's number. `observer` sees what other states layers keep."""
        device = self._embedding.device
        cache = {} if observer is None else {"past_key_values": observer}
        watching = nullcontext() if observer is None else observer.watching(self.decoder)
        recorder = _Recorder()
        pages: Any = _LayerNumbers()
        ids = torch.arange(PROBE_TOKENS, device=device) % self.vocab_size
        try:
            context = ForwardContext(probe_metadata(device), recorder, pages)
            with watching, paged_forward_context(context):
                self.decoder(
                    inputs_embeds=self.embed_tokens(ids)[None],
                    position_ids=probe_positions(self.position_axes).to(device),
                    attention_mask=None,
                    use_cache=False,
                    **cache,
                    **self.step_arguments(ids, None),
                )
        except FORWARD_ERRORS as error:
            raise self.unservable(f"its decoder cannot be run ({error})") from error
        return self._checked(recorder, has_states=observer is not None)

    def _checked(self, recorder: _Recorder, *, has_states: bool) -> dict[int, LayerAttention]:
        layers = dict(sorted(recorder.layers.items()))
        if not layers:
            raise self.unservable("its attention does not use transformers' attention interface")
        if not has_states and len(layers) < int(self.text_config.num_hidden_layers):
            raise self.unservable(OTHER_STATES)
        if not has_states and list(layers) != list(range(len(layers))):
            raise self.unservable("its attention layers are not called once each")
        if any(calls != 1 for calls in recorder.calls.values()):
            raise self.unservable("its attention layers are not called once each")
        most = max(layer.num_kv_heads for layer in layers.values())
        if any(most % layer.num_kv_heads or layer.num_heads % most for layer in layers.values()):
            raise self.unservable("its layers have numbers of heads that do not divide each other")
        return layers


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
    "video": "get_video_features",
}
TOKEN_TYPES = "token_type_ids"
"""How arguments end that say of each token what kind it is."""
DEEPER = re.compile(r"deepstack_\w+")
"""Arguments of decoders that hold features for later layers."""
TOKEN_NAME = re.compile(r"\w*token_(id|index)")


class GeneralMediaFamily(GeneralTextFamily):
    """Items have whatever arrays the model's processor gives for one item, and its token ids.

    Rows are what the model's `get_..._features` gives. Where that is not what its decoder gets
    (`merges`), the model's own forward is run on the item up to its decoder. `prove_media` sets
    `modalities`, `merges` and, where items attend to themselves in both directions, `unsplittable`
    and `largest_unsplittable`.
    """

    def __init__(self, model: Model) -> None:
        self._largest_unsplittable = 0
        self._in_windows = False
        self.bidirectional_prompts = False
        """Whether every token of a prompt sees the whole prompt (PaliGemma)."""
        self._causal_texts = False
        self._not_causal: list[Any] = []
        """Modules of layers that transformers takes as not causal where it has no mask."""
        self.merges = False
        """Whether rows are taken from the decoder's inputs."""
        self._deeper = DeeperRows()
        self._media_tokens: dict[Modality, int] = {}
        self._token_types: dict[str, dict[int, int]] = {}
        text = model.config.get_text_config(decoder=True)
        self.numbers_pictures = num_axes(text.to_dict()) == 4
        if self.numbers_pictures:
            self.position_axes = 4
        else:
            self.position_axes = 3 if num_axes(text.to_dict()) else 1
        if getattr(text, "use_bidirectional_attention", None) is True:
            self._not_causal = _attend_causally(model.get_decoder())
        super().__init__(model)

    @classmethod
    def transformers_class(cls) -> Any:
        return AnyMediaModel

    def attention_features(self, dtype: torch.dtype) -> AttentionFeatures:
        features = super().attention_features(dtype)
        both_ways = bool(self.unsplittable or self.bidirectional_prompts)
        return dataclasses.replace(features, bidirectional=both_ways)

    @property
    def row_width(self) -> int:
        return self.hidden_size * (1 + self._deeper.count * self.merges)

    @property
    def largest_unsplittable(self) -> int:
        return self._largest_unsplittable

    def attend_both_ways(
        self, modalities: tuple[Modality, ...], num_tokens: int, *, in_windows: bool = False
    ) -> None:
        """Items of these modalities attend to themselves in both directions; those of usual sizes
        have at most `num_tokens`, and a request with an item that no step has room for is refused.
        `in_windows`: they do so in layers with a sliding window alone (Gemma 4). The default is
        that none does."""
        self.unsplittable, self._largest_unsplittable = modalities, num_tokens
        self._in_windows, self.bidirectional_prompts = in_windows, False
        self._causal_texts = False
        numbers = range(self.num_layers) if self.layer_numbers is None else self.layer_numbers
        attention = dict(zip(numbers, self._attention, strict=True))
        for module in self.decoder.modules():
            if (layer := getattr(module, "layer_idx", None)) in attention:
                unlimited = attention[layer].call.sliding_window is None
                setattr(module, CAUSAL_LAYER, in_windows and unlimited)

    def attend_over_prompts(self, num_tokens: int, *, causal_texts: bool = False) -> None:
        """Every token of a prompt sees the whole prompt; with `causal_texts` not of one without an
        item. Items have at most `num_tokens`."""
        self.attend_both_ways((), num_tokens)
        self.bidirectional_prompts, self._causal_texts = True, causal_texts

    @contextmanager
    def layers_as_published(self) -> Iterator[None]:
        """In this block layers say that they are not causal where they say so in transformers."""
        for module in self._not_causal:
            module.is_causal = False
        try:
            yield
        finally:
            for module in self._not_causal:
                module.is_causal = True

    @property
    def causal_texts(self) -> bool:
        return self._causal_texts

    @property
    def sees_both_ways(self) -> Literal["causal", "items", "items_in_windows", "prompts"]:
        """What attends to itself in both directions."""
        if self.bidirectional_prompts:
            return "prompts"
        if not self.unsplittable:
            return "causal"
        return "items_in_windows" if self._in_windows else "items"

    @property
    def longest_bidirectional_prompt(self) -> int:
        """No longer than the shortest window: transformers lets prompts see beyond it, too."""
        if not self.bidirectional_prompts:
            return 0
        longest = self.longest_sequence or int(self.text_config.max_position_embeddings)
        return min([longest, *filter(None, self._windows)])

    @property
    def _windows(self) -> list[int | None]:
        return [layer.call.sliding_window for layer in self._attention]

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window, and others none."""
        return len({window is None for window in self._windows}) > 1

    @property
    def reserved_tokens(self) -> frozenset[int]:
        """Ids that the config names, among them those of placeholders."""
        placeholders = {name for names in MEDIA_TOKENS.values() for name in names}
        return frozenset(
            value
            for name, value in self.config.to_dict().items()
            if (name in placeholders or TOKEN_NAME.fullmatch(name)) and type(value) is int
        )

    def learn_token_types(self, examples: Sequence[MediaExample]) -> None:
        """Keep what the model's processor says of each token for its decoder, which may compute
        tokens of pictures with other weights (Ernie 4.5 VL)."""
        taken = inspect.signature(self.decoder.forward).parameters
        for example in examples:
            for name, array in example.arrays.items():
                if name in taken and name.endswith(TOKEN_TYPES):
                    types = np.frombuffer(array.data, array.dtype).tolist()
                    known = self._token_types.setdefault(name, {})
                    known |= {
                        t: kind for t, kind in zip(example.token_ids, types, strict=True) if kind
                    }

    def step_arguments(self, token_ids: Tensor, at: Tensor | None) -> dict[str, Any]:
        arguments = super().step_arguments(token_ids, at)
        for name, known in self._token_types.items():
            types = torch.zeros_like(token_ids)
            for token, kind in known.items():
                types[token_ids == token] = kind
            if at is not None:
                types[at] = known.get(self._media_token(self.modalities[0]), 0)
            arguments[name] = types[None]
        return arguments

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        """Each item in a call of its own, which gets the arrays that it has parameters for."""
        if modality in self.unsplittable and not self._in_windows:
            for item in items:
                self._check_window(modality, item)
        if self.merges:
            return [self._merged(modality, item) for item in items]
        encoder = self._encoder(modality)
        named = inspect.signature(encoder).parameters
        rows = []
        for item in items:
            known = {name: value for name, value in item.items() if name in named}
            rows.append(_rows(encoder(**known)))
        return rows

    def _check_window(self, modality: Modality, item: Tensors) -> None:
        """Whether an item that attends to itself in both directions fits into the shortest window,
        as those did that were compared: what is beyond is seen in some types and not in others.
        Raises `ValueError`."""
        shortest = min(filter(None, self._windows), default=None)
        length = item["input_ids"].shape[1]
        if shortest is not None and self._largest_unsplittable <= shortest < length:
            raise ValueError(
                f"the {modality} has {length} tokens, but the model's sliding window {shortest}"
            )

    def _merged(self, modality: Modality, item: Tensors) -> Tensor:
        """The rows of an item in what the model's own forward gives its decoder: embeddings, and
        features for later layers beside them."""
        given: dict[str, Any] = {}

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("inputs_embeds") is None and module is self.decoder:
                return  # it makes them itself; its first layer gets them
            given.update({"inputs_embeds": args[0]} if args else {}, **kwargs)
            raise _DecoderReachedError

        ids = item["input_ids"]
        hooks = [
            module.register_forward_pre_hook(stop, with_kwargs=True)
            for module in (self.decoder, *getattr(self.decoder, "layers", ())[:1])
        ]
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None  # of the item before
        try:
            self.model(**item, attention_mask=torch.ones_like(ids), use_cache=False)
        except _DecoderReachedError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        if given.get("inputs_embeds") is None:
            raise ValueError("its decoder gets no embeddings")
        token = self._media_token(modality)
        takes_row = torch.ones_like(ids[0], dtype=torch.bool) if token < 0 else ids[0] == token
        deeper = self._deeper.read(given)
        return torch.cat([given["inputs_embeds"][0][takes_row], *deeper], dim=-1)

    def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, Any]:
        first, *deeper = torch.split(rows, self.hidden_size, dim=-1)
        embeds.index_copy_(0, at, first)
        return self._deeper.arguments(len(embeds), at, deeper)

    def _media_token(self, modality: Modality) -> int:
        if modality not in self._media_tokens:
            self._media_tokens[modality] = media_token(self.config.to_dict(), modality)
        return self._media_tokens[modality]

    def _encoder(self, modality: Modality) -> Any:
        as_picture = modality == "video" and self.config.model_type in FILMS_AS_PICTURES
        name = ENCODERS["image" if as_picture else modality]
        for holder in (getattr(self.model, "model", None), self.model):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise self.unservable(f"it has no {name}")


def _attend_plainly(decoder: Any) -> None:
    """Leave out what layers compute by a token's index in a step, which holds parts of several
    sequences. At each position that a sequence may have (`loader`) it changes nothing: the factor
    of queries is 1 (Llama 4), and an index selects all blocks of keys (MiniMax M3)."""
    for module in decoder.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False
        if hasattr(module, "topk_blocks") and hasattr(module, "build_block_mask"):
            module.forward = partial(_select_blocks, module.forward)


def _select_blocks(select: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor | None:
    """What an index of blocks selects where transformers computes; None in a step of ours."""
    return None if in_paged_forward() else select(*args, **kwargs)


def _attend_causally(decoder: Any) -> list[Any]:
    """Layers that say they are not causal, because prompts see all of themselves, are called as
    others are: which tokens see more is found by comparing (`attend_over_prompts`). Returns what
    was changed."""
    changed = [
        module
        for module in decoder.modules()
        if getattr(module, "is_causal", True) is False and hasattr(module, "layer_idx")
    ]
    for module in changed:
        module.is_causal = True
    return changed


class _DecoderReachedError(Exception):
    """Raised where the decoder of a model would run."""


class DeeperRows:
    """How a decoder takes features of pictures for its later layers (deepstack): in one argument, a
    list of tensors [N, H] or a dict of them, beside a mask of their positions."""

    def __init__(self) -> None:
        self._name = self._mask = ""
        self._keys: list[Any] | None = None
        """Of the dict; None: it is a list."""
        self._mask_shape: tuple[int, ...] = ()
        """After the position's axis."""
        self.count = 0

    def read(self, given: dict[str, Any]) -> list[Tensor]:
        """The features among the arguments that a decoder was given; keeps their form."""
        name = next((name for name in given if DEEPER.match(name) and given[name] is not None), "")
        features = given.get(name) or []
        self._name, self.count = name, len(features)
        self._keys = list(features) if isinstance(features, dict) else None
        masks = [
            name for name, value in given.items() if getattr(value, "dtype", None) is torch.bool
        ]
        if features and len(masks) != 1:
            raise ValueError("its decoder gets features for later layers without their positions")
        if features:
            (self._mask,) = masks
            self._mask_shape = tuple(given[self._mask].shape[2:])
        return list(features.values() if isinstance(features, dict) else features)

    def arguments(self, num_tokens: int, at: Tensor, deeper: Sequence[Tensor]) -> dict[str, Any]:
        """The decoder's arguments for features [N, H] at the indices `at` of a step."""
        if not deeper:
            return {}
        mask = torch.zeros(1, num_tokens, dtype=torch.bool, device=at.device)
        mask[0, at] = True  # `at` is sorted, so the mask selects positions in the order of the rows
        mask = mask.view(1, num_tokens, *[1] * len(self._mask_shape))
        mask = mask.expand(1, num_tokens, *self._mask_shape)
        keys = self._keys
        features = list(deeper) if keys is None else dict(zip(keys, deeper, strict=True))
        return {self._mask: mask, self._name: features}


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

    num_heads: int
    """Of queries."""
    num_kv_heads: int
    head_dim: int
    """Of query and key; values may be narrower."""
    call: AttentionCall


class _Recorder:
    """An attention backend that computes nothing and keeps what each layer asks for."""

    name = "recorder"
    default_block_size = block_size_multiple = 1
    is_capturable = False

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
        self.layers[layer] = LayerAttention(query.shape[1], key.shape[1], key.shape[2], call)
        return torch.zeros_like(query)


class _LayerNumbers:
    """Stands in for KV pages: the pages of layer i are the number i."""

    @property
    def by_number(self) -> _LayerNumbers:
        return self

    def __getitem__(self, layer: int) -> int:
        return layer
