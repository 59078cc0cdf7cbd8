"""Sockets that clients of ZMQ connect to: these get what is sent, and nobody takes it from them."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.config import ENGINE_TOPIC, ITEM_TOPIC, EventsConfig
from lookonce.engine.process import zmtp
from lookonce.engine.process.cache_events import CLIENTS_SHARE, SAVED_SECONDS, EventPublisher
from lookonce.engine.process.zmtp import MAX_CLIENTS, MAX_TOPICS, ZmtpServer, encode_message
from tests.support.kv.tiers import eventually

SUBSCRIBE = b"\1"


@contextmanager
def serving(kind: bytes = b"PUB", address: str | None = None) -> Iterator[ZmtpServer]:
    """One whose `turn` a thread calls; a `ROUTER` answers each message with itself. Unless it is
    closed as it should, the test fails."""
    server: ZmtpServer

    def answer(client: zmtp.Client, frames: list[bytes]) -> None:
        server.send(client, frames)

    server = ZmtpServer(address or f"tcp://127.0.0.1:{free_port()}", kind, answer)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            while server.turn(None):
                pass
        except BaseException as error:
            ended.append(error)
            raise
        ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)
    assert ended == [None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def connected(server: ZmtpServer, *, kind: bytes = b"SUB", source: str = "127.0.0.1") -> RawClient:
    port = server._listener.getsockname()[1]
    made = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
    return RawClient(made, kind)


class RawClient:
    """What it sends is chosen byte by byte."""

    def __init__(self, made: socket.socket, kind: bytes) -> None:
        self.socket = made
        ready = b"\5READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(zmtp._GREETING + bytes((4, len(ready))) + ready)
        self._left = bytearray()
        greeting = self._take(64)
        assert greeting[:12] == b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
        flags, body = self.frame()
        assert flags == 4
        assert body.startswith(b"\5READY")

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(encode_message(frames))

    def frame(self) -> tuple[int, bytes]:
        flags = self._take(1)[0]
        size = struct.unpack(">Q", self._take(8))[0] if flags & 2 else self._take(1)[0]
        return flags, self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._left) < size:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._left += data
        taken = bytes(self._left[:size])
        del self._left[:size]
        return taken

    @property
    def is_closed(self) -> bool:
        """Whether the other side has closed it, within a second."""
        self.socket.settimeout(1)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        self.socket.close()
        return True


@contextmanager
def subscriber(address: str, topic: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.connect(address)
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        yield sub


def address_of(server: ZmtpServer) -> str:
    return f"tcp://127.0.0.1:{server._listener.getsockname()[1]}"


def reaches(server: ZmtpServer, sub: zmq.Socket[bytes], topic: bytes = b"topic") -> bool:
    server.publish([topic, b"now"])
    return bool(sub.poll(20))


@pytest.mark.parametrize("address", ["tcp://*:{}", "tcp://[::1]:{}", "tcp://localhost:{}", "ipc"])
def test_a_subscriber_of_zmq_gets_what_it_has_subscribed_to(address: str) -> None:
    with tempfile.TemporaryDirectory(prefix="zmtp-") as folder:
        path = Path(folder) / "socket"
        if address == "ipc":
            with socket.socket(socket.AF_UNIX) as old:
                old.bind(str(path))  # of a process that has ended
            address = f"ipc://{path}"
        address = address.format(free_port())
        with serving(address=address) as server, ExitStack() as stack:
            sub = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.SUB))
            sub.setsockopt(zmq.IPV6, 1)
            sub.setsockopt(zmq.HEARTBEAT_IVL, 100)
            sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
            sub.connect(address.replace("*", "127.0.0.1"))
            sub.setsockopt(zmq.SUBSCRIBE, b"a")
            eventually(lambda: reaches(server, sub, b"ab"), 10)
            server.publish([b"b", b"not for it"])
            large = os.urandom(3_000_000)
            server.publish([b"ac", b"", large])
            frames = [b"ab"]
            while frames[0] == b"ab":
                assert sub.poll(10_000)
                frames = sub.recv_multipart()
            assert frames == [b"ac", b"", large]
            time.sleep(1.5)  # its heartbeats are answered
            server.publish([b"ad", b"still there"])
            assert sub.poll(5000)
        assert not path.exists()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_requests_are_answered_to_who_asked(kind: int) -> None:
    frames = [] if kind == zmq.REQ else [b""]
    with serving(b"ROUTER") as server, ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        asks = [stack.enter_context(context.socket(kind)) for _ in range(3)]
        for number, each in enumerate(asks):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(address_of(server))
            each.send_multipart([*frames, b"%d" % number, b"x" * 300])
        for number, each in enumerate(asks):
            assert each.poll(10_000)
            assert each.recv_multipart() == [*frames, b"%d" % number, b"x" * 300]


def test_who_names_topics_without_end_is_disconnected() -> None:
    """libzmq kept 1.6 GB of them after eight seconds."""
    with serving() as server, subscriber(address_of(server)) as sub:
        eventually(lambda: reaches(server, sub), 10)
        greedy = connected(server)
        for number in range(MAX_TOPICS):
            greedy.send(SUBSCRIBE + b"%d" % number)
            greedy.send(SUBSCRIBE + b"%d" % number)  # once more is none more
        for number in range(MAX_TOPICS):
            greedy.send(b"\0%d" % number)
            greedy.send(SUBSCRIBE + b"t%d" % number)
        assert not greedy.is_closed
        greedy.send(SUBSCRIBE + b"one more")
        assert greedy.is_closed
        assert reaches(server, sub)


def test_of_too_many_connections_those_of_the_address_that_has_most_end() -> None:
    with serving() as server:
        honest = connected(server, source="127.0.0.7")
        honest.send(SUBSCRIBE)
        kept = connected(server)
        silent = socket.create_connection(("127.0.0.1", server._listener.getsockname()[1]))
        held = [connected(server) for _ in range(MAX_CLIENTS - 3)]
        last = connected(server)  # the one that has not said what it is goes for it
        assert silent.recv(4096)
        assert not silent.recv(4096)
        silent.close()
        eventually(lambda: all(each.deadline is None for each in list(server._clients)), 5)
        assert connected(server).is_closed
        assert not any(each.is_closed for each in (kept, last, *held[:2]))
        eventually(lambda: len(server._clients) == MAX_CLIENTS, 5)
        server.publish([b"topic", b"payload"])
        assert [honest.frame()[1] for _ in range(2)] == [b"topic", b"payload"]
        for each in (honest, kept, last, *held):
            each.socket.close()


def test_what_is_queued_for_subscribers_that_do_not_read_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmtp, "MAX_QUEUED_BYTES", 1 << 20)
    with serving() as server, subscriber(address_of(server)) as sub:
        eventually(lambda: reaches(server, sub), 10)
        slow = [connected(server) for _ in range(8)]
        for each in slow:
            each.send(SUBSCRIBE + b"n")
        eventually(lambda: sum(bool(client.topics) for client in server._clients) == 9, 10)
        for number in range(3000):
            server.publish([b"n%d" % number, bytes(10_000)])
            assert server._num_queued <= 1 << 20
            if not number % 10:
                eventually(lambda: server._num_queued <= 1 << 20, 10)
        assert server._num_queued == sum(client.num_queued for client in server._clients) > 0
        got = [int(topic[1:]) for topic in topics_until(server, sub) if topic[:1] == b"n"]
        assert got == sorted(set(got))
        assert len(got) > 1000
        told = [slow[0].frame()[1] for _ in range(40)][::2]
        assert told == [b"n%d" % number for number in range(20)]
        for each in slow:
            each.socket.close()
        eventually(lambda: server._num_queued == 0, 10)


def topics_until(server: ZmtpServer, sub: zmq.Socket[bytes]) -> list[bytes]:
    """Of all messages up to one that is sent now."""
    found: list[bytes] = []
    while b"end" not in found:
        if not sub.poll(50):
            server.publish([b"end"])
            continue
        found.append(sub.recv_multipart()[0])
    return found


def test_commands_of_version_3_1_are_known() -> None:
    with serving() as server:
        client = connected(server)
        client.socket.sendall(b"\4\x0a\4PING\0\7ctx" + b"\4\x0b\x09SUBSCRIBEa")
        assert client.frame() == (4, b"\4PONGctx")
        eventually(lambda: any(each.topics == {b"a"} for each in server._clients), 10)
        client.socket.sendall(b"\4\x08\6CANCELa" + b"\4\x05\4WHAT")
        eventually(lambda: not any(each.topics for each in server._clients), 10)
        client.socket.close()


def test_answers_to_heartbeats_that_nobody_reads_are_counted_with_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are so short that what Python needs for each is most of it."""
    monkeypatch.setattr(zmtp, "MAX_QUEUED_BYTES", 1 << 18)
    with serving() as server:
        greedy = connected(server)
        (client,) = server._clients
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        pings = b"\4\7\4PING\0\7" * 1000
        greedy.socket.settimeout(10)
        most = 0
        while client.num_queued < (1 << 18) - 1000:
            greedy.socket.sendall(pings)
            most = max(most, len(client.queued))
        for _ in range(10):
            greedy.socket.sendall(pings)
            most = max(most, len(client.queued))
        assert most <= (1 << 18) / 64
        greedy.socket.close()


