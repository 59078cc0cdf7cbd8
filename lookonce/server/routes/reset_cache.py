"""`POST /reset_*_cache`: empties one tier; running requests are not disturbed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from lookonce.server.http.auth import Principal
from lookonce.server.services import Services

TIERS = ("mm", "encoder", "prefix")


def reset_route(tier: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler that resets `tier`; needs an admin key where keys are set."""

    async def reset(request: Request) -> Response:
        services: Services = request.app.state.services
        principal: Principal = request.state.principal
        principal.require_admin()
        await services.engine.reset_cache(tier)
        return Response(status_code=200)

    return reset
