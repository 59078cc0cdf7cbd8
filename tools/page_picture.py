"""Pictures of the web page of a busy server: `make page-pictures` puts them into docs.

Starts a server of nano itself. Needs Playwright and a Chromium (`make test-page` installs both).
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

SECONDS_OF_TRAFFIC = 30.0
SECONDS_BETWEEN = 20.0
LOOKS: dict[str, dict[str, Any]] = {
    "page": {"viewport": {"width": 1280, "height": 800}},
    "page-dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 390, "height": 780}},
}
"""File → how the browser shows the page."""
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black")
QUESTIONS = ("What is in the picture?", "What shape is it?", "What color is the background?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="The folder of the pictures.")
    parser.add_argument("--lookonce", default="lookonce", help="The command that serves.")
    chosen = parser.parse_args()
    with serving(chosen.lookonce) as url, sync_playwright() as driver:
        make_traffic(url)
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, look in LOOKS.items():
            traffic = threading.Thread(target=make_traffic, args=(url, SECONDS_BETWEEN))
            page = browser.new_page(**look)
            page.goto(url)
            traffic.start()
            traffic.join()
            talk(page)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            kept = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            kept.save(chosen.target / f"{name}.png", optimize=True)
            page.close()
        browser.close()


@contextmanager
def serving(command: str) -> Iterator[str]:
    """The URL of a server of nano that ends with the block."""
    server = subprocess.Popen([command, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        found = re.search(r"https?://\S+", server.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def talk(page: Page) -> None:
    page.get_by_role("button", name="Two shapes").click()
    page.locator(".receipt").wait_for()
    page.wait_for_timeout(1500)
    page.get_by_label("Question", exact=True).fill("Where is the red circle?")
    page.keyboard.press("Enter")
    page.locator(".receipt").nth(1).wait_for()
    page.wait_for_timeout(1200)


def make_traffic(url: str, seconds: float = SECONDS_OF_TRAFFIC) -> None:
    """Questions about a few pictures, some of them new, at a wandering rate."""
    rng = random.Random(0)
    until, seen = time.monotonic() + seconds, 1
    while time.monotonic() < until:
        seen += rng.random() < 0.3
        parts = [picture_part(rng.randrange(seen)) for _ in range(rng.choice((1, 1, 2)))]
        parts.append({"type": "text", "text": rng.choice(QUESTIONS)})
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
        httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        time.sleep(rng.choice((0.05, 0.2, 0.6)))


def picture_part(seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    image = Image.new("RGB", (84, 84), "white")
    box = (rng.randrange(8, 20), rng.randrange(8, 20), rng.randrange(60, 78), rng.randrange(60, 78))
    draw = ImageDraw.Draw(image)
    rng.choice((draw.ellipse, draw.rectangle))(box, fill=rng.choice(COLOURS))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


if __name__ == "__main__":
    main()