def test_a_client_whose_machine_is_gone_loses_its_connection() -> None:
    """The kernel asks it, also where nothing is sent."""
    with serving(b"ROUTER") as server:
        asks = connected(server, kind=b"DEALER")
        (client,) = server._clients
        assert client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        asks.socket.close()


def test_the_log_tells_once_of_too_many_connections(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        held = [connected(server) for _ in range(MAX_CLIENTS)]
        for _ in range(2):
            eventually(lambda: all(each.deadline is None for each in list(server._clients)), 5)
            port = server._listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), 10) as surplus:
                while surplus.recv(4096):  # until the server ends it
                    pass
        for each in held:
            each.socket.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith("has more than 64 connections: one from 127.0.0.1 ends, as may others")


def test_a_handshake_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(zmtp, "SWEEP_SECONDS", 0.05)
    with serving() as server:
        open_one = connected(server)
        with socket.create_connection(("127.0.0.1", server._listener.getsockname()[1])) as silent:
            silent.sendall(zmtp._GREETING)
            silent.settimeout(10)
            while silent.recv(4096):
                pass
        assert not open_one.is_closed
        open_one.socket.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ZmtpServer, ZmtpServer]]:
    with serving() as pub, serving(b"ROUTER") as router:
        yield pub, router


HELLO = zmtp._GREETING + b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB"


