"""Front-ends that render: chats and completions are rendered, and their answers written, here.

    body ─▶ template, tokens, keys of media ─▶ `RoutedEngine` ─▶ POST /inference/v1/generate
    client ◀─ text, tool calls, reasoning, usage, receipt ◀─ token deltas ◀──┘

Everything but the engine is what `lookonce render` and `lookonce serve` have: their application,
with a renderer that keeps no processed media for engines. Requests that need more than generated
tokens, or media that these do not carry, go to an engine as they came.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from lookonce.config import Config, Options, ServerConfig, resolve
from lookonce.errors import LookOnceError
from lookonce.fleet.config import RenderedModel
from lookonce.fleet.engine_http import Headers
from lookonce.fleet.identity import (
    MAX_VALUES,
    VALUE_MARKS,
    Processor,
    has_more,
    without_payloads,
)
from lookonce.fleet.members import Fleet
from lookonce.fleet.routed_engine import ClientRequest, RoutedEngine, current_request
from lookonce.frontend.model_download import with_local_model
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.app import KEPT_BACK, ROUTES, Application, build_app
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.render_services import open_render_services
from lookonce.server.services import Services
from lookonce.server.warmup import warm_up
from lookonce.types.model import ModelInfo

logger = logging.getLogger("lookonce.fleet")

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
RENDERED_ROUTES = [route for route in ROUTES if route.path in PATHS]
STORING_PATH = "/v1/responses"
COMPLETIONS_PATH = "/v1/completions"
ANTHROPIC_PATH = "/v1/messages"
"""It has no `mm_processor_kwargs`: such a field is passed over."""
UNCARRIED = re.compile(
    rb'"(?:uuid|video_url|input_video|file_data|file_id|input_file|document|item_reference)"'
)
"""In bodies with media that engines alone know, or that are made of a file: films, pages of
documents, uuids, which engines bind, and what is stored. They go to an engine as they came. Where
it stands for something else that is no harm."""
MAX_QUOTES = 1 << 19
"""Of a body in which these names are looked for: each quote costs tens of nanoseconds."""
DROPPED_HEADERS = frozenset(
    {
        *(b"content-type", b"content-length", b"content-encoding", b"accept", b"accept-encoding"),
        *(b"x-request-id", b"x-reuse-receipt"),
    }
)
"""Of the client's, which do not fit what engines get."""
OPEN_AGAIN_SECONDS = 5.0
"""After a model could not be opened; twice as long each time, up to `MAX_OPEN_AGAIN_SECONDS`."""
MAX_OPEN_AGAIN_SECONDS = 300.0
LEFT_TO_ENGINES = frozenset({422, 503})
"""Refusals before any engine was asked: one may know the medium, or render it itself."""


class _Fields(msgspec.Struct):
    """What decides where a request is rendered, and what its engine must know; other fields are
    passed over."""

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None

    @property
    def limit_asked(self) -> bool:
        limits = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        return any(limit is not None for limit in limits)

    @property
    def has_several_prompts(self) -> bool:
        with suppress(msgspec.MsgspecError):  # one text, or one list of token ids
            return len(_PROMPTS.decode(self.prompt)) > 1
        return False


_FIELDS = msgspec.json.Decoder(_Fields)
_PROMPTS = msgspec.json.Decoder(list[str | list[msgspec.Raw]])


@dataclass(slots=True)
class _Served:
    """A model whose prompts are rendered here."""

    app: Application
    services: Services
    engine: RoutedEngine
    stores: bool
    """Its engines store responses."""
    unlike: frozenset[str] = frozenset()
    """Engines that it was said of that they are not what it was opened for."""


