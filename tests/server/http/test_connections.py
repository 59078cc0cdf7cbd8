"""Which connections are closed when; the protocol has a transport of the test."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from lookonce.config import ConnectionConfig
from lookonce.server.http import connections, uvicorn_server
from lookonce.server.http.connections import (
    ACCEPTS_PER_TURN,
    FEW_CHUNKS,
    FEW_CONNECTIONS,
    OPENED_PER_TURN,
    READ_REST_SECONDS,
    SMALL_READ_BYTES,
    UNREAD_BODY_BYTES,
    Acceptor,
    Connections,
    HeadBufferingTransport,
    HttpProtocol,
    TurnAllowance,
    _client_address,
    allowed_connections,
)
from lookonce.server.http.uvicorn_server import AcceptingServer, uvicorn_config
from lookonce.types.counts import Counts
from tests.support.raw_sockets import VERSION, is_open

POST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"


class Wire(asyncio.Transport):
    """A connection's transport, which keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.state = "open"
        self.num_unread = 0

    def get_write_buffer_size(self):
        return self.num_unread

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.state in ("closed", "aborted")

    def close(self):
        self.state = "closed"

    def abort(self):
        self.state = "aborted"
        self.num_unread = 0

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.state = "half closed"

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Running:
    """Connections of an application that answers when `go` is set, and reads bodies first."""

    def __init__(self, **limits):
        self.counts = Counts()
        self.table = Connections(ConnectionConfig(**limits), self.counts)
        self.go = asyncio.Event()
        self.time = self.table.now
        self.outcomes = []
        self.made = []
        """Addresses of the connections for which a protocol was made."""

    async def app(self, scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        self.outcomes.append(message["type"])
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, address="a"):
        protocol, wire = self.protocol(address), Wire()
        self.table.add(protocol)
        protocol.connection_made(wire)
        return protocol, wire

    def protocol(self, address):
        self.made.append(address)
        config = uvicorn_config(self.app)
        config.load()
        server = type("State", (), {"connections": set(), "tasks": set(), "total_requests": 0})()
        server.default_headers = []
        return HttpProtocol(config, server, {}, connections=self.table, address=address)

    def pass_seconds(self, seconds):
        """As if so much time had passed; the table looks once a second."""
        for _ in range(seconds):
            self.time += 1.0
            self.table.sweep(self.time)


async def with_connections(scenario, **limits):
    await scenario(Running(**limits))


def on_connections(scenario, **limits):
    asyncio.run(with_connections(scenario, **limits))


async def until(condition):
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_client_that_does_not_read_its_answer_is_given_up():
    async def scenario(running):
        protocol, wire = running.connect()
        running.go.set()
        protocol.data_received(VERSION)
        await settle()
        assert b"200 OK" in wire.written
        protocol.pause_writing()
        running.pass_seconds(59)
        assert wire.state == "open"
        running.pass_seconds(3)
        assert wire.state == "aborted"
        assert running.counts.read()["http_refused_total:write_timeout"].numbers == (1,)

    on_connections(scenario)


def test_one_that_reads_slowly_is_not():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(VERSION)
        for _ in range(5):
            protocol.pause_writing()
            running.pass_seconds(50)
            protocol.resume_writing()
        assert wire.state == "open"

    on_connections(scenario)


def test_a_request_that_is_served_has_all_the_time_it_takes():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(VERSION)
        await settle()
        running.pass_seconds(1000)
        assert wire.state == "open"
        assert not running.table.evict_one()
        running.go.set()
        await settle()
        running.pass_seconds(74)
        assert wire.state == "open"
        running.pass_seconds(3)
        assert wire.state == "aborted"

    on_connections(scenario)


def test_a_body_that_keeps_its_pace_is_read_and_one_that_does_not_is_told():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(POST)
        for second in range(1, 9):  # 9,000 bytes a second: more than 8 KiB
            protocol.data_received(b"x" * 9000)
            await settle()
            running.pass_seconds(1)
            assert wire.state == "open", second
        for _ in range(33):  # and now 100
            protocol.data_received(b"x" * 100)
            await settle()
            running.pass_seconds(1)
        await settle()
        assert b"408 " in wire.written
        assert b"body_timeout" in wire.written
        assert running.outcomes == ["http.disconnect"]

    on_connections(scenario)


def test_a_refusal_whose_client_lingers_is_counted_once():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(b"garbage\r\n\r\n")
        running.pass_seconds(10)
        assert wire.state == "aborted"
        counts = running.counts.read()
        counted = {name: counts[name].numbers for name in counts if "refused" in name}
        assert counted == {"http_refused_total:invalid_http": (1,)}

    on_connections(scenario)


def test_a_body_that_nobody_reads_yet_is_not_late():
    """The application has not asked for it: no more is read."""

    async def scenario(running):
        protocol, wire = running.connect()
        head = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (1 << 20)
        protocol.data_received(head + b"x" * UNREAD_BODY_BYTES)
        assert not protocol.flow.read_paused
        protocol.data_received(b"x")
        assert protocol.flow.read_paused
        running.pass_seconds(1000)
        assert wire.state == "open"

    on_connections(scenario)


