"""The text model of one step: token embeddings, encoder rows in their places, decoder, LM head.

Three decoders compute the same logits; a step uses the first that can compute it:

    NativeDecoder         few tokens of a plain decoder on a CPU, or any number with weights that
                          torch does not multiply as they are: one call of compiled code
    FusedDecoder          a plain decoder: torch's operators over the same weights
    TransformersDecoder   any other: transformers' own forward
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lookonce.model.attention.backend import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    ForwardContext,
)
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.attention.cross import CrossStates
from lookonce.model.attention.hf_attention import paged_forward_context
from lookonce.model.attention.probe import (
    PROBE_TOKENS,
    probe_metadata,
    probe_pages,
    probe_positions,
)
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily
from lookonce.model.fused_modules import FusedDecoder
from lookonce.model.kv_pages import KVPages, LayerPages
from lookonce.model.lora import LinearHooks
from lookonce.model.native.decoder import DecodeInputs, NativeDecoder, native_decoder
from lookonce.model.step_inputs import StepInputs

logger = logging.getLogger(__name__)

PLAIN_DECODERS = frozenset(
    {
        "LlamaModel",
        "MistralModel",
        "Qwen2Model",
        "Qwen3Model",
        "Qwen2VLTextModel",
        "Qwen2_5_VLTextModel",
        "Qwen2_5OmniThinkerTextModel",
        "VoxtralRealtimeTextModel",
    }
)
"""Classes in transformers whose forward does nothing between or beside their layers."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest difference to transformers' hidden states, relative to their largest value."""


class TextModel:
    """Computes hidden states and logits with one model's weights and KV pages."""

    def __init__(
        self,
        family: ModelFamily,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        kv_pages: KVPages,
        linear_hooks: LinearHooks | None = None,
    ) -> None:
        """`linear_hooks` add adapters to linear layers of transformers' decoders."""
        self._family = family
        self._linear_hooks = linear_hooks or LinearHooks()
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

    def __call__(
        self, inputs: StepInputs, rows: Tensor | None, cross: CrossStates | None = None
    ) -> Tensor:
        """Logits [S, V] float32 of the sampled tokens.

        `rows` [N, W] are the encoder rows for the tokens `inputs.embed_at`; None without any.
        `cross` is what an encoder-decoder's tokens cross-attend to.
        """
        embeds, extras = self._embeds(inputs, rows)
        if self._native is not None and not extras and inputs.lora is None:
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
        return self.compute_logits(
            sampled_rows(self._decode(inputs, embeds, extras, cross), inputs)
        )

    def hidden_states(
        self, inputs: StepInputs, rows: Tensor | None, cross: CrossStates | None = None
    ) -> Tensor:
        """Last hidden states [T, H] of all tokens."""
        return self._decode(inputs, *self._embeds(inputs, rows), cross)

    def _embeds(
        self, inputs: StepInputs, rows: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Embeddings [T, H] with encoder rows in their places, and the decoder's extra arguments.

        Without encoder rows there are no embeddings, and the token ids are embedded later.
        """
        if inputs.embed_at is None or rows is None:
            return None, self._family.step_arguments(inputs.token_ids, None)
        embeds = self._family.embed_tokens(inputs.token_ids)
        extras = self._family.place(embeds, inputs.embed_at, rows)
        return embeds, extras | self._family.step_arguments(inputs.token_ids, inputs.embed_at)

    def _decode(
        self,
        inputs: StepInputs,
        embeds: Tensor | None,
        extras: dict[str, Tensor],
        cross: CrossStates | None,
    ) -> Tensor:
        if embeds is None:
            embeds = self._family.embed_tokens(inputs.token_ids)
        lora = inputs.lora
        step = ForwardContext(
            inputs.metadata, self._backend, self._kv_pages, cross, inputs.states, lora
        )
        if lora is None or isinstance(self._decoder, FusedDecoder):  # which adds by itself
            return self._decoder(embeds, inputs.position_ids, step, extras)
        with self._linear_hooks.adding(lora):
            return self._decoder(embeds, inputs.position_ids, step, extras)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states [S, H] → logits [S, V]."""
        logits: Tensor = self._family.lm_head(hidden).float()
        if self._family.logit_scale != 1.0:
            logits = logits * self._family.logit_scale
        softcap = self._family.final_softcap
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits


def sampled_rows(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """Hidden states [T, H] → those of the sampled tokens [S, H]."""
    return hidden if inputs.sample_rows is None else hidden.index_select(0, inputs.sample_rows)


class TextDecoder(Protocol):
    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext, extras: dict[str, Any]
    ) -> Tensor:
        """embeds [T, H], position_ids [1, T] or [axes, 1, T] → last hidden states [T, H]."""
        ...


class TransformersDecoder:
    """transformers' own forward, with attention over our pages (`attention/hf_attention.py`)."""

    def __init__(self, family: ModelFamily) -> None:
        self._decoder = family.decoder

    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext, extras: dict[str, Any]
    ) -> Tensor:
        if step.states is not None:
            extras = {**extras, "past_key_values": step.states}
        with paged_forward_context(step):
            output = self._decoder(
                inputs_embeds=embeds.unsqueeze(0),
                position_ids=position_ids,
                attention_mask=None,
                use_cache=False,  # by default transformers would build a cache of its own
                **extras,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


@torch.inference_mode()
def choose_decoder(family: ModelFamily, dtype: torch.dtype, device: torch.device) -> TextDecoder:
    """A fused decoder if it agrees with transformers on a random step, else transformers' own."""
    transformers_decoder = TransformersDecoder(family)
    name = type(family.decoder).__name__
    if name not in PLAIN_DECODERS:
        return transformers_decoder
    recorder = _RecordingBackend()
    with _recorded_layers(family.decoder) as passed:
        expected = _probe(transformers_decoder, recorder, family, dtype, device)
    try:
        fused = FusedDecoder(family.decoder, recorder.calls)
        found = _probe(fused, ReferenceBackend(), family, dtype, device)
        if not _agree(found, expected, dtype) and not _layers_agree(
            fused, passed, expected, family
        ):
            raise ValueError("the fused decoder differs")
    except (AttributeError, ValueError) as error:
        logger.warning("%s runs through transformers: %s", name, error)
        return transformers_decoder
    return fused


def _agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCE[dtype] * expected.abs().max())


