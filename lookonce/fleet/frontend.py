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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from lookonce.config import ServerConfig
from lookonce.errors import (
    BadRequestError,
    DrainingError,
    EngineDeadError,
    LookOnceError,
    NotReadyError,
    UnauthorizedError,
)
from lookonce.fleet.engine_http import (
    ENGINE_LOST,
    HOP_BY_HOP,
    NO_DESCRIPTOR,
    OWN_LACKS,
    RETRIED_STATUSES,
    EngineAnswer,
    EngineAnswerParts,
    EngineLostError,
    Headers,
    NoDescriptorError,
)
from lookonce.fleet.identity import (
    Identity,
    InlinePicture,
    body_with_names,
    identify_body,
)
from lookonce.fleet.members import (
    CUT_OFF,
    LOAD_ADAPTER,
    LOAD_TIMEOUT,
    AdapterLoad,
    Fleet,
    Member,
)
from lookonce.fleet.metrics import engines_families, fleet_families
from lookonce.fleet.router import NoEngineError, Route
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.audit import audit, audit_refusal, named_param
from lookonce.server.http.api_keys import KeyRing, Principal
from lookonce.server.http.connections import WRITE_NOW
from lookonce.server.http.forwarded import AUDITED, FORWARDED_FOR, ForwardedClients
from lookonce.server.http.headers import header
from lookonce.server.http.multipart import field_of
from lookonce.server.http.request_guard import FILE_PATHS, FORM_TYPES, RequestGuard
from lookonce.server.http.responses import (
    ANTHROPIC_PATHS,
    UNNAMED_EVENTS,
    anthropic_error_of,
    encode,
    error_response,
    error_shape,
    error_type,
)
from lookonce.server.routes.responses_api.events import ErrorEvent
from lookonce.types.held_bytes import HeldBytes, TenantBytes
from lookonce.types.logs import current_request_id

if TYPE_CHECKING:
    from lookonce.fleet.rendering import Rendering

logger = logging.getLogger("lookonce.fleet")

