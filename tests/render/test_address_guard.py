"""No address that is not public is connected to, by name, number, redirect or changing DNS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from lookonce.errors import MediaForbiddenError, RequestError, UnprocessableMediaError
from lookonce.render.media.address_guard import (
    MAX_LOOKUPS,
    GuardedBackend,
    IPAddress,
    is_any,
    is_public,
)
from lookonce.render.media.fetch import Fetcher
from tests.support.render.origin import Answer, origin

PRIVATE = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1",
    "192.0.2.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.88.99.1",
    "168.63.129.16",
    "::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
    "2001:db8::1", "3fff::1", "5f00::1", "2001::1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::8.8.8.8",
    "64:ff9b:1::1", "2002:7f00:1::1", "2002:808:808::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::200e"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


class Names:
    """A resolver that answers what a test wrote down, in turn, and counts questions."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self._answers[host.partition(".")[0]]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def fetcher(rule: Callable[[IPAddress], bool] = is_public, names: Names | None = None) -> Fetcher:
    backend = GuardedBackend(rule) if names is None else GuardedBackend(rule, names)
    return Fetcher(timeout=30, max_bytes=1000, backend=backend)


def only_first_loopback(address: IPAddress) -> bool:
    """Lets the tests' server stand for a public one; other loopback addresses stay private."""
    return str(address) == "127.0.0.1"


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_that_resolves_to_no_public_address_is_forbidden(address: str) -> None:
    async def scenario() -> None:
        client = fetcher(names=Names(inside=[[address]]))
        with pytest.raises(MediaForbiddenError) as raised:
            await client.fetch("http://inside.example/")
        assert address not in raised.value.message
        await client.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1",
        "127.0.0.1.", "localhost", "LOCALHOST", "0", "[::1]", "[::]", "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "%31%32%37.0.0.1", "①②⑦.0.0.1",
    ],
)  # fmt: skip
def test_no_spelling_of_loopback_reaches_it(host: str) -> None:
    """By the system's own resolver, which understands more spellings than any parser."""

    async def scenario() -> None:
        async with origin({"/": Answer(b"secret")}) as site:
            client = fetcher()
            with pytest.raises(RequestError):
                await client.fetch(site.url(host=host))
            assert site.requests == []
            await client.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["http://127.0.0.2:{port}/", "http://inside.example:{port}/"])
def test_a_redirect_to_a_private_address_is_forbidden(where: str) -> None:
    async def scenario() -> None:
        names = Names(inside=[["127.0.0.3"]], outside=[["127.0.0.1"]])
        names._answers["127"] = [["127.0.0.2"]]
        async with origin({}) as site:
            location = where.format(port=site.port)
            site.answers["/"] = Answer(status=302, headers={"Location": location})
            client = fetcher(only_first_loopback, names)
            with pytest.raises(MediaForbiddenError):
                await client.fetch(f"http://outside.example:{site.port}/")
            assert len(site.requests) == 1
            await client.aclose()

    asyncio.run(scenario())


def test_names_that_nobody_answers_take_no_lookup_from_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, asked = threading.Event(), threading.Event(), Counter[str]()

    def resolve(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        asked[host.partition("-")[0]] += 1
        if host.startswith("slow"):
            begun.set()
            may_end.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def scenario() -> None:
        async with origin({"/": Answer(b"public")}) as site:
            client = Fetcher(timeout=30, max_bytes=1000, backend=GuardedBackend(is_any))
            slow = [
                asyncio.create_task(
                    client.fetch(f"http://slow-{number}.example:{site.port}/", tenant="slow")
                )
                for number in range(100)
            ]
            await asyncio.to_thread(begun.wait)
            for task in slow[:10]:  # their lookups go on though nobody waits for them
                task.cancel()
            async with asyncio.timeout(10):
                url = f"http://quick-one.example:{site.port}/"
                assert await client.fetch(url, tenant="other") == b"public"
            assert asked["slow"] <= MAX_LOOKUPS
            may_end.set()
            assert set(await asyncio.gather(*slow[10:])) == {b"public"}
            await client.aclose()

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        asyncio.run(scenario())
    finally:
        may_end.set()


def test_what_was_checked_is_what_is_connected_to() -> None:
    """A name that is public when it is checked and private when it is used: it is asked once."""

    async def scenario() -> None:
        names = Names(rebinding=[["127.0.0.1"], ["127.0.0.2"]])
        async with origin({"/": Answer(b"public")}) as site:
            client = fetcher(only_first_loopback, names)
            assert await client.fetch(f"http://rebinding.example:{site.port}/") == b"public"
            assert names.asked == ["rebinding.example"]
            with pytest.raises(MediaForbiddenError):
                await client.fetch(f"http://rebinding.example:{site.port}/")
            await client.aclose()

    asyncio.run(scenario())


def test_of_mixed_answers_only_allowed_addresses_are_connected_to() -> None:
    async def scenario() -> None:
        names = Names(mixed=[["127.0.0.2", "127.0.0.1"]])
        async with origin({"/": Answer(b"public")}) as site:
            client = fetcher(only_first_loopback, names)
            assert await client.fetch(f"http://mixed.example:{site.port}/") == b"public"
            await client.aclose()

    asyncio.run(scenario())


def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async def scenario() -> None:
        names = Names(double=[["127.0.0.2", "127.0.0.1"]])
        async with origin({"/": Answer(b"public")}) as site:
            client = fetcher(is_any, names)
            assert await client.fetch(f"http://double.example:{site.port}/") == b"public"
            await client.aclose()

    asyncio.run(scenario())


def test_the_server_is_told_the_name_not_the_address() -> None:
    async def scenario() -> None:
        async with origin({"/": Answer(b"x")}) as site:
            client = fetcher(is_any, Names(media=[["127.0.0.1"]]))
            await client.fetch(f"http://media.example:{site.port}/")
            assert site.requests[0].headers["host"] == f"media.example:{site.port}"
            await client.aclose()

    asyncio.run(scenario())


def test_tls_asks_for_the_name_not_the_address() -> None:
    """The name stands readable in a TLS client's first message."""

    async def scenario() -> bytes:
        hello = asyncio.get_running_loop().create_future()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello.set_result(await reader.read(4096))
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = fetcher(is_any, Names(media=[["127.0.0.1"]]))
        with pytest.raises(UnprocessableMediaError):
            await client.fetch(f"https://media.example:{port}/")
        await client.aclose()
        server.close()
        return bytes(await hello)

    assert b"media.example" in asyncio.run(scenario())


def test_a_name_nobody_knows_is_a_clean_error() -> None:
    async def nobody(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    async def scenario() -> None:
        client = Fetcher(timeout=30, max_bytes=10, backend=GuardedBackend(is_any, nobody))
        with pytest.raises(UnprocessableMediaError, match="connection failed"):
            await client.fetch("http://nowhere.example/")
        await client.aclose()

    asyncio.run(scenario())
