"""Cross-attention over keys and values that were computed once per input and are held.

The encoder cache holds one tensor per input: keys and values of every decoder layer. In a step each
token reads those of its own sequence's input; tokens of all sequences that share an input attend in
one call, so inputs of different lengths need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class InputReaders:
    """The tokens of a step that read one input."""

    key: bytes
    at: Tensor | slice
    """Indices into the step's T tokens; a slice where they lie side by side."""


class CrossStates:
    """The inputs of one step, with their keys and values."""

    def __init__(self, parts: Sequence[tuple[Tensor | slice, Tensor]]) -> None:
        """`parts`: which tokens, and keys and values [2 · layers, Hkv, S, D] for them: keys of
        layer i at 2i, its values at 2i + 1."""
        self._parts = parts

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D] → [1, T, Hq, D]; every token sees its whole input."""
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
