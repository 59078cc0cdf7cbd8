"""Clients that send bytes instead of requests, and count what comes back."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"
VERSION = b"GET /version" + HEAD + b"\r\n"


class Answer(NamedTuple):
    status: int
    """0: the connection was closed without an answer."""
    headers: dict[str, str]
    body: bytes
    closed: bool
    """The server closed the connection."""
    seconds: float

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def connect(url: str, source: str | None = None) -> socket.socket:
    """A connection from the loopback address `source`."""
    parts = urlsplit(url)
    from_address = (source, 0) if source else None
    return socket.create_connection((parts.hostname, parts.port), 60, from_address)


def send_raw(
    url: str, *pieces: bytes, wait: float = 60.0, pause: float = 0.0, source: str | None = None
) -> Answer:
    """Send the pieces, `pause` seconds apart, and read until the server closes, or `wait` s."""
    with connect(url, source) as client:
        started = time.monotonic()
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause)
        except ConnectionError:
            pass  # it was refused meanwhile: the answer is there
        return read_answer(client, wait, started)


def read_all(client: socket.socket, wait: float) -> tuple[bytes, bool]:
    """What comes until the server closes, or for `wait` seconds; whether it has closed."""
    received = b""
    deadline = time.monotonic() + wait
    while (left := deadline - time.monotonic()) > 0:
        client.settimeout(left)
        try:
            data = client.recv(1 << 16)
        except TimeoutError:
            break
        except ConnectionError:
            return received, True
        if not data:
            return received, True
        received += data
    return received, False


def read_answer(client: socket.socket, wait: float, started: float | None = None) -> Answer:
    started = time.monotonic() if started is None else started
    received, closed = read_all(client, wait)
    seconds = time.monotonic() - started
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]) if status else 0, headers, body, closed, seconds)


@contextmanager
def held(url: str, sources: Sequence[str], each: int, first: bytes = b"") -> Iterator[list[Any]]:
    """Holds `each` connections of every source address open, with these first bytes sent."""
    clients: list[socket.socket] = []
    try:
        for source in sources:
            for _ in range(each):
                client = connect(url, source)
                clients.append(client)
                with suppress(ConnectionError):
                    client.sendall(first)
        yield clients
    finally:
        for client in clients:
            client.close()


def is_open(client: socket.socket) -> bool:
    """Whether the server has not closed it."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False
