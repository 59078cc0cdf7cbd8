"""Forms with a file (multipart/form-data, RFC 7578), read while they arrive.

The file's bytes are written once, into the buffer that is handed on; nothing else keeps them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from starlette.requests import Request

from lookonce.errors import BadRequestError, TooLargeError, UnsupportedMediaTypeError
from lookonce.server.http.body import read_chunks
from lookonce.server.http.headers import header

MAX_FIELDS = 100
MAX_FIELD_BYTES = 256 * 1024
"""Of all fields but the file together."""
MAX_HEADER_BYTES = 8192
OVERHEAD_BYTES = MAX_FIELD_BYTES + (MAX_FIELDS + 1) * MAX_HEADER_BYTES
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(slots=True)
class Form:
    """`fields`: name → values in order, a list written as `name[]` under its plain name."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    file: bytearray | None = None
    """Nobody writes it any more."""


async def read_form(request: Request, max_file_bytes: int, file_name: str = "file") -> Form:
    """The form in the body; its one file is the field `file_name`.

    Raises `UnsupportedMediaTypeError`, `BadRequestError`, `TooLargeError` as soon as a limit is
    passed, and `ClientLeftError`.
    """
    boundary = _boundary(header(request.scope, b"content-type"))
    parser = FormParser(boundary, max_file_bytes, file_name)
    await read_chunks(request, max_file_bytes + OVERHEAD_BYTES, parser.feed)
    return parser.finish()


def field_of(body: bytes, content_type: str, name: str) -> str | None:
    """The field's value in a whole form, the last one as where forms are served; None where there
    is none. Nothing is refused, and no file is copied."""
    try:
        delimiter = b"\r\n--" + _boundary(content_type)
    except UnsupportedMediaTypeError:
        return None
    value: str | None = None
    at = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _after(body, delimiter, 0)
    for _ in range(MAX_FIELDS + 1):
        end = _after(body, delimiter, at)
        if end < 0 or body.startswith(b"--", at):
            break
        headers_end = body.find(b"\r\n\r\n", at, min(end, at + MAX_HEADER_BYTES))
        if headers_end >= 0:
            lines = body[at:headers_end].decode("utf-8", "replace").split("\r\n")
            length = end - len(delimiter) - headers_end - 4
            if _name_of(lines[1:]) == name and length <= MAX_FIELD_BYTES:
                value = body[headers_end + 4 : end - len(delimiter)].decode("utf-8", "replace")
        at = end
    return value or None


def _after(body: bytes, delimiter: bytes, at: int) -> int:
    """Where the next delimiter ends; -1 where there is none."""
    found = body.find(delimiter, at)
    return found + len(delimiter) if found >= 0 else -1


def _name_of(lines: list[str]) -> str | None:
    """Of a part with these headers."""
    found = None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = {key.lower(): text for key, text in _PARAMETER.findall(value)}
            found = parameters.get("name", "").replace('\\"', '"')
    return found


def _boundary(content_type: str) -> bytes:
    kind = content_type.partition(";")[0].strip().lower()
    found = _BOUNDARY.search(content_type)
    if kind != "multipart/form-data" or found is None:
        raise UnsupportedMediaTypeError(
            "the body is a form: send it as Content-Type: multipart/form-data with a boundary"
        )
    return (found[1] or found[2]).encode("latin-1")


class FormParser:
    """Takes a form in pieces of any size.

    data ──delimiter──▶ after it ──"\\r\\n"──▶ headers ──empty line──▶ data
                          └──"--"──▶ end
    """

    def __init__(self, boundary: bytes, max_file_bytes: int, file_name: str) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._max_file_bytes = max_file_bytes
        self._file_name = file_name
        self._waiting = bytearray(b"\r\n")  # so that the first delimiter is one like the others
        self._state = "data"
        self._form = Form()
        self._name: str | None = None
        self._value = bytearray()
        self._num_fields = 0
        self._field_bytes = 0

    def feed(self, data: bytes) -> None:
        """Raises `BadRequestError` or `TooLargeError`."""
        self._waiting += data
        while self._step():
            pass

    def finish(self) -> Form:
        """The form. Raises `BadRequestError` if it is cut off."""
        if self._state != "end":
            raise BadRequestError("the form is cut off: its closing boundary is missing")
        return self._form

    def _step(self) -> bool:
        """Take what the state can use; False when it needs more bytes."""
        match self._state:
            case "data":
                return self._read_data()
            case "after":
                return self._read_after()
            case "headers":
                return self._read_headers()
        self._waiting.clear()  # what follows the end has no meaning
        return False

    def _read_data(self) -> bool:
        waiting, delimiter = self._waiting, self._delimiter
        at = waiting.find(delimiter)
        if at < 0:
            self._take(max(0, len(waiting) - len(delimiter) + 1))
            return False
        self._take(at)
        del waiting[: len(delimiter)]
        self._close_part()
        self._state = "after"
        return True

    def _take(self, count: int) -> None:
        """Add the first bytes that wait to the part's value."""
        if not count:
            return
        if self._name is not None:
            self._value += memoryview(self._waiting)[:count]
            if self._name == self._file_name:
                if len(self._value) > self._max_file_bytes:
                    raise TooLargeError(
                        f"{self._file_name}: the media is larger than {self._max_file_bytes} bytes",
                        param=self._file_name,
                    )
            elif self._field_bytes + len(self._value) > MAX_FIELD_BYTES:
                raise TooLargeError(
                    f"the form's fields have more than {MAX_FIELD_BYTES} bytes", param=self._name
                )
        del self._waiting[:count]

    def _close_part(self) -> None:
        name, value = self._name, self._value
        self._name, self._value = None, bytearray()
        if name is None:
            return
        if name == self._file_name:
            self._form.file = value
            return
        self._field_bytes += len(value)
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise BadRequestError(f"{name}: the text is not UTF-8", param=name) from None
        self._form.fields.setdefault(name.removesuffix("[]"), []).append(text)

    def _read_after(self) -> bool:
        if len(self._waiting) < 2:
            return False
        mark = bytes(self._waiting[:2])
        del self._waiting[:2]
        if mark not in (b"--", b"\r\n"):
            raise BadRequestError("the form is malformed after a boundary")
        self._state = "end" if mark == b"--" else "headers"
        return True

    def _read_headers(self) -> bool:
        waiting = self._waiting
        end = 0 if waiting.startswith(b"\r\n") else waiting.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEADER_BYTES:
            if len(waiting) > MAX_HEADER_BYTES:
                raise TooLargeError(f"a part's headers have more than {MAX_HEADER_BYTES} bytes")
            return False
        lines = bytes(waiting[:end]).decode("utf-8", "replace").split("\r\n")
        del waiting[: end + (2 if end == 0 else 4)]
        self._open_part(lines)
        self._state = "data"
        # An empty value's delimiter begins with the line end that closed the headers.
        return True

    def _open_part(self, lines: list[str]) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise TooLargeError(f"the form has more than {MAX_FIELDS} parts")
        self._name = _name_of(lines)
        if not self._name:
            raise BadRequestError("a part of the form has no name")
        if self._name == self._file_name and self._form.file is not None:
            raise BadRequestError(f"{self._name}: one file at a time", param=self._name)
