"""What requests may ask of a processor (`mm_processor_kwargs`), shared by several families.

Options narrow what the folder allows and never widen it: a 1x1 picture must not be blown up to
gigabytes by a request.
"""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.errors import BadRequestError
from lookonce.render.families.base import Options


def bad_option(name: str, message: str) -> BadRequestError:
    return BadRequestError(f"mm_processor_kwargs: {message}", param=f"mm_processor_kwargs.{name}")


def longest_edge(kwargs: Mapping[str, object], least: int, most: int) -> Options:
    """`size.longest_edge` in pixels where it is not `most`, the folder's own, which is no option.

    Raises `BadRequestError` unless it is a whole number from `least` to `most`.
    """
    size = kwargs.get("size")
    if size is None:
        return {}
    edge = size.get("longest_edge") if isinstance(size, Mapping) and len(size) == 1 else None
    if type(edge) is not int or not least <= edge <= most:
        raise bad_option("size", f"size must hold longest_edge, a number from {least} to {most}")
    return {} if edge == most else {"longest_edge": edge}