def test_after_a_pause_of_the_process_nobody_is_blamed():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(VERSION[:9])
        running.time += 60.0
        running.table.sweep(running.time)
        assert wire.state == "open"
        running.pass_seconds(1)
        assert b"408 " in wire.written

    on_connections(scenario)


def test_no_pause_is_earned_by_what_came_before():
    async def scenario(running):
        protocol, wire = running.connect()
        protocol.data_received(POST + b"x" * 60_000)
        await settle()
        running.pass_seconds(29)
        assert wire.state == "open"
        running.pass_seconds(4)
        assert b"408 " in wire.written

    on_connections(scenario)


async def connect_used(running, address, num):
    """Connections by name, whose first requests have been answered."""
    held = {f"used {number}": running.connect(address) for number in range(num)}
    running.go.set()
    for protocol, _ in held.values():
        protocol.data_received(VERSION)
    await settle()
    return held


def closed(held):
    """The names of those that were closed; their ends are told."""
    gone = {name for name, (_, wire) in held.items() if wire.state == "aborted"}
    for name in gone:
        held.pop(name)[0].connection_lost(None)
    return gone


def evict(running, held, num):
    """The names of as many as are closed to make room, one after the other."""
    gone = []
    for _ in range(num):
        assert running.table.evict_one()
        (name,) = closed(held)
        gone.append(name)
    return gone


def test_room_is_made_by_who_keeps_the_server_waiting_and_never_by_who_is_served():
    async def scenario(running):
        held = {}
        for name in ("known", "silent", "half", "second", "sending", "served"):
            held[name] = running.connect("many")
        held["honest"] = running.connect("one")
        running.go.set()
        for name in ("known", "second", "served", "honest"):
            held[name][0].data_received(VERSION)
        held["half"][0].data_received(VERSION[:9])
        await settle()
        running.go.clear()
        running.pass_seconds(2)
        held["served"][0].data_received(VERSION)
        held["second"][0].data_received(VERSION[:9])
        held["sending"][0].data_received(POST)
        await settle()
        order = ["silent", "half", "known", "honest", "second", "sending"]
        assert evict(running, held, 6) == order
        assert not running.table.evict_one()
        assert held["served"][1].state == "open"
        assert running.table.total == 1

    on_connections(scenario)


def test_silent_ones_of_many_addresses_give_way_before_the_used_ones_of_one():
    """Whoever used several connections lost one of them while thousands were silent."""

    async def scenario(running):
        held = await connect_used(running, "one", 5)
        held |= {f"silent {number}": running.connect(f"silent {number}") for number in range(100)}
        running.pass_seconds(2)
        assert evict(running, held, 100) == [f"silent {number}" for number in range(100)]
        assert evict(running, held, 5) == [f"used {number}" for number in range(5)]
        assert running.table.total == 0

    on_connections(scenario)


def test_many_of_one_address_give_way_before_the_used_ones_of_another():
    """Also those that are sending something, slowly."""

    async def scenario(running):
        held = await connect_used(running, "one", 3)
        for number in range(FEW_CONNECTIONS + 3):
            held[f"slow {number}"] = running.connect("many")
            held[f"slow {number}"][0].data_received(POST)
        assert evict(running, held, 5) == ["slow 0", "slow 1", "slow 2", "used 0", "used 1"]
        end(held)

    on_connections(scenario)


def test_one_that_has_just_come_is_not_closed_before_those_that_wait_of_another_address():
    async def scenario(running):
        held = await connect_used(running, "many", 3)
        held["new"] = running.connect("one")
        assert evict(running, held, 1) == ["used 0"]

    on_connections(scenario)


def test_of_addresses_that_do_the_same_the_one_that_has_most_gives_way():
    async def scenario(running):
        held = {f"{of} {number}": running.connect(of) for of in "ab" for number in range(3)}
        held["a 3"] = running.connect("a")
        running.pass_seconds(2)
        assert evict(running, held, 7) == ["a 0", "a 1", "b 0", "a 2", "b 1", "a 3", "b 2"]

    on_connections(scenario)


def test_who_sends_its_first_request_or_ends_meanwhile_is_not_closed():
    """Several that are closed next are chosen at a time."""

    async def scenario(running):
        held = {f"{number}": running.connect(f"{number}") for number in range(4)}
        running.pass_seconds(2)
        assert evict(running, held, 1) == ["0"]
        held["1"][0].data_received(VERSION)
        held["2"][0].connection_lost(None)
        await settle()
        assert evict(running, held, 1) == ["3"]

    on_connections(scenario)


def test_who_leaves_an_answer_unread_makes_room_last():
    async def scenario(running):
        served, wire = running.connect("many")
        served.data_received(VERSION)
        await settle()
        served.pause_writing()
        running.pass_seconds(1)
        assert not running.table.evict_one()
        running.pass_seconds(3)
        _, silent = running.connect("many")
        assert running.table.evict_one()
        assert (silent.state, wire.state) == ("aborted", "open")
        assert running.table.evict_one()
        assert wire.state == "aborted"
        served.connection_lost(None)

    on_connections(scenario)


def leave_unread(running, address, size):
    """A connection that leaves so many bytes of its answer unread."""
    protocol, wire = running.connect(address)
    protocol.data_received(VERSION)
    wire.num_unread = size
    protocol.pause_writing()
    return protocol, wire


