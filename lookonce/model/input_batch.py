"""The running sequences: tokens, block tables and rotary positions, kept from step to step.

With multi-axis rope (mrope) text counts on one line, and a picture of h x w merged patches stands
on a square: its tokens take (base + t, base + row, base + column), and text goes on at
base + max(h, w). So a token's position is its index plus a delta that changes only at pictures:

    index      0 1 2 3 4 5 6 7 8 9    a 2 x 3 picture in [2, 8)
    temporal   0 1 2 2 2 2 2 2 5 6
    height     0 1 2 2 2 3 3 3 5 6
    width      0 1 2 3 4 2 3 4 5 6    from 8 on: index - 3, for max(2, 3) - 6

The items of a film may share one base (`MediaFeature.film_time`): each takes
(base + film time, base + row, base + column), and text goes on at base + max(h, w), as after a
picture: so `generate` of transformers numbers them, also where the film's time reaches further.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lookonce.types.media import MediaFeature
from lookonce.types.step import DropTokens, Extension, NewSequence


class InputBatch:
    """Tokens, block tables and position deltas of up to `max_num_seqs` sequences.

    Arrays are indexed [row, ...]; `row_of` gives a sequence's row, which is reused after the
    sequence is removed. The operating system maps pages at the first touch, so rows that were
    never used take no memory.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        """[row, index]; one column more than the longest sequence, for its last sample."""
        self.block_tables = np.zeros((max_num_seqs, blocks), np.int32)
        self.tail_starts = np.zeros(max_num_seqs, np.int64)
        """[row]; from this index on, a token's position is its index plus `tail_deltas[row]`."""
        self.tail_deltas = np.zeros(max_num_seqs, np.int64)
        """Without mrope it is above 0 only in live sessions that have dropped tokens."""
        self.num_dropped = [0] * max_num_seqs
        """[row]; tokens that the sequence has lost."""
        self._block_size = block_size
        self._num_blocks = [0] * max_num_seqs
        self.input_keys: list[bytes | None] = [None] * max_num_seqs
        """[row]; an encoder-decoder's input, by key."""
        self._positions: list[MropePositions | None] = [None] * max_num_seqs
        self._rows: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, seq_id: int) -> int:
        """Raises `KeyError` for a sequence that was not added."""
        return self._rows[seq_id]

    def add(
        self,
        new: NewSequence,
        *,
        mrope: bool,
        text_after_film_time: bool = False,
        numbers_pictures: bool = False,
        encoder_decoder: bool = False,
    ) -> None:
        row = self._free.pop()
        self._rows[new.seq_id] = row
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self._num_blocks[row] = 0
        self.num_dropped[row] = 0
        self.input_keys[row] = new.features[0].key if encoder_decoder and new.features else None
        self._positions[row] = None
        if numbers_pictures:
            self._positions[row] = NumberedPictures(new.features)
        elif mrope:
            self._positions[row] = MropePositions(
                new.features, text_after_film_time=text_after_film_time
            )
        self._update_tail(row)

    def drop(self, change: DropTokens) -> int:
        """Remove tokens and their blocks; the indices of later tokens become smaller.

        Returns by how much the positions of the tokens after them become smaller: 0 without
        `reanchor`, otherwise what makes every later position its token's index again. With mrope
        positions lie below indices, so afterwards no position is above its index, and none of a
        later token below that of one before `change.start`.
        """
        row, count = self._rows[change.seq_id], change.num_tokens
        start, stop, size = change.start, change.start + count, self._block_size
        tokens, table = self.tokens[row], self.block_tables[row]
        tokens[start : change.length - count] = tokens[stop : change.length]
        used = self._num_blocks[row] - count // size
        table[start // size : used] = table[stop // size : used + count // size]
        self._num_blocks[row] = used
        for index, (_, target) in enumerate(change.moved, start // size):
            table[index] = target
        self.num_dropped[row] += count
        rotated = count + int(self.tail_deltas[row]) if change.reanchor else 0
        positions = self._positions[row]
        if positions is None:
            self.tail_deltas[row] += count - rotated
        else:
            positions.move_back(count, rotated)
            self._update_tail(row)
        return rotated

    def extend(self, extension: Extension) -> None:
        """Append tokens and media items to a sequence that was added before."""
        row = self._rows[extension.seq_id]
        end = extension.start + len(extension.token_ids)
        self.tokens[row, extension.start : end] = extension.token_ids
        positions = self._positions[row]
        if positions is not None:
            for feature in extension.features:
                positions.append(feature)
            self._update_tail(row)

    def _update_tail(self, row: int) -> None:
        positions = self._positions[row]
        self.tail_starts[row] = 0 if positions is None else max(0, positions.tail_start)
        self.tail_deltas[row] = 0 if positions is None else positions.tail_delta

    def remove(self, seq_ids: Iterable[int]) -> None:
        """An unknown sequence is no error: it may never have been scheduled."""
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._positions[row] = None
                self._free.append(row)

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        used = self._num_blocks[row]
        self.block_tables[row, used : used + len(block_ids)] = block_ids
        self._num_blocks[row] = used + len(block_ids)

    def write_tokens(
        self, seq_ids: Sequence[int], indices: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Write one token per sequence at its index; not of one that was removed meanwhile."""
        for seq_id, index, token in zip(seq_ids, indices, token_ids, strict=True):
            if (row := self._rows.get(seq_id)) is not None:
                self.tokens[row, index] = token

    def fill_mrope(self, row: int, start: int, out: NDArray[np.int64]) -> None:
        """Write the positions of `[start, start + n)` on three axes to `out` [3, n].

        Positions before `start` are dropped: their tokens are computed, and a live session may
        have had any number of items there.
        """
        positions = self._positions[row]
        if positions is not None:
            positions.forget_before(start)
            positions.fill(start, out)


SPARE_ITEMS = 16
"""Computed items that are kept at least, so that most steps need not move the lists."""


class MropePositions:
    """Positions of one sequence on three axes; append-only, O(window + log items) per window."""

    __slots__ = (
        *("_after_time", "_deltas", "_ends", "_film", "_forgotten_end"),
        *("_grids", "_starts"),
    )

    def __init__(
        self, features: Iterable[MediaFeature] = (), *, text_after_film_time: bool = False
    ) -> None:
        """`text_after_film_time`: see `ModelFamily`."""
        self._after_time = text_after_film_time
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._grids: list[tuple[int, int, int]] = []
        """`(film time, height, width)` of each item."""
        self._deltas: list[int] = [0]
        """`_deltas[i]` is the delta of text between items i - 1 and i."""
        self._forgotten_end = 0
        """End of the last item that was dropped."""
        self._film: tuple[int, int] = (-1, 0)
        """Where the last item of the last film ends, and the base of that film's positions."""
        for feature in features:
            self.append(feature)

    def append(self, feature: MediaFeature) -> None:
        """Add the next item, which lies after all others. Without a grid it counts like text."""
        if feature.grid is None:
            return
        _, height, width = feature.grid
        time, base = feature.film_time, feature.offset + self._deltas[-1]
        if time is not None and self._film[0] == feature.offset:
            base = self._film[1]
            self._deltas[-1] = base - feature.offset
        self._starts.append(feature.offset)
        self._ends.append(feature.end)
        self._grids.append((time or 0, height, width))
        last = (time or 0) + 1 if self._after_time else 0
        self._deltas.append(base + max(last, height, width) - feature.end)
        if time is not None:
            self._film = feature.end, base

    @property
    def tail_start(self) -> int:
        """From this index on, every axis is the index plus `tail_delta`."""
        return self._ends[-1] if self._ends else 0

    @property
    def tail_delta(self) -> int:
        return self._deltas[-1]

    def forget_before(self, index: int) -> None:
        """Drop items before `index`, whose positions will not be asked for again.

        O(1) on average: items are dropped when they are at least as many as those that stay. The
        last item always stays.
        """
        if len(self._ends) <= SPARE_ITEMS:
            return
        num_passed = bisect_right(self._ends, index, hi=len(self._ends) - 1)
        if num_passed < SPARE_ITEMS or 2 * num_passed < len(self._ends):
            return
        self._forgotten_end = self._ends[num_passed - 1]
        del self._starts[:num_passed], self._ends[:num_passed]
        del self._grids[:num_passed], self._deltas[:num_passed]

    def move_back(self, num_tokens: int, rotated: int) -> None:
        """Make all indices smaller by `num_tokens`, and all positions by `rotated`."""
        self._starts = [start - num_tokens for start in self._starts]
        self._ends = [end - num_tokens for end in self._ends]
        self._deltas = [delta + num_tokens - rotated for delta in self._deltas]
        self._film = self._film[0] - num_tokens, self._film[1] - rotated
        self._forgotten_end = max(0, self._forgotten_end - num_tokens)

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
        time, height, width = self._grids[item]
        base = self._starts[item] + self._deltas[item]
        rows, columns = np.divmod(np.arange(first, last) - self._starts[item], width)
        out[0] = base + time + rows // height
        out[1] = base + rows % height
        out[2] = base + columns


class NumberedPictures(MropePositions):
    """Positions of one sequence where a picture's tokens have their column, their row and the
    picture's number (HunYuanVL); all other tokens have their index on each axis.

    A row of a picture has one token more than its grid has columns, and there is a token before the
    first row and after the last one.
    """

    __slots__ = ("_num_forgotten",)

    def __init__(self, features: Iterable[MediaFeature] = ()) -> None:
        self._num_forgotten = 0
        super().__init__(features)

    def append(self, feature: MediaFeature) -> None:
        if feature.grid is None:
            return
        _, height, width = feature.grid
        self._starts.append(feature.offset + 1)
        self._ends.append(feature.offset + 1 + height * (width + 1))
        self._grids.append((0, height, width + 1))
        self._deltas.append(0)

    def forget_before(self, index: int) -> None:
        known = len(self._ends)
        super().forget_before(index)
        self._num_forgotten += known - len(self._ends)

    def _fill_item(self, item: int, first: int, last: int, out: NDArray[np.int64]) -> None:
        _, _, width = self._grids[item]
        out[1], out[0] = np.divmod(np.arange(first, last) - self._starts[item], width)
        out[2] = self._num_forgotten + item
