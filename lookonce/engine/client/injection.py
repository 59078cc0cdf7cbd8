"""Items processed elsewhere on their way into the processor cache, judged one by one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

import msgspec

from lookonce.cache.directory import Directory
from lookonce.ipc.messages import KeyedItem, UpdateCache
from lookonce.types.media import ProcessedItem

InjectionStatus = Literal["stored", "already_held", "rejected"]
Keyed = tuple[bytes, ProcessedItem]
Update = Callable[[Iterable[KeyedItem]], Awaitable[UpdateCache]]
"""Lists items in directory and store."""


class InjectionOutcome(msgspec.Struct, frozen=True):
    """What became of one item."""

    status: InjectionStatus
    reason: str | None = None


STORED = InjectionOutcome("stored")
ALREADY_HELD = InjectionOutcome("already_held")
DISABLED = InjectionOutcome("rejected", "cache disabled")
NO_ROOM = InjectionOutcome("rejected", "the cache has no room beside the items in use")


async def inject(directory: Directory, update: Update, items: Sequence[Keyed]) -> list[InjectionOutcome]:
    """What became of each item, in order; each is one query, and a hit where it is held already.

    With the processor cache off nothing is counted. Raises `UnavailableError`.
    """
    if not directory.capacity_bytes:
        return [DISABLED] * len(items)
    outcomes: list[InjectionOutcome | None] = []
    new: dict[bytes, ProcessedItem] = {}
    for key, item in items:
        outcomes.append(_judge(directory, key, item, new))
    if new:
        await update(KeyedItem(key, item) for key, item in new.items())
    stored = {key for key in new if key in directory}
    settled = [o or (STORED if k in stored else NO_ROOM)
               for o, (k, _) in zip(outcomes, items, strict=True)]  # fmt: skip
    for outcome in settled:
        directory.count("hit" if outcome is ALREADY_HELD else "miss")
    return settled


def _judge(
    directory: Directory, key: bytes, item: ProcessedItem, new: dict[bytes, ProcessedItem]
) -> InjectionOutcome | None:
    """None for an item that is to be sent, which is noted in `new`."""
    if key in new:
        return ALREADY_HELD
    if directory.lists_for_certain(key):
        directory.pin(key)
        directory.unpin(key)  # it becomes the most recent one
        return ALREADY_HELD
    if item.nbytes > directory.capacity_bytes:
        return InjectionOutcome(
            "rejected",
            f"the item has {item.nbytes} bytes; the cache holds {directory.capacity_bytes}",
        )
    new[key] = item
    return None
