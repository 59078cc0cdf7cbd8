"""LoRA adapters, held side by side and added to the outputs of linear layers.

An adapter has two matrices for each layer that it changes, A [r, in] and B [out, r], and a scale:

    y = W x  +  scale · B A x

All adapters that are loaded lie in one pair of matrices for each layer, the rank's dimension one
adapter after the other (`LoadedAdapters`). It is never changed: whoever adds or removes an adapter
makes a new one, beside the steps, and the runner takes it between two steps.

    rows of a step     [ decodes and short chunks, adapters mixed | a chunk | a chunk ]
                         one product with all adapters, and a       products with the
                         mask of the scales [rows, all ranks]       chunk's adapter alone

A step in which no sequence has an adapter runs as if there were none. A small step of a plain
decoder runs in compiled code, where each row takes the products of its own adapter alone
(`native.decoder`, by `StepLoRA.spans`). Others run in torch: in `FusedDecoder`, which adds what
`StepLoRA` computes, or in transformers' own forward with hooks at its linear layers
(`LinearHooks`). Encoders are always run for one adapter at a time, so a hook's rows are all of that
adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lookonce.model.bf16_products import linear
from lookonce.types.lora import LoRAIdentity

SHORT_CHUNK = 16
"""Chunks of at most so many tokens share one product with all adapters; longer ones have their own.
"""


class LoRALayer(NamedTuple):
    """One adapter's part in one linear layer."""

    a: Tensor
    """[r, in]"""
    b: Tensor
    """[r, out]: B transposed."""
    scale: float


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """One adapter, its layers by their name in the model."""

    identity: LoRAIdentity
    rank: int
    layers: Mapping[str, LoRALayer]


@dataclass(frozen=True, slots=True)
class AdaptableLayers:
    """The linear layers of one model that adapters may change, by name."""

    decoder: dict[str, nn.Module] = field(default_factory=dict)
    encoder: dict[str, nn.Module] = field(default_factory=dict)
    """Layers of media encoders and of what leads from them to the decoder."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name → why a linear layer cannot be changed."""
    gated_products: list[nn.Module] = field(default_factory=list)
    """Parts of encoders whose forward was replaced by one that calls no linear layers."""


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer, whatever holds its weights; None for other modules."""
    found = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (found[0], found[1]) if isinstance(found[0], int) and isinstance(found[1], int) else None


class _Span(NamedTuple):
    """An adapter's place among the ranks of a layer."""

    start: int
    end: int
    scale: float


_NOWHERE = _Span(0, 0, 0.0)


class Layout(dict[bytes, _Span]):
    """Adapter's digest → its place. Layers whose adapters have equal ranks and scales share one."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """All adapters' parts in one linear layer; R is the sum of their ranks there."""

    a: Tensor
    """[R, in]"""
    b: Tensor
    """[R, out]"""
    layout: Layout


class LoadedAdapters:
    """Adapters that are loaded, side by side. It is not changed: `with_adapter` and `without` give
    another one."""

    def __init__(self, layers: AdaptableLayers, adapters: Sequence[LoRAAdapter] = ()) -> None:
        self._layers = layers
        self._adapters = {adapter.identity.digest: adapter for adapter in adapters}
        layouts: dict[tuple[tuple[bytes, _Span], ...], Layout] = {}
        self.decoder = self._joined(layers.decoder, layouts)
        self.encoder = self._joined(layers.encoder, layouts)

    @property
    def gated_products(self) -> Sequence[nn.Module]:
        return self._layers.gated_products

    def with_adapter(self, adapter: LoRAAdapter) -> LoadedAdapters:
        others = [each for each in self._adapters.values() if each.identity != adapter.identity]
        return LoadedAdapters(self._layers, [*others, adapter])

    def without(self, digest: bytes) -> LoadedAdapters:
        kept = [each for key, each in self._adapters.items() if key != digest]
        return LoadedAdapters(self._layers, kept)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._adapters

    @property
    def num_bytes(self) -> int:
        joined = (*self.decoder.values(), *self.encoder.values())
        return sum(layer.a.nbytes + layer.b.nbytes for layer in joined)

    def _joined(
        self,
        modules: Mapping[str, nn.Module],
        layouts: dict[tuple[tuple[bytes, _Span], ...], Layout],
    ) -> dict[nn.Module, JoinedLayer]:
        """By linear layer, of those that some adapter changes. The adapters' own matrices become
        views of the joined ones, so that they are held once."""
        found = {}
        for name, module in modules.items():
            parts = {
                digest: adapter.layers[name]
                for digest, adapter in self._adapters.items()
                if name in adapter.layers
            }
            if not parts:
                continue
            spans, start = [], 0
            for digest, part in parts.items():
                spans.append((digest, _Span(start, start + len(part.a), part.scale)))
                start += len(part.a)
            layout = layouts.setdefault(tuple(spans), Layout(spans))
            a = torch.cat([part.a for part in parts.values()])
            b = torch.cat([part.b for part in parts.values()])
            found[module] = JoinedLayer(a, b, layout)
        return self._held_once(modules, found)

    def _held_once(
        self, modules: Mapping[str, nn.Module], joined: dict[nn.Module, JoinedLayer]
    ) -> dict[nn.Module, JoinedLayer]:
        names = {module: name for name, module in modules.items()}
        for digest, adapter in self._adapters.items():
            layers = dict(adapter.layers)
            for module, layer in joined.items():
                span = layer.layout.get(digest)
                if span is not None:
                    rows = slice(span.start, span.end)
                    layers[names[module]] = LoRALayer(layer.a[rows], layer.b[rows], span.scale)
            self._adapters[digest] = LoRAAdapter(adapter.identity, adapter.rank, layers)
        return joined