def end(held):
    """What waits for its client to read goes on."""
    for protocol, _ in held.values():
        protocol.connection_lost(None)


def test_where_more_is_unread_than_may_be_those_with_most_of_it_are_closed():
    async def scenario(running):
        held = {size: leave_unread(running, f"{size}", size) for size in (100, 300, 200, 350)}
        await settle()
        assert not closed(held)
        held[150] = leave_unread(running, "last", 150)  # 1,100 bytes
        await settle()
        assert closed(held) == {350}
        assert running.counts.read()["http_refused_total:too_much_unread"].numbers == (1,)
        held[300][1].num_unread = 0  # it has read, and what the others write has its room
        held[300][0].resume_writing()
        held[500] = leave_unread(running, "more", 500)
        await settle()
        assert not closed(held)
        held[60] = leave_unread(running, "few", 60)
        await settle()
        assert closed(held) == {500}
        end(held)

    on_connections(scenario, max_unread_bytes=1000)


def test_a_large_answer_that_is_being_read_does_not_give_way_to_those_that_are_not():
    async def scenario(running):
        held = {f"{number}": leave_unread(running, "many", 150) for number in range(5)}
        running.pass_seconds(3)
        held["large"] = leave_unread(running, "one", 400)
        await settle()
        assert closed(held) == {"0", "1", "2"}
        held["next"] = leave_unread(running, "one", 301)
        await settle()
        assert closed(held) == {"3", "4"}
        end(held)

    on_connections(scenario, max_unread_bytes=1000)


def test_many_that_each_have_a_little_unread_and_may_write_more_count_too():
    """They are below the mark from which a transport tells that its client does not read."""

    async def scenario(running):
        held = {}
        for size in range(100, 110):
            held[size] = protocol, wire = running.connect(f"{size % 3}")
            protocol.data_received(VERSION)
            wire.num_unread = size
        running.pass_seconds(1)
        await settle()
        assert closed(held) == {107, 108, 109}  # 1,045 bytes
        held[104][1].num_unread = 0
        held[360] = leave_unread(running, "one", 360)
        await settle()
        assert not closed(held)
        running.pass_seconds(1)
        await settle()
        assert not closed(held)
        end(held)

    on_connections(scenario, max_unread_bytes=1000)


def test_what_was_unread_of_a_connection_that_is_lost_counts_no_more():
    async def scenario(running):
        for _ in range(3):
            leave_unread(running, "one", 900)[0].connection_lost(None)
        held = {"next": leave_unread(running, "one", 900)}
        await settle()
        assert not closed(held)
        end(held)

    on_connections(scenario, max_unread_bytes=1000)


def test_of_a_large_body_no_copy_is_made_to_write_it_behind_its_head():
    class Sharing(Wire):
        def __init__(self):
            super().__init__()
            self.pieces = []

        def writelines(self, pieces):
            self.pieces += pieces

    wire, body = Sharing(), b"a" * 100_000

    async def scenario():
        transport = HeadBufferingTransport(wire)
        transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        transport.write(body)
        await settle()

    asyncio.run(scenario())
    assert wire.pieces[0] == b"HTTP/1.1 200 OK\r\n\r\n"
    assert wire.pieces[1] is body
    assert wire.written == b""


def test_what_is_written_to_a_client_that_was_reset_is_dropped_without_an_error():
    """uvloop raises `RuntimeError`, which was logged as a failure of the server."""
    made = []

    class Keeping(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport)

    async def scenario():
        async with address_of(Keeping()) as address:
            client = socket.create_connection(address)
            await until(lambda: made)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await until(made[0].is_closing)
            await settle()
            transport = HeadBufferingTransport(made[0])
            transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
            transport.write(b"body")
            transport.write_eof()
            transport.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


class Computes:
    """An application that answers when its client has left, and notes that."""

    def __init__(self):
        self.told = []

    async def __call__(self, scope, receive, send):
        await receive()
        self.told.append((await receive())["type"])


def test_a_request_ends_with_its_client_though_another_one_came_behind_it():
    async def scenario(running):
        running.app = Computes()
        protocol, _ = running.connect()
        protocol.data_received(VERSION + VERSION)
        await settle()
        protocol.connection_lost(None)
        await settle()
        assert running.app.told == ["http.disconnect"]

    on_connections(scenario)


def test_a_client_that_left_is_noticed_while_a_request_of_it_waits_behind_another_one():
    """Nothing is read of it then, not even its end."""

    async def scenario(running):
        running.app = Computes()
        protocol = running.protocol("a")
        running.table.add(protocol)
        async with address_of(protocol) as address:
            with socket.create_connection(address) as client:
                client.sendall(VERSION)
                await until(lambda: protocol.phase == "serving")
                await settle()
                client.sendall(VERSION)
                await until(lambda: protocol.flow.read_paused)
                running.pass_seconds(2)
                assert not running.app.told
            running.pass_seconds(2)
            await until(lambda: running.app.told)
            assert running.app.told == ["http.disconnect"]

    on_connections(scenario)


