"""The text model of one step: embedding, encoder rows in their places, decoder, head.

Three ways lead to the same logits; a step takes the first that is for it:

    native   few tokens, plain decoder, CPU: one call of compiled code
    lean     plain decoder: torch's operators over the same weights
    hooked   any other: transformers' own forward
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from lookonce.model.attention.backend import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    ForwardContext,
)
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.attention.hf_attention import paged_forward_context
from lookonce.model.attention.probe import (
    PROBE_TOKENS,
    probe_metadata,
    probe_pages,
    probe_positions,
)
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily
from lookonce.model.fused_decoder import FusedDecoder
from lookonce.model.kv_pages import KVPages, LayerPages
from lookonce.model.native.decoder import DecodeInputs, NativeDecoder, native_decoder
from lookonce.model.step_inputs import StepInputs


class TextModel:
    """Bound to one model's weights and KV pages."""

    def __init__(
        self,
        family: ModelFamily,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        kv_pages: KVPages,
    ) -> None:
        self._family = family
        self._backend = backend
        self._kv_pages = kv_pages
        self._decoder = choose_decoder(family, dtype, device)
        self._native: NativeDecoder | None = None
        if isinstance(self._decoder, FusedDecoder) and isinstance(backend, KernelBackend):
            self._native = native_decoder(self._decoder, family, dtype, kv_pages)

    @property
    def is_native(self) -> bool:
        """Whether decode steps run in compiled code."""
        return self._native is not None

    def __call__(self, inputs: StepInputs, rows: Tensor | None) -> Tensor:
        """Logits [S, V] float32 of the sampled tokens.

        `rows` [N, W] are the encoder rows that go to `inputs.embed_at`; None: there are none.
        """
        embeds, extras = self._placed(inputs, rows)
        if self._native is not None and not extras:
            logits = self._native.logits(
                DecodeInputs(
                    inputs.token_ids,
                    embeds,
                    inputs.position_ids,
                    inputs.sample_rows,
                    inputs.metadata,
                )
            )
            if logits is not None:
                return logits
        return self.predict(sampled_rows(self._decode(inputs, embeds, extras), inputs))

    def hidden(self, inputs: StepInputs, rows: Tensor | None) -> Tensor:
        """Last hidden states [T, H] of all tokens."""
        return self._decode(inputs, *self._placed(inputs, rows))

    def _placed(
        self, inputs: StepInputs, rows: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Embeddings with encoder rows in their places, and what else they bring; None without."""
        if inputs.embed_at is None or rows is None:
            return None, {}
        embeds = self._family.embed_tokens(inputs.token_ids)
        return embeds, self._family.place(embeds, inputs.embed_at, rows)

    def _decode(
        self, inputs: StepInputs, embeds: Tensor | None, extras: dict[str, Tensor]
    ) -> Tensor:
        if embeds is None:
            embeds = self._family.embed_tokens(inputs.token_ids)
        step = ForwardContext(inputs.metadata, self._backend, self._kv_pages)
        return self._decoder(embeds, inputs.position_ids, step, extras)

    def predict(self, hidden: Tensor) -> Tensor:
        """Last hidden states [S, H] → logits [S, V]."""
        logits: Tensor = self._family.lm_head(hidden).float()
        softcap = self._family.final_softcap
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits


def sampled_rows(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """[T, H] → [S, H]: what is sampled after."""
    return hidden if inputs.sample_rows is None else hidden.index_select(0, inputs.sample_rows)


logger = logging.getLogger(__name__)
PLAIN_DECODERS = frozenset(
    {
        "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen2VLTextModel",
        "Qwen2_5_VLTextModel", "Qwen2_5OmniThinkerTextModel",
    }
)  # fmt: skip
"""Classes whose forward is the plain one: nothing happens between or beside their layers."""
TOLERANCE = 1e-4
"""Largest difference to transformers' hidden states, relative to their largest value."""


class TextDecoder(Protocol):
    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext, extras: dict[str, Any]
    ) -> Tensor:
        """embeds [T, H], position_ids [1, T] or [axes, 1, T] → last hidden states [T, H]."""
        ...


class TransformersDecoder:
    """Transformers' forward, whose attention layers find our pages through the hook."""

    def __init__(self, family: ModelFamily) -> None:
        self._decoder = family.decoder

    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext, extras: dict[str, Any]
    ) -> Tensor:
        with paged_forward_context(step.metadata, step.backend, step.kv_pages):
            output = self._decoder(
                inputs_embeds=embeds.unsqueeze(0),
                position_ids=position_ids,
                attention_mask=None,
                use_cache=False,  # left out, transformers would build a cache of its own
                **extras,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


@torch.inference_mode()
def choose_decoder(family: ModelFamily, dtype: torch.dtype, device: torch.device) -> TextDecoder:
    """The lean decoder where it computes what transformers computes, else transformers' own."""
    hooked = TransformersDecoder(family)
    name = type(family.decoder).__name__
    if name not in PLAIN_DECODERS:
        return hooked
    recorder = _RecordingBackend()
    expected = _probe(hooked, recorder, family, dtype, device)
    try:
        lean = FusedDecoder(family.decoder, recorder.calls)
        found = _probe(lean, ReferenceBackend(), family, dtype, device)
    except (AttributeError, ValueError) as error:
        logger.warning("%s runs through transformers: %s", name, error)
        return hooked
    tolerance = TOLERANCE if dtype is torch.float32 else 5e-2
    difference = (found - expected).abs().max()
    if not difference <= tolerance * expected.abs().max():
        logger.warning("%s runs through transformers: the lean way differs", name)
        return hooked
    return lean


class _RecordingBackend(ReferenceBackend):
    """Remembers what each layer asks: the lean decoder then asks the same, whatever its class."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        self.calls.append(call)
        return super().forward(layer, query, key, value, metadata, call)


def _probe(
    decoder: TextDecoder,
    backend: AttentionBackend,
    family: ModelFamily,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Hidden states [T, H] of a small random step, float32."""
    pages = probe_pages(family.num_layers, family.num_kv_heads, family.head_dim, dtype, device)
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(PROBE_TOKENS, family.hidden_size, generator=generator)
    positions = probe_positions(family.position_axes).to(device)
    step = ForwardContext(probe_metadata(device), backend, pages)
    return decoder(embeds.to(device, dtype), positions, step, {}).float()
