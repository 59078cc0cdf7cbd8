"""Tokens that the step under way samples: inputs of the next step before the host knows them.

A step's sampled tokens stay on the device until the step after it was begun. Where that one
computes such a token, its input id is written there, from one tensor to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

_Output = TypeVar("_Output")


class Draw(Generic[_Output]):
    """Tokens that were drawn, one per row."""

    __slots__ = ("output", "tokens")

    def __init__(self, tokens: Tensor | list[int], output: Callable[[], _Output]) -> None:
        self.tokens = tokens
        """[n] on the device, or the values; -1 where a row failed."""
        self.output = output
        """Gives what is told of them, once the step was waited for; called once."""

    def __call__(self) -> _Output:
        return self.output()


def on_device(tokens: Tensor | list[int], device: torch.device) -> Tensor:
    """Drawn tokens [n] on the device."""
    if isinstance(tokens, list):
        return torch.tensor(tokens, dtype=torch.int64, device=device)
    return tokens


Part = tuple[Sequence[int], Tensor | list[int]]
"""Sequences, and the tokens that were drawn for them."""


class SampledTokens:
    """Which sequences' last tokens are only on the device, and where."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        """Number of the step that was begun last."""
        self._drawn: list[Part] = []
        """By that step."""
        self.rows: dict[int, int] = {}
        """Sequence → row of `tokens`, of those whose last token is only on the device: the step
        before has drawn it."""
        self._tokens = torch.empty(0, dtype=torch.int64, device=device)

    def begin_step(self) -> int:
        """A step begins: what the one before it has drawn, and has not told, are its inputs.
        Returns its number, for `told`."""
        self._step += 1
        drawn = self._drawn
        if drawn:
            self._drawn = []
            seq_ids = [seq_id for part, _ in drawn for seq_id in part]
            self.rows = {seq_id: row for row, seq_id in enumerate(seq_ids)}
            parts = [on_device(tokens, self._device) for _, tokens in drawn]
            tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._tokens = tokens.clamp(min=0)  # one that failed is computed once more, for nobody
        elif self.rows:
            self.rows = {}
        return self._step

    def note(self, seq_ids: Sequence[int], tokens: Tensor | list[int]) -> None:
        """The step that was begun last has drawn these."""
        self._drawn.append((seq_ids, tokens))

    def told(self, step: int) -> None:
        """What a step has drawn is on the host: the next one does not take it from the device."""
        if step == self._step:
            self._drawn.clear()

    def remove(self, seq_ids: Iterable[int]) -> None:
        if self.rows:
            for seq_id in seq_ids:
                self.rows.pop(seq_id, None)

    @property
    def tokens(self) -> Tensor:
        """[n] on the device, of the sequences of the step before; 0 where one failed."""
        return self._tokens
