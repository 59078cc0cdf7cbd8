"""What the model package must know about a model family; the defaults suit a text-only one."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lookonce.model.attention.backend import AttentionFeatures
from lookonce.model.kv_pages import kv_layout
from lookonce.model.state import StateLayout
from lookonce.model.streaming_encoder import FrameEncoder
from lookonce.types.kv import KVLayout
from lookonce.types.media import Modality

Tensors = dict[str, Tensor]
"""The arrays of one processed item by name, on the model's device, without a batch dimension."""

PositionAxes = Literal[1, 3, 4]
"""Rows of position ids: 1 linear, 3 mrope, 4 linear and then mrope."""

Model = Any
"""A transformers `PreTrainedModel`, which has no useful types here."""


class ModelFamily:
    """Describes one loaded model; a subclass overrides what is different in its family.

    T is the number of tokens of a step, H the hidden size, N the number of encoder rows placed in
    the step and W their width: H, or more if rows hold features for later layers too.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the configs this class serves."""
    modalities: tuple[Modality, ...] = ()
    unsplittable: tuple[Modality, ...] = ()
    """Modalities whose items attend to themselves in both directions."""
    host_arrays: ClassVar[frozenset[str]] = frozenset()
    """Names of an item's arrays that `encode` gets on the host: few numbers that decide what is
    computed, for which the host would wait if they were on the device."""
    position_axes: PositionAxes = 1
    numbers_pictures: bool = False
    """Whether the last axis of positions counts pictures, and those before it are a picture's
    columns and rows, from 0 on; text goes on by its index (HunYuanVL)."""
    text_after_film_time: ClassVar[bool] = False
    """Whether the positions of text after a film go on after its last time; else they do after the
    height and width of its frames alone."""
    encoder_decoder: ClassVar[bool] = False
    """Items are no part of the prompt: every position cross-attends to them."""
    encoder_only: ClassVar[bool] = False
    """A prompt is computed whole, by `encode_prompts`; no keys and values are kept."""
    dropped_weights: ClassVar[tuple[str, ...]] = (
        r"(^|\.)rotary_emb\.",
        r"(^|\.)(inv_freq|position_ids)$",
        r"(^|\.)mtp(_layers)?\.",
        r"(^|\.)vision_(tower|model)\.(vision_model\.)?head\.",
    )
    """Patterns of published weights that are not used: buffers that the config determines, heads
    that draft tokens (MTP), and pooling heads of vision encoders. transformers itself drops Omni's
    talker."""

    separator_id: int | None = None
    """The token between two texts, where the tokenizer has one; set where the model compares."""
    layer_numbers: tuple[int, ...] | None = None
    """The decoder's layers that have keys and values, by number; None: all of them."""
    states: StateLayout = StateLayout()
    """What layers keep beside keys and values; empty for most models."""
    mixes_by_token: bool = False
    """Whether layers with states go on after a state with one token alone; set by the comparison at
    load."""
    keeps_latents: bool = False
    """Whether the decoder's attention keeps one compressed row for a token, which is key and value
    of all heads (`attention.latent`)."""
    num_ranks: int = 1
    """Ranks that the decoder is divided among (`model.tensor_parallel`)."""
    logit_scale: float = 1.0
    """What the output head gives is multiplied by this, before any softcap."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = model.config
        self.text_config = model.config.get_text_config(decoder=True)
        self.decoder: Any = model.get_decoder()
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Linear = model.get_output_embeddings()

    @classmethod
    def transformers_class(cls) -> Any:
        """The class in transformers whose `from_pretrained` reads the weights."""
        name = "AutoModelForMultimodalLM" if cls.modalities else "AutoModelForCausalLM"
        return getattr(import_module("transformers"), name)

    @classmethod
    def generating_part(cls, model: Model) -> Model | None:
        """The part of transformers' model whose text model attends over KV pages; None: none."""
        return model

    def pooling_head(self) -> Any:
        """What a model that pools has after its hidden states: [n, H] → [n, W]; None: nothing."""
        return None

    def check_kind(self, kind: str) -> None:
        """Raises `ModelLoadError` for a kind of pooling that the model cannot have."""

    def encode_prompts(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token ids [T] of whole prompts, one after the other → hidden states [T, H]."""
        raise ValueError("this model computes its prompts over KV pages")

    @classmethod
    def misses(cls, name: str) -> bool:
        """Whether a published weight that was not loaded should have been."""
        return not any(re.search(pattern, name) for pattern in cls.dropped_weights)

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits; placeholder ids may lie beyond it."""
        return int(getattr(self.lm_head, "vocab_size", self.lm_head.weight.shape[0]))

    @property
    def row_width(self) -> int:
        """W, the width of an encoder row."""
        return self.hidden_size

    @property
    def frame_encoder(self) -> FrameEncoder | None:
        """Encodes sound frame by frame, where a row of it is added to each token; else None."""
        return None

    @property
    def largest_unsplittable(self) -> int:
        """Prompt tokens of the largest item that no chunk may cut; 0 if there is none."""
        return 0

    @property
    def longest_bidirectional_prompt(self) -> int:
        """Not 0: every token of a prompt sees all of it; most tokens of a prompt."""
        return 0

    @property
    def causal_texts(self) -> bool:
        """Whether that is so of prompts with an item alone."""
        return False

    @property
    def longest_sequence(self) -> int | None:
        """Most tokens of a sequence, where the config has another name for it than usual."""
        return None

    def cross_states(self, output: Tensor) -> Tensor:
        """An item's output [num_embeds, W] as keys and values [2 · layers, Hkv, num_embeds, D] of
        the decoder's cross-attention."""
        raise ValueError("this model has no cross-attention")

    @property
    def final_softcap(self) -> float | None:
        """If not None, logits become `softcap * tanh(logits / softcap)`."""
        softcap: float | None = getattr(self.text_config, "final_logit_softcapping", None)
        return softcap

    def attention_features(self, dtype: torch.dtype) -> AttentionFeatures:
        """What the text model needs from its attention backend."""
        text = self.text_config
        layer_types = getattr(text, "layer_types", None) or ()
        return AttentionFeatures(
            dtype=dtype,
            head_dim=self.head_dim,
            sliding_window=any("sliding" in kind for kind in layer_types)
            or bool(getattr(text, "sliding_window", None) and not layer_types),
            softcap=getattr(text, "attn_logit_softcapping", None) is not None,
            sinks=any("sinks" in name for name, _ in self.decoder.named_parameters()),
            bidirectional=bool(self.unsplittable),
        )

    @property
    def sliding_window(self) -> int:
        """Tokens that a token attends to at most in any layer, itself included; 0: some layer
        attends to all."""
        kinds = getattr(self.text_config, "layer_types", None) or ("sliding",)
        window = getattr(self.text_config, "sliding_window", None)
        return int(window) if window and all("sliding" in kind for kind in kinds) else 0

    @property
    def head_dim(self) -> int:
        text = self.text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Of one rank."""
        text = self.text_config
        count = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        return max(1, count // self.num_ranks)

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    def kv_layout(self, block_size: int, dtype: torch.dtype) -> KVLayout:
        """The layout of a KV block of `block_size` tokens."""
        heads, shared = (self.num_kv_heads, self.head_dim), self.keeps_latents
        return kv_layout(self.num_layers, block_size, *heads, dtype, shared=shared)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        """Items of one modality with equal keys are encoded in one call; None: each in its own."""
        return None

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        """Encoder output [num_embeds, W] of each item. Raises `ValueError` for a malformed item."""
        raise ValueError(f"this model takes no {modality}")

    def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, Any]:
        """Put encoder rows [N, W] into `embeds` [T, H] at the indices `at` [N], in place.

        Returns keyword arguments that the decoder needs beside the embeddings.
        """
        embeds.index_copy_(0, at, rows)
        return {}

    def step_arguments(self, token_ids: Tensor, at: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of the decoder that depend on a step's token ids [T], of which those at
        the indices `at` [N] take encoder rows and have any id; None: no token takes one."""
        return {}


class TextFamily(ModelFamily):
    """Text-only decoders."""

    model_types = (
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    )
