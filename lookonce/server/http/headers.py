"""Headers of a request, as ASGI has them: pairs of bytes, names in lower case."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case; empty where there is none."""
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return ""
