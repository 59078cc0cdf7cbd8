"""Growable token storage of one sequence."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_INT32 = "i"


class TokenBuffer:
    """Token ids as int32: the prompt, never written, and what has been appended since.

    The samples of one request share the prompt.
    """

    __slots__ = ("_appended", "_num_prompt", "_prompt", "append")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt)
        self._appended = array(_INT32)
        self.append = self._appended.append
        """Add one token; amortised O(1)."""

    def __len__(self) -> int:
        return self._num_prompt + len(self._appended)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        self._appended.frombytes(token_ids.tobytes())

    def view(self) -> NDArray[np.int32]:
        """All tokens, `[num_tokens]`, read-only; a copy where any were appended."""
        view = self._prompt.view()
        if self._appended:
            view = np.concatenate((view, np.array(self._appended, dtype=np.int32)))
        view.flags.writeable = False
        return view

    def raw(self, start: int, stop: int) -> bytes:
        """Little-endian bytes of tokens `[start, stop)`."""
        in_prompt = self._prompt[start:stop].tobytes()
        first = max(0, start - self._num_prompt)
        return in_prompt + self._appended[first : max(0, stop - self._num_prompt)].tobytes()
