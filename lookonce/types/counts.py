"""What one process counts, by name, in one buffer of numbers.

The buffer may be a file that other processes map (`server.shared_counts`): a count is in it from
the moment it is made, so it outlives a process that is killed.

    0       8 bytes   LAYOUT
    8       8 bytes   bytes of the names that are used
    16      doubles   the values, in the order of the names
    NAMES   text      one line per name: name TAB number of values TAB "gauge" or "counter"

Only one thread writes. A value is aligned, so that a reader sees it before or after a change; a
name is complete before it is counted as used.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LAYOUT = b"COUNTS_1"
SIZE = 64 * 1024
"""Bytes of a buffer; those that are not used take no memory."""
NAMES = 16 * 1024
_VALUES = 16
_USED = struct.Struct("=Q")


class Counts:
    """The counts of one process; without a buffer they are in the process's own memory."""

    def __init__(self, buffer: memoryview | None = None) -> None:
        """`buffer` has `SIZE` writable bytes, all zero."""
        self._buffer = memoryview(bytearray(SIZE)) if buffer is None else buffer
        self._buffer[: len(LAYOUT)] = LAYOUT
        self._numbers = self._buffer[_VALUES:NAMES].cast("d")
        self._num_values = 0
        self._names_nbytes = 0
        self._known: dict[str, memoryview[float]] = {}

    def values(self, name: str, length: int = 1, *, gauge: bool = False) -> memoryview[float]:
        """The `length` numbers of this name, 0 at first; callers of one name share them.

        A gauge is about the process as it is now: it ends with the process. Raises `ValueError`
        when there is no space for another name.
        """
        known = self._known.get(name)
        if known is not None:
            return known
        line = f"{name}\t{length}\t{'gauge' if gauge else 'counter'}\n".encode()
        end = self._num_values + length
        if end > len(self._numbers) or NAMES + self._names_nbytes + len(line) > SIZE:
            raise ValueError("there are more counts than a process may have")
        begin = NAMES + self._names_nbytes
        self._buffer[begin : begin + len(line)] = line
        self._names_nbytes += len(line)
        self._buffer[8:16] = _USED.pack(self._names_nbytes)
        made = self._known[name] = self._numbers[self._num_values : end]
        self._num_values = end
        return made

    def count(self, name: str, *, gauge: bool = False) -> Count:
        return Count(self.values(name, gauge=gauge))

    def by_label(self, name: str) -> CountByLabel:
        """Counts `name:label`; a label appears once it is counted."""
        return CountByLabel(self, name)

    def read(self) -> dict[str, Values]:
        return read_counts(self._buffer)


class Count:
    """One number."""

    __slots__ = ("_values",)

    def __init__(self, values: memoryview[float]) -> None:
        self._values = values

    @property
    def value(self) -> float:
        return self._values[0]

    def add(self, amount: float = 1.0) -> None:
        self._values[0] += amount

    def set(self, value: float) -> None:
        self._values[0] = value


class CountByLabel(Counter[str]):
    """A `Counter` whose numbers are also `Counts` of the name `name:label`.

    Change it by `[label] = …` and `[label] += …`.
    """

    def __init__(self, counts: Counts, name: str) -> None:
        super().__init__()
        self._counts, self._name = counts, name

    def __setitem__(self, label: str, value: int) -> None:
        super().__setitem__(label, value)
        self._counts.values(f"{self._name}:{label}")[0] = value

    def clear(self) -> None:
        for label in self:
            self[label] = 0
        super().clear()


@dataclass(frozen=True, slots=True)
class Values:
    """The numbers of one name."""

    numbers: tuple[float, ...]
    gauge: bool = False


def read_counts(buffer: bytes | memoryview) -> dict[str, Values]:
    """name → values of a buffer that `Counts` writes; empty for one that it has not begun."""
    if bytes(buffer[: len(LAYOUT)]) != LAYOUT:
        return {}
    (used,) = _USED.unpack(buffer[8:16])
    found, begin = {}, _VALUES
    for line in bytes(buffer[NAMES : NAMES + used]).decode().splitlines():
        name, length, kind = line.split("\t")
        end = begin + 8 * int(length)
        numbers = struct.unpack(f"={length}d", buffer[begin:end])
        found[name] = Values(numbers, kind == "gauge")
        begin = end
    return found


def add_up(all_counts: Iterable[dict[str, Values]]) -> dict[str, Values]:
    """The sums by name."""
    sums: dict[str, Values] = {}
    for counts in all_counts:
        for name, values in counts.items():
            before = sums.get(name)
            if before is not None:
                pairs = zip(before.numbers, values.numbers, strict=True)
                values = Values(tuple(a + b for a, b in pairs), values.gauge)
            sums[name] = values
    return sums
