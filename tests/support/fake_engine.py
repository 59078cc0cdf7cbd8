"""An engine's HTTP server that behaves as the tests say, for the fleet's front-end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

FINGERPRINT = "ab" * 8
METRICS = b"""# HELP lookonce_encoder_runs_total Encoder runs
# TYPE lookonce_encoder_runs_total counter
lookonce_encoder_runs_total 3
# HELP lookonce_media_total Media
# TYPE lookonce_media_total counter
lookonce_media_total{modality="image"} 2
"""


@dataclass
class Received:
    """One request as the engine got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[["FakeEngine", Received, asyncio.StreamWriter], Awaitable[None]]


async def echo(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
    """Who answered, and how long the body was."""
    reply(writer, 200, {"engine": engine.name, "bytes": len(request.body)})


def reply(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, len(data))
        + data
    )


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )


def send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@dataclass
class FakeEngine:
    """Listens on a port of 127.0.0.1. Routes that it knows nothing of are answered by `answer`."""

    name: str
    model: str = "nano"
    answer: Answer = echo
    ready: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    """Name → digest of its contents, in hex."""
    probes: dict[str, int] = field(default_factory=dict)
    """Routes of probes that are answered 500, and how often they were."""
    stopped: bool = False
    """It takes connections and answers nothing, as a process that was sent SIGSTOP."""
    unanswered_probes: int = 0
    unanswered: set[str] = field(default_factory=set)
    """Routes that give no answer, and how often they were asked."""
    num_unanswered: int = 0
    engine_silent: float = 0.0
    """Seconds for which the process that computes has said nothing, as its API process tells."""
    fingerprint: str = FINGERPRINT
    files_digest: str = ""
    facts: dict[str, Any] | None = None
    """What front-ends that render want to know of the model."""
    metrics_told: int = 0
    received: list[Received] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has closed its connection."""

    async def __aenter__(self) -> Self:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        await asyncio.sleep(0)

    def kill(self) -> None:
        """End all connections at once, and take no more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                request = await _read(reader)
                if request is None:
                    break
                await self._respond(request, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.left.set()
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, request: Received, writer: asyncio.StreamWriter) -> None:
        self.unanswered_probes += self.stopped and request.target == "/ready"
        while self.stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.num_unanswered += request.target in self.unanswered
        while request.target in self.unanswered:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        match request.target:
            case target if target in self.probes:
                self.probes[target] += 1
                reply(writer, 500, {})
            case "/ready":
                told = {"engine_silent_seconds": self.engine_silent}
                reply(writer, 200 if self.ready else 503, told)
            case "/v1/models":
                cards = [{"id": self.model, "object": "model"}]
                adapters = [
                    {"id": n, "object": "model", "parent": self.model} for n in self.adapters
                ]
                reply(writer, 200, {"data": [*cards, *adapters]})
            case "/inference/v1/media_cache":
                told = {
                    "algorithm": "blake3",
                    "fingerprint": self.fingerprint,
                    "files_digest": self.files_digest,
                    "dtype": "float32",
                    "model": self.facts,
                }
                digests = {
                    name: {"digest": digest, "encoder_digest": ""}
                    for name, digest in self.adapters.items()
                }
                reply(writer, 200, {**told, "adapters": digests, "media_adapters": {}})
            case "/metrics":
                self.metrics_told += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(METRICS))
                writer.write(METRICS)
            case _:
                self.received.append(request)
                await self.answer(self, request, writer)


async def _read(reader: asyncio.StreamReader) -> Received | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.partition(": ") for line in lines if line)
    headers = {name: value for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, target, headers, body)
