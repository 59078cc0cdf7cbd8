"""What a user does on the page: drop files, ask, read answers and receipts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from tests.support.drawing import encoded, picture

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NO_PLAYWRIGHT = "no Playwright to drive a browser: `make test-page` installs it"

expect = pytest.importorskip("playwright.sync_api", reason=NO_PLAYWRIGHT).expect
"""Playwright's assertion that waits. Without Playwright, modules that import it are skipped."""

RED_AND_BLUE = (("red", "circle"), ("blue", "square"))

DROP = """([base64, name, type]) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const event = new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
    document.body.dispatchEvent(event);
  }
}"""


def drop_file(page: Page, data: bytes, name: str, media_type: str) -> None:
    page.evaluate(DROP, [base64.b64encode(data).decode(), name, media_type])


def drop_picture(page: Page) -> None:
    drop_file(page, encoded(picture(*RED_AND_BLUE)), "two.png", "image/png")


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Model")


def stages(page: Page) -> list[str]:
    """The newest receipt's words about its only item: process, encode, prefill."""
    row = page.locator(".receipt").last.get_by_role("row").nth(1)
    return row.locator(".mark").all_inner_texts()


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tile").filter(has=page.get_by_role("heading", name=name, exact=True))
