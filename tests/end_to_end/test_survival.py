"""Clients that disconnect, an engine that is killed, and a server that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer, until

NUM_CLIENTS = 200
LONG = 3000
"""Tokens of an answer that is long enough for the engine to be killed before its end."""


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


@pytest.fixture(scope="module")
def mortal():
    """A server with two API processes for this module: its engine is killed, then it is stopped."""
    with LiveServer("--api-processes", "2", "--vllm-metric-names", "--block-size", "32") as live:
        yield live


def test_any_of_two_api_processes_answers_for_both(mortal):
    def ask_once(number: int) -> str:
        body = chat_body(number, stream=False, reuse_receipt=True)
        return mortal.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(8) as pool:  # connections of their own: both processes get some
        assert list(pool.map(ask_once, range(40))) == [expected(n) for n in range(40)]
    for _ in range(8):
        found = mortal.metrics()
        assert found["request_success_total:stop"] == 40
        assert found["mm_cache_queries_total"] == 40
        assert found["mm_cache_hits_total"] + found["media_processed_total:image"] >= 40
        assert found["vllm:mm_cache_queries_total:nano"] == 40
        assert found["e2e_request_latency_seconds_count"] == 40


async def _finish_reasons(
    live: LiveServer, number: int, begun: asyncio.Event, max_tokens: int = LONG
) -> list[object]:
    """Streams a long answer; `begun` is set with its first words."""
    async with live.async_client() as client:
        stream = await client.chat.completions.create(
            **chat_body(number, max_tokens=max_tokens), extra_body={"ignore_eos": True}
        )
        reasons: list[object] = []
        async for chunk in stream:
            begun.set()
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        return reasons


def _health_of_many_connections(live: LiveServer) -> set[int]:
    """The statuses of /health; any of the API processes may take each connection."""
    return {live.get("/health").status_code for _ in range(16)}


def test_a_killed_engine_means_clear_errors_and_then_a_working_server(mortal):
    killed = mortal.engine_pid()

    async def kill_midway():
        begun = [asyncio.Event() for _ in range(4)]
        streams = [
            asyncio.create_task(_finish_reasons(mortal, n, event)) for n, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(killed, signal.SIGKILL)
        return await asyncio.gather(*streams, return_exceptions=True)

    mortal.process.send_signal(signal.SIGSTOP)  # nobody restarts the engine before we have looked
    try:
        errors = asyncio.run(kill_midway())
        assert [type(error) for error in errors] == [openai.APIError] * 4
        assert {error.code for error in errors} == {"engine_dead"}
        until(lambda: _health_of_many_connections(mortal) == {503}, 100, mortal.log)
    finally:
        mortal.process.send_signal(signal.SIGCONT)
    until(lambda: mortal.get("/ready").status_code == 200, 90, mortal.log)
    assert mortal.get("/health").status_code == 200
    with mortal.client() as client:
        answer = client.chat.completions.create(**chat_body(1, stream=False))
    assert answer.choices[0].message.content == expected(1)
    assert mortal.log().count("warmed up audio") == 2  # each engine, before it served


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(mortal):
    engine = mortal.engine_pid()

    async def stop_midway():
        begun = asyncio.Event()
        stream = asyncio.create_task(_finish_reasons(mortal, 0, begun, max_tokens=600))
        await begun.wait()
        os.kill(engine, signal.SIGSTOP)  # the stream cannot end before a request is refused
        try:
            mortal.process.send_signal(signal.SIGTERM)
            refusal = await _first_refusal(mortal)
        finally:
            os.kill(engine, signal.SIGCONT)
        return await stream, refusal

    reasons, refusal = asyncio.run(stop_midway())
    assert reasons == ["length"]
    assert refusal.status_code == 503
    assert refusal.json()["error"]["code"] == "draining"
    assert refusal.headers["connection"] == "close"
    assert mortal.process.wait(60) == 0
    assert mortal.engine_pid() is None


async def _first_refusal(live: LiveServer) -> httpx.Response:
    """Asks until a request is refused.

    One that came in before the signal waits for the stopped engine, and a process that has nothing
    left to do closes its connections: both are left behind.
    """
    async with asyncio.timeout(100), httpx.AsyncClient(base_url=live.url, timeout=1) as client:
        body = chat_body(0, stream=False, max_tokens=1)
        while True:
            with suppress(httpx.TransportError):
                response = await client.post("/v1/chat/completions", json=body)
                if response.status_code != 200:
                    return response
            await asyncio.sleep(0.02)
