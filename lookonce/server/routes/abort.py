"""`POST /inference/v1/abort_requests`: ends the tenant's own requests."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.server.http.auth import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.error_responses import json_response
from lookonce.server.services import Services


class AbortRequest(msgspec.Struct):
    request_ids: list[str]


class AbortResponse(msgspec.Struct):
    aborted: list[str]
    """Those of the ids that named running requests of this tenant."""


async def abort_requests(request: Request) -> Response:
    principal: Principal = request.state.principal
    services: Services = request.app.state.services
    body = await receive(request, AbortRequest)
    return json_response(AbortResponse(await services.abort(principal.tenant, body.request_ids)))
