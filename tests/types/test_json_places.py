"""Errors about numbers can be sent, and take no longer than a moment."""

from __future__ import annotations

import msgspec
import pytest

from lookonce.errors import BadRequestError
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.types import json_places
from lookonce.types.json_places import unreadable_number


def sent(error: BadRequestError) -> bytes:
    return msgspec.json.encode(ErrorResponse(ErrorBody(error.message, "", error.param, None)))


@pytest.mark.parametrize("text", ['{"a": 1e999, "\\ud800": 1e999}', '{"\\udfff": {"a": [1e999]}}'])
def test_names_that_are_no_unicode_are_sent_all_the_same(text: str) -> None:
    error = unreadable_number(text, "arguments")
    assert b"beyond 1.8e+308" in sent(error)


def test_what_is_large_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a film of base64 a number at its end would be searched for in Python's decoder."""
    monkeypatch.setattr(json_places.json, "loads", lambda *_, **__: pytest.fail("searched"))
    large = b'{"url": "%s", "temperature": 1e999}' % (b"a" * json_places.MAX_SEARCHED_BYTES)
    for text in (large, "[%s1e999]" % ("1," * (json_places.MAX_SEARCHED_VALUES + 1))):
        error = unreadable_number(text, "")
        assert error.message == "a number is too large or too long"
        assert error.param is None


def test_a_number_alone_has_no_name() -> None:
    error = unreadable_number("1e999", "")
    assert error.message == "a number beyond 1.8e+308, which is the limit"
    assert error.param is None


def test_a_limit_of_no_digits_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_places.sys, "get_int_max_str_digits", lambda: 0)
    error = unreadable_number('{"a": 12, "b": 1e999}', "")
    assert error.param == "b"
