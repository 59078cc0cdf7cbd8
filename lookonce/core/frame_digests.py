"""Digests of the frames of sound that a live session adds to its tokens, for the hashes of blocks.

Equal sound from the beginning gives equal hashes, in whatever pieces it came.
"""

from __future__ import annotations

from blake3 import blake3

from lookonce.types.media import Array

DIGEST_BYTES = 32
SPARE = 64
"""Digests that are kept although they are not needed, so that they are not moved every step."""


class FrameDigests:
    """One digest for each frame, of which those before the last full block are forgotten."""

    __slots__ = ("_digests", "_first", "_moved", "total")

    def __init__(self) -> None:
        self._digests = bytearray()
        self._first = 0
        self._moved = False
        self.total = 0
        """Frames so far; position p has a frame if p < total."""

    def extend(self, frames: Array) -> None:
        """Add frames [n, *frame shape]."""
        count = frames.shape[0]
        self.total += count
        if self._moved:
            return
        size = frames.nbytes // count
        data = memoryview(frames.data).cast("B")
        for at in range(0, count * size, size):
            self._digests += blake3(data[at : at + size]).digest()

    def move_back(self, num_tokens: int) -> None:
        """So many tokens have left the sequence, and their frames with them: no prefix begins as it
        does any more, and nothing is hashed."""
        self.total -= num_tokens
        self._digests.clear()
        self._moved = True

    def between(self, start: int, end: int) -> bytes:
        """The digests of frames `[start, end)`, one after the other.

        Raises `RuntimeError` for a frame that is forgotten or has not come.
        """
        if self._moved or not self._first <= start <= end <= self.total:
            raise RuntimeError(f"frames {start} to {end} of {self._first} to {self.total}")
        first = self._first
        return bytes(self._digests[(start - first) * DIGEST_BYTES : (end - first) * DIGEST_BYTES])

    def forget_before(self, position: int) -> None:
        """Drop what will not be asked for again; amortised O(1)."""
        passed = min(position, self.total) - self._first
        if passed >= SPARE and not self._moved:
            del self._digests[: passed * DIGEST_BYTES]
            self._first += passed
