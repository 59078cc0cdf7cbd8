"""A picture of the web page of a running server that is busy: `page_picture.py URL docs/page.png`.

Needs Playwright and a Chromium (`make test-page` installs both) and a fresh `lookonce serve`.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import shutil
import threading
import time

import httpx
from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

SECONDS_OF_TRAFFIC = 45
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black")
QUESTIONS = ("What is in the picture?", "What shape is it?", "What color is the background?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("target")
    parser.add_argument("--dark", action="store_true")
    chosen = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": 1280, "height": 800},
            color_scheme="dark" if chosen.dark else "light",
        )
        page.goto(chosen.url)
        traffic = threading.Thread(target=make_traffic, args=(chosen.url,))
        traffic.start()
        traffic.join()
        talk(page)
        page.screenshot(path=chosen.target)
        browser.close()


def talk(page: Page) -> None:
    page.get_by_role("button", name="Two shapes").click()
    page.locator(".receipt").wait_for()
    page.wait_for_timeout(1500)
    page.get_by_label("Question", exact=True).fill("Where is the red circle?")
    page.keyboard.press("Enter")
    page.locator(".receipt").nth(1).wait_for()
    page.wait_for_timeout(1200)


def make_traffic(url: str) -> None:
    """Questions about a few pictures, some of them new, at a wandering rate."""
    rng = random.Random(0)
    until, seen = time.monotonic() + SECONDS_OF_TRAFFIC, 1
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
