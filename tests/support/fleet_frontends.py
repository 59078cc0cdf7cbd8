"""Front-ends of a fleet inside the test's process, over engines that run as `lookonce serve`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookonce.config import Options, resolve
from lookonce.fleet.config import RenderedModel
from lookonce.fleet.frontend import Frontend
from lookonce.fleet.members import EngineAddress, EngineKeys, Fleet
from lookonce.fleet.rendering import Rendering
from lookonce.fleet.router import Router
from lookonce.fleet.server import FrontendServer
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import LiveServer


@dataclass
class RunningFrontend:
    url: str
    frontend: Frontend
    fleet: Fleet


@contextlib.contextmanager
def running_engine(name: str, *options: str, model: str = "nano") -> Iterator[Engine]:
    """An engine that tells its events."""
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        line = (model, "--events", f"{events}?replay={replay}", *options)
        with LiveServer(*line) as server:
            http = server.url.removeprefix("http://")
            yield Engine(server, EngineAddress(name, model, http, events, replay))


@dataclass
class Engine:
    server: LiveServer
    address: EngineAddress


@contextlib.asynccontextmanager
async def serving_frontend(
    addresses: Sequence[EngineAddress],
    rendered: Sequence[RenderedModel] = (),
    keys: Path | None = None,
    fakes: Sequence[FakeEngine] = (),
) -> AsyncIterator[RunningFrontend]:
    """It serves once all engines are ready, and what it renders is open. `fakes` begin to listen
    with it."""
    file = None if keys is None else str(keys)
    config = resolve(Options(port=0, api_key_file=file)).server
    fleet = Fleet(Router(), EngineKeys(file))
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        listening = [EngineAddress(fake.name, fake.model, fake.address) for fake in fakes]
        fleet.update({address.name: address for address in (*addresses, *listening)})
        rendering = Rendering(fleet, rendered, config) if rendered else None
        frontend = Frontend(fleet, config, rendering)
        async with asyncio.timeout(60):
            while len(fleet.ready()) < len(addresses) + len(fakes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if rendering is not None:
                await stack.enter_async_context(rendering)
                await rendering.wait_opened()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = FrontendServer(frontend, config)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield RunningFrontend(url, frontend, fleet)
        finally:
            await server.stop()
            await task
            fleet.router.check_integrity()
            fleet.close()


@contextlib.contextmanager
def running_frontend(
    addresses: Sequence[EngineAddress],
    rendered: Sequence[RenderedModel] = (),
    keys: Path | None = None,
    fakes: Sequence[FakeEngine] = (),
) -> Iterator[RunningFrontend]:
    """As `serving_frontend`, in a thread of its own."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[RunningFrontend] = []
    failed: list[BaseException] = []
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(over.set) and None)
        async with serving_frontend(addresses, rendered, keys, fakes) as running:
            found.append(running)
            ready.set()
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(120)
    if failed:
        raise failed[0]
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join(30)
    if failed:
        raise failed[0]
