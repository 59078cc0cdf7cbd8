"""The page of a fleet's front-end: it shows the engines, and where requests went and why."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lookonce.config import Options, resolve
from lookonce.fleet.frontend import Frontend
from lookonce.fleet.members import EngineAddress, Fleet
from lookonce.fleet.router import Router
from lookonce.fleet.server import FrontendServer
from tests.support.page.actions import answers, ask, expect
from tests.support.page.pausable_server import PausableServer


@contextmanager
def fleet_of(**engines: PausableServer) -> Iterator[str]:
    """The URL of a front-end over these servers, by name, which runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        config = resolve(Options(port=0)).server
        fleet = Fleet(Router())
        addresses = {}
        for name, engine in engines.items():
            model = engine.services.config.model.served_name
            addresses[name] = EngineAddress(name, model, engine.url.removeprefix("http://"))
        fleet.update(addresses)
        await fleet.wait_served(1)
        server = FrontendServer(Frontend(fleet, config), config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        fleet.close()
        server.should_exit = True
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(30)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()
        listener.close()


def test_a_fleet_is_shown_engine_by_engine(open_page):
    with PausableServer("yes") as one, PausableServer("yes") as two:
        one.engine.counters |= {
            "encoder_cache_queries_total": 4, "encoder_cache_hits_total": 3,
            "kv_tier_lookups_total:disk": 200, "kv_tier_hits_total:disk": 50,
        }  # fmt: skip
        with fleet_of(red=one, blue=two) as url:
            page = open_page(url)
            tile = page.locator("#tile-fleet")
            expect(tile.locator(".figure")).to_have_text("2 of 2 engines take requests")
            ask(page, "What?")
            expect(answers(page).locator(".said")).to_have_text("yes")
            expect(tile).to_contain_text("index: 0 KV blocks")
            engines = tile.get_by_role("listitem")
            expect(engines).to_have_count(2)
            red = engines.filter(has_text="red")
            expect(red).to_contain_text("encoder 75 %, KV in disk 25 %")
            expect(engines.filter(has_text="blue")).not_to_contain_text("disk")
            expect(tile).to_contain_text("least loaded")


def test_one_server_shows_no_fleet(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url)
        expect(page.locator("#tile-requests")).to_be_visible()
        expect(page.locator("#tile-fleet")).to_have_count(0)
