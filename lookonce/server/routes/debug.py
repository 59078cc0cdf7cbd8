"""Routes for whoever runs the server: what it does now, what it saved, and profiles of it."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce import __version__
from lookonce.errors import BadRequestError, ConflictError, UnavailableError
from lookonce.frontend.savings import Saved
from lookonce.server.api_process_peers import ProcessState
from lookonce.server.audit import audit
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.responses import json_response
from lookonce.server.services import Services
from lookonce.types.stack_samples import ProcessSamples, sample_stacks

MAX_SECONDS = 60.0
MAX_TORCH_SECONDS = 10.0
"""Of torch's profile, which grows by megabytes a second."""
WRITING_SECONDS = 60.0
POLL_SECONDS = 0.05


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


class SavedToday(msgspec.Struct, kw_only=True):
    day: str
    """Of UTC, e.g. 2026-01-31."""
    saved: Saved
    """Of the tenant that asks; of all tenants together for an admin."""
    tenants: dict[str, Saved] | UnsetType = UNSET
    """For an admin: by tenant."""


async def show_savings(request: Request) -> Response:
    """What reuse saved today, in all API processes that answer."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    day, by_tenant = services.savings.today()[0], dict[str, Saved]()
    for state in await services.process_states():
        for tenant, saved in state.saved.items() if state.day == day else ():
            by_tenant.setdefault(tenant, Saved()).add(saved)
    if not principal.admin:
        return json_response(SavedToday(day=day, saved=by_tenant.get(principal.tenant, Saved())))
    whole = Saved()
    for saved in by_tenant.values():
        whole.add(saved)
    return json_response(SavedToday(day=day, saved=whole, tenants=by_tenant))


# --- profiles -------------------------------------------------------------------------------------


class ProfileRequest(msgspec.Struct, kw_only=True):
    kind: Literal["stacks", "torch"] = "stacks"
    """Stacks of all processes, or torch's profile of the engine's steps."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 5.0
    format: Literal["json", "folded"] = "json"
    """Of stacks; folded: a line each, as flame graph tools read."""


class StacksProfile(msgspec.Struct):
    seconds: float
    processes: list[ProcessSamples]


async def take_profile(request: Request) -> Response:
    """A profile of the next seconds; one at a time in all API processes."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    principal.require_admin()
    asked = await receive(request, ProfileRequest)
    if asked.kind == "torch" and asked.seconds > MAX_TORCH_SECONDS:
        raise BadRequestError(
            f"seconds: at most {MAX_TORCH_SECONDS:g} of torch's profile", param="seconds"
        )
    folder = Path(services.config.channel.address).parent
    with _alone(folder):
        audit("profiled", request.scope, kind=asked.kind, seconds=asked.seconds)
        if asked.kind == "torch":
            trace = await _torch_trace(services, folder, asked.seconds)
            return Response(trace, media_type="application/gzip")
        found = await asyncio.to_thread(sample_stacks, folder, asked.seconds)
    if asked.format == "folded":
        return Response(_folded(found), media_type="text/plain")
    return json_response(StacksProfile(asked.seconds, found))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raises `ConflictError` while another profile is taken."""
    lock = os.open(folder / "profile.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConflictError("another profile is being taken", code="profile_running") from None
    finally:
        os.close(lock)


async def _torch_trace(services: Services, folder: Path, seconds: float) -> bytes:
    """A Chrome trace, compressed. Raises `UnavailableError` where the engine does not write it."""
    path = folder / f"profile-{secrets.token_hex(8)}.json"
    services.engine.take_profile(seconds, str(path))
    try:
        async with asyncio.timeout(seconds + WRITING_SECONDS):
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(POLL_SECONDS)
        return await asyncio.to_thread(lambda: gzip.compress(path.read_bytes(), 1))
    except TimeoutError:
        raise UnavailableError("the engine wrote no profile") from None
    finally:
        path.unlink(missing_ok=True)


def _folded(found: list[ProcessSamples]) -> str:
    """`process;thread;function;… microseconds`, a line for each stack."""
    return "".join(
        f"{each.process} {each.pid};{stack} {int(seconds * 1e6)}\n"
        for each in found
        for stack, seconds in each.stacks.items()
    )