class _Part(NamedTuple):
    """Neighbouring rows of a step."""

    rows: slice
    adapter: bytes | None
    """Of all of them; None: they have several, or some none."""


class StepLoRA:
    """What adapters add in one step of the decoder, or in one call of an encoder."""

    def __init__(
        self, loaded: LoadedAdapters, lengths: Sequence[int], adapters: Sequence[bytes]
    ) -> None:
        """`lengths` [B] are the tokens of each sequence of the step, one after the other, and
        `adapters` [B] the digest of its adapter, empty for none. Raises `KeyError` for one that is
        not loaded."""
        for digest in adapters:
            if digest and digest not in loaded:
                raise KeyError("an adapter that is not loaded")
        self.loaded = loaded
        self.num_rows: int | None = sum(lengths)
        """Tokens of the step; None: any number, as in an encoder."""
        self._given = tuple(lengths), tuple(adapters)
        self._owners: list[bytes] = []
        """Adapter of each row of the mixed parts."""
        self._parts: list[_Part] = []
        self._spans: tuple[Sequence[Layout], tuple[Tensor, Tensor]] | None = None
        self._masks: dict[Layout, Tensor] = {}
        """[rows of mixed parts, R]: a row's scale where its own adapter's ranks are."""
        self._divide(lengths, adapters)

    def is_of(
        self, loaded: LoadedAdapters, lengths: Sequence[int], adapters: Sequence[bytes]
    ) -> bool:
        return loaded is self.loaded and self._given == (tuple(lengths), tuple(adapters))

    @classmethod
    def whole(cls, loaded: LoadedAdapters, adapter: bytes) -> StepLoRA:
        """For one call of an encoder, all of whose rows have one adapter."""
        step = cls(loaded, (0,), (adapter,))
        step.num_rows, step._parts = None, [_Part(slice(None), adapter)]
        return step

    def _divide(self, lengths: Sequence[int], adapters: Sequence[bytes]) -> None:
        start = mixed = 0
        for length, adapter in zip(lengths, adapters, strict=True):
            end = start + length
            if length > SHORT_CHUNK:
                self._add_mixed(mixed, start)
                if adapter:
                    self._parts.append(_Part(slice(start, end), adapter))
                mixed = end
            else:
                self._owners += [adapter] * length
            start = end
        self._add_mixed(mixed, start)

    def _add_mixed(self, start: int, end: int) -> None:
        """The mixed rows from `start` on; one part alone where all have one adapter."""
        if start == end:
            return
        owners = self._owners[len(self._owners) - (end - start) :]
        if len(set(owners)) == 1:
            del self._owners[len(self._owners) - (end - start) :]
            if owners[0]:
                self._parts.append(_Part(slice(start, end), owners[0]))
            return
        self._parts.append(_Part(slice(start, end), None))

    def spans(self, layouts: Sequence[Layout]) -> tuple[Tensor, Tensor]:
        """Where the ranks of each token's adapter begin and end in each layout, [layouts, T, 2]
        int32, and its scale there, [layouts, T] float32; nowhere for a token without one."""
        if self._spans is not None and self._spans[0] is layouts:
            return self._spans[1]
        lengths, adapters = self._given
        rows = [[layout.get(adapter, _NOWHERE) for layout in layouts] for adapter in adapters]
        repeats = torch.tensor(lengths)
        told = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(layouts), 3)
        found = told.repeat_interleave(repeats, 0).transpose(0, 1)
        bounds = found[..., :2].to(torch.int32).contiguous()
        self._spans = layouts, (bounds, found[..., 2].float().contiguous())
        return self._spans[1]

    def add(self, modules: Sequence[nn.Module], inputs: Tensor, outputs: Tensor) -> None:
        """Add the adapters' part to `outputs` [T, N] of linear layers over `inputs` [T, K], one
        layer's columns after the other's."""
        first = 0
        for module in modules:
            sizes = linear_sizes(module)
            assert sizes is not None
            layer = self.loaded.decoder.get(module) or self.loaded.encoder.get(module)
            if layer is not None:
                self._add(layer, inputs, outputs[:, first : first + sizes[1]])
            first += sizes[1]

    def _add(self, layer: JoinedLayer, inputs: Tensor, outputs: Tensor) -> None:
        if self.num_rows is not None and len(inputs) != self.num_rows:
            raise ValueError(f"a layer has {len(inputs)} rows in a step of {self.num_rows} tokens")
        seen = 0
        for rows, adapter in self._parts:
            if adapter is None:
                given = inputs[rows]
                mask = self._mask(layer)[seen : seen + len(given)]
                seen += len(given)
                # Nothing of other adapters stays, not even what is infinite there.
                down = (linear(given, layer.a) * mask).masked_fill_(mask == 0, 0)
                _add_product(outputs[rows], down, layer.b)
            elif (span := layer.layout.get(adapter)) is not None:
                ranks = slice(span.start, span.end)
                down = linear(inputs[rows], layer.a[ranks])
                _add_product(outputs[rows], down, layer.b[ranks], span.scale)

    def _mask(self, layer: JoinedLayer) -> Tensor:
        mask = self._masks.get(layer.layout)
        if mask is None:
            scales = torch.zeros((len(self._owners), len(layer.a)))
            for row, adapter in enumerate(self._owners):
                span = layer.layout.get(adapter)
                if span is not None:
                    scales[row, span.start : span.end] = span.scale
            mask = self._masks[layer.layout] = scales.to(layer.a)
        return mask


