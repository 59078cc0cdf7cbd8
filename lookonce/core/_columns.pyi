from array import array

from lookonce.types.media import MediaFeature, Modality, ProcessedItem

def bind(feature: type, item: type, expansion: type, /) -> None: ...
def plain_columns(
    features: tuple[MediaFeature, ...], start: int, /
) -> tuple[list[bytes], bytes, bytes, int, set[Modality]] | None: ...
def one_run_items(
    keys: list[bytes],
    items: dict[bytes, ProcessedItem],
    offsets: array[int],
    ends: array[int],
    /,
) -> list[ProcessedItem] | None: ...
