"""The interface of attention backends: what they are given and what they compute.

T is the number of new tokens in the step (all sequences, one after the other), B the number of
sequences, Hq and Hkv the query and key-value heads, D the head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lookonce.model.attention.cross import CrossStates
from lookonce.model.kv_pages import KVPages, LayerPages
from lookonce.model.state import StepStates

Span = tuple[int, int]
"""Absolute `(start, end)` positions of one sequence."""


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What a model's attention needs beyond causal softmax."""

    dtype: torch.dtype
    head_dim: int
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    bidirectional: bool = False
    """Some media items attend to themselves in both directions."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's tokens sit; built once per step, shared by all layers.

    Tensors are views of static buffers on the model's device; the tuples are host copies, so that
    backends that loop over sequences need not read a device tensor back.
    """

    num_tokens: int
    """T."""
    num_decodes: int
    """The first `num_decodes` sequences have one query token each."""
    query_lens: tuple[int, ...]
    """[B] new tokens per sequence, at least 1 each."""
    context_lens: tuple[int, ...]
    """[B] keys per sequence after this step, the new tokens included."""
    query_start: Tensor
    """[B + 1] int32; sequence i's tokens are rows query_start[i] to query_start[i + 1]."""
    kv_start: Tensor
    """[B + 1] int32; running sums of `kv_lens`, which some kernels need too."""
    kv_lens: Tensor
    """[B] int32; `context_lens` on the device."""
    block_tables: Tensor
    """[B, C] int32, C >= blocks of the longest sequence; entries past a sequence's end are junk.
    Rows are contiguous, the row stride may exceed C."""
    slot_mapping: Tensor
    """[T] int64; the slot to which each new token's key and value are written."""
    visible_end: Tensor | None = None
    """[T] int32, None if purely causal. A token at position p sees keys
    `[max(0, p - window + 1), visible_end)`. `visible_end` is `p + 1`, or the end of the
    bidirectional item that the token is in. Items do not overlap, so this means
    `sliding AND (causal OR same item)`."""

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def max_kv_len(self) -> int:
        return max(self.context_lens)


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention beside its tensors."""

    scale: float
    """Factor of the scores."""
    sliding_window: int | None = None
    """A token sees at most this many keys, its own included; None: all."""
    softcap: float | None = None
    """After scaling, `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[Hq] one more score per head, which takes probability and has no value."""


class AttentionBackend(Protocol):
    """Writes new keys and values into the pages and attends over them, one layer at a time."""

    name: str
    default_block_size: int
    block_size_multiple: int
    """Block sizes must be a multiple of this."""
    is_capturable: bool
    """A decode step reads lengths from the device alone, so that a graph can hold it."""

    def supports(self, features: AttentionFeatures) -> bool: ...

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] (last dimension contiguous) → [T, Hq, D]."""
        ...


class AddsToLinear(Protocol):
    """What is added to the outputs of linear layers in one step (`lora.StepLoRA`)."""

    def add(self, modules: Sequence[nn.Module], inputs: Tensor, outputs: Tensor) -> None: ...


class ForwardContext(NamedTuple):
    """What attention needs in one step, beside each layer's tensors."""

    metadata: AttentionMetadata
    backend: AttentionBackend
    kv_pages: KVPages
    cross: CrossStates | None = None
    """What an encoder-decoder's tokens cross-attend to."""
    states: StepStates | None = None
    """Of the step's sequences, where layers keep other states than keys and values."""
    lora: AddsToLinear | None = None
    """Where some sequence of the step has an adapter."""
