"""Clients that flood, that never read, that send giants, and that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct

import pytest
from websockets.exceptions import InvalidStatus

from lookonce.config import ConnectionConfig, Options, SessionConfig, resolve
from lookonce.server.http.websocket import MAX_FRAGMENTS, MAX_MESSAGE_BYTES
from tests.support.server.realtime import as_text, nothing_left, on_realtime_site, silence, until

APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": as_text(silence(0.1))})
RESPOND = b'{"type": "response.create", "response": {"instructions": "a"}}'
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, CONTINUATION, PING = 1, 0, 9


def frame(opcode, data=b"", *, final=True):
    """A client's frame, masked with zeros."""
    first = bytes([opcode | (0x80 if final else 0)])
    if len(data) < 126:
        length = bytes([0x80 | len(data)])
    elif len(data) < 1 << 16:
        length = b"\xfe" + struct.pack(">H", len(data))
    else:
        length = b"\xff" + struct.pack(">Q", len(data))
    return first + length + bytes(4) + data


async def raw(here, *, small=False):
    """A connection that has shaken hands, by hand; `small`: it can hold little unread."""
    sock = socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", here.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
    writer.write(HANDSHAKE)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101"), head
    return reader, writer


async def closing_code(reader, writer):
    """Of the close frame that ends what the server sends."""
    data = b""
    async with asyncio.timeout(100):
        while part := await reader.read(1 << 16):
            data += part
    writer.close()
    return struct.unpack(">H", data[data.rindex(b"\x88") + 2 :][:2])[0]


def test_a_flood_of_sound_is_taken_as_fast_as_it_is_heard_and_no_further():
    async def scenario(here):
        async with here.session("transcription") as connection:
            budget = here.site.services.realtime.budget
            for _ in range(300):
                await connection.send_raw(APPEND)
                assert budget.used <= 200_000
            await connection.input_audio_buffer.clear()
            await until(connection, "input_audio_buffer.cleared")

    on_realtime_site(scenario)


def test_a_session_holds_so_much_and_then_says_so():
    async def scenario(here):
        async with here.session() as connection:
            picture = {"type": "input_image", "image_url": "data:," + "a" * 60_000}
            item = {"type": "message", "role": "user", "content": [picture]}
            codes = []
            for _ in range(5):
                await connection.conversation.item.create(item=item)
                told = (await until(connection, "conversation.item.done"))[-1]
                codes.append(told.error.code if told.type == "error" else None)
            assert codes == [None, None, None, "session_full", "session_full"]

    on_realtime_site(scenario, SessionConfig(max_bytes=200_000))


def test_all_sessions_together_hold_so_much():
    async def scenario(here):
        picture = {"type": "input_image", "image_url": "data:," + "a" * 60_000}
        item = {"type": "message", "role": "user", "content": [picture]}
        async with here.session() as first, here.session() as second:
            await first.conversation.item.create(item=item)
            await until(first, "conversation.item.done")
            await second.conversation.item.create(item=item)
            assert (await until(second))[-1].error.code == "session_full"
        await nothing_left(here)
        async with here.session() as third:
            await third.conversation.item.create(item=item)
            await until(third, "conversation.item.done")

    on_realtime_site(scenario, SessionConfig(max_total_bytes=100_000))


KEYS = ("mallory:one", "alice:two")


def test_one_tenant_has_half_of_the_sessions_where_there_are_others():
    async def scenario(here):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(here.client("one").realtime.connect())
            with pytest.raises(InvalidStatus) as caught:
                await stack.enter_async_context(here.client("one").realtime.connect())
            assert caught.value.response.status_code == 429
            await stack.enter_async_context(here.client("two").realtime.connect())

    on_realtime_site(scenario, max_sessions=4, api_key=KEYS)
    assert resolve(Options(api_key=("a", "b"))).server.sessions.max_tenant_sessions is None
    asked = Options(api_key=KEYS, max_tenant_sessions=100)
    assert resolve(asked).server.sessions.max_tenant_sessions == 100


