"""Forms: every way of cutting them into chunks gives the same, and limits hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import BadRequestError, TooLargeError
from lookonce.server.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, FormParser, field_of

FILE = b"\r\n--b\r\n--boun\x00\xff\r\n-bound--\r\n--boun"
"""Bytes that look like the boundary, nearly."""


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\nContent-Type: text/plain\r\n'
    return b"--bound\r\n" + head.encode() + b"\r\n" + value + b"\r\n"


BODY = (
    b"preamble\r\n"
    + part("model", b"nano")
    + part("file", FILE, '; filename="a \\"b\\".wav"')
    + part("include[]", b"logprobs")
    + part("include[]", b"")
    + b"--bound--\r\nepilogue"
)


def parsed(body: bytes, cuts: list[int], max_file_bytes: int = 1000):
    parser = FormParser(b"bound", max_file_bytes, "file")
    at = 0
    for cut in [*sorted(cuts), len(body)]:
        parser.feed(body[at:cut])
        at = cut
    return parser.finish()


@given(st.lists(st.integers(0, len(BODY)), max_size=8))
def test_chunks_do_not_matter(cuts: list[int]) -> None:
    form = parsed(BODY, cuts)
    assert form.fields == {"model": ["nano"], "include": ["logprobs", ""]}
    assert bytes(form.file or b"") == FILE


def test_byte_by_byte() -> None:
    form = parsed(BODY, list(range(len(BODY))))
    assert bytes(form.file or b"") == FILE


@given(st.binary(max_size=300))
def test_any_file_comes_out_as_it_went_in(data: bytes) -> None:
    if b"\r\n--bound" in b"\r\n" + data:
        return
    form = parsed(part("file", data) + b"--bound--", [7, 60])
    assert bytes(form.file or b"") == data


PARTS = st.lists(
    st.builds(
        part,
        st.sampled_from(["model", "file0", "language"]),
        st.sampled_from([b"", b"nano", FILE[:40].replace(b"\xff", b""), b"\r\n\r\nname=model"]),
    ),
    max_size=5,
)


@given(PARTS, st.sampled_from([b"", b"preamble\r\n"]))
def test_a_field_of_a_whole_form_is_what_serving_it_reads(parts: list[bytes], begin: bytes) -> None:
    body = begin + b"".join(parts) + b"--bound--\r\n" + part("model", b"after the end")
    fields = parsed(body, []).fields
    for name in ("model", "language", "none"):
        wanted = (fields.get(name) or [""])[-1] or None
        assert field_of(body, 'multipart/form-data; boundary="bound"', name) == wanted


@given(st.binary(max_size=200), st.sampled_from(["", "text/plain", "multipart/form-data"]))
def test_a_field_of_what_is_no_form_is_none(body: bytes, sent_as: str) -> None:
    assert field_of(body, sent_as, "model") is None
    assert field_of(body, "multipart/form-data; boundary=bound", "model") is None


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (BODY[:-20], BadRequestError, "cut off"),
        (b"", BadRequestError, "cut off"),
        (b"--bound??", BadRequestError, "malformed"),
        (b"--bound\r\nX: y\r\n\r\nv\r\n--bound--", BadRequestError, "no name"),
        (part("file", b"a") + part("file", b"b") + b"--bound--", BadRequestError, "one file"),
        (part("x", b"\xff") + b"--bound--", BadRequestError, "UTF-8"),
        (part("file", bytes(1001)) + b"--bound--", TooLargeError, "larger than 1000"),
        (part("x", bytes(MAX_FIELD_BYTES + 99)), TooLargeError, "fields"),
        (part("x", b"") * (MAX_FIELDS + 1), TooLargeError, "parts"),
        (b"--bound\r\n" + b"h" * 20_000, TooLargeError, "headers"),
    ],
)
def test_what_is_refused(body: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parsed(body, [len(body) // 2])