@settings(deadline=None, max_examples=150)
@given(
    which=st.integers(0, 1),
    start=st.sampled_from([b"", zmtp._GREETING, HELLO]),
    rest=st.lists(
        st.binary(max_size=40)
        | st.builds(lambda f, b: bytes((f, len(b))) + b, st.integers(0, 8), st.binary(max_size=60)),
        max_size=8,
    ),
)
def test_whatever_is_received_ends_no_more_than_its_connection(
    served: tuple[ZmtpServer, ZmtpServer], which: int, start: bytes, rest: list[bytes]
) -> None:
    port = served[which]._listener.getsockname()[1]
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as made:
        for part in (start, *rest):
            made.sendall(part)


def test_a_frame_that_is_too_long_ends_its_connection() -> None:
    with serving(b"ROUTER") as server:
        for frame in (b"\0" + b"\xff" + bytes(255), b"\2" + struct.pack(">Q", 1 << 40)):
            client = connected(server, kind=b"DEALER")
            client.socket.sendall(frame)
            assert client.is_closed == (frame[0] == 2)
            client.socket.close()
        client = connected(server, kind=b"SUB")
        assert client.is_closed


def test_who_connects_subscribes_and_leaves_without_end_takes_a_share_of_the_time() -> None:
    ports = free_port(), free_port()
    publisher = EventPublisher(EventsConfig(*(f"tcp://127.0.0.1:{port}" for port in ports)))
    clock = time.pthread_getcpuclockid(publisher._threads[2].ident or 0)
    stopped = threading.Event()

    def churn() -> None:
        while not stopped.is_set():
            with suppress(OSError, EOFError, AssertionError):
                made = socket.create_connection(("127.0.0.1", ports[0]), 5)
                with made:
                    client = RawClient(made, b"SUB")
                    for number in range(20):
                        client.send(SUBSCRIBE + b"%d" % number)
                        client.send(b"\0%d" % number)

    with subscriber(f"tcp://127.0.0.1:{ports[0]}", ENGINE_TOPIC.encode()[:8]) as sub:

        def told() -> bool:
            publisher.item_changed(b"k" * 32, True)
            return bool(sub.poll(20))

        eventually(told, 10)
        threads = [threading.Thread(target=churn) for _ in range(8)]
        for each in threads:
            each.start()
        try:
            eventually(lambda: time.clock_gettime(clock) > 2 * SAVED_SECONDS, 60)
            began, used = time.monotonic(), time.clock_gettime(clock)
            while sub.poll(100):
                sub.recv_multipart()
            while time.monotonic() < began + 3:
                publisher.item_changed(os.urandom(32), True)
                assert sub.poll(1000), "who has subscribed is told at once"
                assert sub.recv_multipart()[0] == ITEM_TOPIC.encode()
            used = time.clock_gettime(clock) - used
            assert used < 1.5 * CLIENTS_SHARE * (time.monotonic() - began)
        finally:
            stopped.set()
            for each in threads:
                each.join()
            publisher.close()
