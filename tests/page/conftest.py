"""A real Chromium, driven by Playwright; its microphone hears a file over and over.

Where either is absent, these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.drawing import wav
from tests.support.server.realtime import spoken_turn

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

PageOpener = Callable[..., "Page"]


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, closed before other tests begin: its driver uses this thread's event loop."""
    # Imported here, since pytest reads this file even where the tests beside it are skipped.
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium: `apt-get install chromium`")
    with sync_playwright() as driver:
        said = tmp_path_factory.mktemp("microphone") / "said.wav"
        said.write_bytes(wav(spoken_turn() / 32_768))
        microphone = (
            "--use-fake-device-for-media-stream",
            "--use-fake-ui-for-media-stream",
            f"--use-file-for-fake-audio-capture={said}",
        )
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", *microphone])
        yield browser
        browser.close()


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
            page.on("console", lambda line: errors.append(line.text) if line.type == "error" else 0)
        page.goto(url)
        return page

    yield get
    for context in contexts:
        context.close()
    assert errors == []
