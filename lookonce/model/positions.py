"""Rotary positions of any stretch of a sequence, from its media features alone.

With multi-axis rope (mrope) text counts on one line, and a picture of h x w merged patches stands
on a square: its tokens take (base + t, base + row, base + column), and text goes on at
base + max(h, w). So a token's position is its index plus a delta that changes only at pictures:

    index      0 1 2 3 4 5 6 7 8 9    a 2 x 3 picture in [2, 8)
    temporal   0 1 2 2 2 2 2 2 5 6
    height     0 1 2 2 2 3 3 3 5 6
    width      0 1 2 3 4 2 3 4 5 6    from 8 on: index - 3, for max(2, 3) - 6
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lookonce.types.media import MediaFeature

SPARE_ITEMS = 16
"""Passed items that are kept at least, so that forgetting them is not worth a look each step."""


class MropePositions:
    """Positions of one sequence on three axes; append-only, O(window + log items) per window."""

    __slots__ = ("_deltas", "_ends", "_forgotten_end", "_grids", "_starts")

    def __init__(self, features: Iterable[MediaFeature] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._grids: list[tuple[int, int, int]] = []
        self._deltas: list[int] = [0]
        """`_deltas[i]` holds for text before item i and after item i - 1."""
        self._forgotten_end = 0
        """Where the last item ended that is not stored any more."""
        for feature in features:
            self.append(feature)

    def append(self, feature: MediaFeature) -> None:
        """Add the next item, which lies after all others; one without a grid counts like text."""
        if feature.grid is None:
            return
        _, height, width = feature.grid
        self._starts.append(feature.offset)
        self._ends.append(feature.end)
        self._grids.append(feature.grid)
        self._deltas.append(self._deltas[-1] + max(height, width) - feature.length)

    @property
    def tail_start(self) -> int:
        """From this index on, every axis is the index plus `tail_delta`."""
        return self._ends[-1] if self._ends else 0

    @property
    def tail_delta(self) -> int:
        return self._deltas[-1]

    def forget_before(self, index: int) -> None:
        """Nobody will ask any more for positions before `index`.

        O(1) on average: items go once they are as many as those that stay. The last one stays.
        """
        if len(self._ends) <= SPARE_ITEMS:
            return
        num_passed = bisect_right(self._ends, index, hi=len(self._ends) - 1)
        if num_passed < SPARE_ITEMS or 2 * num_passed < len(self._ends):
            return
        self._forgotten_end = self._ends[num_passed - 1]
        del self._starts[:num_passed], self._ends[:num_passed]
        del self._grids[:num_passed], self._deltas[:num_passed]

    def fill(self, start: int, out: NDArray[np.int64]) -> None:
        """Write the positions of `[start, start + n)` to `out` [3, n]."""
        if start < self._forgotten_end:
            raise RuntimeError(f"the positions before {self._forgotten_end} are forgotten")
        end = start + out.shape[1]
        out[:] = np.arange(start, end)
        item, text = bisect_right(self._ends, start), start
        while item < len(self._starts) and self._starts[item] < end:
            first, last = max(start, self._starts[item]), min(end, self._ends[item])
            out[:, text - start : first - start] += self._deltas[item]
            self._fill_item(item, first, last, out[:, first - start : last - start])
            item, text = item + 1, last
        out[:, text - start :] += self._deltas[item]

    def _fill_item(self, item: int, first: int, last: int, out: NDArray[np.int64]) -> None:
        _, height, width = self._grids[item]
        base = self._starts[item] + self._deltas[item]
        rows, columns = np.divmod(np.arange(first, last) - self._starts[item], width)
        out[0] = base + rows // height
        out[1] = base + rows % height
        out[2] = base + columns
