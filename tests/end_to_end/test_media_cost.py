"""Pictures that are dear to decode, through the real server: refused, or kept from delaying others.

Small variants of the attacks in `tests/attack/test_media.py`.
"""

from __future__ import annotations

import base64
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.drawing import image_part, picture, text_part
from tests.support.live_server import LiveServer, until
from tests.support.render.bombs import Scan, gif, png, progressive_jpeg

CHAT = "/v1/chat/completions"
REFINING = Scan(refining=True)


def part_of(data: bytes) -> dict[str, object]:
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def question(*parts: dict[str, object]) -> dict[str, object]:
    content = [*parts, text_part("What?")]
    return {"model": "nano", "messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (progressive_jpeg(64, [REFINING] * 600), "more than 100 scans (JPEG)"),
        (progressive_jpeg(64, [Scan()] * 100), "more than 100 scans (JPEG)"),
        (png(64, 64, chunks=20_001), "more than 20000 chunks (PNG)"),
        (gif(64, 64, comments=20_001), "blocks before its first frame (GIF)"),
        (progressive_jpeg(64, [])[:20] + bytes(25_000_000), "CPU seconds; at most 10 are allowed"),
        (gif(60_000, 60_000), "more than 50000000 pixels"),
    ],
    ids=["scans", "101 scans", "chunks", "blocks", "strays", "pixels"],
)
def test_a_bomb_is_refused_by_name_before_any_worker_sees_it(
    server: LiveServer, data: bytes, words: str
) -> None:
    before = server.metrics()
    good = image_part(picture(("red", "circle")))
    answer = server.post(CHAT, question(good, part_of(data)))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (413, "messages[0].content[1]")
    assert words in error["message"]
    after = server.metrics()
    assert after["media_refused_total:estimate"] == before["media_refused_total:estimate"] + 1
    assert after["media_queued_total:image"] <= before["media_queued_total:image"] + 1


def test_an_ordinary_progressive_picture_is_served(server: LiveServer) -> None:
    answer = server.post(CHAT, question(part_of(progressive_jpeg(300, [Scan()] * 10))))
    assert answer.status_code == 200


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one worker short jobs wait for it")
def test_heavy_pictures_leave_a_worker_for_others(server: LiveServer) -> None:
    """Five legal pictures that take a second of CPU each, then a small one: it does not wait."""
    scans = [REFINING] * 98
    heavy = [part_of(progressive_jpeg(3000 + 8 * number, scans)) for number in range(5)]
    small = image_part(picture(("blue", "square")))
    with ThreadPoolExecutor(6) as clients:
        slow = [clients.submit(server.post, CHAT, question(each)) for each in heavy]
        until(lambda: server.metrics()["media_waiting"] >= 2, 100, server.log)
        assert server.post(CHAT, question(small)).status_code == 200
        num_done = sum(each.done() for each in slow)
    assert num_done <= 2
    assert all(each.result().status_code == 200 for each in slow)


def test_a_worker_that_is_killed_while_idle_costs_nobody_a_picture(server: LiveServer) -> None:
    for number in range(3):
        for pid in media_workers(server):
            os.kill(pid, 9)
        part = part_of(progressive_jpeg(40 + number, []))
        assert server.post(CHAT, question(part)).status_code == 200


def media_workers(server: LiveServer) -> list[int]:
    """Media workers of this server, by their session and command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
        except (OSError, IndexError):
            continue
        if b"lookonce.render.media.worker" in command and int(session) == server.process.pid:
            found.append(int(folder.name))
    return found
