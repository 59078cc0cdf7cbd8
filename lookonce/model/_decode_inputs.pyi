from typing import Any

from numpy.typing import NDArray

def fill_decodes(
    rows: list[int], starts: list[int], block_size: int, /, *arrays: NDArray[Any]
) -> int: ...
