"""The head of an answer goes out with what follows it, and never later than that."""

from __future__ import annotations

import asyncio

import pytest

from lookonce.server.http.connection import HeadHolder

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


@pytest.fixture
def on_wire():
    def run(scenario) -> list[bytes]:
        async def whole() -> list[bytes]:
            wire = Wire()
            await scenario(HeadHolder(wire), wire)
            return wire.written

        return asyncio.run(whole())

    return run


def test_head_and_body_are_one_write_and_what_follows_its_own(on_wire):
    async def scenario(holder, wire):
        for data in (HEAD, b"2\r\nhi\r\n", b"0\r\n\r\n"):
            holder.write(data)

    assert on_wire(scenario) == [HEAD + b"2\r\nhi\r\n", b"0\r\n\r\n"]


def test_a_head_alone_waits_for_nobody(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        await asyncio.sleep(0)
        assert wire.written == [HEAD]
        holder.write(b"later")

    assert on_wire(scenario) == [HEAD, b"later"]


def test_closing_sends_what_is_held_first(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        holder.close()
        assert wire.closed

    assert on_wire(scenario) == [HEAD]


def test_a_head_for_a_connection_that_is_gone_is_dropped(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        wire.closed = True
        await asyncio.sleep(0)

    assert on_wire(scenario) == []


def test_all_else_is_the_transport_s_own(on_wire):
    async def scenario(holder, wire):
        assert holder.get_extra_info("peername") == "the peername"

    on_wire(scenario)