def test_a_connection_counts_until_it_is_lost_and_once():
    async def scenario(running):
        protocol, _ = running.connect()
        assert (running.table.total, running.table.full("a")) == (1, True)
        protocol.connection_lost(None)
        running.table.remove(protocol)
        assert (running.table.total, running.table.full("a")) == (0, False)
        assert not running.table.full(None)

    on_connections(scenario, max_per_address=1)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 5), "127.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        ("", None),
    ],
)
def test_connections_are_counted_by_who_can_have_the_address(peer, address):
    assert _client_address(peer) == address


def test_descriptors_are_kept_for_those_who_are_served(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        many = allowed_connections(ConnectionConfig(max_connections=10_000_000))
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == min(hard, 65_536) or hard == resource.RLIM_INFINITY
        assert 0 < many <= raised - 64
        assert "instead of 10000000" in caplog.text
        assert allowed_connections(ConnectionConfig(max_connections=10)) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


STARTED = """
import asyncio, socket
from lookonce.config import ConnectionConfig
from lookonce.server.http.connections import Connections
from lookonce.server.http.uvicorn_server import AcceptingServer

async def main():
    server = AcceptingServer(None, Connections(ConnectionConfig(max_connections=3000)))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        print(open("/proc/self/status").read())
        server.servers[0].close()

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_the_table_of_descriptors_does_not_grow_while_connections_come():
    """Each time it did, the event loop stood still for 10 to 20 ms."""
    told = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    size = next(line for line in told.splitlines() if line.startswith("FDSize:"))
    assert int(size.split()[1]) >= 3000


def connection(listener):
    return socket.create_connection(listener.getsockname())


@contextlib.asynccontextmanager
async def accepting(running, tls=None):
    """A listening socket whose connections are accepted."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        acceptor = Acceptor(listener, running.table, running.protocol, tls)
        acceptor.resume()
        yield listener
        acceptor.close()
        await acceptor.wait_closed()


@contextlib.asynccontextmanager
async def address_of(protocol):
    """Where the one connection is accepted whose protocol this is."""
    server = await asyncio.get_running_loop().create_server(lambda: protocol, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()


def test_of_connections_closed_before_they_were_looked_at_none_is_left():
    async def scenario(running):
        running.table.most = 2
        running.go.set()
        async with accepting(running) as listener:
            clients = [connection(listener) for _ in range(50)]
            last = connection(listener)
            last.sendall(VERSION)
            await until(lambda: running.outcomes)
            assert running.table.total <= 2
            for client in [*clients, last]:
                client.close()
            await until(lambda: running.table.total == 0)

    on_connections(scenario)


def test_a_connection_that_is_cancelled_while_it_is_made_is_not_counted_for_ever():
    """An event loop may connect the protocol before the task hears that it was cancelled, and then
    closes the transport without a word."""

    class Loop:
        def __init__(self, loop):
            self.create_task, self.call_soon = loop.create_task, loop.call_soon
            self.call_later = loop.call_later
            self.add_reader, self.remove_reader = loop.add_reader, loop.remove_reader

        async def connect_accepted_socket(self, factory, accepted, **_):
            accepted.close()
            protocol = factory()
            protocol.connection_made(Wire())
            raise asyncio.CancelledError

    async def scenario(running):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, running.table, running.protocol, None)
            acceptor._loop = Loop(acceptor._loop)
            acceptor.resume()
            client = connection(listener)
            client.sendall(VERSION)
            await until(lambda: "http_refused_total:handshake" in running.counts.read())
            client.close()
            assert running.table.total == 0
            acceptor.close()
            await acceptor.wait_closed()

    on_connections(scenario)


class Short:
    """A listening socket of a process that has no descriptor left."""

    def __init__(self, listener):
        self._listener, self.num_tried = listener, 0

    def accept(self):
        self.num_tried += 1
        raise OSError(errno.EMFILE, "too many open files")

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_without_descriptors_none_is_accepted_for_a_while_whoever_leaves():
    async def scenario(running):
        with socket.create_server(("127.0.0.1", 0)) as listener, connection(listener):
            short = Short(listener)
            acceptor = Acceptor(short, running.table, running.protocol, None)
            acceptor.resume()
            await until(lambda: short.num_tried)
            for _ in range(20):
                running.table.on_room()
                await settle()
            assert short.num_tried == 1
            acceptor.close()
            await acceptor.wait_closed()

    on_connections(scenario)


def test_without_room_new_connections_wait_until_one_ends():
    """Neither is served: room comes when one leaves."""

    async def scenario(running):
        running.table.most = 1
        async with accepting(running) as listener:
            with connection(listener) as first:
                first.sendall(VERSION)
                await until(lambda: running.outcomes)
                second = connection(listener)
                second.sendall(VERSION)
                await asyncio.sleep(0.05)
                assert len(running.outcomes) == running.table.total == 1
                first.close()
                await until(lambda: len(running.outcomes) == 2)
                running.go.set()
                await settle()
                assert is_open(second)
                second.close()

    on_connections(scenario)


def test_nothing_is_made_for_a_connection_before_its_first_byte():
    async def scenario(running):
        running.go.set()
        async with accepting(running) as listener:
            clients = [connection(listener) for _ in range(12)]
            await until(lambda: running.table.total == 12)
            for client in clients[:6]:
                client.close()
            await until(lambda: running.table.total == 6)
            assert (running.made, running.table.num_ended) == ([], 6)
            clients[6].sendall(VERSION)
            await until(lambda: running.outcomes)
            assert len(running.made) == 1
            for client in clients[6:]:
                client.close()
            await until(lambda: running.table.total == 0)

    on_connections(scenario)


def test_who_connects_without_end_is_accepted_a_few_at_a_time(monkeypatch):
    """Also while connections end, which makes room."""

    async def scenario(running):
        table = running.table
        async with accepting(running) as listener:
            clients = [connection(listener) for _ in range(4 * ACCEPTS_PER_TURN)]
            monkeypatch.setattr(connections, "REST_SECONDS", 0.2)
            for client in clients[:2]:
                client.close()
            await asyncio.sleep(0.1)
            assert table.total + table.num_ended == ACCEPTS_PER_TURN
            assert table.num_ended == 2
            monkeypatch.setattr(connections, "REST_SECONDS", 0.0)
            await until(lambda: table.total + table.num_ended == len(clients))
            for client in clients:
                client.close()
            await until(lambda: table.total == 0)

    on_connections(scenario)


async def long_turns(condition):
    """How many turns of the event loop, of 20 ms each, pass until `condition`."""
    for turn in range(1000):
        if condition():
            return turn
        time.sleep(0.02)  # noqa: ASYNC251 - whoever is served takes so long
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


def test_long_turns_accept_and_open_as_many_as_short_ones_would_have():
    """At six and at two in a turn these are 20 and 60 turns."""

    async def scenario(running):
        table, num = running.table, 120
        async with accepting(running) as listener:
            clients = [connection(listener) for _ in range(num)]
            assert await long_turns(lambda: table.total == num) < num / ACCEPTS_PER_TURN / 2
            for client in clients:
                client.sendall(VERSION[:9])
            assert await long_turns(lambda: len(running.made) == num) < num / OPENED_PER_TURN / 2
            for client in clients:
                client.close()
            await until(lambda: table.total == 0)

    on_connections(scenario)


def test_a_turn_may_do_what_the_time_since_the_last_one_allows_up_to_a_limit():
    now = 100.0
    allowance = TurnAllowance(2, 1000, lambda: now)
    assert allowance.take() == 2  # nothing waited before
    now += 0.001
    assert allowance.take() == 2
    now += 0.0205
    assert allowance.take() == 20
    now += 9.0
    assert allowance.take() == 50
    allowance.reset()
    now += 9.0
    assert allowance.take() == 2


def test_one_that_is_silent_ends_at_the_deadline_of_its_header():
    """And so does one that sends its first byte shortly before."""

    async def scenario(running):
        async with accepting(running) as listener:
            silent, slow = connection(listener), connection(listener)
            await until(lambda: running.table.total == 2)
            running.pass_seconds(18)
            slow.sendall(VERSION[:9])
            await until(lambda: running.table.num_received)
            assert running.table.total == 2
            running.pass_seconds(3)
            assert not is_open(silent)
            assert b"408 " in await asyncio.to_thread(slow.recv, 1 << 16)
            counted = running.counts.read()
            assert counted["http_refused_total:no_request"].numbers == (1,)
            assert counted["http_refused_total:header_timeout"].numbers == (1,)
            silent.close()
            slow.close()
            await until(lambda: running.table.total == 0)

    on_connections(scenario)


@pytest.mark.parametrize("begun", [b"\x16\x03\x01\x02\x00", b"no TLS\r\n\r\n"])
def test_a_new_address_takes_turns_with_all_whose_handshakes_go_on_or_have_failed(begun):
    num = 30

    async def scenario(running):
        async with accepting(running, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as listener:

            def connect(number):
                source = f"127.0.0.{number}", 0
                return socket.create_connection(listener.getsockname(), 10, source)

            first = [connect(2 + number) for number in range(num)]
            for client in first:
                client.sendall(begun)
            await until(lambda: len(running.made) == num)
            if begun.startswith(b"no"):
                await until(lambda: running.table.total == 0)
            second = [connect(2 + number) for number in range(num)]
            new = connect(99)
            await until(lambda: running.table.num_ended + running.table.total == 2 * num + 1)
            for client in (*second, new):
                client.sendall(begun)
            while len(running.made) == num:  # noqa: ASYNC110 - what the very first turn opens
                await asyncio.sleep(0)
            assert "127.0.0.99" in running.made
            assert len(running.made) == num + OPENED_PER_TURN
            await until(lambda: len(running.made) == 2 * num + 1)  # nobody waits for ever
            for client in (*first, *second, new):
                client.close()
            await until(lambda: running.table.total == 0)

    on_connections(scenario)


def test_many_first_bytes_that_come_at_once_are_answered_in_turns_by_address():
    async def scenario(running):
        async with accepting(running) as listener:
            many = [connection(listener) for _ in range(20)]
            one = socket.create_connection(listener.getsockname(), 10, ("127.0.0.9", 0))
            await until(lambda: running.table.total == 21)
            for client in (*many, one):
                client.sendall(VERSION[:9])
            while not running.made:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0)
            assert len(running.made) == OPENED_PER_TURN
            assert "127.0.0.9" in running.made
            await until(lambda: len(running.made) == 21)
            for client in (*many, one):
                client.close()
            await until(lambda: running.table.total == 0)

    on_connections(scenario)


def test_a_drain_and_an_eviction_reach_those_that_are_silent():
    async def scenario(running):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, running.table, running.protocol, None)
            acceptor.resume()
            clients = [connection(listener) for _ in range(3)]
            await until(lambda: running.table.total == 3)
            assert running.table.evict_one()
            assert [is_open(client) for client in clients] == [False, True, True]
            acceptor.close()
            running.table.drain(5)
            running.pass_seconds(4)
            assert running.table.total == 2
            running.pass_seconds(2)
            assert running.table.total == 0
            for client in clients:
                client.close()
            await acceptor.wait_closed()

    on_connections(scenario)


