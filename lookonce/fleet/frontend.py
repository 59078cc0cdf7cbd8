"""The fleet as one server: an ASGI application that sends each request to the engine which the
router chooses, and hands on the answer as bytes.

    body → identity (digests of encoded bytes) → router → the engine's own HTTP server → client

A request whose engine is lost, or cannot serve, before its answer has begun is sent once more, to
another engine; so is one that refers by name to media which only another engine knows. Afterwards
an engine's death ends its own requests alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from lookonce.config import ApiKey, ServerConfig, sent_keys
from lookonce.errors import (
    BadRequestError,
    ConfigError,
    EngineDeadError,
    LookOnceError,
    NotReadyError,
    UnauthorizedError,
)
from lookonce.fleet.engine_http import (
    HOP_BY_HOP,
    NO_DESCRIPTOR,
    OWN_LACKS,
    EngineAnswer,
    EngineClient,
    EngineLostError,
    EngineUnreachableError,
    Headers,
    IdleConnections,
    NoDescriptorError,
)
from lookonce.fleet.identity import (
    Identity,
    InlinePicture,
    Processor,
    body_with_names,
    identify_body,
)
from lookonce.fleet.metrics import engines_families, fleet_families
from lookonce.fleet.router import EngineState, NoEngineError, Route, Router
from lookonce.fleet.subscriber import Change, EventSubscriber
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.connections import WRITE_NOW
from lookonce.server.http.headers import header
from lookonce.server.http.multipart import field_of
from lookonce.server.http.request_guard import FILE_PATHS, FORM_TYPES, RequestGuard
from lookonce.server.http.responses import (
    ANTHROPIC_PATHS,
    anthropic_error_of,
    encode,
    error_response,
    error_shape,
    error_type,
)
from lookonce.types.held_bytes import HeldBytes, TenantBytes
from lookonce.types.lora import LoRAIdentity

logger = logging.getLogger("lookonce.fleet")

MAX_BODY_BYTES = 512 << 20
PROBE_SECONDS = 1.0
"""Between two looks at an engine's `/ready`."""
PROBE_TIMEOUT = 5.0
SILENT_PROBES = 2
"""So many probes in a row without an answer in time: the engine is given up. One alone may be a
long pause of the engine, or of this process."""
METRICS_TIMEOUT = 2.0
METRICS_SECONDS = 0.5
"""For so long what engines told of themselves is told again: anybody may ask, and to gather it
takes milliseconds of the event loop."""
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Of all bodies that wait for an engine; one tenant has half of it where there are others."""
MAX_KEYLESS_BYTES = 64 << 10
"""Of a body that came without a key that is known."""
RETRIED_STATUSES = frozenset({502, 503})
"""An engine that answers so has not begun: another one may serve the request."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ANSWER_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
MAX_USAGE_BYTES = 4096
"""At the end of an answer, where its usage is."""
OTHER_EVENTS = 3
"""Of a stream: its first, which has no text, that with the reason of the end, and the last."""
STORED_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[^"]{1,200})"')
STORED_PATH = re.compile(r"/v1/(?:responses|conversations)/((?:resp|conv)_[^/]+)(?:/.*)?")
STORING_PATHS = frozenset({"/v1/responses", "/v1/conversations"})
GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
MODEL_PATHS = frozenset(
    {
        *GENERATING_PATHS,
        *(f"{path}/render" for path in GENERATING_PATHS),
        *ANTHROPIC_PATHS,
        *FILE_PATHS,
        *("/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings", "/pooling"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
        *("/tokenize", "/detokenize", "/invocations"),
        *("/inference/v1/generate", "/inference/v1/media_cache", "/v1/realtime"),
    }
)
"""What each model answers in its own way."""
NAMING_PATHS = frozenset({"/v1/chat/completions"})
"""Nothing of these requests is stored, so a picture's name may take its place."""
BROADCAST_PATHS = frozenset(
    {
        "/inference/v1/abort_requests",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/reset_prefix_cache",
    }
)
"""POSTs that every engine gets."""
SUMMED_PATHS = frozenset({"/load", "/savings"})
"""GETs whose figures are those of all engines together."""
LOAD_ADAPTER = "/v1/load_lora_adapter"
LOAD_TIMEOUT = 300.0
LOAD_HEADERS: Headers = [(b"content-type", b"application/json")]
ADAPTER_PATHS = frozenset({LOAD_ADAPTER, "/v1/unload_lora_adapter"})
"""POSTs that every engine gets which loads adapters while it runs."""
MODEL_PATH = "/v1/models/"
OWN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/fleet"})
CLIENT_LEFT_STATUS = 499
ENGINE_LOST = "the engine was lost"
ORIGIN = re.compile(rb"\Ahttps?://[^/]*")
REFUSAL_HEADERS = frozenset({"content-type", "www-authenticate", "retry-after", "x-request-id"})
"""Of an engine's answer to a WebSocket's handshake that it refuses, which clients get."""
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine's server is, and what it serves."""

    name: str
    model: str
    http: str
    """`HOST:PORT` or `unix:PATH`."""
    events: str | None = None
    """ZMQ endpoints of its `--events`, and the topic of KV blocks."""
    events_replay: str | None = None
    events_topic: str = "kv-events"
    draining: bool = False


class AdapterLoad(msgspec.Struct, frozen=True):
    """A LoRA adapter that was loaded by route, and the body that did so: engines that start later
    get it, too, with the front-end's own key."""

    identity: LoRAIdentity
    body: bytes


EngineAnswerParts = tuple[int, Headers, bytes]
"""Status, headers and body."""
AdapterLoads = dict[str, AdapterLoad]
"""Name of an adapter → its load; of one model."""


class EngineKeys:
    """The keys by which a front-end asks its engines: those of a key file, as it is now."""

    def __init__(self, path: str | None, now: Callable[[], float] = time.time) -> None:
        """`now` is the Unix time. Raises `ConfigError`."""
        self._path, self._now = path, now
        self._keys: list[tuple[str, ApiKey]] = []
        self._version: tuple[int, ...] | None = ()
        self._used: dict[bool, str] = {}
        """By whether an admin's was asked for."""
        self._read()

    def first(self, *, admin: bool = False) -> str | None:
        """The first key that is valid now, of an admin if that is needed, as clients send it; None
        without a file or such a key. It stays as long as it is valid: engines that have not read a
        changed file know it, too."""
        try:
            self._read()
        except ConfigError as error:
            logger.error("the keys stay what they were: %s", error)
        moment = self._now()
        valid = [
            text
            for text, key in self._keys
            if (key.expires is None or moment < key.expires) and (key.admin or not admin)
        ]
        if self._used.get(admin) not in valid:
            if not valid:
                return None
            self._used[admin] = valid[0]
        return self._used[admin]

    def headers(self, *, admin: bool = False) -> Headers:
        key = self.first(admin=admin)
        return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    @property
    def asked_for(self) -> bool:
        """Whether engines have keys."""
        return self._path is not None

    def _read(self) -> None:
        """The file, if it is another one than before. Raises `ConfigError`, once."""
        if self._path is None:
            return
        version: tuple[int, ...] | None = None
        with contextlib.suppress(OSError):  # reading it names the reason
            found = Path(self._path).stat()
            version = found.st_mtime_ns, found.st_size, found.st_ino
        if version != self._version:
            self._version = version
            self._keys = sent_keys(self._path)


class Member:
    """One engine of the fleet: its connections, its events, and whether it is ready."""

    def __init__(
        self,
        address: EngineAddress,
        state: EngineState,
        keys: EngineKeys,
        connections: IdleConnections,
        loads: AdapterLoads,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`loads`: what this engine has to load before it gets requests. `on_look` is called
        whenever it is known anew whether the engine accepts requests."""
        self.address, self.state = address, state
        self._keys = keys
        self._loads = loads
        self._on_look = on_look
        self.without: set[str] = set()
        """Names of adapters that it could not load as others have: it gets no requests for them."""
        self.client = EngineClient(address.http, connections)
        self.processor = Processor()
        self.cards: list[dict[str, Any]] = []
        """Of the model, and of its adapters."""
        self.subscriber: EventSubscriber | None = None
        self.draining = address.draining
        self._learning = asyncio.Lock()
        self._looks = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def look(self) -> None:
        """It failed: see at once whether it is still there."""
        self.state.accepts = False
        self._looks.set()

    def close(self) -> None:
        self._task.cancel()
        self.client.close()
        self.state.accepts = False
        if self.subscriber is not None:
            asyncio.get_running_loop().run_in_executor(None, self.subscriber.close)

    async def _watch(self) -> None:
        num_silent = 0
        while True:
            self._looks.clear()
            ready = self.state.accepts  # as long as nothing was found out
            try:
                ready = await self._probe()
                num_silent = 0
            except TimeoutError:
                num_silent += 1
                if num_silent >= SILENT_PROBES:
                    ready = False
                    self._give_up()
            except NoDescriptorError:
                pass
            self.state.accepts = ready and not self.draining
            self._on_look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._looks.wait()
                    await asyncio.sleep(0.05)

    async def _probe(self) -> bool:
        """Whether the engine takes requests. Raises `TimeoutError` where it gives no answer, and
        `NoDescriptorError`."""
        found = await self._told("/ready")
        if found is None or found[0] != 200:
            self.without.clear()  # whatever comes back may be able to
            return False
        if not await self._learn():
            return self.state.accepts  # it goes on as it is known
        if not self.state.accepts and not self.draining:
            return await self._load_adapters()
        return True

    def _give_up(self) -> None:
        """The engine is silent, so its requests are lost: those that have no answer yet are sent to
        another engine, the others end with an error."""
        if self.client.abort() or self.state.accepts:
            logger.error("%s has stopped answering: it is given up", self.address.name)

    async def learn(self) -> bool:
        """What the model and its adapters are called and how caches know their media and prompts;
        whether it told. Adapters come and go while an engine runs."""
        with contextlib.suppress(TimeoutError):
            return await self._learn()
        return False

    async def _learn(self) -> bool:
        """As `learn`. Raises `TimeoutError` where the engine gives no answer."""
        async with self._learning:  # what was told later counts
            return await self._learn_in_turn()

    async def _learn_in_turn(self) -> bool:
        cache = await self._told("/inference/v1/media_cache")
        if cache is None or cache[0] != 200:
            return False
        try:
            told = Processor.told(self.address.model, msgspec.json.decode(cache[1]))
            if not self.cards or told != self.processor:
                models = await self._told("/v1/models")
                if models is None or models[0] != 200:
                    return False
                self.cards = list(msgspec.json.decode(models[1])["data"])
        except (msgspec.MsgspecError, LookupError, ValueError, TypeError, AttributeError):
            logger.error("%s does not answer as an engine does", self.address.name)
            return False
        for name, load in list(self._loads.items()):
            if told.adapters.get(name) == load.identity:
                self.without.discard(name)
            elif self.state.accepts and name not in self.without:
                del self._loads[name]  # it was changed by another front-end
        self.processor, self.state.adapters = told, frozenset(told.adapters) - self.without
        return bool(self.cards)

    async def _load_adapters(self) -> bool:
        """What was loaded by route before this engine started; whether it tells what it has now."""

        def missing() -> set[str]:
            told = self.processor.adapters
            return {n for n, load in self._loads.items() if told.get(n) != load.identity}

        while wanted := missing() - self.without:  # more may be loaded meanwhile
            key = self._keys.headers(admin=True)
            if not key and self._keys.asked_for:
                logger.error("adapters cannot be loaded again: no admin key is valid now")
            headers = [*LOAD_HEADERS, *key]
            answered: dict[str, AdapterLoad] = {}
            for name in sorted(wanted):
                if (load := self._loads.get(name)) is None:
                    continue
                if not await self.ask("POST", LOAD_ADAPTER, headers, load.body, LOAD_TIMEOUT):
                    logger.error("%s did not answer a load of %s", self.address.name, name)
                    return False  # it is asked again
                answered[name] = load
            if not await self._learn():
                return False
            if failed := {n for n in missing() if self._loads[n] is answered.get(n)}:
                names, engine = ", ".join(sorted(failed)), self.address.name
                logger.error("%s could not load adapters as others have: %s", engine, names)
                self.without |= failed
                self.state.adapters -= failed
        return True

    async def _told(self, path: str) -> tuple[int, bytes] | None:
        """Status and body of a probe; None where the engine was lost. Raises `TimeoutError` where
        it gives no answer, and `NoDescriptorError`."""
        answer = await self._answer("GET", path, self._keys.headers(), b"", PROBE_TIMEOUT)
        return None if answer is None else (answer[0], answer[2])

    async def get(self, path: str, timeout: float) -> tuple[int, bytes] | None:
        """Status and body; None where none came in time. Raises `NoDescriptorError`."""
        answer = await self.ask("GET", path, self._keys.headers(), b"", timeout)
        return None if answer is None else (answer[0], answer[2])

    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes, timeout: float
    ) -> EngineAnswerParts | None:
        """The whole answer; None where none came in time. Raises `NoDescriptorError`."""
        with contextlib.suppress(TimeoutError):
            return await self._answer(method, target, headers, body, timeout)
        return None

    async def _answer(
        self, method: str, target: str, headers: Headers, body: bytes, timeout: float
    ) -> EngineAnswerParts | None:
        """The whole answer; None where the engine was lost. Raises `TimeoutError` and
        `NoDescriptorError`."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self.client.request(method, target, headers, body)
                try:
                    return answer.status, answer.headers, await answer.body()
                finally:
                    answer.close()
        except EngineUnreachableError:
            raise TimeoutError from None
        except EngineLostError:
            return None


class Fleet:
    """The engines as one front-end knows them. Made and used on its event loop."""

    def __init__(self, router: Router, keys: EngineKeys | None = None) -> None:
        """`keys`: what engines ask for, where they have keys."""
        self.router = router
        self._keys = keys or EngineKeys(None)
        self._connections = IdleConnections()
        self.members: dict[str, Member] = {}
        self._looked = asyncio.Event()
        self.loads: dict[str, AdapterLoads] = {}
        """Model → its adapters that were loaded by route."""

    async def wait_served(self, num_models: int) -> None:
        """Until engines of so many models accept requests."""
        while len({member.address.model for member in self.ready()}) < num_models:
            self._looked.clear()
            await self._looked.wait()

    def update(self, addresses: Mapping[str, EngineAddress]) -> None:
        """The engines that there are now, by name. One that is named no more gets no new requests;
        those that it serves go on."""
        loop = asyncio.get_running_loop()
        for name in self.members.keys() - addresses.keys():
            logger.info("engine %s is gone", name)
            member = self.members.pop(name)
            member.close()
            self.router.remove_engine(name)
        for name, address in addresses.items():
            member_of = self.members.get(name)
            if member_of is None:
                logger.info("engine %s of model %s at %s", name, address.model, address.http)
                follows = address.events is not None
                state = self.router.add_engine(name, address.model, follows=follows)
                state.accepts = False
                member = Member(
                    address,
                    state,
                    self._keys,
                    self._connections,
                    self.loads.setdefault(address.model, {}),
                    self._looked.set,
                )
                self.members[name] = member
                if address.events is not None:
                    replay = address.events_replay or address.events
                    member.subscriber = EventSubscriber(
                        address.events,
                        replay,
                        address.events_topic,
                        self._on_changes(state, loop),
                    )
            elif address.draining and not member_of.draining:
                member_of.draining, member_of.state.accepts = True, False

    def _on_changes(
        self, state: EngineState, loop: asyncio.AbstractEventLoop
    ) -> Callable[[list[Change]], None]:
        def hand_over(changes: list[Change]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.router.apply, state, changes)

        return hand_over

    def served_models(self) -> set[str]:
        """Without adapters."""
        return {member.address.model for member in self.members.values()}

    async def told_of(self, model: str) -> Processor:
        """What an engine of the model tells, once one has told what rendering needs."""
        while (told := self.processor_of(model)).facts is None:
            self._looked.clear()
            await self._looked.wait()
        return told

    def processors_of(self, model: str) -> dict[str, Processor]:
        """Of all engines of the model that told, by their names; `model`: without adapters."""
        return {
            name: member.processor
            for name, member in self.members.items()
            if member.cards and member.address.model == model
        }

    def processor_of(self, model: Any) -> Processor:
        """Of any engine of the model."""
        for member in self.members.values():
            if member.cards and member.state.serves(model if isinstance(model, str) else None):
                return member.processor
        return Processor()

    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state.accepts]

    def close(self) -> None:
        self.update({})


class RendersPrompts(Protocol):
    """What answers requests here, but for the tokens (`fleet.rendering`)."""

    num_rendered: int
    num_retried: int
    """Prompts that a second engine got."""

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        content: Callable[[], bytes],
        headers: Headers,
    ) -> bool:
        """Answer a POST; `content`: its body, until an answer has begun. False: nothing was sent,
        and an engine has to get the request as it came."""

    async def abort(self, tenant: str, request_ids: Sequence[str]) -> list[str]:
        """Abort a tenant's requests that are rendered or answered here; those that there were."""


class Frontend:
    """The ASGI application."""

    def __init__(
        self, fleet: Fleet, config: ServerConfig, rendering: RendersPrompts | None = None
    ) -> None:
        """`rendering`: of the models whose prompts are rendered here; None: engines do that."""
        self._fleet = fleet
        self._rendering = rendering
        self._keys = KeyRing.of(config)
        self._held_bytes = TenantBytes(MAX_HELD_BYTES, lambda: self._keys.are_of_several)
        self._guard = RequestGuard.of(config)
        self.draining = False
        self.active = 0
        """Requests that are being served."""
        self.responses: Counter[int] = Counter()
        self.retried = 0
        self.decision_seconds = 0.0
        self._gathered: asyncio.Task[str] | None = None
        """What engines tell of themselves."""
        self._gathered_until = -math.inf
        """On the event loop's clock; later it is asked for anew."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, receive, send)
        self.active += 1
        try:
            exchange.added = list(self._guard.admit(scope))
            asked = self._guard.preflight(scope) if exchange.added else None
            if self.draining:  # the client's next request goes to another front-end
                exchange.added.append((b"connection", b"close"))
            if asked is not None:
                await exchange.answer(204, [*asked], b"")
            elif scope["path"] in OWN_PATHS:
                await self._own(exchange)
            else:
                await self._serve(exchange)
        except _ClientLeft:
            exchange.status = exchange.status or CLIENT_LEFT_STATUS
        except LookOnceError as error:
            response = error_response(error, error_shape(exchange.path))
            await exchange.answer(response.status_code, response.raw_headers, bytes(response.body))
        except Exception:
            logger.exception("a request failed")
            await exchange.refuse(500, "internal", "the front-end failed to serve this request")
        finally:
            self.active -= 1
            self.responses[exchange.status] += 1
            exchange.close()

    # --- requests for engines --------------------------------------------------------------------

    async def _serve(self, exchange: _Exchange) -> None:
        """Engines refuse a request without a key that is known, but for open routes. What they
        would not read of it is not read here either, nor looked into."""
        refused: UnauthorizedError | None = None
        try:
            exchange.tenant = self._keys.principal(exchange.scope).tenant
        except UnauthorizedError as error:
            refused = error
        with HeldBytes(self._held_bytes, exchange.tenant) as held:
            exchange.held_bytes = held
            await self._serve_known(exchange, refused)

    async def _serve_known(self, exchange: _Exchange, refused: UnauthorizedError | None) -> None:
        """`refused`: why nobody is known by the request's key."""
        body = await exchange.body(MAX_BODY_BYTES if refused is None else MAX_KEYLESS_BYTES)
        if body is None and refused is not None:
            raise refused
        if body is None:
            await exchange.refuse(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
            return
        exchange.content = body
        del body  # `exchange` gives it up when the answer begins
        method, path = exchange.method, exchange.path
        if path == "/v1/models" and method == "GET":
            await self._models(exchange)
        elif method == "GET" and path in SUMMED_PATHS:
            await self._sum(exchange)
        elif method == "POST" and path in BROADCAST_PATHS:
            await self._broadcast(exchange)
        elif method == "POST" and path in ADAPTER_PATHS:
            await self._change_adapters(exchange, exchange.content)
        elif stored := STORED_PATH.fullmatch(path):
            await self._stored(exchange, stored[1])
        elif refused is None and method == "POST" and await self._rendered(exchange):
            pass  # it is answered
        else:
            began = time.perf_counter()
            request_id, identity = exchange.request_id, Identity()
            if refused is None:
                request_id, identity = self._identify(exchange, exchange.content)
            self.decision_seconds += time.perf_counter() - began
            exchange.pictures = identity.inline
            identity = msgspec.structs.replace(identity, inline=())
            await self._route(exchange, request_id, identity)

    async def _rendered(self, exchange: _Exchange) -> bool:
        """Whether it was answered here."""
        if self._rendering is None:
            return False
        headers = exchange.sent_on(exchange.request_id)
        receive, send = exchange.receive, exchange.send
        return await self._rendering.answer(
            exchange.scope, receive, send, lambda: exchange.content, headers
        )

    def _identify(self, exchange: _Exchange, body: bytes) -> tuple[str, Identity]:
        """The request's id and what it refers to; of a form, its model alone, and of what is no
        JSON, nothing. Engines take what is no form for JSON, whatever its type."""
        if exchange.method == "GET" and exchange.path.startswith(MODEL_PATH):
            return exchange.request_id, Identity(exchange.path.removeprefix(MODEL_PATH))
        sent_as = exchange.header(b"content-type")
        if exchange.path in FILE_PATHS:
            identity = Identity(field_of(body, sent_as, "model"))
            if identity.model is None:
                self._check_unnamed(exchange.path)
            return exchange.request_id, identity
        if not body or sent_as.partition(";")[0].strip().lower() in FORM_TYPES:
            return exchange.request_id, Identity()
        session = exchange.header(b"x-session-id") or None
        given, identity = identify_body(body, exchange.tenant, self._fleet.processor_of, session)
        if given and given.get("model") is None and identity.stored is None:
            self._check_unnamed(exchange.path)
        named = given.get("request_id")
        if isinstance(named, str) and REQUEST_ID.fullmatch(named):
            return named, identity
        return exchange.request_id, identity

    def _check_unnamed(self, path: str) -> None:
        """Raises `BadRequestError` where a request names none of several models: which one would
        answer would depend on their load."""
        served = sorted(self._fleet.served_models())
        if path in MODEL_PATHS and len(served) > 1:
            raise BadRequestError(
                f"model: several are served here; name one of {', '.join(served)}",
                param="model",
                code="invalid_value",
            )

    async def _route(self, exchange: _Exchange, request_id: str, identity: Identity) -> None:
        """To the engine of the router's choice. Where that one refuses, to another; where it is
        lost before its answer has begun, once more."""
        router, failed, lost = self._fleet.router, set[str](), 0
        self._check_stored(identity)
        while True:
            began = time.perf_counter()
            try:
                route = router.route(request_id, identity, failed)
            except NoEngineError:
                await self._no_engine(exchange, identity, failed)
                return
            self.decision_seconds += time.perf_counter() - began
            try:
                done = await self._forward(exchange, request_id, route)
            except EngineLostError:
                router.ended(request_id, route, failed=True)
                if exchange.left:
                    raise _ClientLeft from None
                if (member := self._fleet.members.get(route.engine.name)) is not None:
                    member.look()
                lost += 1
                if exchange.begun or lost > 1:
                    await exchange.refuse(503, "engine_dead", ENGINE_LOST)
                    return
                done = False
            except BaseException as error:
                failed_here = isinstance(error, NoDescriptorError)
                router.ended(request_id, route, failed=failed_here)
                raise
            router.ended(request_id, route, failed=not done)
            if done:
                return
            failed.add(route.engine.name)
            self.retried += 1

    def _check_stored(self, identity: Identity) -> None:
        """Raises `BadRequestError` where what a request goes on with is stored with another model:
        no engine of its own can find it."""
        if identity.stored is None:
            return
        holder = self._fleet.router.engine_of_stored(identity.tenant, identity.stored)
        if holder is not None and not holder.serves(identity.model):
            raise BadRequestError(
                f"{identity.stored[:80]!r} is stored with the model {holder.model!r}, and this"
                f" request is for {str(identity.model)[:80]!r}",
                param="model",
                code="stored_with_other_model",
            )

    async def _no_engine(self, exchange: _Exchange, identity: Identity, failed: set[str]) -> None:
        if exchange.held is not None:
            held, exchange.held = exchange.held, None
            await exchange.answer(*held)
            return
        known = self._fleet.router.models()
        if identity.model is not None and known and identity.model not in known:
            message = f"there is no model {identity.model[:100]!r}; there is: {', '.join(known)}"
            await exchange.refuse(404, "model_not_found", message, param="model")
            return
        await exchange.refuse(503, "no_engine", "no engine takes requests now")

    async def _forward(self, exchange: _Exchange, request_id: str, route: Route) -> bool:
        """Send to the route's engine, and hand on its answer. False: nothing was handed on, and
        another engine may serve the request.

        Raises `EngineLostError`; the answer may have begun.
        """
        member = self._fleet.members.get(route.engine.name)
        if member is None:
            return False
        router, engine = self._fleet.router, route.engine
        if exchange.path not in NAMING_PATHS:
            exchange.pictures = ()
        held = {each.key for each in exchange.pictures if router.holds_item(engine, each.key)}
        if held:
            with contextlib.suppress(_NotHeldError):
                return await self._pass_on(exchange, request_id, route, member, held)
        return await self._pass_on(exchange, request_id, route, member, set())

    async def _pass_on(
        self,
        exchange: _Exchange,
        request_id: str,
        route: Route,
        member: Member,
        held: Collection[int],
    ) -> bool:
        """As `_forward`; `held`: keys of pictures that are sent by their names. Raises
        `_NotHeldError` where the engine does not hold one of these any more."""
        began = time.monotonic()
        async with exchange.asking(member, request_id, held=held) as answer:
            if answer.status == 422 and held:
                await answer.body()
                raise _NotHeldError
            unknown = answer.status == 422 and any(m.bare for m in route.identity.media)
            unknown |= (
                answer.status == 404
                and route.identity.stored is not None
                and route.reason != "stored"
            )
            if unknown or answer.status in RETRIED_STATUSES:
                exchange.held = answer.status, answer.headers, await answer.body()
                return False
            exchange.added += [
                (b"x-lookonce-engine", route.engine.name.encode("latin-1", "replace")),
                (b"x-lookonce-route", route.why().encode("latin-1", "replace")),
            ]
            first: bytes | None = None
            async for chunk in answer.chunks(exchange.write_now):
                if first is None:
                    first = chunk
                    self._fleet.router.answered(route, time.monotonic() - began)
                    if answer.status == 200:
                        self._learn_stored(exchange, chunk, route)
                    await exchange.begin(answer)
                await exchange.write(chunk)
            if first is None:
                await exchange.begin(answer)
            await exchange.end()
        if (num_tokens := exchange.answer_tokens()) is not None:
            self._fleet.router.note_answer_tokens(num_tokens)
        return True

    def _learn_stored(self, exchange: _Exchange, chunk: bytes, route: Route) -> None:
        """Where what it went on with is, and what it stored."""
        if exchange.path not in STORING_PATHS:
            return
        tenant, engine = exchange.tenant, route.engine.name
        if (known := route.identity.stored) is not None:
            self._fleet.router.bind_stored(tenant, known, engine)
        if found := STORED_ID.search(chunk[:4096]):
            self._fleet.router.bind_stored(tenant, found[1].decode("latin-1"), engine)

    # --- requests for several engines ------------------------------------------------------------

    async def _stored(self, exchange: _Exchange, stored: str) -> None:
        """What an engine has stored: the one that is known for it, or each until one has it."""
        tenant = exchange.tenant
        known = self._fleet.router.engine_of_stored(tenant, stored)
        members = sorted(self._fleet.ready(), key=lambda each: each.state is not known)
        held: EngineAnswerParts | None = None
        for member in members:
            try:
                async with exchange.asking(member, exchange.request_id) as answer:
                    held = answer.status, answer.headers, await answer.body()
            except EngineLostError:
                continue
            if held[0] == 200:  # any other status says nothing of where it is
                self._fleet.router.bind_stored(tenant, stored, member.address.name)
            if held[0] != 404:
                break
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        else:
            await exchange.answer(*held)

    async def _ask_all(self, exchange: _Exchange) -> list[EngineAnswerParts]:
        """The answers of all engines that take requests, without those that were lost."""
        answers: list[EngineAnswerParts] = []
        for member in self._fleet.ready():
            with contextlib.suppress(EngineLostError):
                async with exchange.asking(member, exchange.request_id) as answer:
                    answers.append((answer.status, answer.headers, await answer.body()))
        return answers

    async def _broadcast(self, exchange: _Exchange) -> None:
        """To all engines; the first error is answered, else what all aborted."""
        aborting = exchange.path.endswith("abort_requests")
        answers = await self._ask_all(exchange)
        held = next((each for each in answers if each[0] != 200), answers[-1] if answers else None)
        aborted: list[str] = []
        if aborting:
            for status, _, body in answers:
                if status == 200:
                    aborted += msgspec.json.decode(body)["aborted"]
        if self._rendering is not None and aborting and held is not None and held[0] == 200:
            asked = msgspec.json.decode(exchange.content, type=_Aborts).request_ids
            unknown = [each for each in asked if each not in aborted]  # to engines, yet
            aborted += await self._rendering.abort(exchange.tenant, unknown)
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        elif held[0] == 200 and aborting:
            await exchange.answer(200, held[1], msgspec.json.encode({"aborted": aborted}))
        else:
            await exchange.answer(*held)

    async def _sum(self, exchange: _Exchange) -> None:
        """The figures of all engines that answer, added; the first error where none does."""
        answers = await self._ask_all(exchange)
        good = [each for each in answers if each[0] == 200]
        told: list[dict[str, Any]] = [msgspec.json.decode(body) for _, _, body in good]
        held = good[-1] if good else answers[0] if answers else None
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        elif told:
            await exchange.answer(200, held[1], msgspec.json.encode(_added(told)))
        else:
            await exchange.answer(*held)

    async def _change_adapters(self, exchange: _Exchange, body: bytes) -> None:
        """To all engines, whether or not the client stays: otherwise some would have it, and others
        not. Those that were started without `--lora-dir` (403) are left out, as long as there are
        others; of these the first error is answered."""
        name = _adapter_name(body)
        answers: list[EngineAnswerParts] = []
        changed: list[Member] = []
        asked: list[Member] = []
        headers = exchange.sent_on(exchange.request_id)
        # also those that become ready meanwhile
        while member := next((each for each in self._fleet.ready() if each not in asked), None):
            asked.append(member)
            answer = None
            with contextlib.suppress(NoDescriptorError):
                answer = await member.ask("POST", exchange.target, headers, body, LOAD_TIMEOUT)
            if answer is None:
                continue
            answers.append(answer)
            if answer[0] == 200:
                self._fleet.loads[member.address.model].pop(name, None)
                member.without.discard(name)
                if await member.learn():
                    changed.append(member)
        if exchange.path == LOAD_ADAPTER:
            self._note_loaded(name, changed, body)
        meant = [each for each in answers if each[0] != 403] or answers
        if not meant:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
            return
        await exchange.answer(*next((each for each in meant if each[0] != 200), meant[0]))

    def _note_loaded(self, name: str, changed: Sequence[Member], body: bytes) -> None:
        """Engines of the same models that start later load it, too."""
        identities = {each.address.model: each.processor.adapters.get(name) for each in changed}
        for model, identity in identities.items():
            if identity is None:
                continue
            given = msgspec.json.decode(body) | {"load_inplace": True}
            load = AdapterLoad(identity, msgspec.json.encode(given))
            self._fleet.loads[model][name] = load
            for member in self._fleet.ready():
                unlike = member.processor.adapters.get(name) != identity
                if unlike and member.address.model == model:
                    member.without.add(name)

    async def _models(self, exchange: _Exchange) -> None:
        """A card of each model and adapter. One engine is asked, so that keys are checked."""
        members = self._fleet.ready()
        if not members:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
            return
        async with exchange.asking(members[0], exchange.request_id) as answer:
            status, headers, body = answer.status, answer.headers, await answer.body()
        if status == 200:
            cards = {card["id"]: card for member in members for card in member.cards}
            body = msgspec.json.encode({"object": "list", "data": list(cards.values())})
        await exchange.answer(status, headers, body)

    # --- the front-end's own routes --------------------------------------------------------------

    async def _own(self, exchange: _Exchange) -> None:
        json = [(b"content-type", b"application/json")]
        if exchange.path == "/metrics":
            lines = await self._metrics()
            await exchange.answer(200, [(b"content-type", METRICS_TYPE)], lines.encode())
        elif exchange.path == "/fleet":
            self._keys.principal(exchange.scope).require_admin()
            await exchange.answer(200, json, msgspec.json.encode(self._state()))
        else:
            models = {member.address.model for member in self._fleet.members.values()}
            served = {member.address.model for member in self._fleet.ready()}
            ready = bool(models) and models == served and not self.draining
            good = ready or (exchange.path != "/ready" and bool(served))
            status = "ready" if ready else "draining" if self.draining else "loading"
            body = msgspec.json.encode({"status": status})
            await exchange.answer(200 if good else 503, json, body)

    def _state(self) -> dict[str, Any]:
        router = self._fleet.router
        return {
            "engines": [
                {
                    "name": member.address.name,
                    "model": member.address.model,
                    "ready": member.state.accepts,
                    "draining": member.draining,
                    "requests": member.state.num_requests,
                    "others": member.state.others,
                    "backlog_seconds": round(member.state.backlog, 4),
                    "rates": {
                        name: getattr(member.state.rates, name)
                        for name in (
                            *("prompt_token", "encoder_run", "processing"),
                            *("decoded_token", "beside"),
                        )
                    },
                }
                for member in self._fleet.members.values()
            ],
            "index": {
                "blocks": len(router.blocks),
                "encoder_outputs": len(router.outputs),
                "items": len(router.items),
            },
            "answer_tokens": round(router.answer_tokens, 4),
            "retried": self._num_retried,
        }

    @property
    def _num_retried(self) -> int:
        return self.retried + (0 if self._rendering is None else self._rendering.num_retried)

    async def _metrics(self) -> str:
        """Its own figures, and those of the engines that answer in time. Engines are asked once
        for all who ask at the same time, and for `METRICS_SECONDS`."""
        loop = asyncio.get_running_loop()
        gathered = self._gathered
        if gathered is None or (gathered.done() and loop.time() >= self._gathered_until):
            gathered = self._gathered = loop.create_task(self._gather())
        theirs = await asyncio.shield(gathered)
        own = fleet_families(
            self._fleet.router,
            self._num_retried,
            self.decision_seconds,
            self.responses,
            None if self._rendering is None else self._rendering.num_rendered,
        )
        return "\n".join([*own, theirs]) + "\n"

    async def _gather(self) -> str:
        """The figures of the engines that answer in time."""

        async def told(member: Member) -> str | None:
            with contextlib.suppress(NoDescriptorError):
                answer = await member.get("/metrics", METRICS_TIMEOUT)
                if answer is not None and answer[0] == 200:
                    return answer[1].decode(errors="replace")
            return None

        members = list(self._fleet.members.values())
        answers = await asyncio.gather(*map(told, members))
        names = (member.address.name for member in members)
        texts = {n: text for n, text in zip(names, answers, strict=True) if text is not None}
        lines = "\n".join(engines_families(texts))
        self._gathered_until = asyncio.get_running_loop().time() + METRICS_SECONDS
        return lines

    # --- WebSockets ------------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To an engine of the model that the query names, or of any, where the least waits; message
        by message. What is refused is answered as any other request."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import (
            ConnectionClosed,
            InvalidStatus,
            InvalidURI,
            WebSocketException,
        )

        await receive()
        exchange = _Exchange(scope, receive, send)
        self.active += 1
        try:
            self._guard.admit(scope)
            named = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[0]
            if not named and self._is_known(scope):
                self._check_unnamed(exchange.path)
            known = named in self._fleet.router.models()  # of others engines say what is wrong
            identity = Identity(named if known else None)
            route = self._fleet.router.route(exchange.request_id, identity)
        except (LookOnceError, NoEngineError) as error:
            self.active -= 1
            if isinstance(error, NoEngineError):
                error = NotReadyError("no engine takes requests now")
            await _deny(scope, receive, send, error_response(error))
            return
        accepted = False
        try:
            http = self._fleet.members[route.engine.name].address.http
            path = http.removeprefix("unix:") if http.startswith("unix:") else None
            host = "localhost" if path is not None else http
            query = scope["query_string"].decode("latin-1")
            url = f"ws://{host}{scope['path']}" + (f"?{query}" if query else "")
            passed = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in scope["headers"]
                if name in (b"authorization", b"x-api-key", b"openai-beta")
            }
            options: dict[str, Any] = {
                "additional_headers": passed,
                "subprotocols": scope.get("subprotocols") or None,
                "max_size": 32 << 20,
                "compression": None,
                "proxy": None,  # none for engines, whatever the environment has for others
            }
            if path is not None:
                options |= {"unix": True, "path": path}
            async with connect(url, **options) as engine:
                await send({"type": "websocket.accept", "subprotocol": engine.subprotocol})
                accepted = True
                await _relay(engine, receive, send)
        except ConnectionClosed:
            pass
        except (OSError, WebSocketException, TimeoutError) as error:
            if accepted:
                await send({"type": "websocket.close", "code": 1013})
            elif isinstance(error, InvalidStatus) and error.response.status_code >= 400:
                await _deny(scope, receive, send, _as_it_came(error.response))
            else:
                failure: LookOnceError = EngineDeadError(ENGINE_LOST)
                if isinstance(error, InvalidURI):
                    failure = BadRequestError("the query has a character that no URL has")
                elif isinstance(error, OSError) and error.errno in OWN_LACKS:
                    failure = NoDescriptorError(NO_DESCRIPTOR)
                await _deny(scope, receive, send, error_response(failure))
        finally:
            self.active -= 1
            self._fleet.router.ended(exchange.request_id, route)

    def _is_known(self, scope: Scope) -> bool:
        """Whether a request has a key that is valid; engines refuse it otherwise."""
        with contextlib.suppress(UnauthorizedError):
            self._keys.principal(scope)
            return True
        return False


