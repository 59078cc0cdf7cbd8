"""Three sizes of windows, as a fixture: a phone that is touched, a tablet and a desk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES: dict[str, dict[str, Any]] = {
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
    "tablet": {"viewport": {"width": 820, "height": 1100}, "has_touch": True},
    "desk": {"viewport": {"width": 1280, "height": 800}},
}


@pytest.fixture(params=SIZES)
def open_sized(request: pytest.FixtureRequest, open_page: Callable[..., Page]) -> Any:
    """`open_page` at each of the sizes."""
    options = SIZES[request.param]
    return lambda url, **more: open_page(url, **{**options, **more})