class Rendering:
    """The models of a fleet that its front-end renders for; an async context manager.

    Each is opened once an engine has told of it. Before, and as long as some of its engines are not
    what it was opened for, its requests go to engines as they came. Once none of them is that any
    more, it is opened anew.
    """

    def __init__(self, fleet: Fleet, models: Sequence[RenderedModel], server: ServerConfig) -> None:
        self._fleet, self._models, self._server = fleet, models, server
        self._served: dict[str, _Served] = {}
        self._failed: set[str] = set()
        """Models that could not be opened; each is tried again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Event()
        self.num_rendered = self.num_retried = 0
        """Requests, and prompts that a second engine got."""

    async def __aenter__(self) -> Rendering:
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._serve(model)) for model in self._models}
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_opened(self) -> None:
        """Until every model is opened, or cannot be now. It waits for none whose engines have not
        told what rendering needs: they may never."""
        while any(map(self._is_opening, self._models)):
            self._opened.clear()
            await self._opened.wait()

    def _is_opening(self, model: RenderedModel) -> bool:
        told = self._fleet.processor_of(model.name).facts is not None
        return told and model.name not in self._served and model.name not in self._failed

    async def _serve(self, model: RenderedModel) -> None:
        """As long as the front-end lives. What cannot be opened is tried again: files may come, and
        engines be replaced by others."""
        delay, said = OPEN_AGAIN_SECONDS, ""
        while True:
            try:
                told = await self._fleet.told_of(model.name)
                async with AsyncExitStack() as stack:
                    served = await stack.enter_async_context(
                        open_served(model, told, self._fleet, self._server)
                    )
                    self._served[model.name] = served
                    self._failed.discard(model.name)
                    self._opened.set()
                    delay, said = OPEN_AGAIN_SECONDS, ""
                    await self._wait_all_unlike(model.name, served)
                    logger.info("all engines of %s have other files than before", model.name)
                    del self._served[model.name]
                    self._close_when_idle(served, stack.pop_all())
                    continue
            except LookOnceError as error:
                if error.message != said:
                    said = error.message
                    logger.error("%s is rendered by its engines: %s", model.name, said)
            except Exception:
                logger.exception("%s is rendered by its engines", model.name)
            finally:
                self._served.pop(model.name, None)
                self._failed.add(model.name)
                self._opened.set()
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_OPEN_AGAIN_SECONDS)

    async def _wait_all_unlike(self, model: str, served: _Served) -> None:
        """Until no engine is what the model was opened for, and some have told what they are."""
        while True:
            await self._fleet.wait_looked()
            told = self._fleet.processors_of(model).values()
            if told and not any(_are_alike(each, served.engine.processor) for each in told):
                return

    def _close_when_idle(self, served: _Served, opened: AsyncExitStack) -> None:
        """No request comes any more; those that are being answered go on."""

        async def close() -> None:
            async with opened:
                await served.services.drain.wait_idle()

        task = asyncio.get_running_loop().create_task(close())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, tenant: str, request_ids: Sequence[str]) -> list[str]:
        """Abort a tenant's requests that are rendered or answered here; those that there were."""
        aborted: list[str] = []
        for served in list(self._served.values()):
            aborted += await served.services.abort(tenant, [*request_ids])
        return aborted

    def _served_for(self, path: str, body: bytes) -> tuple[_Served, _Fields] | None:
        """None: the request goes to an engine as it came."""
        if not self._served or path not in PATHS:
            return None
        body = without_payloads(body)
        if has_more(body, VALUE_MARKS, MAX_VALUES) or has_more(body, b'"', MAX_QUOTES):
            return None  # engines look at such a body beside their event loop
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # engines say what is wrong
        told = self._fleet.processor_of(fields.model)
        served = self._served.get(told.model or "")
        if served is None or (fields.model is None and len(self._fleet.served_models()) > 1):
            return None
        if path == COMPLETIONS_PATH and fields.has_several_prompts:
            return None  # each would be a request of its own to the limits of a tenant
        if path == STORING_PATH and (
            (served.stores and fields.store is not False)
            or fields.previous_response_id is not None
            or fields.conversation is not None
        ):
            return None
        listed = self._fleet.processors_of(str(told.model))
        unlike = [n for n, each in listed.items() if not _are_alike(each, served.engine.processor)]
        if unlike or served.unlike:
            _tell_unlike(served, frozenset(unlike), str(told.model))
        if unlike or UNCARRIED.search(body):
            return None
        adapters = {
            name: found for each in listed.values() for name, found in each.adapters.items()
        }
        served.engine.learn(msgspec.structs.replace(told, adapters=adapters))
        return served, fields

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        content: Callable[[], bytes],
        headers: Headers,
    ) -> bool:
        """Answer a POST; `content`: its body, until an answer has begun; `headers`: those that
        engines get of it. False: nothing was sent, and an engine has to get it as it came."""
        found = self._served_for(scope["path"], content())
        if found is None:
            return False
        served, fields = found
        kwargs = None if scope["path"] == ANTHROPIC_PATH else fields.mm_processor_kwargs
        request = ClientRequest(
            headers=[
                *[each for each in headers if each[0] not in DROPPED_HEADERS],
                (b"content-type", b"application/json"),
            ],
            stream=bool(fields.stream),
            cache_salt=fields.cache_salt,
            mm_processor_kwargs=kwargs,
            session=dict(headers).get(b"x-session-id", b"").decode("latin-1")
            or fields.prompt_cache_key,
            limit_asked=fields.limit_asked,
        )
        replies = _Replies(request, scope, send)
        token = current_request.set(request)
        try:
            await served.app({**scope, "headers": headers}, _replayed(content, receive), replies)
        finally:
            current_request.reset(token)
            self.num_retried += request.num_retried
        if not replies.begun:
            return False
        self.num_rendered += 1
        if request.num_tokens:
            self._fleet.router.note_answer_tokens(request.num_tokens)
        return True


