"""Request bodies: JSON bytes → declared structs, with errors that name the part at fault.

msgspec's errors have `[...]` where a client needs a list position. So after a failure the body is
searched for the exact part at fault (`messages[1].content[0]`).
"""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from lookonce.errors import BadRequestError, RequestError, TooLargeError
from lookonce.frontend.requests import (
    HARMLESS_VALUES,
    NOTHING,
    Raw,
    RefusesUnsupported,
    asks_nothing,
    raw_bytes,
)
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.headers import header
from lookonce.server.http.responses import ClientLeftError
from lookonce.server.http.unknown_fields import (
    ignored_fields,
    note_ignored,
    noting_kind,
    strict_kind,
    unknown_fields,
    unknown_part_fields,
)
from lookonce.server.services import Services
from lookonce.types.held_bytes import current_held_bytes
from lookonce.types.json_places import unreadable_number

T = TypeVar("T", bound=msgspec.Struct)
D = TypeVar("D")

MISSING_FIELD = re.compile("missing required field `(.+)`")
MSGSPEC_PATH = re.compile(r" - at `\$\.?([^`]{1,200})`$")

SMALL_BODY_BYTES = 64 * 1024
FEW_VALUES = 2048
"""A body with more commas is not decoded on the event loop."""
PLAIN_BYTES, FEW_BYTES = 1024, 256 * 1024
"""Nor is one with more bytes than the latter beside plain texts longer than the former: they are
decoded ten times as slowly where they are names, and must be searched for those that nothing
reads."""
MAX_VALUES = 1 << 21
"""Most commas and brackets of a body: decoding so many values takes a quarter of a second."""
MAX_LOCATED = 1 << 16
"""Commas of a body that is searched for the part at fault, in Python; in others it is named as
msgspec does, which may leave positions out (`messages[...]`)."""
SPACES = 64
"""Most bytes that are searched for what follows a text."""
SLICE_BYTES = 1 << 20
HEADROOM = 200
"""Frames that a thread adds to its stack before it decodes: the event loop's stack is deeper, and
what is nested too deeply to be encoded there must not be decoded."""


async def receive(request: Request, kind: type[T]) -> T:
    """Read and decode the body; raises `TooLargeError` or `BadRequestError` naming the part."""
    services: Services = request.app.state.services
    body = await read_body(request, services.config.media.max_body_bytes)
    decoded, unknown = await decoded_body(request, body, lambda: parse_reporting(body, kind))
    if unknown:
        request.state.warning = services.unknown_fields.judge(unknown, kind)
    if ignored := ignored_fields(decoded):
        note_ignored(request, services.unknown_fields, ignored)
    return decoded


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises as `read_chunks` does."""
    chunks: list[bytes] = []
    try:
        await read_chunks(request, limit, chunks.append)
    except BaseException:
        chunks.clear()  # what failed is a cycle that holds this list until it is collected
        raise
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_chunks(request: Request, limit: int, take: Callable[[bytes], object]) -> None:
    """Give `take` the body as it comes. Raises `ClientLeftError`, `TooLargeError` as soon as
    more than `limit` bytes are declared or read, and `QueueFullError` where the tenant's requests
    hold too much together; small bodies do not count."""
    declared = header(request.scope, b"content-length")
    if declared.isdigit() and int(declared) > limit:
        raise TooLargeError(f"the body has {declared} bytes, {limit} are allowed")
    held = current_held_bytes.get()
    size, counted, more = 0, 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        # The part gets no name here: what fails holds this frame until it is collected.
        num_bytes, more = len(message.get("body", b"")), message.get("more_body", False)
        size += num_bytes
        if size > limit:
            raise TooLargeError(f"the body has more than {limit} bytes, which is the limit")
        if size > SMALL_BODY_BYTES:
            if held is not None:
                held.take(size - counted)
                counted = size
            await _loop_turn(request, num_bytes)
        take(message.get("body", b""))


async def decoded_body(request: Request, body: bytes, decode: Callable[[], D]) -> D:
    """What `decode` makes of `body`: if it may take long in a thread, when it is the tenant's turn,
    and others are served meanwhile, except while msgspec decodes.

    Raises `TooLargeError`, `QueueFullError` and what `decode` raises.
    """

    def checked() -> D:
        _check_count(body)
        return _deeper(HEADROOM, decode)

    if len(body) <= SMALL_BODY_BYTES:
        return decode()
    await _loop_turn(request, len(body))
    if not _takes_long(body):
        return decode()
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    return await services.renderer.in_turn_if(True, principal.tenant, checked)


async def _loop_turn(request: Request, nbytes: int) -> None:
    """Wait for the tenant's turn to hold the event loop with so many bytes of a large body. What
    comes meanwhile is not read."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    await services.renderer.loop_turn(principal.tenant, nbytes)


