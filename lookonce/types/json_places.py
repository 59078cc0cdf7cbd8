"""Places in JSON values, for errors that name them: `arguments.cities[2]`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from lookonce.errors import BadRequestError

MAX_KEY_CHARS, MAX_NAMES = 64, 16
"""Of the place that an error names: clients choose the keys and the depth."""
MAX_SEARCHED_BYTES, MAX_SEARCHED_VALUES = 1 << 20, 1 << 14
"""Of JSON that is searched for the number at fault, in Python; of more it is said that there is
one."""
Place: TypeAlias = "tuple[Place, object] | None"
"""That of what a value is in, and its key or number there; None: the whole value."""


def parts_of(value: object) -> Iterator[tuple[object, Place]]:
    """All values in a JSON value, itself and the keys of objects among them, with their places; a
    key has its object's."""
    # Not recursive, because clients choose the depth.
    waiting: list[tuple[object, Place]] = [(value, None)]
    while waiting:
        part, place = waiting.pop()
        yield part, place
        if isinstance(part, Mapping):
            waiting += [(key, place) for key in part]
            waiting += [(inner, (place, key)) for key, inner in part.items()]
        elif isinstance(part, Sequence) and not isinstance(part, str):
            waiting += [(inner, (place, number)) for number, inner in enumerate(part)]


def place_name(place: Place, param: str) -> str:
    """`param` and the way from there, as in `param.key[2]`; long keys are cut. Python's decoder
    takes keys with half of a pair of surrogates, which no answer could hold: it becomes `?`."""
    names: list[str] = []
    while place is not None:
        place, key = place
        names.append(f"[{key}]" if isinstance(key, int) else f".{str(key)[:MAX_KEY_CHARS]}")
    name = (param + "".join(reversed(names[-MAX_NAMES:]))).removeprefix(".")
    return name.encode("utf-8", "replace").decode()


class _Unreadable(str):
    """Why a number is not read."""


def unreadable_number(text: str | bytes, param: str) -> BadRequestError:
    """The error about JSON, the value of `param`, with a number that msgspec does not read: it says
    which number, and why, unless there is too much to search."""
    value = None
    if len(text) <= MAX_SEARCHED_BYTES and _num_commas(text) <= MAX_SEARCHED_VALUES:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text, parse_int=_read_int, parse_float=_read_float)
    name, why = param, "a number is too large or too long"
    for part, place in parts_of(value):
        if isinstance(part, _Unreadable):
            name, why = place_name(place, param), str(part)
            break
    where = f"{name}: " if name else ""
    return BadRequestError(f"{where}{why}", param=name or None, code="invalid_value")


def _num_commas(text: str | bytes) -> int:
    return text.count(",") if isinstance(text, str) else text.count(b",")


def _read_int(text: str) -> object:
    most = sys.get_int_max_str_digits() or sys.int_info.default_max_str_digits
    if len(text.removeprefix("-")) <= most:
        return 0
    return _Unreadable(f"a number of more than {most} digits, which is the limit")


def _read_float(text: str) -> object:
    if abs(float(text)) < float("inf"):
        return 0
    return _Unreadable(f"a number beyond {sys.float_info.max:.2g}, which is the limit")
