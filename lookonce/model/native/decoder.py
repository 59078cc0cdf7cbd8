"""Decode steps of a plain decoder in one call of compiled code, on the CPU.

With a handful of tokens in a step a small model spends more time between torch's operators than in
them. Here the whole text model runs from embedding to logits without returning to Python, over the
same weights and pages, and with the LoRA adapters of its tokens. Beyond `MAX_TOKENS` torch's
products of floats are as fast or ahead: such steps are left to it, as is every step whose rope axes
differ (media in the chunk). Weights that torch cannot multiply as they are, int8 and bf16 without
instructions for it, are met here by any number of tokens.
"""

from __future__ import annotations

import logging
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lookonce.model.attention.backend import AttentionMetadata, ForwardContext
from lookonce.model.attention.probe import (
    PROBE_TOKENS,
    probe_metadata,
    probe_pages,
    probe_positions,
)
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.bf16_products import Weight, linear
from lookonce.model.families.base import ModelFamily
from lookonce.model.fused_modules import (
    FusedDecoder,
    FusedLayer,
    Linear,
    RMSNorm,
    linear_weight,
    plain_positions,
)
from lookonce.model.int8_weights import Int8Linear, Int8Weight
from lookonce.model.kv_pages import KVPages
from lookonce.model.lora import JoinedLayer, Layout, LoadedAdapters, StepLoRA
from lookonce.model.native import compiled
from lookonce.types.cpu import cpu_multiplies_bf16

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Tokens of a step up to which this is ahead of torch where torch multiplies the weights."""
FIRST_POSITIONS = 1024
MAX_HALVED_BYTES = 2 << 30
"""Of fp32 matrices that are copied as bf16."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference to the fused decoder's logits after one layer, relative to their largest."""

_PLAIN_LOOKUP = nn.Embedding.forward
_DONE, _AXES_DIFFER, _UNKNOWN_TOKEN = 0, -1, -2


class DecodeInputs(NamedTuple):
    """One step of T tokens, of which S are sampled after."""

    token_ids: Tensor
    """[T] int64."""
    embeds: Tensor | None
    """[T, H], contiguous; None: those of `token_ids`."""
    position_ids: Tensor
    """[1, T] or [axes, 1, T] int64."""
    sample_rows: Tensor | None
    """[S] int64 indices into T; None: every token."""
    metadata: AttentionMetadata
    lora: StepLoRA | None = None
    """What adapters add; None: no token has one."""


class _BoundAdapters(NamedTuple):
    loaded: weakref.ref[LoadedAdapters]
    handle: object
    layouts: tuple[Layout, ...]
    """By the number that compiled code knows them by."""


