"""Sockets that ZMQ's clients connect to, with limits that ZMQ's own have not.

ZMTP 3.0 (https://rfc.zeromq.org/spec/23), the bound side, without security. libzmq's PUB keeps
every topic that a client names, in a trie that takes tens of bytes for each of its characters: one
client that subscribes and never stops took gigabytes. Here a client may have `MAX_TOPICS` topics,
and there are `MAX_CLIENTS` clients; what is queued for all that are slow together is bounded.

    accepted ─▶ greeting ─▶ READY ─▶ open: subscriptions, or requests, and messages to it

One thread calls `turn`; any thread may `send` and `publish`.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_CLIENTS = 64
"""Connections; of more, one of the address that has most ends."""
MAX_TOPICS = 64
"""Of one subscriber; who names more is disconnected."""
MAX_RECEIVED_BYTES = 512
"""Of a frame from a client (a request, a topic, a command): who sends more is disconnected."""
MAX_RECEIVED_FRAMES = 4
"""Of a message; further ones are dropped."""
MAX_QUEUED_BYTES = 64 << 20
"""For all clients together that are slow: what comes then is lost for the one that has most."""
MESSAGE_OVERHEAD = 64
"""Bytes that a queued message is counted with beside its own: an answer to a PING has seven."""
HANDSHAKE_SECONDS = 10.0
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds, and how often: then a client whose machine is gone has no connection any more, of which
there are `MAX_CLIENTS`. Of many it would never be known: nothing is sent to them."""
READ_BYTES = 1024
"""At a time, of one client: hundreds of small messages."""
ACCEPTED_AT_ONCE = 8
SHORTAGE_SECONDS = 0.5
"""Without a descriptor, until connections are accepted again."""
SWEEP_SECONDS = 1.0
TOLD_SECONDS = 60.0
"""Between two lines of the log about too many connections."""

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
PEERS = {b"PUB": (b"SUB", b"XSUB"), b"ROUTER": (b"DEALER", b"REQ", b"ROUTER")}
"""Which sockets may connect to one."""


def encode_message(frames: Sequence[bytes]) -> bytes:
    """A message as it is sent."""
    parts: list[bytes] = []
    for left, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
        more = _MORE if left else 0
        if len(frame) > 255:
            parts.append(struct.pack(">BQ", more | _LONG, len(frame)))
        else:
            parts.append(bytes((more, len(frame))))
        parts.append(frame)
    return b"".join(parts)


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


class InvalidPeerError(Exception):
    """What was received is not what a client of such a socket sends."""


class Client:
    """One connection."""

    def __init__(self, accepted: socket.socket, address: str, deadline: float) -> None:
        self.socket = accepted
        self.address = address
        """An IP address, or "" for all of a unix socket."""
        self.deadline: float | None = deadline
        """Of the handshake; None: it has ended."""
        self.is_closed = False
        self.received = bytearray()
        self.has_greeted = False
        self.frames: list[bytes] = []
        """Of the message that is being received."""
        self.topics: set[bytes] = set()
        self.wants: dict[bytes, bool] = {}
        """Topic of a message → whether any of `topics` begins it."""
        self.queued: deque[bytes] = deque()
        self.num_sent = 0
        """Bytes of the first of these."""
        self.num_queued = 0
        """Bytes of all, and `MESSAGE_OVERHEAD` of each."""

    def subscribe(self, topic: bytes) -> None:
        if len(self.topics) >= MAX_TOPICS and topic not in self.topics:
            raise InvalidPeerError
        self.topics.add(topic)
        self.wants.clear()

    def unsubscribe(self, topic: bytes) -> None:
        self.topics.discard(topic)
        self.wants.clear()

    def is_subscribed(self, topic: bytes) -> bool:
        wanted = self.wants.get(topic)
        if wanted is None:
            wanted = self.wants[topic] = any(map(topic.startswith, self.topics))
        return wanted


