"""The load generator, against a server of a few lines."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.load_generator import Arrivals, LoadResult, Target, drive
from lookonce.errors import ConfigError

EVENTS = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"content": "one"}}]},
    {"choices": [{"delta": {"content": " two"}}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "reuse_receipt": {"items": [{"processor": "hit", "encoder": "skipped"}]},
    },
]
STREAM = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in EVENTS)
DONE = b"data: [DONE]\n\n"


def chunked(body: bytes, size: int = 50) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class Server:
    """Answers every request with `answer`, and counts connections."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if not self.answer:
                    break
                writer.write(self.answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    def load(self, count: int, arrivals: Arrivals) -> LoadResult:
        async def run() -> LoadResult:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            target = Target(f"http://{host}:{port}/v1", "secret")
            try:
                return await drive(target, [b"{}"] * count, arrivals)
            finally:
                target.close()
                server.close()
                await asyncio.sleep(0.01)

        return asyncio.run(run())


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
