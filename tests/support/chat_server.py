"""A server of a few lines that answers every request with the same bytes."""

from __future__ import annotations

import asyncio
import json

from benchmarks.load_generator import Arrivals, LoadResult, Target, drive

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
