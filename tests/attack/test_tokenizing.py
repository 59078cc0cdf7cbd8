"""One tenant's long texts do not stop its API process."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.support.attacked_server import (
    ATTACKER,
    OTHER,
    SLOWEST,
    AttackedServer,
    check_memory,
    settled_memory,
)

pytestmark = pytest.mark.attack
HOPELESS = "A " * 50_000
"""Some 100,000 tokens: a check of the characters alone would let them through on nano, whose
context is 4,096 tokens and whose longest token has 14 characters."""
NUM_TEXTS = 20


def hopeless(server: AttackedServer, number: int) -> httpx.Response:
    return server.complete(ATTACKER, prompt=HOPELESS + str(number))


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "the prompt has at least" in error["message"]


def slowest_health(server: AttackedServer, running: list[Future[httpx.Response]]) -> float:
    """Seconds of the slowest `/health` until all of `running` is done."""
    slowest = 0.0
    with server.client(OTHER) as client:
        while not all(future.done() for future in running):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_hopeless_texts_are_refused_at_once(server: AttackedServer):
    """They were refused after they had been tokenized, which counts their tokens exactly."""
    with server.canaries() as canaries, ThreadPoolExecutor(NUM_TEXTS) as attackers:
        for response in attackers.map(lambda n: hopeless(server, n), range(NUM_TEXTS)):
            check_refused(response)
    canaries.check()


def test_hopeless_texts_delay_nobody(server: AttackedServer):
    """`/health` and every stream waited while they were tokenized."""
    with server.canaries() as canaries, ThreadPoolExecutor(NUM_TEXTS) as attackers:
        asked = [attackers.submit(hopeless, server, number) for number in range(NUM_TEXTS)]
        slowest = slowest_health(server, asked)
        for future in asked:
            check_refused(future.result())
    canaries.check()
    assert slowest < SLOWEST
    assert canaries.slowest < SLOWEST


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_they_are_refused_on_every_route(server: AttackedServer, route):
    messages = {"messages": [{"role": "user", "content": HOPELESS}]}
    with server.client(ATTACKER) as client:
        response = client.post(route, json=messages)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "the prompt has at least" in response.json()["error"]["message"]


def test_texts_that_only_tokenizing_can_judge_delay_nobody(server: AttackedServer):
    """White space alone: its tokens may be long, so nothing can be said before."""

    def attack() -> None:
        texts = [" " * (100_000 - number) for number in range(NUM_TEXTS)]
        with server.canaries() as canaries, ThreadPoolExecutor(NUM_TEXTS) as attackers:
            asked = [attackers.submit(server.complete, ATTACKER, prompt=text) for text in texts]
            slowest = slowest_health(server, asked)
            assert {future.result().status_code for future in asked} == {400}
        canaries.check()
        assert slowest < SLOWEST
        assert canaries.slowest < SLOWEST

    attack()
    before = settled_memory(server.live)
    attack()
    check_memory(server.live, before)
