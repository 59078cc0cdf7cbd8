"""How errors travel between processes."""

from __future__ import annotations

import pytest

from lookonce.errors import (
    BadRequestError,
    DrainingError,
    MediaNotCachedError,
    RequestFailedError,
    UnprocessableMediaError,
    error_from_wire,
    error_to_wire,
)


@pytest.mark.parametrize(
    "error",
    [
        BadRequestError("no", param="guided_regex", code="invalid_grammar"),
        UnprocessableMediaError("no"),
        MediaNotCachedError("gone", param="messages[0].content[1]"),
        DrainingError("bye"),
    ],
)
def test_an_error_is_the_same_after_its_way(error):
    made = error_from_wire(*error_to_wire(error))
    assert type(made) is type(error)
    assert (made.message, made.code) == (error.message, error.code)
    assert getattr(made, "param", None) == getattr(error, "param", None)


def test_an_unknown_kind_is_a_failed_request():
    assert isinstance(error_from_wire("Strange", "?", None, "odd"), RequestFailedError)
