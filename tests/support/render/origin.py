"""A small web server on loopback whose answers a test writes down, and which counts requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    path: str
    headers: dict[str, str]


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    more_headers: tuple[tuple[str, str], ...] = ()
    """Further header lines, whose names may repeat."""
    declare_length: bool = True
    """False: the body ends when the connection is closed."""
    hold: asyncio.Event | None = None
    """The response is sent when this is set."""


Handler = Callable[[Request], Answer]


class Origin:
    """Paths → answers, or functions of the request; anything else is a 404."""

    def __init__(self, answers: dict[str, Answer | Handler]) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.asked = asyncio.Event()
        """Set by the first request."""
        self.port = 0

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").strip().split("\r\n")
            pairs = (line.split(": ", 1) for line in lines)
            request = Request(first.split(" ")[1], {k.lower(): v for k, v in pairs})
            self.requests.append(request)
            self.asked.set()
            await self._answer(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        found = self.answers.get(request.path, Answer(status=404))
        answer = found if isinstance(found, Answer) else found(request)
        if answer.hold is not None:
            await answer.hold.wait()
        headers = {"Connection": "close", **answer.headers}
        if answer.declare_length:
            headers.setdefault("Content-Length", str(len(answer.body)))
        fields = [*headers.items(), *answer.more_headers]
        lines = [f"HTTP/1.1 {answer.status} X", *(f"{k}: {v}" for k, v in fields)]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + answer.body)
        await writer.drain()


@asynccontextmanager
async def origin(
    answers: dict[str, Answer | Handler], host: str = "127.0.0.1"
) -> AsyncIterator[Origin]:
    site = Origin(answers)
    server = await asyncio.start_server(site.serve, host, 0)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()
        await server.wait_closed()
