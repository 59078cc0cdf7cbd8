"""Clients that leave, an engine that is killed, and a server told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import httpx
import openai
import pytest

from tests.end_to_end.drawing import ask, picture
from tests.end_to_end.live import LiveServer, until

NUM_CLIENTS = 200


def chat_body(number: int, **fields: object) -> dict[str, object]:
    colour = ["red", "green", "blue", "purple", "orange"][number % 5]
    messages = ask(picture((colour, "circle"), background="white"), "What is in the picture?")
    return {"model": "nano", "messages": messages, "temperature": 0, "stream": True, **fields}


def expected(number: int) -> str:
    return ["a red", "a green", "a blue", "a purple", "an orange"][number % 5] + " circle"


async def _one_client(client: httpx.AsyncClient, number: int) -> str | None:
    """The whole answer; every third client leaves after its first words."""
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

    until(quiet, 30, lambda: str(server.metrics()))
    assert server.metrics()["kv_cache_usage_ratio"] == 0


@pytest.fixture(scope="module")
def mortal():
    """A server of this module's own: its engine is killed and then it is stopped."""
    with LiveServer() as live:
        yield live


def test_a_killed_engine_means_clear_errors_and_then_a_working_server(mortal):
    answers: list[object] = []
    started = threading.Barrier(5)

    def ask_long(number: int) -> None:
        body = chat_body(number, ignore_eos=True, max_tokens=3000)
        with mortal.client() as client:
            try:
                stream = client.chat.completions.create(**body)
                next(stream)
                started.wait(60)
                answers.extend(stream)
            except openai.APIError as error:
                answers.append(error)

    threads = [threading.Thread(target=ask_long, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    started.wait(60)
    killed = mortal.engine_pid()
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    errors = [answer for answer in answers if isinstance(answer, openai.APIError)]
    assert len(errors) == 4
    assert {error.code for error in errors} == {"engine_dead"}

    until(lambda: mortal.get("/health").status_code == 503 or mortal.engine_pid() not in
          (None, killed), 30, mortal.log)  # fmt: skip
    until(lambda: mortal.get("/ready").status_code == 200, 90, mortal.log)
    assert mortal.get("/health").status_code == 200
    with mortal.client() as client:
        answer = client.chat.completions.create(**chat_body(1, stream=False))
    assert answer.choices[0].message.content == expected(1)


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(mortal):
    first_words = threading.Event()
    texts: list[str] = []

    def ask_long() -> None:
        body = chat_body(0, ignore_eos=True, max_tokens=600)
        with mortal.client() as client:
            for chunk in client.chat.completions.create(**body):
                first_words.set()
                texts.extend(c.finish_reason for c in chunk.choices if c.finish_reason)

    thread = threading.Thread(target=ask_long)
    thread.start()
    assert first_words.wait(60)
    mortal.process.send_signal(signal.SIGTERM)
    refused = []

    def is_refused() -> bool:
        try:
            refused.append(mortal.post("/v1/chat/completions", chat_body(0, stream=False)))
        except httpx.TransportError:
            return True
        return refused[-1].status_code == 503

    until(is_refused, 30, mortal.log)
    thread.join(60)
    assert texts == ["length"]
    assert mortal.process.wait(60) == 0
    assert mortal.engine_pid() is None
