"""Chromium for the page's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launched(driver: Playwright, microphone: Path) -> Iterator[Browser]:
    """Chromium, whose microphone plays this WAV file. Skips the test where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium: `apt-get install chromium`")
    arguments = (
        "--no-sandbox",
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        "--auto-accept-this-tab-capture",
        f"--use-file-for-fake-audio-capture={microphone}",
    )
    browser = driver.chromium.launch(executable_path=path, args=list(arguments))
    try:
        yield browser
    finally:
        browser.close()
