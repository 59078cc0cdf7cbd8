"""The audit log: who injected, reset, leased, aborted, profiled, or was refused, and why.

One INFO line of the logger `lookonce.audit` for each event, with the request's id, the tenant, the
first 8 hex digits of the SHA-256 of the key, and the client's address. Never what was sent: of a
refusal the class, code and the name of the part at fault.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from lookonce.errors import LookOnceError, http_status

if TYPE_CHECKING:
    from lookonce.server.http.api_keys import Principal

logger = logging.getLogger("lookonce.audit")
MAX_PARAM = 80
AUDITED_ELSEWHERE = "audited_elsewhere"
"""In a request's state: statuses of refusals that the front-end who sent it audits itself; `*`:
all."""
NO_STATUSES: frozenset[str] = frozenset()
_NOT_IN_NAMES = re.compile(r"[^\w.\[\]-]+")


def audit(event: str, scope: Scope, **fields: Any) -> None:
    """Write one line; `event` is a word. What is None or empty is left out."""
    principal: Principal | None = scope["state"].get("principal")
    client = scope.get("client")
    logger.info(
        event,
        extra={
            "event": event,
            "tenant": None if principal is None else principal.tenant,
            "key": None if principal is None else principal.key[:8],
            "client": client[0] if client else None,
            "route": route_of(scope),
            **fields,
        },
    )


def audit_refusal(scope: Scope, error: LookOnceError) -> None:
    status = http_status(error)
    if {"*", str(status)} & scope["state"].get(AUDITED_ELSEWHERE, NO_STATUSES):
        return
    audit(
        "refused",
        scope,
        status=status,
        error=type(error).__name__,
        code=getattr(error, "code", None),
        param=named_param(getattr(error, "param", None)),
    )


def named_param(param: object) -> str | None:
    """The name of the part at fault, as a line has it."""
    return None if param is None else _NOT_IN_NAMES.sub("_", str(param))[:MAX_PARAM]


def route_of(scope: Scope) -> str:
    """Method and path, where the path is one of ours; clients write anything into others."""
    method = "WS" if scope["type"] == "websocket" else scope["method"]
    known = scope["path"] in scope["app"].paths
    return f"{method} {scope['path']}" if known else f"{method} (other)"