class NativeDecoder:
    """Text model, embedding and head of one family; `bind` it to KV pages before use."""

    def __init__(self, fused: FusedDecoder, family: ModelFamily) -> None:
        """Raises `ValueError` for a model it does not compute."""
        embedding, head, layers = family.embed_tokens, family.lm_head, fused.layers
        _require(compiled.kernels is not None, "it is not compiled")
        if not isinstance(embedding, nn.Embedding) or type(embedding).forward is not _PLAIN_LOOKUP:
            raise ValueError("the embedding is not a plain one")
        kind: type[nn.Module] = type(head)
        is_plain = kind in (nn.Linear, Int8Linear) and head.bias is None
        _require(is_plain, "the head is not a plain one")
        _require(family.final_softcap is None, "logits are capped")
        self._dtype = embedding.weight.dtype
        _require(self._dtype in TOLERANCE, f"{self._dtype} is not compiled for")
        _require(len({_sizes(layer) for layer in layers}) == 1, "layers differ in size")
        self._fused = fused
        self.position_axes = family.position_axes
        self.reads_bf16 = self._dtype is torch.float32 and _are_bf16(
            _matrices(fused, linear_weight(head))
        )
        """Matrices are read as bf16: the same numbers in half the memory traffic."""
        first = layers[0]
        self._before_head = (self._plain(embedding.weight), *self._norm(fused.norm))
        self._head = self._matrix(linear_weight(head))
        is_int8, is_bf16 = kind is Int8Linear, self._dtype is torch.bfloat16
        self._takes_any_step = is_int8 or (is_bf16 and not cpu_multiplies_bf16())
        self._num_outputs = head.out_features
        self._sizes = (first.num_heads, first.num_kv_heads, first.head_dim, first.down[0].shape[1])
        self._layers = [self._layer_weights(layer) for layer in layers]
        self._handle: object = None
        self._adapters: _BoundAdapters | None = None
        self._cos = self._sin = torch.empty((0, first.head_dim))

    def bind(
        self, kv_pages: KVPages, part: slice = slice(None), num_outputs: int | None = None
    ) -> None:
        """Attend over these pages from now on.

        To be compared with torch, it computes a part of its layers and the first outputs alone.
        """
        layers = tuple(
            (*weights, pages.keys, pages.values, *_asked_of(layer))
            for layer, weights, pages in zip(
                self._fused.layers, self._layers, kv_pages.layers, strict=True
            )
        )
        weight, scales = self._head
        head = weight[:num_outputs], None if scales is None else scales[:num_outputs], None
        self._num_outputs = len(head[0])
        # As `make` in module.cpp reads it.
        model = (*self._before_head, self._num_outputs, *head, *self._sizes)
        self._handle, self._adapters = _kernels().make(model, layers[part]), None

    def logits(self, inputs: DecodeInputs) -> Tensor | None:
        """Logits [S, V] float32; None for a step it does not compute.

        Raises `IndexError` for a token id outside the vocabulary, `ValueError` for blocks or slots
        outside the pages.
        """
        metadata, rows = inputs.metadata, inputs.sample_rows
        num_tokens = metadata.num_tokens
        if num_tokens > MAX_TOKENS and not self._takes_any_step:
            return None
        num_samples = num_tokens if rows is None else rows.shape[0]
        logits = torch.empty((num_samples, self._num_outputs))
        outcome = self._run(inputs, logits)
        if outcome > _DONE:
            self._grow(outcome)
            outcome = self._run(inputs, logits)
        if outcome == _UNKNOWN_TOKEN:
            raise IndexError("a token id is outside the vocabulary")
        return logits if outcome == _DONE else None

    def _run(self, inputs: DecodeInputs, logits: Tensor) -> int:
        metadata = inputs.metadata
        adapters: tuple[object, ...] = (None, None, None)
        if inputs.lora is not None and inputs.lora.loaded.decoder:
            bound = self._bound(inputs.lora.loaded)
            adapters = (bound.handle, *inputs.lora.spans(bound.layouts))
        return _kernels().run(
            self._handle,
            inputs.token_ids,
            inputs.embeds,
            inputs.position_ids,
            inputs.sample_rows,
            logits,
            self._cos,
            self._sin,
            metadata.query_start,
            metadata.kv_lens,
            metadata.block_tables,
            metadata.slot_mapping,
            metadata.visible_end,
            torch.get_num_threads(),
            *adapters,
        )

    def _bound(self, loaded: LoadedAdapters) -> _BoundAdapters:
        """These adapters as compiled code takes them. They are bound when a step first has them."""
        if self._adapters is None or self._adapters.loaded() is not loaded:
            layouts: dict[Layout, int] = {}
            layers = tuple(
                tuple(_adapted(loaded.decoder.get(module), layouts) for module in layer.modules)
                for layer in self._fused.layers
            )
            handle = _kernels().adapt(self._handle, layers)
            self._adapters = _BoundAdapters(
                weakref.ref(loaded, self._forget), handle, tuple(layouts)
            )
        return self._adapters

    def _forget(self, gone: weakref.ref[LoadedAdapters]) -> None:
        """Adapters that nobody has any more: their memory is held here alone."""
        if self._adapters is not None and self._adapters.loaded is gone:
            self._adapters = None

    def _grow(self, positions: int) -> None:
        """Tables of at least so many positions, in powers of two."""
        count = max(FIRST_POSITIONS, 1 << (positions - 1).bit_length())
        like = torch.empty(0, dtype=self._dtype)
        cos, sin = self._fused.rotation(like, plain_positions(count, self.position_axes))
        self._cos, self._sin = cos.float().contiguous(), sin.float().contiguous()

    def _layer_weights(self, layer: FusedLayer) -> tuple[object, ...]:
        _require(layer.gate.is_silu, "the activation is not SiLU")
        _require(layer.asked.sinks is None, "attention has sinks")
        return (
            *self._norm(layer.before),
            *self._norm(layer.between),
            *self._norm(layer.q_norm),
            *self._norm(layer.k_norm),
            *self._linear(layer.qkv),
            *self._linear(layer.out),
            *self._linear(layer.gate_up),
            *self._linear(layer.down),
        )

    def _norm(self, norm: RMSNorm | None) -> tuple[Tensor | None, float]:
        return (None, 0.0) if norm is None else (self._plain(norm.weight), norm.eps)

    def _linear(self, linear: Linear) -> tuple[Tensor | None, ...]:
        """Weight, scales and bias."""
        weight, bias = linear
        return *self._matrix(weight), None if bias is None else self._plain(bias)

    def _matrix(self, weight: Weight) -> tuple[Tensor, Tensor | None]:
        """The numbers, and the scales of int8."""
        if isinstance(weight, Int8Weight):
            return weight.values, weight.scales
        return weight.bfloat16() if self.reads_bf16 else self._plain(weight), None

    def _plain(self, tensor: Tensor) -> Tensor:
        _require(tensor.is_contiguous(), "a weight is not contiguous")
        _require(tensor.dtype == self._dtype, f"a weight is {tensor.dtype}")
        return tensor


