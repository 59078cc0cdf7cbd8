"""Growable token storage of one sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPARE_TOKENS = 64
"""Room made beyond doubling, so that short prompts do not grow every few tokens."""


class TokenBuffer:
    """Token ids as int32, appended in amortised O(1).

    Begins as a shared view of the prompt, which is never written: the first append moves to
    storage of its own, so that the samples of one request share the prompt until they generate.
    """

    __slots__ = ("_data", "_length")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._data = prompt
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        if self._length == len(self._data):
            grown = np.empty(2 * self._length + SPARE_TOKENS, dtype=np.int32)
            grown[: self._length] = self._data
            self._data = grown
        self._data[self._length] = token_id
        self._length += 1

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        length = self._length + len(token_ids)
        if length > len(self._data):
            grown = np.empty(2 * length + SPARE_TOKENS, dtype=np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[self._length : length] = token_ids
        self._length = length

    def view(self) -> NDArray[np.int32]:
        """All tokens, `[num_tokens]`, read-only and without a copy."""
        view = self._data[: self._length]
        view.flags.writeable = False
        return view

    def raw(self, start: int, stop: int) -> bytes:
        """Little-endian bytes of tokens `[start, stop)`."""
        return self._data[start:stop].tobytes()
