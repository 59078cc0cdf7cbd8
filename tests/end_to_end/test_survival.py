"""Clients that disconnect. What is killed and stopped is in test_chaos.py."""

from __future__ import annotations

import asyncio

import httpx

from tests.support.drawing import ask, picture
from tests.support.live_server import until

NUM_CLIENTS = 200


def chat_body(number: int, **fields: object) -> dict[str, object]:
    colour = ["red", "green", "blue", "purple", "orange"][number % 5]
    messages = ask(picture((colour, "circle"), background="white"), "What is in the picture?")
    return {"model": "nano", "messages": messages, "temperature": 0, "stream": True, **fields}


def expected(number: int) -> str:
    return ["a red", "a green", "a blue", "a purple", "an orange"][number % 5] + " circle"


async def _one_client(client: httpx.AsyncClient, number: int) -> str | None:
    """The whole answer; every third client disconnects after its first words."""
    text = ""
    leaves = number % 3 == 0
    # Those that leave ask for long answers, so that there is something left to abort.
    extra = {"ignore_eos": True, "max_tokens": 500} if leaves else {}
    async with client.stream("POST", "/v1/chat/completions", json=chat_body(number, **extra)) as r:
        assert r.status_code == 200, await r.aread()
        async for line in r.aiter_lines():
            assert '"error"' not in line
            if '"content":"' in line:
                text += line.split('"content":"')[1].split('"')[0]
            if leaves and text:
                return None
    return text


def test_of_200_streams_a_third_leave_and_nothing_is_left_behind(server):
    async def everybody():
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(_one_client(client, n) for n in range(NUM_CLIENTS)))

    answers = asyncio.run(everybody())
    for number, text in enumerate(answers):
        assert text is None if number % 3 == 0 else text == expected(number)

    def quiet() -> bool:
        found = server.metrics()
        return found["num_requests_running"] == found["num_requests_waiting"] == 0

    until(quiet, 100, lambda: str(server.metrics()))
    for tier in ("mm", "encoder", "prefix"):  # a reset keeps only what a request still holds
        assert server.post(f"/reset_{tier}_cache").status_code == 200
    found = server.metrics()
    assert found["kv_cache_usage_ratio"] == 0
    assert found["encoder_cache_bytes"] == 0
    assert found["mm_cache_bytes"] == 0
