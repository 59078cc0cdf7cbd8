"""The server of `lookonce render`: it renders and never generates, without engine and weights.

Its answers are requests for `/inference/v1/generate` of a server with an engine. Both must serve
the same folder with the same dtype, for these are part of a MediaHash.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from lookonce.config import Config
from lookonce.server.http.app import RENDER_ROUTES, build_app
from lookonce.server.process import DrainOnSignal, api_server
from lookonce.server.render_services import open_render_services
from lookonce.server.warmup import warming_up


async def serve_render(
    config: Config, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serve on a bound socket until SIGTERM or Ctrl-C, then drain. Raises `ModelLoadError`.

    `on_ready` is called once, at the end of the warm-up.
    """
    async with open_render_services(config) as services:
        app = build_app(services, RENDER_ROUTES)
        server = api_server(app, services)
        drainer = DrainOnSignal(server, services, has_parent=False)
        with drainer:
            async with warming_up(services, app, on_ready):
                await server.serve(sockets=[listener])
