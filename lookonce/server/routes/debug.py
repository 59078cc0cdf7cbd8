"""Routes for whoever runs the server, with an admin key: what it does now, and profiles of it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce import __version__
from lookonce.server.api_process_peers import ProcessState
from lookonce.server.http.responses import json_response
from lookonce.server.services import Principal, Services


class ServerState(msgspec.Struct):
    version: str
    model: str
    engine: str
    """As of `/health`."""
    processes: list[ProcessState]
    """Of the API processes, those that answer."""


async def show_state(request: Request) -> Response:
    """Requests that run, by tenant and API process; `lookonce top` shows them."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    principal.require_admin()
    return json_response(
        ServerState(
            version=__version__,
            model=services.config.model.served_name,
            engine=services.engine.state,
            processes=await services.process_states(),
        )
    )