class ZmtpServer:
    """A bound socket of type `kind`: `PUB` or `ROUTER`."""

    def __init__(
        self,
        address: str,
        kind: bytes,
        on_message: Callable[[Client, list[bytes]], None] = lambda client, frames: None,
    ) -> None:
        """`address`: `tcp://HOST:PORT`, where `*` is every interface, or `ipc://PATH`.
        `on_message` gets what clients of a `ROUTER` send, in the thread that calls `turn`. Raises
        `OSError` for an address that cannot be bound."""
        self._address = address
        self._kind = kind
        self._on_message = on_message
        ready = _command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)
        self._hello = _GREETING + ready
        self._lock = threading.RLock()
        """Of all clients and of what is queued for them."""
        self._clients: dict[Client, None] = {}
        self._num_queued = 0
        self._is_closed = False
        self._path: Path | None = None
        self._listener = self._bind(address)
        self._listens_from = 0.0
        self._next_sweep = 0.0
        self._told_full = -math.inf
        """When the log was told last that there are too many connections."""
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        for each in (self._wakes, self._waker, self._listener):
            each.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _bind(self, address: str) -> socket.socket:
        scheme, _, place = address.partition("://")
        if scheme == "ipc":
            self._path = Path(place)
            if self._path.is_socket():
                self._path.unlink()  # of a process that has ended
            bound = socket.socket(socket.AF_UNIX)
            try:
                bound.bind(place)
                bound.listen()
            except OSError:
                bound.close()
                raise
            return bound
        host, _, port = place.rpartition(":")
        host = "" if host == "*" else host.strip("[]")
        if host and socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] != socket.AF_INET:
            return socket.create_server((host, int(port)), family=socket.AF_INET6)
        return socket.create_server((host, int(port)))

    # --- any thread ---

    def publish(self, frames: Sequence[bytes]) -> None:
        """Send a message to all that have subscribed to its first frame."""
        topic = frames[0]
        with self._lock:
            wanting = [client for client in self._clients if client.is_subscribed(topic)]
            if not wanting:
                return
            message = encode_message(frames)
            for client in wanting:
                self._queue(client, message)

    def send(self, client: Client, frames: Sequence[bytes]) -> None:
        with self._lock:
            if not client.is_closed:
                self._queue(client, encode_message(frames))

    def close(self) -> None:
        """End all connections; `turn` returns False from now on."""
        self._is_closed = True
        self._wake()

    # --- the thread that calls `turn` ---

    def turn(self, seconds: float | None) -> bool:
        """Wait so long at most for anything to do, and do it; None: as long as it takes. False: it
        was closed."""
        if self._clients or self._listens_from:  # else there is nothing to sweep
            seconds = SWEEP_SECONDS if seconds is None else min(seconds, SWEEP_SECONDS)
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._wakes:
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        if self._is_closed:
            self._close_all()
            return False
        if (now := time.monotonic()) >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sweep(now)
        return True

    def _close_all(self) -> None:
        with self._lock:
            for client in list(self._clients):
                with suppress(OSError):
                    self._flush(client)
                self._end(client)
        for each in (self._listener, self._wakes, self._waker, self._selector):
            each.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("no subscriber can be accepted: %s", error.strerror)
                self._selector.unregister(self._listener)
                self._listens_from = time.monotonic() + SHORTAGE_SECONDS
                return
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                _set_options(accepted)
            address = str(peer[0]) if isinstance(peer, tuple) else ""
            client = Client(accepted, address, time.monotonic() + HANDSHAKE_SECONDS)
            with self._lock:
                self._clients[client] = None
                self._selector.register(accepted, selectors.EVENT_READ, client)
                self._queue(client, self._hello)
                if len(self._clients) > MAX_CLIENTS:
                    self._end_one()

    def _end_one(self) -> None:
        surplus = self._one_too_many()
        if (now := time.monotonic()) >= self._told_full + TOLD_SECONDS:
            self._told_full = now
            logger.warning(
                "%s has more than %d connections: one from %s ends, as may others",
                self._address,
                MAX_CLIENTS,
                surplus.address or "this machine",
            )
        self._end(surplus)

    def _one_too_many(self) -> Client:
        """Of the address that has most: the first that has not said yet what it is, or the last."""
        counts = Counter(client.address for client in self._clients)
        most = max(counts.values())
        ranked = [client for client in self._clients if counts[client.address] == most]
        unopened = (client for client in ranked if client.deadline is not None)
        return next(unopened, ranked[-1])

    def _sweep(self, now: float) -> None:
        if self._listens_from and now >= self._listens_from:
            self._listens_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for client in list(self._clients):
            if client.deadline is not None and now > client.deadline:
                self._end(client)

    def _serve(self, client: Client, events: int) -> None:
        if client.is_closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    self._flush(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except BlockingIOError:
            return
        except (OSError, InvalidPeerError):
            self._end(client)

    def _read(self, client: Client) -> None:
        data = client.socket.recv(READ_BYTES)
        if not data:
            raise InvalidPeerError
        received = client.received
        received += data
        if not client.has_greeted:
            if len(received) < _GREETING_BYTES:
                return
            _check_greeting(bytes(received[:_GREETING_BYTES]))
            del received[:_GREETING_BYTES]
            client.has_greeted = True
        at = 0
        while (found := _next_frame(received, at)) is not None:
            flags, frame, at = found
            if flags & _COMMAND:
                self._take_command(client, frame)
            else:
                self._take_frame(client, frame, more=bool(flags & _MORE))
        del received[:at]

    def _take_command(self, client: Client, frame: bytes) -> None:
        size = frame[0] if frame else 0
        name, data = frame[1 : 1 + size], frame[1 + size :]
        if client.deadline is not None:
            if name != b"READY" or _socket_type(data) not in PEERS[self._kind]:
                raise InvalidPeerError
            client.deadline = None
        elif name == b"PING":
            with self._lock:
                self._queue(client, _command(b"PONG", data[2:18]))
        elif name == b"SUBSCRIBE":
            self._subscribe(client, b"\1" + data)
        elif name == b"CANCEL":
            self._subscribe(client, b"\0" + data)

    def _take_frame(self, client: Client, frame: bytes, *, more: bool) -> None:
        if client.deadline is not None:
            raise InvalidPeerError
        if len(client.frames) < MAX_RECEIVED_FRAMES:
            client.frames.append(frame)
        if more:
            return
        frames, client.frames = client.frames, []
        if self._kind == b"PUB":
            self._subscribe(client, frames[0])
        else:
            self._on_message(client, frames)

    def _subscribe(self, client: Client, message: bytes) -> None:
        """Its first byte tells whether the client subscribes; the rest is a topic."""
        with self._lock:
            if message[:1] == b"\1":
                client.subscribe(message[1:])
            elif message[:1] == b"\0":
                client.unsubscribe(message[1:])

    # --- queues; the lock is held ---

    def _queue(self, client: Client, message: bytes) -> None:
        """Send at once what can be; the rest waits until the client reads."""
        if not client.queued:
            try:
                sent = client.socket.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # reading tells its end
            if sent == len(message):
                return
            client.num_sent = sent
            self._watch(client, selectors.EVENT_READ | selectors.EVENT_WRITE)
        client.queued.append(message)
        self._count(client, len(message) + MESSAGE_OVERHEAD)
        while self._num_queued > MAX_QUEUED_BYTES:
            most = max(self._clients, key=lambda each: each.num_queued)
            if len(most.queued) < 2:
                return
            self._count(most, -len(most.queued.pop()) - MESSAGE_OVERHEAD)

    def _count(self, client: Client, num_bytes: int) -> None:
        client.num_queued += num_bytes
        self._num_queued += num_bytes

    def _flush(self, client: Client) -> None:
        """Raises `OSError`, `BlockingIOError` among others."""
        while client.queued:
            message = client.queued[0]
            client.num_sent += client.socket.send(memoryview(message)[client.num_sent :])
            if client.num_sent < len(message):
                return
            client.queued.popleft()
            client.num_sent = 0
            self._count(client, -len(message) - MESSAGE_OVERHEAD)
        self._watch(client, selectors.EVENT_READ)

    def _watch(self, client: Client, events: int) -> None:
        if not client.is_closed:
            self._selector.modify(client.socket, events, client)
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")

    def _end(self, client: Client) -> None:
        with self._lock:
            if client.is_closed:
                return
            client.is_closed = True
            del self._clients[client]
            self._num_queued -= client.num_queued
            client.queued.clear()
            self._selector.unregister(client.socket)
            client.socket.close()


def _set_options(accepted: socket.socket) -> None:
    with suppress(OSError):  # it has ended meanwhile, which reading tells
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not on every system
                accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_greeting(greeting: bytes) -> None:
    is_zmtp_3 = greeting[0] == 0xFF and greeting[9] == 0x7F and greeting[10] >= 3
    if not is_zmtp_3 or greeting[12:32].rstrip(b"\0") != b"NULL":
        raise InvalidPeerError


def _next_frame(received: bytearray, at: int) -> tuple[int, bytes, int] | None:
    """(flags, frame, where the next one begins); None: it has not come whole."""
    if len(received) < at + 2:
        return None
    flags, size, begin = received[at], received[at + 1], at + 2
    if flags & _LONG:
        if len(received) < at + 9:
            return None
        (size,), begin = struct.unpack_from(">Q", received, at + 1), at + 9
    if size > MAX_RECEIVED_BYTES or flags > _MORE | _LONG | _COMMAND:
        raise InvalidPeerError
    if len(received) < begin + size:
        return None
    return flags, bytes(received[begin : begin + size]), begin + size


def _socket_type(metadata: bytes) -> bytes:
    """Of what READY says; empty where it says none."""
    at = 0
    while at < len(metadata):
        end = at + 1 + metadata[at]
        name = metadata[at + 1 : end]
        size = int.from_bytes(metadata[end : end + 4], "big")
        if name.lower() == b"socket-type":
            return metadata[end + 4 : end + 4 + size]
        at = end + 4 + size
    return b""