MAX_BODY_BYTES = 512 << 20
METRICS_TIMEOUT = 2.0
METRICS_SECONDS = 0.5
"""For so long what engines told of themselves is told again: anybody may ask, and to gather it
takes milliseconds of the event loop."""
LATE_ANSWER_SECONDS = 0.25
"""How long an engine that is late is waited for where others answer, too."""
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Of all bodies that wait for an engine; one tenant has half of it where there are others."""
MAX_KEYLESS_BYTES = 64 << 10
"""Of a body that came without a key that is known."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ANSWER_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
MAX_USAGE_BYTES = 4096
"""At the end of an answer, where its usage is."""
OTHER_EVENTS = 3
"""Of a stream: its first, which has no text, that with the reason of the end, and the last."""
EVENT_END = b"\n\n"
EVENT_NAME = b"event: "
"""Events of responses have names, as Anthropic's; those of completions have none."""
SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
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
ADAPTER_PATHS = frozenset({LOAD_ADAPTER, "/v1/unload_lora_adapter"})
"""POSTs that every engine gets which loads adapters while it runs."""
MODEL_PATH = "/v1/models/"
UNCOUNTED_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Probes and collectors, whose answers are not counted, as those of `lookonce serve` are not."""
OWN_PATHS = UNCOUNTED_PATHS | {"/fleet"}
Statuses: TypeAlias = Collection[int | str]
ALL_REFUSALS: Statuses = ("*",)
"""In the place of each of their statuses."""
CLIENT_LEFT_STATUS = 499
SHUTTING_DOWN = "the server is shutting down; send the request elsewhere"
ORIGIN = re.compile(rb"\Ahttps?://[^/]*")
REFUSAL_HEADERS = frozenset({"content-type", "www-authenticate", "retry-after", "x-request-id"})
"""Of an engine's answer to a WebSocket's handshake that it refuses, which clients get."""
NOT_SENT_ON = frozenset({b"origin", b"x-request-id", FORWARDED_FOR, AUDITED})
"""Of a client's headers: the front-end's own come in the place of the last three."""
SENT_ON_TO_WEBSOCKETS = frozenset({b"authorization", b"x-api-key", b"openai-beta"})
"""Of a client's headers, with the handshake."""
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Frontend:
    """The ASGI application."""

    def __init__(
        self, fleet: Fleet, config: ServerConfig, rendering: Rendering | None = None
    ) -> None:
        """`rendering`: of the models whose prompts are rendered here; None: engines do that."""
        self._fleet = fleet
        self._rendering = rendering
        self._keys = KeyRing.of(config)
        self._held_bytes = TenantBytes(MAX_HELD_BYTES, lambda: self._keys.are_of_several)
        self._guard = RequestGuard.of(config)
        self._forwarded = ForwardedClients(config.forwarded_allow_ips)
        self.paths = OWN_PATHS | MODEL_PATHS | BROADCAST_PATHS | SUMMED_PATHS | ADAPTER_PATHS
        """Paths that the log may name."""
        self.draining = False
        """Each connection is closed after the answer to its next request."""
        self.refusing = False
        """The fleet ends: new requests are refused, too."""
        self.active = self._num_websockets = 0
        """Requests that are being served, WebSockets among them."""
        self._ended = asyncio.Event()
        """A request has ended."""
        self.responses: Counter[int] = Counter()
        self.retried = 0
        self.decision_seconds = 0.0
        self._gathered: asyncio.Task[str] | None = None
        """What engines tell of themselves."""
        self._gathered_until = -math.inf
        """On the event loop's clock; later it is asked for anew."""

    def refuse_new(self) -> None:
        """The fleet ends: refuse what comes from now on. Requests that run go on."""
        self.draining = self.refusing = True

    async def wait_idle(self, *, websockets: bool = True) -> None:
        """Until no request is being served; `websockets`: nor any WebSocket open."""
        while self.active > (0 if websockets else self._num_websockets):
            self._ended.clear()
            await self._ended.wait()

    def cut_off(self) -> None:
        """End what runs at engines with the error `draining`."""
        self._fleet.cut_off()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        scope["app"] = self
        scope.setdefault("state", {})
        self._forwarded.resolve(scope)
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        current_request_id.set(exchange.request_id)
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
            elif self.refusing:
                raise DrainingError(SHUTTING_DOWN)
            else:
                await self._serve(exchange)
        except _ClientLeft:
            exchange.status = exchange.status or CLIENT_LEFT_STATUS
        except LookOnceError as error:
            if not exchange.begun:
                audit_refusal(scope, error)
            response = error_response(error, error_shape(exchange.path))
            await exchange.answer(response.status_code, response.raw_headers, bytes(response.body))
        except Exception:
            logger.exception("a request failed")
            await exchange.refuse(500, "internal", "the front-end failed to serve this request")
        finally:
            self.active -= 1
            self._ended.set()
            if exchange.path not in UNCOUNTED_PATHS:
                self.responses[exchange.status] += 1
            exchange.close()

    # --- requests for engines --------------------------------------------------------------------

    async def _serve(self, exchange: _Exchange) -> None:
        """Engines refuse a request without a key that is known, but for open routes. What they
        would not read of it is not read here either, nor looked into."""
        refused: UnauthorizedError | None = None
        try:
            exchange.tenant = self._principal(exchange.scope).tenant
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
        headers = exchange.sent_on(exchange.request_id, ALL_REFUSALS)
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
                route = router.route(request_id, identity, failed, now=time.monotonic())
            except NoEngineError:
                await self._no_engine(exchange, identity, failed)
                return
            self.decision_seconds += time.perf_counter() - began
            self.retried += len(failed) == 1
            try:
                done = await self._forward(exchange, request_id, route)
            except EngineLostError:
                router.ended(request_id, route, failed=True, now=time.monotonic())
                if exchange.left:
                    raise _ClientLeft from None
                if self._fleet.is_cut_off:
                    raise DrainingError(CUT_OFF) from None
                if (member := self._fleet.members.get(route.engine.name)) is not None:
                    member.look()
                lost += 1
                if exchange.begun or lost > 1:
                    await exchange.refuse(503, "engine_dead", ENGINE_LOST)
                    return
                done = False
            except BaseException as error:
                failed_here = isinstance(error, NoDescriptorError)
                router.ended(request_id, route, failed=failed_here, now=time.monotonic())
                raise
            refused = exchange.status >= 400
            router.ended(request_id, route, failed=refused or not done, now=time.monotonic())
            if done:
                return
            failed.add(route.engine.name)

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
            await exchange.answer_kept_back(*held)
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
        kept_back: set[int | str] = {*RETRIED_STATUSES}
        if held or any(medium.bare for medium in route.identity.media):
            kept_back.add(422)
        if route.identity.stored is not None and route.reason != "stored":
            kept_back.add(404)
        async with exchange.asking(member, request_id, held=held, kept_back=kept_back) as answer:
            if answer.status == 422 and held:
                await answer.body()
                raise _NotHeldError
            if answer.status in kept_back:
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
            answer = await self._whole_answer(exchange, member, kept_back={404})
            if answer is None:
                continue
            held = answer
            if held[0] == 200:  # any other status says nothing of where it is
                self._fleet.router.bind_stored(tenant, stored, member.address.name)
            if held[0] != 404:
                break
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        elif held[0] == 404:
            await exchange.answer_kept_back(*held)
        else:
            await exchange.answer(*held)

    async def _ask_all(self, exchange: _Exchange) -> dict[str, EngineAnswerParts]:
        """Name → answer of all engines that take requests and answer, refusals too, which they do
        not audit. They are asked side by side; those that are late are not waited for, as long as
        there are others, but once one that hangs goes on it reads what it was sent."""
        members = self._fleet.ready()
        all_late = all(member.state.late for member in members)
        ask = self._whole_answer if all_late or len(members) == 1 else self._answer_unless_late
        found = await asyncio.gather(
            *(ask(exchange, member, kept_back=ALL_REFUSALS) for member in members),
            return_exceptions=True,
        )
        answers: dict[str, EngineAnswerParts] = {}
        for member, answer in zip(members, found, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                answers[member.address.name] = answer
        return answers

    def _add_missing(self, exchange: _Exchange, answered: Collection[str]) -> None:
        """Say which engines an answer that was put together from `answered` knows nothing of."""
        if missing := sorted(self._fleet.members.keys() - answered):
            names = ", ".join(missing).encode("latin-1", "replace")
            exchange.added.append((b"x-lookonce-missing", names))

    async def _answer_unless_late(
        self, exchange: _Exchange, member: Member, *, kept_back: Statuses = ()
    ) -> EngineAnswerParts | None:
        """As `_whole_answer`, and None where the engine is late."""
        asked = asyncio.ensure_future(self._whole_answer(exchange, member, kept_back=kept_back))
        try:
            await asyncio.wait({asked}, timeout=LATE_ANSWER_SECONDS)
            if not asked.done():
                member.probe_now()
            while not asked.done() and not member.state.late:
                await asyncio.wait({asked}, timeout=LATE_ANSWER_SECONDS)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    async def _whole_answer(
        self, exchange: _Exchange, member: Member, *, kept_back: Statuses = ()
    ) -> EngineAnswerParts | None:
        """An engine's; None where it was lost. `kept_back`: statuses of refusals that it does not
        audit."""
        try:
            asking = exchange.asking(member, exchange.request_id, kept_back=kept_back)
            async with asking as answer:
                return answer.status, answer.headers, await answer.body()
        except EngineLostError:
            if exchange.left:
                raise _ClientLeft from None
            member.look()
            return None

    async def _broadcast(self, exchange: _Exchange) -> None:
        """To all engines; the first error is answered, else what all aborted."""
        aborting = exchange.path.endswith("abort_requests")
        answered = await self._ask_all(exchange)
        answers = [*answered.values()]
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
        if held is not None and held[0] == 200:
            self._add_missing(exchange, answered)
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        elif held[0] == 200 and aborting:
            await exchange.answer(200, held[1], msgspec.json.encode({"aborted": aborted}))
        else:
            await exchange.answer_kept_back(*held)

    async def _sum(self, exchange: _Exchange) -> None:
        """The figures of all engines that answer, added; the first error where none does."""
        answers = await self._ask_all(exchange)
        good = {name: each for name, each in answers.items() if each[0] == 200}
        told: list[dict[str, Any]] = [msgspec.json.decode(each[2]) for each in good.values()]
        held = next(iter((good or answers).values()), None)
        if held is None:
            await exchange.refuse(503, "no_engine", "no engine takes requests now")
        elif told:
            self._add_missing(exchange, good)
            await exchange.answer(200, held[1], msgspec.json.encode(_added(told)))
        else:
            await exchange.answer_kept_back(*held)

    async def _change_adapters(self, exchange: _Exchange, body: bytes) -> None:
        """To all engines, whether or not the client stays: otherwise some would have it, and others
        not. Those that were started without `--lora-dir` (403) are left out, as long as there are
        others; of these the first error is answered."""
        name = _adapter_name(body)
        answers: list[EngineAnswerParts] = []
        changed: list[Member] = []
        asked: list[Member] = []
        headers = exchange.sent_on(exchange.request_id, ALL_REFUSALS)
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
        told = next((each for each in meant if each[0] != 200), meant[0])
        await exchange.answer_kept_back(*told)

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
        for asked in members:
            is_last = asked is members[-1]
            ask = self._whole_answer if is_last else self._answer_unless_late
            answer = await ask(exchange, asked, kept_back=ALL_REFUSALS)
            if answer is None:
                continue
            status, headers, body = answer
            if status == 200:
                cards = {card["id"]: card for member in members for card in member.cards}
                body = msgspec.json.encode({"object": "list", "data": list(cards.values())})
            await exchange.answer_kept_back(status, headers, body)
            return
        await exchange.refuse(503, "no_engine", "no engine takes requests now")

    # --- the front-end's own routes --------------------------------------------------------------

    async def _own(self, exchange: _Exchange) -> None:
        json = [(b"content-type", b"application/json")]
        if exchange.path == "/metrics":
            lines = await self._metrics()
            await exchange.answer(200, [(b"content-type", METRICS_TYPE)], lines.encode())
        elif exchange.path == "/fleet":
            self._principal(exchange.scope).require_admin()
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
                    "late": member.state.late,
                    "draining": member.draining,
                    "requests": member.state.num_requests,
                    "others": member.state.others,
                    "backlog_seconds": round(member.state.backlog, 4),
                    "rates": {
                        name: getattr(member.state.rates, name)
                        for name in (
                            *("prompt_token", "encoder_run", "processing"),
                            *("processing_megabyte", "decoded_token", "beside"),
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
        await receive()
        exchange = _Exchange(scope, receive, send)
        current_request_id.set(exchange.request_id)
        self.active += 1
        self._num_websockets += 1
        try:
            await self._relayed(exchange, scope, receive, send)
        finally:
            self.active -= 1
            self._num_websockets -= 1
            self._ended.set()

    async def _relayed(
        self, exchange: _Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import (
            ConnectionClosed,
            InvalidStatus,
            InvalidURI,
            WebSocketException,
        )

        try:
            self._guard.admit(scope)
            if self.refusing:
                raise DrainingError(SHUTTING_DOWN)
            named = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[0]
            if not named and self._is_known(scope):
                self._check_unnamed(exchange.path)
            known = named in self._fleet.router.models()  # of others engines say what is wrong
            identity = Identity(named if known else None)
            route = self._fleet.router.route(exchange.request_id, identity, now=time.monotonic())
        except (LookOnceError, NoEngineError) as error:
            if isinstance(error, NoEngineError):
                error = NotReadyError("no engine takes requests now")
            audit_refusal(scope, error)
            await _deny(scope, receive, send, error_response(error))
            return
        accepted = False
        try:
            http = self._fleet.members[route.engine.name].address.http
            path = http.removeprefix("unix:") if http.startswith("unix:") else None
            host = "localhost" if path is not None else http
            query = scope["query_string"].decode("latin-1")
            url = f"ws://{host}{scope['path']}" + (f"?{query}" if query else "")
            kept = [each for each in scope["headers"] if each[0] in SENT_ON_TO_WEBSOCKETS]
            passed = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in (*kept, *_client_header(scope))
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
                audit_refusal(scope, failure)
                await _deny(scope, receive, send, error_response(failure))
        finally:
            self._fleet.router.ended(exchange.request_id, route, now=time.monotonic())

    def _is_known(self, scope: Scope) -> bool:
        """Whether a request has a key that is valid; engines refuse it otherwise."""
        with contextlib.suppress(UnauthorizedError):
            self._principal(scope)
            return True
        return False

    def _principal(self, scope: Scope) -> Principal:
        """Who asks, whom the audit names from now on. Raises `UnauthorizedError`."""
        principal = scope["state"]["principal"] = self._keys.principal(scope)
        return principal


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


def _client_header(scope: Scope) -> Headers:
    """By which engines, which trust this front-end, know who asked it."""
    client = scope.get("client")
    return [(FORWARDED_FOR, client[0].encode("latin-1"))] if client else []


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


def _ending_with(error: bytes, last: bytes, path: str, *, named: bool) -> bytes:
    """The end of a stream as one server writes it where its engine dies. `error`: the body that a
    whole answer would have; `last`: what was written last; `named`: whether events have names."""
    gap = b"" if last.endswith(EVENT_END) else EVENT_END  # an event was cut off
    if path in ANTHROPIC_PATHS:
        event = error
    elif not named:
        return gap + b"data: " + error + EVENT_END + UNNAMED_EVENTS.end
    else:
        told = msgspec.json.decode(error, type=ErrorResponse).error
        numbers = SEQUENCE_NUMBER.findall(last)
        event = encode(
            ErrorEvent(
                sequence_number=int(numbers[-1]) + 1 if numbers else 0,
                code=told.code or told.type,
                message=told.message,
                param=told.param,
            )
        )
    return gap + b"event: error\ndata: " + event + EVENT_END


class _Told(msgspec.Struct):
    """What of an error is audited."""

    code: str | None = None
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Told


def _refusal_told(body: bytes) -> _Told:
    """Nothing, where the body does not say so: Anthropic's, or an adapter's line of text."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_Refusal).error
    return _Told()


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
        self._names_events = False
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

    def sent_on(self, request_id: str, kept_back: Statuses = ()) -> Headers:
        """The headers that engines get; `kept_back`: statuses of refusals that they do not
        audit."""
        kept = [each for each in self.scope["headers"] if each[0] not in NOT_SENT_ON]
        named = (b"x-request-id", request_id.encode("latin-1"))
        audited = [(AUDITED, " ".join(sorted(map(str, kept_back))).encode())]
        return [*kept, named, *_client_header(self.scope), *(audited if kept_back else ())]

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
        self,
        member: Member,
        request_id: str,
        *,
        held: Collection[int] = (),
        kept_back: Statuses = (),
    ) -> AsyncIterator[EngineAnswer]:
        """The engine's answer to `content`, in which pictures whose keys are in `held` are named. A
        client that leaves meanwhile ends it (`_ClientLeft`). `kept_back`: as in `sent_on`."""
        headers = self.sent_on(request_id, kept_back)
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
            if not self._num_events:  # parts of long events come later, and do not tell
                self._names_events = chunk.startswith(EVENT_NAME)
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
            if not self._last.endswith(UNNAMED_EVENTS.end):  # else the engine was lost after it
                named = self._names_events
                await self.write(_ending_with(body, self._last, self.path, named=named))
            await self.end()
            return
        kept = [each for each in headers if each[0] != b"content-length"]
        if status != 204:
            kept.append((b"content-length", b"%d" % len(body)))
        await self._start(status, kept)
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def answer_kept_back(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of an engine which did not audit it, if it is a refusal."""
        if status >= 400:
            told = _refusal_told(body)
            audit(
                "refused", self.scope, status=status, code=told.code, param=named_param(told.param)
            )
        await self.answer(status, headers, body)

    async def refuse(self, status: int, code: str, message: str, param: str | None = None) -> None:
        if status != 500 and not self.begun:
            audit("refused", self.scope, status=status, code=code, param=param)
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
