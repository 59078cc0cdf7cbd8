"""Warms up an API process while the engine loads and warms itself.

Requests go through a second application with a renderer, metrics and an engine of its own: body,
template, tokenizer, both processor paths, streaming. Afterwards modules are imported, workers run
and templates are compiled, but no cache, counter or metric of the server has changed.
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
from lookonce.frontend.savings import Savings
from lookonce.render.families.base import LargestItem
from lookonce.render.media.pool import share_of_workers
from lookonce.render.readonly import ReadOnlyRenderer
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.app import build_app
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.services import Drain, RunningRequests, Services
from lookonce.types.model import ModelInfo
from lookonce.types.request import EncoderOutcome, PrefillStats, RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams

logger = logging.getLogger("lookonce.server")

TEXT = "What is this?"
Body = Mapping[str, object]


@asynccontextmanager
async def warming_up(
    services: Services,
    app: Starlette,
    on_done: Callable[[], None] = lambda: None,
    *,
    hold_ready: bool = True,
) -> AsyncIterator[None]:
    """Warms up beside the block. Until it has ended `/ready` says no, if `hold_ready`.

    Requests are sent to the routes that `app` has. `on_done` is called at the end.
    """
    services.warming = hold_ready and services.warmup_renderer is not None
    task = asyncio.create_task(_prove_and_warm_up(services, app))
    task.add_done_callback(lambda done: None if done.cancelled() else on_done())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _prove_and_warm_up(services: Services, app: Starlette) -> None:
    try:
        await services.readonly.prove_sizes()
    except Exception:  # it is tried again with the first picture
        logger.warning("tokens of pictures could not be tried out", exc_info=True)
    await warm_up(services, app)


async def warm_up(services: Services, app: Starlette) -> None:
    """Warm up the routes of `app`; may be repeated. A failure is logged as a warning."""
    if services.warmup_renderer is None:
        return
    try:
        await _send_warmup_requests(services, services.warmup_renderer, app.routes)
    except Exception:
        logger.warning("warm-up failed", exc_info=True)
    finally:
        services.warmup_renderer.forget()
        services.warming = False


async def _send_warmup_requests(
    services: Services, renderer: ReadOnlyRenderer, routes: Sequence[BaseRoute]
) -> None:
    media = await asyncio.to_thread(_largest_media, renderer, services.config)
    if renderer.speech is not None:
        for each, _ in media:
            await renderer.open_sound(each.encoded())
        return
    if not renderer.takes_messages:
        text: dict[str, list[Body]] = {
            "/tokenize": [{"prompt": TEXT}],
            "/v1/completions": [{"prompt": TEXT, "max_tokens": 1}],
        }
        await _send_to_served(services, renderer, routes, "text", text)
        return
    content = [_part(each, data) for each, data in media]
    if not (renderer.transcribes_live or (renderer.item_alone and content)):
        content.append({"type": "text", "text": TEXT})
    messages = {"messages": [{"role": "user", "content": content}]}
    chat = {**messages, "max_tokens": 1}
    names = ", ".join(each.modality for each, _ in media) or "text"
    num_workers = share_of_workers(services.config.server.api_processes)
    salted = ({**chat, "cache_salt": str(number)} for number in range(1, num_workers))
    renders: list[Body] = [chat, *salted]  # each salt is a scope of its own, so all are processed
    requests: dict[str, list[Body]] = {
        "/v1/chat/completions/render": renders if media else [chat],
        "/tokenize": [messages],
        "/v1/chat/completions": [chat, {**chat, "stream": True}],
    }
    await _send_to_served(services, renderer, routes, names, requests)


async def _send_to_served(
    services: Services,
    renderer: ReadOnlyRenderer,
    routes: Sequence[BaseRoute],
    names: str,
    requests: Mapping[str, Sequence[Body]],
) -> None:
    """Send `requests` by path, where the path is one of `routes`."""
    served = {route.path for route in routes if isinstance(route, Route)}
    app = build_app(_warmup_services(services, renderer))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://warm-up") as client:
        for path, bodies in requests.items():
            if path in served:
                await _post(client, names, path, bodies)


async def _post(client: httpx.AsyncClient, what: str, route: str, bodies: Sequence[Body]) -> None:
    """Send all `bodies` at once. An error is logged as a warning."""
    started = time.monotonic()
    answers = await asyncio.gather(
        *(client.post(route, json=body, timeout=None) for body in bodies)
    )
    for answer in answers:
        if answer.is_error:
            logger.warning("warm-up of %s: %d, %.300s", route, answer.status_code, answer.text)
            return
    logger.info("warmed up %s with %s in %.2f s", route, what, time.monotonic() - started)


def _largest_media(renderer: ReadOnlyRenderer, config: Config) -> list[tuple[LargestItem, str]]:
    limits = (config.scheduler.max_num_batched_tokens, config.model.max_model_len)
    media = renderer.largest_media(min(filter(None, limits)))
    return [(each, base64.b64encode(each.encoded()).decode()) for each in media]


def _part(medium: LargestItem, data: str) -> Body:
    if medium.modality == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _warmup_services(services: Services, renderer: ReadOnlyRenderer) -> Services:
    """`services` with state of its own: what requests change there, clients do not see."""
    return dataclasses.replace(
        services,
        renderer=renderer,
        readonly=renderer,
        engine=WarmupEngine(),
        metrics=Metrics(services.config.model.served_name),
        savings=Savings(),
        keys=KeyRing(()),
        guard=RequestGuard(),
        drain=Drain(),
        running=RunningRequests(),
        rates=None,
        shared_counts=None,
        abort_peers=None,
        request_log=None,
        tracer=None,
    )


class WarmupEngine(RenderOnlyEngine):
    """Answers every prompt with its last token."""

    model = ModelInfo(
        name="",
        model_type="",
        vocab_size=1 << 31,
        max_model_len=1 << 31,
        eos_token_ids=(),
        modalities=(),
        dtype="",
        encoder_row_bytes=0,
    )

    async def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        skipped: EncoderOutcome = "skipped"
        count = len(rendered.features)
        reuse_stats = PrefillStats(0, encoder=(skipped,) * count, encode_ms=(0.0,) * count)
        tokens: list[int] = rendered.ids[-1:].tolist()
        yield TokenDelta(request_id, 0, tokens, finish_reason="length", reuse_stats=reuse_stats)
