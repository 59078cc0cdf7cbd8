"""What one planning pass may still spend and what it has decided: short-lived, one per step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat

from lookonce.core.request import Sequence
from lookonce.core.reuse_stats import FactsRecord
from lookonce.types.media import ProcessedItem
from lookonce.types.step import EncodeItem, NewSequence, ScheduledSequence


class EncoderBudget:
    """Encoder rows one step may compute; an item above the whole budget runs alone."""

    __slots__ = ("_left", "_untouched", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._left = rows
        self._untouched = True

    def affords(self, rows: int) -> bool:
        return rows <= self._left or self._untouched

    @property
    def most(self) -> int:
        """Rows of the largest item that it affords."""
        return sys.maxsize if self._untouched else self._left

    @property
    def spent(self) -> int:
        return self.rows - self._left

    @property
    def left(self) -> int:
        """Rows that are to spare; not above zero when the budget is used up."""
        return self._left

    def spend(self, rows: int) -> None:
        self._left -= rows
        self._untouched = False


class EncodeOwners:
    """Of each encoder run of a step, in order: the receipt and the feature that caused it."""

    __slots__ = ("_indices", "_records")

    def __init__(self) -> None:
        self._records: list[FactsRecord] = []
        self._indices: list[int] = []

    def __iter__(self) -> Iterator[tuple[FactsRecord, int]]:
        return zip(self._records, self._indices, strict=True)

    def add(self, facts: FactsRecord, index: int) -> None:
        self._records.append(facts)
        self._indices.append(index)

    def add_many(self, facts: FactsRecord, indices: range) -> None:
        """Columns, not pairs: the garbage collector would count each pair."""
        self._records += repeat(facts, len(indices))
        self._indices += indices


class StepPass:
    """One pass of planning: budgets going down, the plan growing."""

    __slots__ = (
        "encode",
        "encode_owners",
        "encoder",
        "new",
        "room_kept",
        "scheduled",
        "stalled",
        "starved",
        "tokens",
    )

    def __init__(self, tokens: int, encoder_rows: int) -> None:
        self.tokens = tokens
        """Token positions that can still be scheduled."""
        self.encoder = EncoderBudget(encoder_rows)
        self.new: list[NewSequence] = []
        self.encode: list[EncodeItem] = []
        self.encode_owners = EncodeOwners()
        """One of each entry of `encode`."""
        self.scheduled: list[ScheduledSequence] = []
        self.stalled = False
        """A running sequence waits for tokens or room: nobody is admitted who could take them."""
        self.room_kept = False
        """The first in turn waits for room: the others go on with the outputs they hold only."""
        self.starved: list[Sequence] = []
        """Those that could compute and got nothing."""

    def add_encode(
        self, key: bytes, item: ProcessedItem, rows: int, facts: FactsRecord, index: int
    ) -> None:
        """Run the encoder on `item`, for the feature `index` of the request with that receipt."""
        self.encoder.spend(rows)
        self.encode.append(EncodeItem(key, item))
        self.encode_owners.add(facts, index)