def test_one_that_comes_closes_one_and_many_that_come_close_several_at_a_time():
    class Counting(Acceptor):
        num_evictions = 0

        def _evict(self):
            self.num_evictions += 1
            super()._evict()

    async def scenario(running):
        def evicted():
            counts = running.counts.read()
            return counts["http_connections_evicted_total"].numbers[0]

        running.table.most = 20
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, ExitStack() as held:
            acceptor = Counting(listener, running.table, running.protocol, None)
            acceptor.resume()
            for _ in range(20):
                held.enter_context(connection(listener))
            await until(lambda: running.table.total == 20)
            for number in range(1, 4):
                held.enter_context(connection(listener))
                await until(lambda: running.table.total + evicted() == 20 + number)  # noqa: B023
                assert evicted() <= number + 3
            acceptor.num_evictions = 0
            for _ in range(64):
                held.enter_context(connection(listener))
            await until(lambda: running.table.total + evicted() == 20 + 67)
            assert evicted() <= 67 + 16
            assert acceptor.num_evictions < 64 / 4
            acceptor.close()
            running.table.close_silent()
            await acceptor.wait_closed()

    on_connections(scenario)


# --- what is dropped ------------------------------------------------------------------------------


class Endless(Wire):
    """Of a client that sends without end: whenever it is read, there is more."""

    protocol = None

    def __init__(self):
        super().__init__()
        self.num_reads = 0
        self.reads = True
        self.on_read = lambda: None

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True
        asyncio.get_running_loop().call_soon(self.read)

    def read(self):
        """As long as nobody objects."""
        if self.reads and not self.is_closing():
            self.num_reads += 1
            self.on_read()
            self.protocol.data_received(b"a" * self.num_bytes)
            asyncio.get_running_loop().call_soon(self.read)