@torch.inference_mode()
def native_decoder(
    fused: FusedDecoder, family: ModelFamily, dtype: torch.dtype, kv_pages: KVPages
) -> NativeDecoder | None:
    """The native decoder where each of its layers computes what the fused one's does.

    The fused decoder attends in torch here. Layers are compared one by one, on equal inputs. Over a
    whole model two correct ways may end far apart: some models amplify the rounding of one layer a
    thousandfold (SmolLM2-135M on this step: in bf16 torch is 13 off float32 where logits reach 36,
    and compiled code 2).
    """
    pages = probe_pages(family.num_layers, family.num_kv_heads, family.head_dim, dtype)
    try:
        decoder = NativeDecoder(fused, family)
        fault = _find_fault(decoder, fused, family, dtype, pages)
    except ValueError as error:
        logger.info("decode steps run in torch: %s", error)
        return None
    if fault is not None:
        logger.warning("decode steps run in torch: %s", fault)
        return None
    decoder.bind(kv_pages)
    return decoder


PROBE_OUTPUTS = 256
"""Outputs of the head that are compared after each layer but the last, after which all are."""


def _find_fault(
    decoder: NativeDecoder,
    fused: FusedDecoder,
    family: ModelFamily,
    dtype: torch.dtype,
    pages: KVPages,
) -> str | None:
    """Where compiled logits of a small step differ from torch's; None where they do nowhere.

    Layer i of both is given what torch has after layer i - 1, layer 0 embeddings of token ids.
    """
    positions, metadata = probe_positions(family.position_axes), probe_metadata()
    embeds: Tensor | None = None
    ids = _probe_ids()
    step = ForwardContext(metadata, ReferenceBackend(), pages)
    outputs = fused.residuals(family.embed_tokens(ids), positions, step)
    head = linear_weight(family.lm_head)
    for index, residual in enumerate(outputs):
        is_last = index == len(fused.layers) - 1
        compared = head if is_last else head[:PROBE_OUTPUTS]
        decoder.bind(pages, slice(index, index + 1), compared.shape[0])
        found = decoder.logits(DecodeInputs(ids, embeds, positions, None, metadata))
        if found is None:
            raise ValueError("a plain step is not computed")
        expected = linear(fused.norm(residual), compared).float()
        difference, largest = (found - expected).abs().max(), expected.abs().max()
        if not difference <= TOLERANCE[dtype] * largest:
            return f"layer {index} of the compiled ones differs by {difference:g}"
        embeds = residual
    return None


def _probe_ids() -> Tensor:
    """[T], few different ones: vocabularies can be small."""
    return torch.arange(PROBE_TOKENS) % 12


def _sizes(layer: FusedLayer) -> tuple[int, ...]:
    """What must be the same in all layers."""
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    shapes = [size for weight, _ in linears for size in weight.shape]
    return (*shapes, layer.num_heads, layer.num_kv_heads, layer.head_dim)


def _adapted(layer: JoinedLayer | None, layouts: dict[Layout, int]) -> tuple[object, ...] | None:
    """What `adapt` in module.cpp is told of one product; gives its layout a number."""
    if layer is None:
        return None
    return layer.a, layer.b, layouts.setdefault(layer.layout, len(layouts))


def _asked_of(layer: FusedLayer) -> tuple[float, ...]:
    """Window, scale and softcap of its attention; 0 for what there is not."""
    asked = layer.asked
    return asked.sliding_window or 0, asked.scale, asked.softcap or 0.0


def _matrices(fused: FusedDecoder, head: Weight) -> list[Weight]:
    linears = [
        linear
        for layer in fused.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    return [head, *(weight for weight, _ in linears)]


def _are_bf16(weights: list[Weight]) -> bool:
    """Whether all numbers are bf16 numbers, as they are where a published model was widened.

    Not of int8 weights, and never beyond `MAX_HALVED_BYTES`: the copies take half as much again.
    """
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) < len(weights) or sum(weight.nbytes for weight in plain) > MAX_HALVED_BYTES:
        return False
    return all(torch.equal(weight.bfloat16().float(), weight) for weight in plain)


def _kernels() -> compiled.Kernels:
    if compiled.kernels is None:
        raise RuntimeError("the decoder is not compiled")
    return compiled.kernels


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
