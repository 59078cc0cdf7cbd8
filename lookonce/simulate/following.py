"""How a simulated router learns what engines hold: as by events and index, with less work.

A real engine's changes become messages, and a subscriber makes `Change`s of them for an index of
two arrays. A simulation makes the `Change`s at once, and its index is Python's own sets and
dictionaries. `tests/simulate/test_following.py` compares both with the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from lookonce.config import ENCODER_TOPIC
from lookonce.engine.process import cache_events
from lookonce.engine.process.cache_events import Computed, Load, StepEvents
from lookonce.fleet.index import DigestIndex, short
from lookonce.fleet.subscriber import Added, AllGone, Change, EngineLoad, Gone, PromptComputed


class FollowedEvents(StepEvents):
    """Collects what a step changes, as a subscriber would tell it: keys that come or go together
    are one change. `hand_on` gets the changes of a step in order."""

    def __init__(
        self,
        hand_on: Callable[[list[Change]], None],
        topic: str,
        take_outputs: Callable[[], tuple[list[bytes], list[bytes]]],
        load: Load,
    ) -> None:
        super().__init__(
            lambda topic, changes: None, topic, take_outputs, load, needs_content=False
        )
        self._hand_on = hand_on
        self._blocks: list[Change] = []
        self._coming: list[int] | None = None
        self._going: list[int] | None = None
        """Keys of the last change, if it is one of such."""

    def stored(
        self,
        block_hash: bytes,
        parent: bytes | None,
        tokens: bytes,
        items: tuple[bytes, ...],
        adapter: bytes = b"",
    ) -> None:
        if self._coming is None:
            self._coming, self._going = [], None
            self._blocks.append(Added(self._topic, self._coming))
        self._coming.append(short(block_hash))

    def removed(self, block_hash: bytes) -> None:
        if self._going is None:
            self._coming, self._going = None, []
            self._blocks.append(Gone(self._topic, self._going))
        self._going.append(short(block_hash))

    def cleared(self) -> None:
        self._coming = self._going = None
        self._blocks.append(AllGone(self._topic))

    def flush(self) -> None:
        changes: list[Change] = []
        if self._blocks:
            changes += self._blocks
            self._blocks, self._coming, self._going = [], None, None
        come, gone = self._take_outputs()
        if gone:
            changes.append(Gone(ENCODER_TOPIC, [short(key) for key in gone]))
        if come:
            changes.append(Added(ENCODER_TOPIC, [short(key) for key in come]))
        if self._requests:
            changes += [_told(each) for each in self._requests]
            self._requests = []
        if changes:
            self._hand_on(changes)


def _told(change: cache_events.Change) -> Change:
    """Of a prompt or of the load."""
    if isinstance(change, Load):
        return EngineLoad(*msgspec.structs.astuple(change))
    assert isinstance(change, Computed)
    return PromptComputed(
        change.request_id,
        change.num_tokens,
        list(change.items),
        change.block_hash,
        list(change.earlier) or None,
    )


class BlockIndex(DigestIndex):
    """A set of keys for each engine, without a bound."""

    def __init__(self) -> None:
        super().__init__(0)
        self._held: dict[int, set[int]] = {}

    def add(self, engine: int, keys: Iterable[int]) -> None:
        self._held.setdefault(engine, set()).update(keys)

    def remove(self, engine: int, keys: Iterable[int]) -> None:
        if engine in self._held:
            self._held[engine].difference_update(keys)

    def drop(self, engine: int) -> None:
        self._held.pop(engine, None)

    def holders(self, key: int) -> int:
        return sum(1 << engine for engine, keys in self._held.items() if key in keys)

    def holds(self, engine: int, key: int) -> bool:
        return engine in self._held and key in self._held[engine]

    def held(self, engine: int) -> set[int]:
        return set(self._held.get(engine, ()))

    def __len__(self) -> int:
        return len(set().union(*self._held.values()))


class OutputIndex(DigestIndex):
    """A bit for each engine, by key; without a bound."""

    def __init__(self) -> None:
        super().__init__(0)
        self._masks: dict[int, int] = {}

    def add(self, engine: int, keys: Iterable[int]) -> None:
        masks, bit = self._masks, 1 << engine
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def remove(self, engine: int, keys: Iterable[int]) -> None:
        masks, bit = self._masks, 1 << engine
        for key in keys:
            left = masks.get(key, 0) & ~bit
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)

    def drop(self, engine: int) -> None:
        self.remove(engine, list(self._masks))

    def holders(self, key: int) -> int:
        return self._masks.get(key, 0)

    def holds(self, engine: int, key: int) -> bool:
        return bool(self._masks.get(key, 0) >> engine & 1)

    def held(self, engine: int) -> set[int]:
        return {key for key, mask in self._masks.items() if mask >> engine & 1}

    def __len__(self) -> int:
        return len(self._masks)