def test_one_tenant_s_sessions_leave_memory_to_others():
    picture = {"type": "input_image", "image_url": "data:," + "a" * 60_000}
    item = {"type": "message", "role": "user", "content": [picture]}

    async def told(here, key):
        connection = await here.client(key).realtime.connect().enter()
        await until(connection, "conversation.created")
        await connection.conversation.item.create(item=item)
        return connection, (await until(connection, "conversation.item.done"))[-1]

    async def scenario(here):
        first, taken = await told(here, "one")
        second, full = await told(here, "one")
        third, others = await told(here, "two")
        assert taken.type == others.type == "conversation.item.done"
        assert full.error.code == "session_full"
        for connection in (first, second, third):
            await connection.close()

    limits = SessionConfig(max_total_bytes=200_000, max_tenant_bytes=100_000)
    on_realtime_site(scenario, limits, api_key=KEYS)
    assert resolve(Options(api_key=KEYS)).server.sessions.max_tenant_bytes


def test_who_never_reads_is_not_read_either_and_is_closed():
    """The client asks for its item again and again: the answers are larger than what it sends."""
    large = "a" * 100_000
    content = [{"type": "input_text", "text": large}]
    create = {"type": "message", "role": "user", "id": "x", "content": content}

    async def scenario(here):
        _, writer = await raw(here, small=True)
        event = json.dumps({"type": "conversation.item.create", "item": create}).encode()
        writer.write(frame(TEXT, event))
        ask = frame(TEXT, b'{"type": "conversation.item.retrieve", "item_id": "x"}')
        written = 0

        async def ask_on():
            nonlocal written
            while True:
                writer.write(ask * 1000)
                written += 1000
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(ask_on(), 100)
        assert written * len(ask) < 20_000_000
        writer.transport.abort()
        await nothing_left(here)
        refused = here.site.services.metrics.counts.read()["http_refused_total:write_timeout"]
        assert refused.numbers == (1,)

    on_realtime_site(scenario, connections=ConnectionConfig(write_timeout=1.0))


def test_pings_that_are_never_read_are_answered_only_so_far():
    async def scenario(here):
        _, writer = await raw(here, small=True)
        (protocol,) = here.server.server_state.connections
        pings = frame(PING, bytes(100)) * 1000
        for _ in range(200):
            writer.write(pings)
            await asyncio.sleep(0)
        async with asyncio.timeout(100):
            await writer.drain()
        assert protocol.transport.get_write_buffer_size() < 1 << 20
        writer.transport.abort()

    on_realtime_site(scenario)


def test_giant_messages_close_their_own_connection():
    async def scenario(here):
        async with here.session() as other:
            reader, writer = await raw(here)
            head = b"\x81\xff" + struct.pack(">Q", MAX_MESSAGE_BYTES + 1) + bytes(4)
            writer.write(head)
            assert await closing_code(reader, writer) == 1009
            reader, writer = await raw(here)
            writer.write(frame(TEXT, final=False))
            writer.write(frame(CONTINUATION, final=False) * MAX_FRAGMENTS)
            assert await closing_code(reader, writer) == 1009
            reader, writer = await raw(here)
            writer.write(frame(TEXT, b"\xff\xfe"))
            assert await closing_code(reader, writer) == 1007
            reader, writer = await raw(here)
            writer.write(b"\x01\x02garbage" * 10)
            assert await closing_code(reader, writer) == 1002
            await other.response.cancel()
            assert (await until(other))[-1].error.code == "response_cancel_not_active"

    on_realtime_site(scenario)


def test_a_message_that_trickles_is_given_up():
    async def scenario(here):
        reader, writer = await raw(here)
        writer.write(frame(TEXT, bytes(1000))[:500])
        assert await closing_code(reader, writer) == 1008

    on_realtime_site(scenario, connections=ConnectionConfig(body_timeout=0.5))


def test_a_thousand_that_come_and_go_leave_nothing():
    async def scenario(here):
        async def knock(number):
            reader, writer = await raw(here)
            if number % 3:
                writer.write(frame(TEXT, APPEND.encode()))
            if number % 3 == 2:
                writer.write(frame(TEXT, RESPOND))
                await reader.read(100)
            writer.transport.abort() if number % 2 else writer.close()

        for begin in range(0, 1000, 50):
            await asyncio.gather(*(knock(number) for number in range(begin, begin + 50)))
        await nothing_left(here)
        opened = here.site.services.metrics.counts.read()["realtime_sessions_total"]
        assert opened.numbers == (1000,)

    on_realtime_site(scenario, max_sessions=2000)


def test_a_client_that_leaves_in_mid_answer_ends_it():
    async def scenario(here):
        here.site.engine.gate.clear()
        _, writer = await raw(here)
        writer.write(frame(TEXT, RESPOND))
        async with asyncio.timeout(100):
            while not here.site.engine.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()
        await nothing_left(here)

    on_realtime_site(scenario)