def _add_product(outputs: Tensor, down: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """outputs [T, N] += scale · down [T, R] · b [R, N]"""
    if outputs.dtype is torch.float32:
        outputs.addmm_(down, b, alpha=scale)
    else:
        outputs.add_(linear(down, b.t()), alpha=scale)


class LinearHooks:
    """Lets linear layers of transformers' modules add what a `StepLoRA` computes.

    Hooks stay from one step to the next as long as steps have adapters: registering them takes
    about as long as a small model's step.
    """

    def __init__(self) -> None:
        self._step: StepLoRA | None = None
        self._loaded: LoadedAdapters | None = None
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def adding(self, step: StepLoRA) -> Iterator[None]:
        """In this block layers of the decoder add the adapters of this step."""
        if step.loaded is not self._loaded:
            self.remove()
            self._handles = [self._hook(module) for module in step.loaded.decoder]
            self._loaded = step.loaded
        self._step = step
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def encoding(self, step: StepLoRA) -> Iterator[None]:
        """In this block layers of encoders add the adapter of this call."""
        handles = [self._hook(module) for module in step.loaded.encoder]
        self._step = step
        try:
            with _own_forwards(step.loaded.gated_products):
                yield
        finally:
            self._step = None
            for handle in handles:
                handle.remove()

    def remove(self) -> None:
        """Called where a step has no adapters; cheap where there are no hooks."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles, self._loaded = [], None

    def _hook(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self._add)

    def _add(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._step is not None:
            inputs = args[0]
            self._step.add(
                (module,),
                inputs.reshape(-1, inputs.shape[-1]),
                output.view(-1, output.shape[-1]),
            )


@contextmanager
def _own_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this block modules whose forward was replaced run transformers' own."""
    replaced = [(each, vars(each).pop("forward")) for each in modules]
    try:
        yield
    finally:
        for module, forward in replaced:
            module.forward = forward


class RunnerLoRA:
    """What a runner has of adapters: those that are loaded, and which sequences have one."""

    def __init__(self, layers: AdaptableLayers) -> None:
        self.layers = layers
        self.loaded = LoadedAdapters(layers)
        """The runner's thread replaces it between two steps."""
        self.hooks = LinearHooks()
        self._of_sequence: dict[int, bytes] = {}
        """Sequence → digest of its adapter; those without one are missing."""
        self._last: StepLoRA | None = None
        """Of the last step that had adapters: decode steps of the same sequences have it again."""

    def add(self, seq_id: int, adapter: bytes) -> None:
        if adapter:
            self._of_sequence[seq_id] = adapter

    @property
    def in_use(self) -> bool:
        """Whether some sequence has an adapter; only then steps ask."""
        return bool(self._of_sequence)

    def remove(self, seq_ids: Iterable[int]) -> None:
        if self._of_sequence:
            for seq_id in seq_ids:
                self._of_sequence.pop(seq_id, None)
            if not self._of_sequence:
                self.hooks.remove()
                self._last = None

    def step(self, seq_ids: Sequence[int], lengths: Sequence[int]) -> StepLoRA | None:
        """What adapters add in a step of these sequences; None where none has one. Raises
        `KeyError` for an adapter that is not loaded."""
        adapters = [self._of_sequence.get(seq_id, b"") for seq_id in seq_ids]
        if any(adapters):
            last = self._last
            if last is None or not last.is_of(self.loaded, lengths, adapters):
                last = self._last = StepLoRA(self.loaded, lengths, adapters)
            return last
        self.hooks.remove()
        return None

    def encoding(self, adapter: bytes) -> AbstractContextManager[None]:
        """A block in which encoders run with an adapter. Raises `KeyError` for one that is not
        loaded."""
        return self.hooks.encoding(StepLoRA.whole(self.loaded, adapter))
