"""The frontend: renderer, engine client and all that turns their work into answers.

The HTTP server and `LLM` both stand on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lookonce.config import Config, LoRAConfig, MediaConfig
from lookonce.engine.client.engine_client import EngineClient, EngineState, KnownAdapters
from lookonce.engine.client.sender_cache import DISABLED, InjectionOutcome
from lookonce.errors import LookOnceError, NotReadyError
from lookonce.frontend.metrics import Metrics
from lookonce.frontend.reasoning import ReasoningFormat, choose_reasoning
from lookonce.frontend.sampling_params import SamplingDefaults, read_defaults
from lookonce.frontend.tools.formats import ToolDialect, choose_dialect
from lookonce.render.media.pool import MAX_QUEUE_PER_TENANT, ServerShare, share_of_workers
from lookonce.render.media.resolver import MAX_SIDE_BY_SIDE
from lookonce.render.prompt.encoder import PromptEncoder
from lookonce.render.renderer import Renderer, open_renderer
from lookonce.types.counts import Counts
from lookonce.types.fair_queue import TenantWeights
from lookonce.types.lora import LoRAIdentity, LoRAInfo
from lookonce.types.media import ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class Frontend:
    """What is needed to answer a prompt; one per process."""

    config: Config
    renderer: Renderer
    engine: EngineClient | RenderOnlyEngine
    metrics: Metrics
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tool_dialect: ToolDialect | None = None
    """How the served model writes tool calls; None where its template has no place for tools."""
    reasoning: ReasoningFormat | None = None
    """How the served model writes its thoughts; None where answers have none apart."""
    weights: TenantWeights = field(default_factory=TenantWeights)


def engine_client(config: Config, counts: Counts | None = None) -> EngineClient:
    """The client of the engine at the configured address, to be entered."""
    nbytes = config.media.processor_cache_bytes
    return EngineClient(config.channel, processor_cache_bytes=nbytes, counts=counts)


@asynccontextmanager
async def open_frontend(
    config: Config,
    client: EngineClient,
    counts: Counts | None = None,
    *,
    wait_for_worker: bool = True,
    weights: TenantWeights | None = None,
    fork_server: Path | None = None,
    encoder: PromptEncoder | None = None,
) -> AsyncIterator[Frontend]:
    """A frontend of an entered client, whose engine may still be loading.

    `counts` gets what is counted for metrics; media workers come from `fork_server`, if given;
    `encoder` is the model's, if it is loaded already. Raises `ModelLoadError`.
    """
    share = ServerShare(
        num_workers=share_of_workers(config.server.api_processes),
        wait_for_worker=wait_for_worker,
        fork_server=fork_server,
        slabs=client.slabs if config.media.shared_cache_bytes else None,
        shared_cache_bytes=config.media.shared_cache_bytes,
        claims=client.claims,
        counts=Counts() if counts is None else counts,
        weights=weights or TenantWeights(),
    )
    async with (
        open_renderer(
            config.model,
            config.media,
            directory=client.directory,
            uuids=client.sender.uuids,
            chat_template=config.server.chat_template,
            share=share,
            encoder=encoder,
        ) as renderer,
        limits_learned(client, renderer),
    ):
        metrics = Metrics(config.model.served_name, config.server.vllm_metric_names, counts)
        yield Frontend(
            config=config,
            renderer=renderer,
            engine=client,
            metrics=metrics,
            defaults=read_defaults(
                config.model.folder, closed_schemas=config.server.closed_schemas
            ),
            tool_dialect=dialect_of(config, renderer),
            reasoning=reasoning_of(config, renderer),
            weights=share.weights,
        )


@asynccontextmanager
async def limits_learned(client: EngineClient, renderer: Renderer) -> AsyncIterator[None]:
    """Within the block the renderer gets, as soon as the engine is ready, the limits that only the
    engine knows, so that it refuses too long prompts early."""

    async def learn() -> None:
        await client.wait_ready()
        renderer.pools = client.model.pooling is not None
        renderer.max_model_len = client.model.max_model_len
        renderer.vocab_size = client.model.vocab_size
        renderer.served_modalities = client.model.modalities

    learning = asyncio.create_task(learn())
    try:
        yield
    finally:
        learning.cancel()


def max_prompts_rendered(media: MediaConfig) -> int:
    """Prompts to render side by side at most: their media fill half of what one tenant may have in
    the media pool's queue, since the engine may ask for some items a second time."""
    per_prompt = min(MAX_SIDE_BY_SIDE, sum(media.limit_per_prompt.values()))
    return MAX_QUEUE_PER_TENANT // 2 // max(1, per_prompt)


def dialect_of(config: Config, renderer: Renderer) -> ToolDialect | None:
    """How the served model writes tool calls."""
    return choose_dialect(
        config.server.tool_call_parser, renderer.tools_template, renderer.special_tokens
    )


def reasoning_of(config: Config, renderer: Renderer) -> ReasoningFormat | None:
    """How the served model writes its thoughts."""
    return choose_reasoning(
        config.server.reasoning_parser,
        renderer.tools_template,
        renderer.added_tokens,
        renderer.special_tokens,
    )


class RenderOnlyEngine:
    """Stands in for `EngineClient` where a server only renders: without weights and caches.

    Asked to generate, it raises `NotReadyError`.
    """

    state: EngineState = "ready"

    def __init__(self, lora: LoRAConfig | None = None) -> None:
        """`lora`: requests may name its adapters; prompts are rendered alike with each."""
        self.adapters = KnownAdapters()
        named = () if lora is None else lora.adapters
        self.adapters.set(LoRAInfo(name, LoRAIdentity(b""), 0, path) for name, path in named)

    @property
    def model(self) -> ModelInfo:
        raise _none()

    def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        raise _none()

    async def silent_seconds(self) -> float | None:
        return None

    async def wait_ready(self) -> None:
        return

    async def abort(self, request_id: str, index: int | None = None) -> None:
        return

    async def inject_items(
        self, items: Sequence[tuple[bytes, ProcessedItem]]
    ) -> list[InjectionOutcome]:
        return [DISABLED] * len(items)

    async def stats(self) -> dict[str, float]:
        return {}

    async def reset_cache(self, tier: str) -> None:
        return

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        raise _none()

    async def unload_adapter(self, name: str) -> None:
        raise _none()

    def take_profile(self, seconds: float, path: str) -> None:
        raise _none()

    def expect_no_restart(self) -> None:
        return

    def cut_off(self, error: LookOnceError) -> None:
        return


def _none() -> NotReadyError:
    return NotReadyError("this server renders and does not generate")
