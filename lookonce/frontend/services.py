"""What the handlers need, passed in: no globals, and every seam has a double in the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import msgspec
from prometheus_client.core import Metric

from lookonce.config import Config
from lookonce.engine.client.injection import Injected
from lookonce.errors import (
    BadRequestError,
    DrainingError,
    EngineDeadError,
    ModelNotFoundError,
    NotReadyError,
)
from lookonce.frontend.abort_peers import AbortPeers, RunningRequests
from lookonce.frontend.auth import KeyRing
from lookonce.frontend.metrics import Metrics
from lookonce.frontend.metrics_peers import Peers
from lookonce.frontend.sampling_params import SamplingDefaults
from lookonce.frontend.tools.formats import ToolDialect
from lookonce.render.families.base import LargestItem
from lookonce.render.media.external_items import ExternalItem
from lookonce.types.media import Array, Modality, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import RenderedItem, RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams

EngineState = Literal["starting", "ready", "stuck", "dead"]


class Deltas(Protocol):
    """One request's token deltas; closing it aborts what is still computed."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """The part of `engine.client.EngineClient` the server uses."""

    @property
    def state(self) -> EngineState: ...

    @property
    def model(self) -> ModelInfo: ...

    def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> Deltas: ...

    async def wait_ready(self) -> None: ...

    async def abort(self, request_id: str, index: int | None = None) -> None: ...

    async def inject_items(
        self, items: Sequence[tuple[bytes, ProcessedItem]]
    ) -> list[Injected]: ...

    async def stats(self) -> dict[str, float]: ...

    async def reset_cache(self, tier: str) -> None: ...


class Detokenizer(Protocol):
    """Token ids of one sample → text, holding back what may become a stop string."""

    num_tokens: int
    """Tokens taken, up to the one that completed the stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Renderer(Protocol):
    """The part of `render.renderer.Renderer` the server uses."""

    async def render_chat(
        self,
        messages: Sequence[object],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt: ...

    async def render_completion(
        self,
        prompt: str | list[int],
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> RenderedPrompt: ...

    async def render_tokens(
        self,
        token_ids: Sequence[int],
        media: Sequence[ExternalItem] = (),
        *,
        tenant: str = "",
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trusted: bool = False,
    ) -> RenderedPrompt: ...

    def injected(
        self,
        modality: Modality,
        name: str,
        arrays: Mapping[str, Array],
        *,
        tenant: str,
        cache_salt: str | None = None,
        trusted: bool = False,
    ) -> tuple[bytes, ProcessedItem]: ...

    @property
    def fingerprint(self) -> bytes: ...

    def release(self, prompt: RenderedPrompt) -> None:
        """Give back the pins of a prompt that was, or is, not sent. May be called again."""

    def detokenizer(
        self, sampling: SamplingParams, context: Sequence[int] = (), keep: Collection[str] = ()
    ) -> Detokenizer:
        """`context`: the prompt's token ids. Special tokens whose text is in `keep` are text."""

    def skipped(self, sampling: SamplingParams, keep: Collection[str] = ()) -> Collection[int]:
        """Tokens that add nothing to a sample's text."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str | None: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ReadOnlyRenderer(Renderer, Protocol):
    """For routes that answer with tokens: it changes nothing that others see."""

    async def item_of(self, part: RenderedItem) -> ProcessedItem | None:
        """The part's arrays; None where a name alone stands for it."""


class Rehearsal(ReadOnlyRenderer, Protocol):
    """A renderer that works as the others do and shows nowhere, for warming up."""

    def largest_media(self, max_tokens: int) -> list[LargestItem]:
        """Of each modality that is served, with placeholders of at most `max_tokens`."""

    def forget(self) -> None:
        """Let go of all it has made."""


class Drain:
    """Counts the requests being served, and refuses new ones once draining has begun."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def serving(self) -> Self:
        """To be entered around one request; raises `DrainingError` for one while draining."""
        if self.draining:
            raise DrainingError("the server is shutting down; send the request elsewhere")
        return self

    def __enter__(self) -> None:
        self.active += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.active -= 1
        if self.active == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass(slots=True)
class Services:
    config: Config
    renderer: Renderer
    readonly: ReadOnlyRenderer
    engine: Engine
    metrics: Metrics
    keys: KeyRing
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    drain: Drain = field(default_factory=Drain)
    peers: Peers | None = None
    """The other API processes of this server, where there are any."""
    running: RunningRequests = field(default_factory=RunningRequests)
    abort_peers: AbortPeers | None = None
    tool_dialect: ToolDialect | None = None
    """How the served model writes tool calls; None where its template has no place for tools."""
    rehearsal: Rehearsal | None = None
    """None: nothing is warmed up."""
    warming: bool = False
    """Not ready yet: what the first requests need is still being loaded."""

    async def local_metrics(self) -> list[Metric]:
        """What the API processes count themselves, summed over all of them."""
        if self.peers is None:
            return self.metrics.local_families()
        return await self.peers.families()

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """End a tenant's requests wherever they run; the ids that were running."""
        if self.abort_peers is None:
            return await self.running.abort(tenant, request_ids)
        return await self.abort_peers.abort(tenant, request_ids)

    def require_ready(self) -> None:
        """Raises what keeps the server from generating now."""
        match self.engine.state:
            case "starting":
                raise NotReadyError("the model is still loading")
            case "dead":
                raise EngineDeadError("the engine is not running; it is being restarted")
            case "stuck":
                raise EngineDeadError("the engine does not answer")

    def max_model_len(self) -> int | None:
        """Prompt plus generated tokens of one sequence; None until the engine has told."""
        if self.engine.state == "starting":
            return None
        try:
            return self.engine.model.max_model_len
        except NotReadyError:
            return None

    def require_model(self, name: str | None) -> str:
        """The served model's name; raises `ModelNotFoundError` for any other."""
        served = self.config.model.served_name
        if name is not None and name != served:
            raise ModelNotFoundError(
                f"the model {name[:200]!r} is not served here; {served!r} is", param="model"
            )
        return served


def shortened(rendered: RenderedPrompt, sampling: SamplingParams, limit: int) -> SamplingParams:
    """With a `max_tokens` that nobody asked for no larger than a context of `limit` leaves room."""
    room = limit - len(rendered.token_ids)
    if sampling.max_tokens is None or not 0 < room < sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def check_fits(rendered: RenderedPrompt, sampling: SamplingParams, model: ModelInfo) -> None:
    """Refuse what the model cannot take; raises `BadRequestError` naming the field."""
    prompt, limit = len(rendered.token_ids), model.max_model_len
    if prompt == 0:
        raise BadRequestError("the prompt is empty", param="prompt")
    asked = sampling.max_tokens
    if prompt + (asked or 1) > limit:
        raise BadRequestError(
            f"the prompt has {prompt} tokens and {asked or 'at least 1'} are to be generated, but "
            f"the model's context is {limit} tokens",
            param="max_tokens" if prompt < limit else "prompt",
            code="context_length_exceeded",
        )
    if not sampling.stop_token_ids and not sampling.logit_bias:
        return
    named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias or ()}
    for name, token_ids in named.items():
        for token in token_ids:
            if not 0 <= token < model.vocab_size:
                raise BadRequestError(
                    f"{name}: token ids are 0 to {model.vocab_size - 1}, got {token!r:.20}",
                    param=name,
                )
