"""Processed items of an exact size, for cache tests."""

from lookonce.types.media import ITEM_OVERHEAD, Array, Expansion, ProcessedItem


def expansion(count: int = 4) -> Expansion:
    return Expansion(((900, 1), (901, count), (902, 1)), 901)


def item(nbytes: int = 1000, count: int = 4) -> ProcessedItem:
    """An item that every cache accounts for with exactly `nbytes`."""
    size = nbytes - ITEM_OVERHEAD
    return ProcessedItem(
        "image", {"pixels": Array("uint8", (size,), bytes(size))}, expansion(count)
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")
