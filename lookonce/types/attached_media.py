"""Media that came behind a request's JSON as they are, not in base64: a fleet's front-end has
decoded large pictures to know them, and engines need not do that a second time."""

from __future__ import annotations

from contextvars import ContextVar

ATTACHED_HEADER = b"x-lookonce-attached"
"""The lengths, in bytes, of what stands behind the JSON, with commas between them."""
ATTACHED_SCHEME = "attached:"
"""Begins the URL of a picture that is attached; its number follows, from 0."""

attached_media: ContextVar[tuple[bytes, ...]] = ContextVar("attached_media", default=())
"""Of the request that is being served."""
