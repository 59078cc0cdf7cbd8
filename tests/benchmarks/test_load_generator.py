"""The load generator, against a server of a few lines."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load_generator import Arrivals, Target, drive
from lookonce.errors import ConfigError
from tests.support.chat_server import DONE, STREAM, Server, chunked, whole


def test_an_answer_is_timed_and_its_receipt_read():
    result = Server(chunked(STREAM + DONE)).load(1, Arrivals(concurrency=1))
    (outcome,) = result.answered
    assert len(outcome.text_times) == 2
    assert 0 < outcome.first_text <= outcome.whole
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (9, 4, 2)
    assert [(item.processor, item.encoder) for item in outcome.items] == [("hit", "skipped")]


def test_connections_are_kept_and_as_many_as_places():
    server = Server(chunked(STREAM + DONE))
    result = server.load(20, Arrivals(concurrency=3))
    assert len(result.answered) == 20
    assert server.connections <= 3
    assert b"POST /v1/chat/completions HTTP/1.1" in server.requests[0]
    assert b"Authorization: Bearer secret" in server.requests[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (whole(429, b'{"error": "full"}'), 'status 429: {"error": "full"}'),
        (whole(200, b'data: {"error": {"message": "it broke"}}\n\n'), "it broke"),
        (whole(200, b"data: {nonsense\n\n"), "DecodeError"),
        (whole(200, DONE), "no text"),
        (b"SMTP ready\r\n\r\n", "not HTTP"),
        (b"", "closed the connection"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_request(answer, words):
    result = Server(answer).load(2, Arrivals(concurrency=1))
    assert len(result.outcomes) == 2
    assert not result.answered
    assert all(words in str(outcome.error) for outcome in result.outcomes)


def test_nobody_listening_is_an_error_too():
    result = asyncio.run(drive(Target("http://127.0.0.1:1"), [b"{}"], Arrivals(concurrency=1)))
    assert "Error" in str(result.outcomes[0].error)


def test_random_arrivals_come_at_the_rate_and_again_the_same():
    times = Arrivals(rate=50.0, seed=3).times(2000)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(40, rel=0.1)
    assert times == Arrivals(rate=50.0, seed=3).times(2000)
    assert times != Arrivals(rate=50.0, seed=4).times(2000)


def test_at_a_rate_nobody_waits_for_answers():
    result = Server(chunked(STREAM + DONE)).load(5, Arrivals(rate=1000.0))
    assert len(result.answered) == 5


@pytest.mark.parametrize("fields", [{}, {"concurrency": 0}, {"rate": 0.0}, {"rate": -1.0}])
def test_a_load_without_pace_is_refused(fields):
    with pytest.raises(ConfigError):
        Arrivals(**fields)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        Target(url)