def _deeper(frames: int, work: Callable[[], D]) -> D:
    return _deeper(frames - 1, work) if frames else work()


def _takes_long(body: bytes) -> bool:
    """Whether decoding may take long. Base64 media have no commas and are plain texts; the search
    for one byte passes over 10 MB in less than a millisecond."""
    at = -1
    for _ in range(FEW_VALUES):
        at = body.find(b",", at + 1)
        if at < 0:
            return _has_many_bytes(body)
    return True


def _has_many_bytes(body: bytes) -> bool:
    """Whether more than `FEW_BYTES` are in no plain text of some length."""
    count, is_ascii = len(body), body.isascii()
    start = body.find(b'"')
    for _ in range(4 * FEW_VALUES):
        end = body.find(b'"', start + 1)
        if start < 0 or end < 0 or count <= FEW_BYTES:
            return count > FEW_BYTES
        if end - start > PLAIN_BYTES and _is_plain_value(body, start + 1, end, is_ascii):
            count -= end - start
        start = end
    return True


def _is_plain_value(body: bytes, start: int, end: int, is_ascii: bool) -> bool:
    """Whether what is between two quotes is the end of a text, no name, and has no escapes. Where
    it is not sure, it is none."""
    return (
        body[end + 1 : end + SPACES].lstrip()[:1] in (b",", b"}", b"]")
        and body.find(b"\\", start, end) < 0
        and (is_ascii or _is_ascii(body, start, end))
    )


def _is_ascii(body: bytes, start: int, end: int) -> bool:
    slices = range(start, end, SLICE_BYTES)
    return all(body[at : min(at + SLICE_BYTES, end)].isascii() for at in slices)


def _check_count(body: bytes) -> None:
    count = 0
    for start in range(0, len(body), SLICE_BYTES):
        count += sum(body.count(mark, start, start + SLICE_BYTES) for mark in (b",", b"[", b"{"))
        if count > MAX_VALUES:
            raise TooLargeError(
                f"the body has more than {MAX_VALUES} commas and brackets, which is the limit: "
                "a prompt of so many parts or token ids would fit no model"
            )


def parse_reporting(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """As `parse`, and the names of fields that nothing reads."""
    _require_utf8(body)
    try:
        request: T = _decoder(strict_kind(kind)).decode(body)
    except (ValueError, RecursionError):
        request = parse(body, noting_kind(kind))
        return request, unknown_fields(body, kind) + unknown_part_fields(request)
    if isinstance(request, RefusesUnsupported):
        refuse_unsupported(request)
    return request, unknown_part_fields(request)


def _require_utf8(body: bytes) -> None:
    """msgspec does not look into names and values that it passes over."""
    if body.isascii():  # a tenth of a millisecond a megabyte, and no copy
        return
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"the body is not valid JSON: not UTF-8 (byte {error.start})", code="invalid_json"
        ) from None


def parse(body: bytes, kind: type[T]) -> T:
    """Decode `body` as `kind`; raises `BadRequestError` naming the part at fault."""
    try:
        request: T = _decoder(kind).decode(body)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8 or types
        raise _explain(body, kind, error) from None
    if isinstance(request, RefusesUnsupported):
        refuse_unsupported(request)
    return request


def refuse_unsupported(request: RefusesUnsupported) -> None:
    """Raises `BadRequestError` for a field that is declared unsupported and asks for something."""
    for name in type(request).unsupported_fields():
        value = getattr(request, name)
        if value is not NOTHING and raw_bytes(value) not in HARMLESS_VALUES:
            raise _unsupported(name)


def _unsupported(name: str) -> BadRequestError:
    return BadRequestError(
        f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
    )


