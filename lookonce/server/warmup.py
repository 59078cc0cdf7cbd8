"""Warming up an API process, while the engine loads and warms itself.

Real requests go through a copy of the application whose renderer, counters and engine are its own:
body, template, tokenizer, both processor paths, streaming. What they leave behind is the imports,
the started workers and the compiled templates; no cache, no counter and no metric has changed.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from lookonce.config import Config
from lookonce.frontend.frontend import RenderOnlyEngine
from lookonce.frontend.metrics import Metrics
from lookonce.render.media.largest_media import Largest
from lookonce.render.readonly import ReadOnlyRenderer
from lookonce.server.http.app import build_app
from lookonce.server.services import Drain, KeyRing, RunningRequests, Services
from lookonce.types.model import ModelInfo
from lookonce.types.request import EncoderOutcome, PrefillFacts, RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams

logger = logging.getLogger("lookonce.server")

NUM_WORKERS = 4
"""Prompts rendered side by side: so many workers the media pool starts at most."""
TEXT = "What is this?"
Body = Mapping[str, object]


@asynccontextmanager
async def warming_up(
    services: Services, app: Starlette, on_done: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """`/ready` says no until it is done; it runs beside whatever the block does.

    Only what `app` serves is warmed.
    """
    services.warming = services.rehearsal is not None
    task = asyncio.create_task(warm_up(services, app))
    task.add_done_callback(lambda done: None if done.cancelled() else on_done())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def warm_up(services: Services, app: Starlette) -> None:
    """May be called again. What fails is a warning."""
    if services.rehearsal is None:
        return
    try:
        await _rehearse(services, services.rehearsal, app.routes)
    except Exception:
        logger.warning("warm-up failed", exc_info=True)
    finally:
        services.rehearsal.forget()
        services.warming = False


async def _rehearse(
    services: Services, rehearsal: ReadOnlyRenderer, routes: Sequence[BaseRoute]
) -> None:
    media = await asyncio.to_thread(_largest, rehearsal, services.config)
    content = [*(_part(each, data) for each, data in media), {"type": "text", "text": TEXT}]
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    names = ", ".join(each.modality for each, _ in media) or "text"
    salted = ({**chat, "cache_salt": str(number)} for number in range(1, NUM_WORKERS))
    renders: list[Body] = [chat, *salted]  # other scopes: each processes for itself
    rehearsed: dict[str, list[Body]] = {
        "/v1/chat/completions/render": renders if media else [chat],
        "/tokenize": [chat],
        "/v1/chat/completions": [chat, {**chat, "stream": True}],
    }
    served = {route.path for route in routes if isinstance(route, Route)}
    app = build_app(_understudies(services, rehearsal))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://warm-up") as client:
        for path, bodies in rehearsed.items():
            if path in served:
                await _post(client, names, path, bodies)


async def _post(client: httpx.AsyncClient, what: str, route: str, bodies: Sequence[Body]) -> None:
    """All at once; refused ones are a warning."""
    started = time.monotonic()
    answers = await asyncio.gather(
        *(client.post(route, json=body, timeout=None) for body in bodies)
    )
    for answer in answers:
        if answer.is_error:
            logger.warning("warm-up of %s: %d, %.300s", route, answer.status_code, answer.text)
            return
    logger.info("warmed up %s with %s in %.2f s", route, what, time.monotonic() - started)


def _largest(rehearsal: ReadOnlyRenderer, config: Config) -> list[tuple[Largest, str]]:
    limits = (config.scheduler.max_num_batched_tokens, config.model.max_model_len)
    media = rehearsal.largest_media(min(filter(None, limits)))
    return [(each, base64.b64encode(each.encoded()).decode()) for each in media]


def _part(medium: Largest, data: str) -> Body:
    if medium.modality == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _understudies(services: Services, rehearsal: ReadOnlyRenderer) -> Services:
    """The same handlers for everybody, over state of their own."""
    return dataclasses.replace(
        services,
        renderer=rehearsal,
        readonly=rehearsal,
        engine=_Understudy(),
        metrics=Metrics(services.config.model.served_name),
        keys=KeyRing(()),
        drain=Drain(),
        running=RunningRequests(),
        peers=None,
        abort_peers=None,
    )


class _Understudy(RenderOnlyEngine):
    """Answers any prompt with its last token: the real engine warms itself."""

    model = ModelInfo(
        name="", model_type="", vocab_size=1 << 31, max_model_len=1 << 31, eos_token_ids=(),
        modalities=(), dtype="", encoder_row_bytes=0,
    )  # fmt: skip

    async def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        skipped: EncoderOutcome = "skipped"
        count = len(rendered.features)
        facts = PrefillFacts(0, encoder=(skipped,) * count, encode_ms=(0.0,) * count)
        tokens = rendered.token_ids[-1:]
        yield TokenDelta(request_id, 0, tokens, finish_reason="length", facts=facts)