class _Passed(NamedTuple):
    """What transformers gave a layer and got from it, each [1, T, H]."""

    given: Tensor
    got: Tensor


@contextmanager
def _recorded_layers(decoder: nn.Module) -> Iterator[list[_Passed]]:
    """In this block every layer's input and output are recorded, in the order of calls."""
    passed: list[_Passed] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        passed.append(_Passed(given, output[0] if isinstance(output, tuple) else output))

    layers = decoder.layers if isinstance(decoder.layers, nn.ModuleList) else ()
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield passed
    finally:
        for hook in hooks:
            hook.remove()


def _layers_agree(
    fused: FusedDecoder, passed: list[_Passed], expected: Tensor, family: ModelFamily
) -> bool:
    """Whether each fused layer gives what transformers' does for the same input, and so the norm.

    Over a whole model two correct ways may end far apart: some amplify the rounding of one layer a
    thousandfold. Nothing may happen between transformers' layers, either.
    """
    if len(passed) != len(fused.layers):
        return False
    dtype, device = passed[0].given.dtype, passed[0].given.device
    if not torch.equal(passed[0].given[0], _probe_embeds(family).to(device, dtype)):
        return False
    if not all(torch.equal(a.got, b.given) for a, b in itertools.pairwise(passed)):
        return False
    step = ForwardContext(probe_metadata(device), ReferenceBackend(), _pages(family, dtype, device))
    positions = probe_positions(family.position_axes).to(device)
    for index, (given, got) in enumerate(passed):
        found = fused.layer_output(index, given[0], positions, step)
        # The layer's own part: a large residual would hide it.
        if not _agree(found - given[0], got[0] - given[0], dtype):
            return False
    return _agree(fused.norm(passed[-1].got[0]), expected, dtype)


class _RecordingBackend(ReferenceBackend):
    """Records what each layer asks of attention, so that the fused decoder can ask the same."""

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
    positions = probe_positions(family.position_axes).to(device)
    step = ForwardContext(probe_metadata(device), backend, _pages(family, dtype, device))
    return decoder(_probe_embeds(family).to(device, dtype), positions, step, {}).float()


def _probe_embeds(family: ModelFamily) -> Tensor:
    """[T, H] random embeddings; every call gives the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBE_TOKENS, family.hidden_size, generator=generator)


def _pages(family: ModelFamily, dtype: torch.dtype, device: torch.device) -> KVPages:
    return probe_pages(family.num_layers, family.num_kv_heads, family.head_dim, dtype, device)