async def _deny(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    """Answer a WebSocket's handshake with an error."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # the client is gone
        await WebSocket(scope, receive, send).send_denial_response(response)


def _as_it_came(refused: Any) -> Response:
    """An engine's answer to a handshake that it refused."""
    response = Response(bytes(refused.body or b""), refused.status_code)
    response.raw_headers += [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in refused.headers.raw_items()
        if name.lower() in REFUSAL_HEADERS
    ]
    return response


async def _relay(engine: Any, receive: Receive, send: Send) -> None:
    from websockets.exceptions import ConnectionClosed

    async def up() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await engine.send(text if text is not None else message["bytes"])
        await engine.close()

    upward = asyncio.get_running_loop().create_task(up())
    try:
        async for data in engine:
            kind = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", kind: data})
        if not upward.done():
            code = engine.close_code or 1000
            await send({"type": "websocket.close", "code": code})
    except ConnectionClosed as closed:
        code = closed.rcvd.code if closed.rcvd is not None else 1011
        await send({"type": "websocket.close", "code": code})
    finally:
        upward.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
            await upward


def _added(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers are added, level by level; of all else, a day, only what the last has counts."""
    last = {name: each for name, each in told[-1].items() if isinstance(each, str)}
    told = [each for each in told if each.items() >= last.items()]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each[name] for each in told if name in each]
        if isinstance(values[0], dict):
            found[name] = _added(values)
        else:
            found[name] = values[0] if isinstance(values[0], str) else sum(values)
    return found


def _adapter_name(body: bytes) -> str:
    """Which adapter a load or an unload is about; engines refuse what names none."""
    try:
        return msgspec.json.decode(body, type=_NamesAdapter).lora_name
    except msgspec.MsgspecError:
        return ""


class _NamesAdapter(msgspec.Struct):
    lora_name: str


class _Aborts(msgspec.Struct):
    request_ids: list[str]


class _NotHeldError(Exception):
    """The engine does not know a picture by its name."""


class _ClientLeft(Exception):  # noqa: N818  not an error
    """Nobody waits for the answer, or it cannot be completed."""


class _Exchange:
    """One request of a client and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self._watch: asyncio.Task[Message] | None = None
        self.path: str = scope["path"]
        self.method: str = scope.get("method", "GET")
        self.added: Headers = []
        """Headers that the answer gets."""
        self.begun = False
        self._streams = self._ended = False
        extension = scope.get("extensions", {}).get(WRITE_NOW, {})
        self._write_now: Callable[[bytes], bool] = extension.get("write", lambda chunk: False)
        self._num_events = 0
        self._last = b""
        """What was written last."""
        self.status = 0
        self.content = b""
        """Its body, until an answer has begun."""
        self.pictures: tuple[InlinePicture, ...] = ()
        """Large ones of the body, which may be sent by their names."""
        self.held: EngineAnswerParts | None = None
        """An answer that is given if no other engine has a better one."""
        self.held_bytes: HeldBytes | None = None
        """Of the body, until an answer has begun."""
        self.tenant = ""
        """Of the request's key; the empty one too where that is not known."""
        asked = self.header(b"x-request-id")
        self.request_id = asked if REQUEST_ID.fullmatch(asked) else os.urandom(16).hex()

    @property
    def left(self) -> bool:
        """The client has gone."""
        return self._watch is not None and self._watch.done()

    def header(self, name: bytes) -> str:
        return header(self.scope, name)

    @property
    def target(self) -> str:
        query = self.scope["query_string"].decode("latin-1")
        raw = self.scope.get("raw_path") or self.path.encode()
        return raw.decode("latin-1") + (f"?{query}" if query else "")

    def sent_on(self, request_id: str) -> Headers:
        """The headers that engines get."""
        dropped = (b"origin", b"x-request-id")
        kept = [each for each in self.scope["headers"] if each[0] not in dropped]
        return [*kept, (b"x-request-id", request_id.encode("latin-1"))]

    async def receive(self) -> Message:
        """For whoever answers in the place of an engine."""
        return await self._receive()

    async def send(self, message: Message) -> None:
        """The same."""
        if message["type"] == "http.response.start":
            await self._start(message["status"], message["headers"])
        else:
            await self._send(message)

    async def body(self, limit: int) -> bytes | None:
        """None: it is longer than `limit` bytes. Raises `QueueFullError` where the tenant's
        requests hold too much together."""
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            return None
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                return None
            if self.held_bytes is not None:
                self.held_bytes.take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.asynccontextmanager
    async def asking(
        self, member: Member, request_id: str, *, held: Collection[int] = ()
    ) -> AsyncIterator[EngineAnswer]:
        """The engine's answer to `content`, in which pictures whose keys are in `held` are named. A
        client that leaves meanwhile ends it (`_ClientLeft`)."""
        headers = self.sent_on(request_id)
        sent = body_with_names(self.content, [each for each in self.pictures if each.key in held])
        answer: EngineAnswer = await self._unless_left(
            member.client.request(self.method, self.target, headers, sent)
        )
        assert self._watch is not None
        self._watch.add_done_callback(answer.abort)
        try:
            yield answer
        finally:
            self._watch.remove_done_callback(answer.abort)
            answer.close()

    async def _unless_left(self, wanted: Awaitable[EngineAnswer]) -> EngineAnswer:
        """The result, unless the client leaves before."""
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._receive())
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _ClientLeft
            return task.result()
        finally:
            if not task.done():
                task.cancel()

    async def begin(self, answer: EngineAnswer) -> None:
        self._streams = (b"content-type", b"text/event-stream; charset=utf-8") in answer.headers
        headers = answer.headers
        if 300 <= answer.status < 400:  # an engine knows nothing of where clients reach it
            headers = [
                (name, ORIGIN.sub(b"", value, count=1) if name == b"location" else value)
                for name, value in headers
            ]
        await self._start(answer.status, headers)

    def write_now(self, chunk: bytes) -> bool:
        """Write a part of an answer that has begun, if that needs no waiting."""
        if not self.begun or not self._write_now(chunk):
            return False
        self._note(chunk)
        return True

    def _note(self, chunk: bytes) -> None:
        self._last = chunk
        if self._streams:
            self._num_events += chunk.count(b"data: ")

    def answer_tokens(self) -> int | None:
        """Of a model's answer that has ended: what its usage says, or else, of a stream, about as
        many as it had events. None for other answers."""
        if self.status != 200:
            return None
        if said := ANSWER_TOKENS.findall(self._last, max(0, len(self._last) - MAX_USAGE_BYTES)):
            return int(said[-1])
        return max(0, self._num_events - OTHER_EVENTS) if self._streams else None

    async def write(self, chunk: bytes) -> None:
        if self.left:
            raise _ClientLeft
        self._note(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer. Where one has begun: the stream ends with `body` as its last event, any
        other answer is cut off."""
        if self._ended:
            return
        if self.begun:
            if not self._streams:
                raise _ClientLeft
            name = b"event: error\n" if self.path in ANTHROPIC_PATHS else b""
            await self.write(name + b"data: " + body + b"\n\n")
            await self.end()
            return
        kept = [each for each in headers if each[0] != b"content-length"]
        if status != 204:
            kept.append((b"content-length", b"%d" % len(body)))
        await self._start(status, kept)
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, status: int, code: str, message: str, param: str | None = None) -> None:
        if self.path in ANTHROPIC_PATHS:
            body = encode(anthropic_error_of(status, message))
        else:
            body = encode(ErrorResponse(ErrorBody(message, error_type(status), param, code)))
        headers = [(b"content-type", b"application/json")]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await self.answer(status, headers, body)

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun, self.status = True, status
        self.content, self.pictures = b"", ()
        if self.held_bytes is not None:
            self.held_bytes.give_all()
        kept = [each for each in headers if each[0] not in HOP_BY_HOP and each[0] != b"date"]
        if not any(name == b"x-request-id" for name, _ in kept):  # it is the front-end's own answer
            names = (b"x-request-id", b"request-id")[: 1 + (self.path in ANTHROPIC_PATHS)]
            kept += [(name, self.request_id.encode("latin-1")) for name in names]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*kept, *self.added],
            }
        )

    def close(self) -> None:
        if self._watch is not None and not self._watch.done():
            self._watch.cancel()
