"""A real Chromium, driven by Playwright; its microphone plays a file over and over.

Where either is absent, these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.drawing import wav
from tests.support.page.chromium import launched
from tests.support.server.realtime import spoken_turn

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright

GONE = "net::ERR_CONNECTION"
PageOpener = Callable[..., "Page"]


@pytest.fixture(scope="package")
def driver() -> Iterator[Playwright]:
    """Stopped before other tests begin: it uses this thread's event loop."""
    # Imported here, since pytest reads this file even where the tests beside it are skipped.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="package")
def browser(driver: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    said = tmp_path_factory.mktemp("microphone") / "said.wav"
    said.write_bytes(wav(spoken_turn() / 32_768))
    with launched(driver, said) as browser:
        yield browser


def is_error(line: ConsoleMessage) -> bool:
    """Not so the page's look at a server that its test has ended."""
    return line.type == "error" and GONE not in line.text


@pytest.fixture
def open_page(browser: Browser) -> Iterator[PageOpener]:
    """`open_page(url, **context options)`; fails the test on any error in the page's console."""
    contexts, errors = [], []

    def get(url: str, *, expect_errors: bool = False, **options: object) -> Page:
        size = {"width": 1280, "height": 800}
        context = browser.new_context(**{"viewport": size, **options})  # type: ignore[arg-type]
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        if not expect_errors:
            page.on("console", lambda line: errors.append(line.text) if is_error(line) else None)
        page.goto(url)
        return page

    yield get
    for context in contexts:
        context.close()
    assert errors == []
