"""The application is one that any ASGI 3 server can run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httpx
import pytest
import uvicorn

from lookonce.server.http.app import build_app
from tests.support.server.site import Site


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_a_server_with_no_options_of_ours_runs_it(on_site: Callable[..., None], http: str) -> None:
    async def scenario(site: Site) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        app = build_app(site.services)
        config = uvicorn.Config(app, http=http, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/version")).status_code == 200
                assert (await client.get("/nothing")).status_code == 404
        finally:
            server.should_exit = True
            await serving

    on_site(scenario)