def renamed_error(error: RequestError, param: str) -> RequestError:
    """`error` about a part that the request calls `param`, in its message too."""
    renamed = copy.copy(error)
    renamed.message = error.message.replace(error.param or param, param, 1)
    renamed.args = (renamed.message,)
    renamed.param = param
    return renamed


def message_place(param: str) -> tuple[int, str] | None:
    """The number of a message and what of it is named, of `messages[2].content`; None of other
    names."""
    head, bracket, rest = param.partition("]")
    number = head.removeprefix("messages[")
    return (int(number), rest) if bracket and number.isdecimal() else None


@contextmanager
def renaming_errors(renamed: Callable[[str], str]) -> Iterator[None]:
    """Errors inside name their part as `renamed` does; those that name none stay as they are."""
    try:
        yield
    except RequestError as error:
        param = error.param and renamed(error.param)
        if not param or param == error.param:
            raise
        raise renamed_error(error, param) from None


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def _explain(body: bytes, kind: type, error: Exception) -> BadRequestError:
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        return BadRequestError("the body is nested too deeply", code="invalid_json")
    except msgspec.ValidationError:  # JSON, with a number that is not read
        return unreadable_number(body, "")
    except ValueError as broken:
        return BadRequestError(f"the body is not valid JSON: {broken}", code="invalid_json")
    _refuse_unsupported_json(value, kind)
    message = _strip_path(str(error))
    if body.count(b",") > MAX_LOCATED:
        found = MSGSPEC_PATH.search(str(error))
        path = found[1] if found is not None else ""
    else:
        path, message = _locate(value, kind, "", message)
    where = f"{path}: " if path else ""
    missing = MISSING_FIELD.search(message)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
    return BadRequestError(f"{where}{message}", param=path or None, code="invalid_value")


def _refuse_unsupported_json(value: object, kind: type) -> None:
    """Say that a field is not supported rather than that another one is missing beside it."""
    if isinstance(value, dict) and issubclass(kind, RefusesUnsupported):
        for name in kind.unsupported_fields():
            if not asks_nothing(value.get(name)):
                raise _unsupported(name)


def _strip_path(message: str) -> str:
    """msgspec's message without its path."""
    text = message.split(" - at `")[0]
    return text[:1].lower() + text[1:]


def _locate(value: Any, kind: Any, path: str, message: str) -> tuple[str, str]:
    """`(path, message)` of the deepest part of `value` that does not fit its declared type."""
    for name, part, part_kind in _parts(value, _member(value, kind)):
        if part_kind in (Raw, msgspec.Raw):
            continue  # any JSON fits
        problem = _problem(part, part_kind)
        if problem is not None:
            inner = f"{path}{name}" if name.startswith("[") or not path else f"{path}.{name}"
            return _locate(part, part_kind, inner, problem)
    return path, message


def _problem(value: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return _strip_path(str(error))
    except RecursionError:
        return "nested too deeply"
    return None


def _member(value: Any, kind: Any) -> Any:
    """The member of a union that `value` is meant to be, by its tag or its JSON type."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    for member in typing.get_args(kind):
        if _is_meant(value, member):
            return member
    return None


def _is_meant(value: Any, member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if isinstance(value, dict) and isinstance(origin, type):
        if issubclass(origin, msgspec.Struct):
            config = origin.__struct_config__
            return config.tag is None or value.get(config.tag_field) == config.tag
        return issubclass(origin, dict)
    return isinstance(value, list) and origin in (list, tuple)


def _parts(value: Any, kind: Any) -> list[tuple[str, Any, Any]]:
    """`(path step, value, declared type)` of each direct part of a JSON object or array."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if isinstance(value, dict) and isinstance(origin, type):
        if issubclass(origin, msgspec.Struct):
            hints = typing.get_type_hints(origin, include_extras=True)
            return [
                (field.encode_name, value[field.encode_name], hints[field.name])
                for field in msgspec.structs.fields(origin)
                if field.encode_name in value and hints[field.name] != Raw
            ]
        if issubclass(origin, dict) and arguments:
            return [(f"[{key!r}]", part, arguments[1]) for key, part in value.items()]
    if isinstance(value, list) and origin in (list, tuple) and arguments:
        return [(f"[{i}]", part, arguments[0]) for i, part in enumerate(value)]
    return []
