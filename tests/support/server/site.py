"""A server on doubles with a client of it, and readers of its event streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from lookonce.config import Options, resolve
from lookonce.frontend.metrics import Metrics
from lookonce.frontend.sampling_params import SamplingDefaults
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.app import build_app
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.http.unknown_fields import UnknownFields
from lookonce.server.services import Services
from tests.support.server.doubles import ByteRenderer, RecitingEngine


@dataclasses.dataclass
class Site:
    """A server on doubles, and a client of it."""

    services: Services
    client: httpx.AsyncClient
    engine: RecitingEngine
    renderer: ByteRenderer

    async def chat(self, text: str = "hello", **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)


@pytest.fixture
def on_site() -> Callable[..., None]:
    """Runs `async def scenario(site)` against a fresh server; options are those of `serve`."""

    def run(scenario: Callable[[Site], Awaitable[None]], **options: object) -> None:
        asyncio.run(_run(scenario, options))

    return run


async def _run(scenario: Callable[[Site], Awaitable[None]], options: dict[str, object]) -> None:
    async with site(**options) as here:
        await scenario(here)
        assert here.engine.running == {}
        assert all(prompt in here.renderer.released for prompt in here.renderer.rendered)
        assert here.services.drain.active == 0


@asynccontextmanager
async def site(**options: object) -> AsyncIterator[Site]:
    config = resolve(Options(served_model_name="recital", **options))  # type: ignore[arg-type]
    engine, renderer = RecitingEngine(), ByteRenderer()
    services = Services(
        config=config,
        renderer=renderer,
        readonly=renderer,
        engine=engine,  # type: ignore[arg-type]
        metrics=Metrics("recital", vllm_names=config.server.vllm_metric_names),
        unknown_fields=UnknownFields(strict=config.server.strict_requests),
        defaults=SamplingDefaults(closed_schemas=config.server.closed_schemas),
        keys=KeyRing.of(config.server),
        guard=RequestGuard.of(config.server),
    )
    transport = httpx.ASGITransport(app=build_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Site(services, client, engine, renderer)


def events(text: str) -> list[dict]:
    """The JSON of every event; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def response_events(text):
    """(name, data) of every event of a stream, in order and numbered."""
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(data["type"] == name for name, data in found)
    return found
