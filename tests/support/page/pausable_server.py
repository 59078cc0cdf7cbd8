"""A server with test doubles on a real port, whose engine pauses until a test resumes it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Self

from lookonce.server.http.app import WEBSOCKETS, build_app
from lookonce.server.process import api_server
from lookonce.types.request import RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams
from tests.support.server.doubles import RecitingEngine
from tests.support.server.site import Site, site


class PausingEngine(RecitingEngine):
    """Sends `pause_after` tokens of an answer, then waits for `resume`."""

    def __init__(self, answer: str, pause_after: int) -> None:
        super().__init__(answer)
        self.pause_after = pause_after
        self.resume = asyncio.Event()

    async def _recite(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        told = 0
        async for delta in super()._recite(rendered, sampling, request_id):
            if told == self.pause_after:
                await self.resume.wait()
            told += 1
            yield delta


class PausableServer:
    """Serves in a thread; a context manager."""

    def __init__(self, answer: str, pause_after: int = 10**9, **options: object) -> None:
        self.engine = PausingEngine(answer, pause_after)
        self._options = options
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        async with site(**self._options) as here:
            await self._serve(here)

    async def _serve(self, here: Site) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain = here.services.drain
        self.services, self.renderer = here.services, here.renderer
        here.services.engine = self.engine  # type: ignore[assignment]
        app = build_app(here.services, websockets=WEBSOCKETS)
        self._server = api_server(app, here.services)
        self._serving.set()
        async with here.services.realtime.detectors:
            await self._server.serve(sockets=[self._socket])

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.resume.set)

    def drain(self) -> None:
        self._loop.call_soon_threadsafe(self._drain.begin)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._serving.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