def endless(running, address, begun, num_bytes=1000):
    """`num_bytes`: of each read."""
    protocol = running.protocol(address)
    wire = Endless()
    wire.num_bytes = num_bytes
    wire.protocol = protocol
    running.table.add(protocol)
    protocol.connection_made(wire)
    protocol.data_received(begun)
    wire.read()
    return protocol, wire


REFUSED = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200


def test_what_follows_a_refusal_is_read_in_turns_by_address():
    async def scenario(running):
        many = [endless(running, "many", REFUSED) for _ in range(6)]
        _, one = endless(running, "one", REFUSED)
        assert all(b"431" in wire.written for _, wire in many)
        await until(lambda: one.num_reads >= 6)
        reads = [wire.num_reads for _, wire in many]
        assert abs(sum(reads) - one.num_reads) <= 1
        assert max(reads) - min(reads) <= 1

    on_connections(scenario)


class Bodies:
    """An application that reads bodies, and notes whose parts come."""

    def __init__(self):
        self.parts = []

    async def __call__(self, scope, receive, send):
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            self.parts.append(scope["path"])
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})


def upload(path):
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" % path


def large(path):
    """The beginning of a body that is read in turns, and the bytes of a read that is not small."""
    return upload(path) + b"a" * (UNREAD_BODY_BYTES + 1), SMALL_READ_BYTES


def test_large_bodies_are_read_once_in_each_turn_of_the_event_loop():
    """Whose address has fewer of them comes at least as often."""

    async def scenario(running):
        running.app = Bodies()
        many = [endless(running, "many", *large(b"/many"))[1] for _ in range(6)]
        _, one = endless(running, "one", *large(b"/one"))
        await settle()
        before = [wire.num_reads for wire in (*many, one)]
        turns = 200
        for _ in range(turns):
            await asyncio.sleep(0)
        reads = [w.num_reads - read for w, read in zip((*many, one), before, strict=True)]
        assert turns / 4 <= sum(reads) <= turns + 1
        assert reads[-1] >= max(reads[:-1])

    on_connections(scenario)


@pytest.mark.parametrize(
    ("size", "rests"), [(256 * 1024, 1.0), (96 * 1024, 1.0), (SMALL_READ_BYTES, 0.5)]
)
def test_after_what_large_bodies_cost_the_loop_rests_while_others_ask(size, rests):
    """Whoever is alone, and the others once nobody asks any more, need not wait."""

    async def scenario(running):
        running.app, times = Bodies(), []

        async def share():
            """Of the gaps between the next reads, how many are rests."""
            times.clear()
            await until(lambda: len(times) >= 50)
            gaps = [after - before for before, after in pairwise(times)]
            return sum(gap > READ_REST_SECONDS / 2 for gap in gaps) / len(gaps)

        begun, _ = large(b"/large")
        uploads = [endless(running, "large", begun, size)[1] for _ in range(3)]
        for wire in uploads:
            wire.on_read = lambda: times.append(asyncio.get_running_loop().time())
        await settle()
        for address, expected in (("large", 0.0), ("other", rests)):
            protocol, wire = running.connect(address)
            protocol.data_received(POST + b"a" * 100_000)
            await until(lambda wire=wire: b"200 OK" in wire.written)
            assert await share() == pytest.approx(expected, abs=0.2)
        running.pass_seconds(3)
        await settle()
        assert await share() < 0.1

    on_connections(scenario)


