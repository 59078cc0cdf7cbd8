"""A server as it is by default on an NVIDIA GPU: bfloat16, paged attention, graphs, steps ahead.

Other servers that tests start there compute in float32, for which there is no paged attention.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from tests.support.device import ON_CUDA
from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer

SEEN = [
    (one, other)
    for one, other in product(product(("red", "blue"), ("circle", "square")), repeat=2)
    if one != other
]
STORY = "Once upon a time there was a small house by the sea. " * 12
"""More than a page of attention has tokens."""


@pytest.mark.skipif("TEST_DEVICE" not in os.environ, reason="make test-cuda")
def test_many_pictures_at_once_are_told_rightly_and_long_prompts_are_found_again() -> None:
    def told(server: LiveServer, index: int) -> str:
        messages = ask(picture(*SEEN[index]), "What is in the picture?")
        response = server.post("/v1/chat/completions", {"model": "nano", "messages": messages})
        assert response.status_code == 200, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    with LiveServer("--dtype", "bfloat16", "--async-scheduling", "on") as server:
        with ThreadPoolExecutor(len(SEEN)) as pool:
            answers = list(pool.map(lambda index: told(server, index), range(len(SEEN))))
        for (one, other), answer in zip(SEEN, answers, strict=True):
            assert answer == f"a {' '.join(one)} to the left of a {' '.join(other)}"
        assert [told(server, index) for index in range(2)] == answers[:2]
        cached = []
        for _ in range(2):
            usage = server.client().completions.create(model="nano", prompt=STORY, max_tokens=8)
            assert usage.usage is not None
            assert usage.usage.prompt_tokens > 256
            details = usage.usage.prompt_tokens_details
            cached.append(details.cached_tokens if details else 0)
        assert cached[0] == 0
        assert cached[1] >= 256
        assert ("attention varlen" if ON_CUDA else ", attention ") in server.log()
