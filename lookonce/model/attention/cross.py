"""Cross-attention over keys and values that were computed once per input and are held.

The encoder cache holds one tensor per input: keys and values of every decoder layer. In a step each
token reads those of its own sequence's input; tokens of all sequences that share an input attend in
one call, so inputs of different lengths need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class InputReaders:
    """The tokens of a step that read one input."""

    key: bytes
    at: Tensor | slice
    """Indices into the step's T tokens; a slice where they lie side by side."""


class Recording:
    """The attention weights of some heads for tokens `rows` of a step, which `CrossStates` adds."""

    def __init__(self, rows: slice, heads: Sequence[tuple[int, int]]) -> None:
        """`heads`: (layer, head)."""
        self.rows = rows
        self.heads = heads
        self._found: dict[tuple[int, int], Tensor] = {}

    @property
    def weights(self) -> Tensor:
        """[heads, tokens, S]."""
        return torch.stack([self._found[head] for head in self.heads])

    def record(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """query [Hq, tokens, D] and keys [Hkv, S, D] of one layer."""
        for at, head in self.heads:
            if at == layer:
                group = head * len(keys) // len(query)
                scores = query[head].float() @ keys[group].float().T * scale
                self._found[at, head] = scores.softmax(dim=-1)


class CrossStates:
    """The inputs of one step, with their keys and values."""

    def __init__(
        self,
        parts: Sequence[tuple[Tensor | slice, Tensor]],
        recordings: Sequence[tuple[Recording, Tensor]] = (),
    ) -> None:
        """`parts`: which tokens, and keys and values [2 · layers, Hkv, S, D] for them: keys of
        layer i at 2i, its values at 2i + 1. `recordings`: with the states of their input."""
        self._parts = parts
        self._recordings = recordings

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D] → [1, T, Hq, D]; every token sees its whole input."""
        for recording, states in self._recordings:
            recording.record(layer, query[0, :, recording.rows], states[2 * layer], scale)
        outputs = [
            scaled_dot_product_attention(
                query[:, :, at],
                states[2 * layer].unsqueeze(0),
                states[2 * layer + 1].unsqueeze(0),
                scale=scale,
                enable_gqa=query.shape[1] != states.shape[1],
            ).transpose(1, 2)
            for at, states in self._parts
        ]
        if len(outputs) == 1:
            return outputs[0]
        joined = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        for (at, _), output in zip(self._parts, outputs, strict=True):
            joined[:, at] = output
        return joined