def test_a_large_body_does_not_wait_for_many_that_come_little_by_little():
    """Neither for those of other addresses nor for those of its own."""

    async def scenario(running):
        running.app = Bodies()
        begun = upload(b"/little") + b"a" * (UNREAD_BODY_BYTES + 1)
        addresses = [*("one" for _ in range(50)), *(f"other {n}" for n in range(50))]
        little = [endless(running, address, begun)[1] for address in addresses]
        _, one = endless(running, "one", *large(b"/one"))
        await settle()
        before = [wire.num_reads for wire in (*little, one)]
        await until(lambda: sum(wire.num_reads for wire in little) >= 4000)
        reads = [w.num_reads - read for w, read in zip((*little, one), before, strict=True)]
        assert reads[-1] >= 15  # in turns with all others it would have one or two
        assert min(reads[-51:-1]) > 0  # and the others come, too

    on_connections(scenario)


def test_the_beginning_of_a_body_waits_for_no_turn():
    async def scenario(running):
        running.app = Bodies()
        for _ in range(3):
            endless(running, "many", upload(b"/many") + b"a" * (UNREAD_BODY_BYTES + 1))
        protocol, wire = running.connect()
        protocol.data_received(POST + b"a" * 100_000)
        await settle()
        assert b"200 OK" in wire.written
        assert not protocol.flow.read_paused

    on_connections(scenario)


def test_a_connection_that_is_lost_while_it_waits_for_its_turn_has_none():
    async def scenario(running):
        gone = [endless(running, address, REFUSED) for address in ("many", "many", "one")]
        for protocol, wire in gone:
            wire.abort()
            protocol.connection_lost(None)
        _, last = endless(running, "one", REFUSED)
        await until(lambda: last.num_reads >= 3)
        assert not any(wire.num_reads for _, wire in gone)

    on_connections(scenario)


def test_the_rest_of_a_body_that_was_answered_is_read_in_turns_and_not_for_ever():
    async def scenario(running):
        async def answers_at_once(scope, receive, send):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})

        running.app = answers_at_once
        protocol, wire = running.connect()
        protocol.data_received(POST)
        await settle()
        assert b"401" in wire.written
        for number in range(1, 101):
            await until(lambda: not protocol.flow.read_paused)
            protocol.data_received(b"a" * 1000)
            assert protocol.flow.read_paused == (number < 100)
        assert protocol.phase == "idle"

        protocol.data_received(POST)
        await settle()
        running.pass_seconds(9)
        assert wire.state == "open"
        running.pass_seconds(3)
        assert wire.state == "aborted"

    on_connections(scenario)


CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\na\r\n"


def test_a_body_of_very_many_chunks_is_read_in_turns_whether_it_is_dropped_or_not():
    """16 connections of chunks of one byte held the event loop for three seconds."""

    async def scenario(running):
        bodies = []

        async def app(scope, receive, send):
            got, more = b"", True
            while more:
                message = await receive()
                got, more = got + message["body"], message["more_body"]
            bodies.append(got)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        running.app = app
        protocol, wire = running.connect()
        protocol.data_received(CHUNKED + TINY * FEW_CHUNKS)
        await settle()
        assert not protocol.flow.read_paused
        for _ in range(3):
            protocol.data_received(TINY * (FEW_CHUNKS + 1))
            await settle()  # the application wants to read on
            assert protocol.flow.read_paused
            await until(lambda: not protocol.flow.read_paused)
        protocol.data_received(b"0\r\n\r\n")
        await until(lambda: b"ok" in wire.written)
        assert bodies == [b"a" * (4 * FEW_CHUNKS + 3)]
        assert (protocol.phase, protocol.flow.read_paused) == ("idle", False)

    on_connections(scenario)


def test_a_turn_reads_nothing_that_the_application_has_no_room_for():
    async def scenario(running):
        async def reads_nothing(scope, receive, send):
            await running.go.wait()

        running.app = reads_nothing
        protocol, _ = running.connect()
        full = b"%x\r\n%b\r\n" % (UNREAD_BODY_BYTES + 1, b"a" * (UNREAD_BODY_BYTES + 1))
        protocol.data_received(CHUNKED + full + TINY * (FEW_CHUNKS + 1))
        assert protocol.flow.waits_for_turn
        await until(lambda: not protocol.flow.waits_for_turn)
        assert protocol.flow.read_paused
        running.go.set()

    on_connections(scenario)


def test_who_sends_megabytes_of_header_reads_why_they_are_refused():
    async def scenario(running):
        with socket.create_server(("127.0.0.1", 0)) as listener, connection(listener) as client:
            acceptor = Acceptor(listener, running.table, running.protocol, None)
            acceptor.resume()
            await asyncio.to_thread(client.sendall, REFUSED + b"X: y\r\n" * 500_000)
            answer = await asyncio.to_thread(client.recv, 1 << 16)
            assert answer.startswith(b"HTTP/1.1 431 ")
            client.close()
            await until(lambda: running.table.total == 0)
            acceptor.close()
            await acceptor.wait_closed()

    on_connections(scenario)


WEBSOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
"""The application of these tests answers none."""


# --- connections that have ended ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (VERSION, b"200 OK"),
        (VERSION[:-2], b""),
        (b"garbage\r\n\r\n" * 9, b" 400 "),
        (POST, b""),
        (VERSION + VERSION, b"200 OK"),
        (WEBSOCKET, b" 500 "),
    ],
    ids=["a request", "half a header", "garbage", "half a body", "pipelined", "socket"],
)
def test_a_connection_that_has_ended_is_freed_without_garbage_collection(sent, answered):
    """Thousands a second would else be there at a time, and leave holes that nothing fills."""
    made = weakref.WeakSet()

    async def scenario(running):
        running.go.set()

        def protocol(address):
            connection = running.protocol(address)
            made.add(connection)
            return connection

        with socket.create_server(("127.0.0.1", 0)) as listener:
            acceptor = Acceptor(listener, running.table, protocol, None)
            acceptor.resume()
            loop = asyncio.get_running_loop()
            with connection(listener) as client:
                client.setblocking(False)
                await loop.sock_sendall(client, sent)
                answer = b""
                while answered not in answer:
                    more = await loop.sock_recv(client, 1 << 16)
                    assert more, answer
                    answer += more
                await until(lambda: running.made)
                await settle()
            await until(lambda: running.table.total == 0)
            await until(lambda: not made)
            acceptor.close()
            await acceptor.wait_closed()

    gc.collect()
    gc.disable()
    try:
        uvloop.run(with_connections(scenario))
    finally:
        gc.enable()


# --- clients that have left -----------------------------------------------------------------------


class Begins:
    """An application that reads the beginning of a body, and the rest once it may."""

    def __init__(self):
        self.goes_on = asyncio.Event()
        self.ended = None

    async def __call__(self, scope, receive, send):
        message = await receive()
        await self.goes_on.wait()
        while message.get("more_body"):
            message = await receive()
        self.ended = message["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


SENT = 1_500_000


@contextlib.asynccontextmanager
async def uploading(running, declared):
    """A client that has sent `SENT` bytes of a body and no more; not all of them are read."""
    loop, running.app = asyncio.get_running_loop(), Begins()
    protocol = running.protocol("a")
    async with address_of(protocol) as address:
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, POST.replace(b"100000", b"%d" % declared) + b"a" * SENT)
            client.shutdown(socket.SHUT_WR)
            await until(lambda: protocol.transport is not None)
            await until(lambda: protocol.transport.is_closing() or protocol.flow.read_paused)
            running.app.goes_on.set()
            yield client


def test_what_is_there_of_a_large_body_is_not_read_when_its_client_has_left():
    async def scenario(running):
        async with uploading(running, 2 * SENT):
            await until(lambda: running.app.ended)
            assert running.app.ended == "http.disconnect"
            assert running.table.num_received < SENT

    on_connections(scenario)


def test_a_large_body_that_is_whole_is_served_though_its_client_sends_no_more():
    async def scenario(running):
        async with uploading(running, SENT) as client:
            loop = asyncio.get_running_loop()
            assert b"200 OK" in await loop.sock_recv(client, 1 << 16)
            assert running.app.ended == "http.request"

    on_connections(scenario)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_given_back_once_the_process_grew_or_nothing_more_comes(monkeypatch):
    times = []
    size = 0
    monkeypatch.setattr(uvicorn_server, "give_memory_back", lambda: times.append(1))
    monkeypatch.setattr(uvicorn_server, "resident_bytes", lambda: size)

    async def scenario():
        connections = Connections(ConnectionConfig())
        server = AcceptingServer(None, connections)

        async def after(received: int, ended: int = 0) -> int:
            """How often by the sweep after so much has come."""
            connections.num_received += received
            connections.num_ended += ended
            await server.on_tick(0)
            return len(times)

        assert await after(uvicorn_server.REST_BYTES) == 0  # more may come
        quiet = [await after(0) for _ in range(40)]
        assert quiet == [1] * 4 + [2] * 25 + [3] * 11  # what was begun may end later
        assert await after(100 * uvicorn_server.TRIM_BYTES) == 3  # all of it was freed again
        nonlocal size
        size = uvicorn_server.TRIM_BYTES
        assert await after(1) == 4
        assert await after(1) == 4  # the rest is in use
        size += uvicorn_server.TRIM_BYTES - 1
        assert await after(1) == 4
        size -= 2 * uvicorn_server.TRIM_BYTES - 1  # what was in use is free by itself
        assert await after(1) == 4
        size += uvicorn_server.TRIM_BYTES
        assert await after(1) == 5
        assert await after(0) == 6  # what was not garbage before
        assert await after(0, ended=uvicorn_server.REST_CONNECTIONS) == 6
        assert await after(0) == 7
        assert await after(uvicorn_server.REST_BYTES // 2, ended=1) == 7
        assert await after(0) == 7

    asyncio.run(scenario())