class _Replies:
    """The application's `send`. A refusal that an engine may not share is kept back."""

    def __init__(self, request: ClientRequest, scope: Scope, send: Send) -> None:
        self._request, self._scope, self._send = request, scope, send
        self.begun = self._kept_back = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._kept_back = not self._request.asked and message["status"] in LEFT_TO_ENGINES
            self._scope["state"][KEPT_BACK] = self._kept_back
            if not self._kept_back:
                self.begun = True
                message["headers"] = [*message.get("headers", ()), *self._request.added]
        if not self._kept_back:
            await self._send(message)


def _replayed(content: Callable[[], bytes], receive: Receive) -> Receive:
    """As `receive`, but that the body comes first."""
    waiting = [content]

    async def replay() -> Message:
        if not waiting:
            return await receive()
        return {"type": "http.request", "body": waiting.pop()(), "more_body": False}

    return replay


def _are_alike(told: Processor, opened: Processor) -> bool:
    """Whether engines know media, and take prompts, as when the model was opened here."""
    return (told.fingerprint, told.files_digest, told.algorithm, told.dtype, told.facts) == (
        *(opened.fingerprint, opened.files_digest, opened.algorithm),
        *(opened.dtype, opened.facts),
    )


def _tell_unlike(served: _Served, unlike: frozenset[str], model: str) -> None:
    """Say once of each engine that its files, or its limits, are others."""
    if new := sorted(unlike - served.unlike):
        logger.error(
            "%s has other files, or another model, than was opened here:"
            " prompts of %s are rendered by its engines",
            ", ".join(new),
            model,
        )
    elif not unlike:
        logger.info("prompts of %s are rendered here again", model)
    served.unlike = unlike


@asynccontextmanager
async def open_served(
    model: RenderedModel, told: Processor, fleet: Fleet, server: ServerConfig
) -> AsyncIterator[_Served]:
    """The application for one model. Raises `ModelLoadError` or `ConfigError`."""
    assert told.facts is not None
    config = await asyncio.to_thread(_config_of, model, told)
    async with open_render_services(config) as opened:
        renderer, main = opened.readonly, opened.renderer
        if (renderer.fingerprint, renderer.files_digest) != (told.fingerprint, told.files_digest):
            raise LookOnceError("its files here are not those of its engines")
        renderer.token_cache = main.token_cache
        renderer.vocab_size = told.facts.vocab_size
        renderer.served_modalities = told.facts.modalities
        info = _model_info(model.name, told)
        engine = RoutedEngine(fleet, told, info, config.media.max_body_bytes)
        services = dataclasses.replace(
            opened, renderer=renderer, engine=engine, keys=KeyRing.of(server), guard=RequestGuard()
        )
        app = build_app(services, RENDERED_ROUTES)
        await warm_up(services, app)
        logger.info("prompts of %s are rendered here", model.name)
        stores = config.server.responses.max_bytes > 0
        yield _Served(app, services, engine, stores)


def _config_of(model: RenderedModel, told: Processor) -> Config:
    """Raises `ModelLoadError` or `ConfigError`."""
    given: Mapping[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in model.options.items()
    }
    assert told.facts is not None
    of_engines = {
        "model": model.model,
        "served_model_name": model.name,
        "dtype": told.dtype,
        "mm_hash_algorithm": told.algorithm,
        "max_model_len": told.facts.max_model_len,
    }
    options = Options(**{**given, **of_engines})
    return with_local_model(resolve(options), weights=False)


def _model_info(name: str, told: Processor) -> ModelInfo:
    assert told.facts is not None
    return ModelInfo(
        name=name,
        model_type="",
        vocab_size=told.facts.vocab_size,
        max_model_len=told.facts.max_model_len,
        eos_token_ids=(),
        modalities=told.facts.modalities,
        dtype=told.dtype,
        encoder_row_bytes=0,
    )
