"""A grammar for samplers, without its engine."""

from __future__ import annotations

import numpy as np

EOS = 3


class Spelled:
    """A grammar that allows exactly `words`, token by token, then the end."""

    def __init__(self, words: list[list[int]], gives_up_after: int = 1000) -> None:
        self.words = words
        self.gives_up_after = gives_up_after

    def start(self) -> SpelledState:
        return SpelledState(self)


class SpelledState:
    def __init__(self, grammar: Spelled) -> None:
        self._grammar = grammar
        self.taken: list[int] = []

    @property
    def error(self) -> str | None:
        return "too hard" if len(self.taken) >= self._grammar.gives_up_after else None

    def allowed(self) -> set[int]:
        count = len(self.taken)
        fitting = [w for w in self._grammar.words if w[:count] == self.taken]
        return {w[count] if count < len(w) else EOS for w in fitting}

    def fill(self, allowed: np.ndarray) -> None:
        allowed[:] = 0
        for token in self.allowed():
            allowed[token // 8] |= 1 << token % 8

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)
