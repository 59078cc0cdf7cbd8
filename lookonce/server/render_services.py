"""The services of a server without an engine: it renders, and changes no cache that others see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lookonce.config import Config
from lookonce.frontend.frontend import RenderOnlyEngine, dialect_of, reasoning_of
from lookonce.frontend.metrics import Metrics
from lookonce.frontend.sampling_params import read_defaults
from lookonce.render.readonly import ReadOnlyBindings, ReadOnlyDirectory, open_readonly
from lookonce.render.renderer import open_renderer
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.http.unknown_fields import UnknownFields
from lookonce.server.services import Services
from lookonce.types.counts import Counts


@asynccontextmanager
async def open_render_services(config: Config) -> AsyncIterator[Services]:
    """Without `--max-model-len` a prompt may have any length. Raises `ModelLoadError`."""
    counts = Counts()
    async with (
        open_renderer(
            config.model,
            config.media,
            directory=ReadOnlyDirectory(),
            uuids=ReadOnlyBindings(),
            chat_template=config.server.chat_template,
            max_model_len=config.model.max_model_len,
        ) as renderer,
        open_readonly(renderer, config.media, counts=counts) as readonly,
        open_readonly(renderer, config.media, reads_headers=False) as warmup_renderer,
    ):
        metrics = Metrics(config.model.served_name, config.server.vllm_metric_names, counts)
        yield Services(
            config=config,
            renderer=renderer,
            readonly=readonly,
            engine=RenderOnlyEngine(config.lora),
            metrics=metrics,
            keys=KeyRing.of(config.server),
            guard=RequestGuard.of(config.server),
            defaults=read_defaults(
                config.model.folder, closed_schemas=config.server.closed_schemas
            ),
            warmup_renderer=warmup_renderer,
            tool_dialect=dialect_of(config, renderer),
            reasoning=reasoning_of(config, renderer),
            unknown_fields=UnknownFields(strict=config.server.strict_requests),
        )
