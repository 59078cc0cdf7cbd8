"""The engine behind prompts that a front-end renders: each goes to one of the fleet's.

    RenderedPrompt ─▶ identity (tokens, keys of media) ─▶ router
                                                            │  POST /inference/v1/generate, streamed
    TokenDelta ◀── its events ◀── the chosen engine ◀───────┘

Media that the engine holds are named by their MediaHash, others go with their encoded bytes. Where
an engine is lost, or refuses, before anything of the answer was handed on, another one gets the
prompt: of a stream that is until its first token, of any other answer until its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lookonce.errors import (
    DrainingError,
    EngineDeadError,
    LookOnceError,
    MediaNotCachedError,
    RequestFailedError,
    UnavailableError,
)
from lookonce.fleet.engine_http import (
    ENGINE_LOST,
    RETRIED_STATUSES,
    EngineAnswer,
    EngineLostError,
    Headers,
)
from lookonce.fleet.generate_events import (
    LIMIT_HEADERS,
    NO_EVENTS,
    deltas_of,
    error_of,
    events_of,
    raised_for,
)
from lookonce.fleet.identity import Identity, Processor
from lookonce.fleet.index import short
from lookonce.fleet.members import CUT_OFF, Fleet, Member
from lookonce.fleet.router import NoEngineError, Route
from lookonce.fleet.token_identity import identify_prompt
from lookonce.frontend.frontend import RenderOnlyEngine
from lookonce.server.routes.generate import Features, referring_features
from lookonce.types.logs import current_request_id
from lookonce.types.lora import LoRAInfo
from lookonce.types.model import ModelInfo
from lookonce.types.request import RenderedItem, RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams

GENERATE = "/inference/v1/generate"
KV_TRANSFER = {"num_lmcache_extra_cached_tokens": 0}
OTHER_BYTES = 8 << 20
"""Left in a body for all but media: token ids, where media are, and their names."""
OFF_LOOP_BYTES = 1 << 20
"""Media of more bytes are encoded in a thread."""
MAX_ERROR_BYTES = 1 << 20
"""Of a refusal that are read."""
YIELD_DELTAS = 64
"""Of a whole answer, after which others have a turn on the event loop."""


@dataclass(slots=True)
class ClientRequest:
    """What of a client's request its prompts' engines must know."""

    headers: Headers
    """Those that engines get."""
    stream: bool = False
    cache_salt: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    session: str | None = None
    limit_asked: bool = True
    """The client set the most tokens to generate."""
    added: Headers = field(default_factory=list)
    """Headers that the answer gets."""
    asked: bool = False
    """An engine was asked."""
    num_retried: int = 0
    num_tokens: int = 0
    """Generated."""


current_request: ContextVar[ClientRequest] = ContextVar("client_request")


class NotCarriedError(UnavailableError):
    """The prompt has media that `/inference/v1/generate` does not carry; nothing was sent."""


class GenerateBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an engine is asked (`server.routes.generate.GenerateRequest`)."""

    model: str
    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    features: Features | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] = {}
    stream: bool = False
    reuse_receipt: bool = False
    receipt_first: bool = False
    return_tokens_as_token_ids: bool = False
    shorten_max_tokens: bool = False


@dataclass(slots=True)
class _Running:
    """One prompt at an engine."""

    unfinished: set[int]
    """Samples."""
    answer: EngineAnswer | None = None
    aborted: bool = False

    def take(self, delta: TokenDelta) -> bool:
        """Whether the delta is of a sample that has not ended."""
        if delta.index not in self.unfinished:
            return False
        if delta.finish_reason is not None:
            self.unfinished.discard(delta.index)
        return True


class _RefusedError(Exception):
    """The engine has not begun; another one may serve the prompt."""

    def __init__(self, error: LookOnceError | None = None) -> None:
        super().__init__()
        self.error = error


class RoutedEngine(RenderOnlyEngine):
    """What renders and answers stands on this in the place of an `EngineClient`. Every call is made
    on behalf of `current_request`."""

    def __init__(
        self, fleet: Fleet, processor: Processor, model: ModelInfo, max_body_bytes: int
    ) -> None:
        """`processor`: by which prompts are rendered; `max_body_bytes`: that engines take."""
        super().__init__()
        self._fleet, self._model = fleet, model
        self._max_media_bytes = max_body_bytes - OTHER_BYTES
        self.processor = processor
        self._running: dict[str, _Running] = {}

    @property
    def model(self) -> ModelInfo:
        return self._model

    def learn(self, processor: Processor) -> None:
        """The adapters that there are now."""
        self.processor = processor
        listed = processor.adapters.items()
        self.adapters.set(LoRAInfo(name, identity, 0) for name, identity in listed)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """The samples of an aborted request finish with "abort". One sample alone is only left
        unread: engines end it by its own stop string."""
        running = self._running.get(request_id)
        if running is None:
            return
        if index is not None:
            running.unfinished.discard(index)
            return
        running.aborted = True
        if running.answer is not None:
            running.answer.abort()

    async def generate(
        self, rendered: RenderedPrompt, sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        """Raises what the engine answered, `UnavailableError`, or `NotCarriedError`."""
        _check_carried(rendered, self._max_media_bytes)
        request = current_request.get()
        running = self._running[request_id] = _Running(set(range(sampling.n)))
        prompt = _Prompt(self, request, rendered, sampling, request_id, running)
        try:
            async with aclosing(self._routed(prompt)) as deltas:
                async for delta in deltas:
                    request.num_tokens += len(delta.token_ids)
                    yield delta
        finally:
            del self._running[request_id]

    async def _routed(self, prompt: _Prompt) -> AsyncGenerator[TokenDelta, None]:
        router, request, running = self._fleet.router, prompt.request, prompt.running
        client_id = current_request_id.get()
        identity = prompt.identity()
        failed, lost, begun = set[str](), 0, False
        refusal: LookOnceError | None = None
        while True:
            try:
                route = router.route(client_id, identity, failed, now=time.monotonic())
            except NoEngineError:
                raise refusal or UnavailableError("no engine takes requests now") from None
            request.num_retried += len(failed) == 1
            done = False
            try:
                async with aclosing(self._asked(prompt, route)) as deltas:
                    async for delta in deltas:
                        begun = done = True
                        yield delta
                done = True
                return
            except EngineLostError:
                if running.aborted:
                    for index in sorted(running.unfinished):
                        yield TokenDelta(prompt.request_id, index, [], finish_reason="abort")
                    return
                if self._fleet.is_cut_off:
                    raise DrainingError(CUT_OFF) from None
                if (member := self._fleet.members.get(route.engine.name)) is not None:
                    member.look()
                lost += 1
                if begun or lost > 1:
                    raise EngineDeadError(ENGINE_LOST) from None
            except _RefusedError as refused:
                refusal = refused.error or refusal
            except (LookOnceError, GeneratorExit, asyncio.CancelledError) as error:
                done = done or not isinstance(error, LookOnceError)  # else it was refused
                raise
            finally:
                router.ended(client_id, route, failed=not done, now=time.monotonic())
            failed.add(route.engine.name)

    async def _asked(self, prompt: _Prompt, route: Route) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of the route's engine. Raises `EngineLostError`, `_RefusedError` and what
        the engine answered."""
        member = self._fleet.members.get(route.engine.name)
        if member is None:
            raise _RefusedError
        router, running = self._fleet.router, prompt.running
        items = prompt.rendered.items
        held = {i.key for i in items if router.holds_item(route.engine, short(i.key))}
        began = time.monotonic()
        answer = await self._answered(prompt, member, held)
        try:
            if answer.status != 200:
                body = await answer.body(MAX_ERROR_BYTES)
                error = error_of(body, items, answer.status, answer.headers)
                unknown = answer.status == 422 and any(m.bare for m in route.identity.media)
                if unknown or answer.status in RETRIED_STATUSES:
                    raise _RefusedError(error)
                prompt.tell(route, answer)
                raise error
            running.answer = answer
            if running.aborted:
                raise EngineLostError

            def on_first() -> None:
                router.answered(route, time.monotonic() - began)

            async with aclosing(self._read(prompt, answer, on_first)) as deltas:
                async for delta in deltas:
                    prompt.tell(route, answer)
                    yield delta
        finally:
            running.answer = None
            answer.close()

    async def _answered(
        self, prompt: _Prompt, member: Member, held: Collection[bytes]
    ) -> EngineAnswer:
        """The answer's head. An engine that has forgotten what it held gets everything."""
        while True:
            body = await prompt.body(held)
            prompt.request.asked = True
            answer = await member.client.request("POST", GENERATE, prompt.headers(), body)
            if answer.status != 422 or not held:
                return answer
            try:
                error = error_of(await answer.body(MAX_ERROR_BYTES), prompt.rendered.items, 422, [])
            finally:
                answer.close()
            if getattr(error, "code", None) != MediaNotCachedError.code:
                raise error
            held = ()

    async def _read(
        self, prompt: _Prompt, answer: EngineAnswer, on_first: Callable[[], None]
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas, as they come in a stream, else once all have come. The last one is handed on
        when the answer has ended, so that its connection serves the next request. `on_first` is
        called with the first event."""
        kept: list[TokenDelta] = []
        running, items = prompt.running, prompt.rendered.items
        streams = prompt.request.stream
        left, room = set(running.unfinished), prompt.most_tokens
        try:
            async with aclosing(events_of(answer)) as events:
                async for event in events:
                    on_first()
                    if event.error is not None:
                        error = raised_for(event.error, items)
                        if isinstance(error, UnavailableError) and not streams:
                            raise _RefusedError(error)
                        raise error
                    try:
                        new = deltas_of(event, prompt.request_id, prompt.sampling, items)
                    except ValueError:
                        raise RequestFailedError(NO_EVENTS) from None
                    room -= sum(max(1, len(delta.token_ids)) for delta in new)
                    if room < 0:
                        raise RequestFailedError("the engine sent more tokens than were asked for")
                    left -= {each.index for each in new if each.finish_reason is not None}
                    kept += new
                    if not streams or not left:
                        continue
                    prompt.release()
                    for delta in kept:
                        if running.take(delta):
                            yield delta
                    kept = []
        except EngineLostError:
            if left:
                raise
        prompt.release()
        for number, delta in enumerate(kept, 1):
            if running.take(delta):
                yield delta
            if number % YIELD_DELTAS == 0:
                await asyncio.sleep(0)


@dataclass(slots=True)
class _Prompt:
    """One prompt of a client's request, and how it is sent."""

    engine: RoutedEngine
    request: ClientRequest
    rendered: RenderedPrompt
    sampling: SamplingParams
    request_id: str
    """The one that deltas have."""
    running: _Running

    @property
    def model(self) -> str:
        return self.rendered.lora_name or str(self.engine.processor.model)

    @property
    def most_tokens(self) -> int:
        """Of its answer, and for each sample one for an end without a token."""
        most = self.sampling.max_tokens
        if most is None:
            most = self.engine.model.max_model_len
        return (most + 1) * self.sampling.n

    def identity(self) -> Identity:
        return identify_prompt(
            self.rendered,
            self.engine.processor,
            model=self.model,
            max_tokens=self.sampling.max_tokens,
            session=self.request.session,
        )

    def headers(self) -> Headers:
        return [*self.request.headers, (b"x-request-id", current_request_id.get().encode())]

    async def body(self, held: Collection[bytes]) -> bytes:
        carried = [i.encoded for i in self.rendered.items if i.encoded and i.key not in held]
        if sum(map(len, carried)) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._encoded, held)
        return self._encoded(held)

    def _encoded(self, held: Collection[bytes]) -> bytes:
        request, sampling = self.request, self.sampling
        if request.stream and sampling.n == 1:
            # Stop strings are looked for here, where there is text; the request is ended then.
            sampling = msgspec.structs.replace(sampling, stop=())
        features = referring_features(self.rendered, held)
        return msgspec.json.encode(
            GenerateBody(
                model=self.model,
                request_id=current_request_id.get(),
                token_ids=self.rendered.token_ids,
                sampling_params=sampling,
                features=features,
                mm_processor_kwargs=request.mm_processor_kwargs if features else None,
                cache_salt=request.cache_salt,
                kv_transfer_params=KV_TRANSFER,
                stream=True,
                reuse_receipt=True,
                receipt_first=True,
                return_tokens_as_token_ids=sampling.logprobs is not None,
                shorten_max_tokens=not request.limit_asked,
            )
        )

    def tell(self, route: Route, answer: EngineAnswer) -> None:
        """Who answers, and why, to the client; of several prompts the first that is answered."""
        if self.request.added:
            return
        self.request.added += [
            (b"x-lookonce-engine", route.engine.name.encode("latin-1", "replace")),
            (b"x-lookonce-route", route.why().encode("latin-1", "replace")),
        ]
        if answer.status == 200:
            limits = [each for each in answer.headers if each[0].startswith(LIMIT_HEADERS)]
            self.request.added += limits

    def release(self) -> None:
        """Give up the media: the answer has begun, and no other engine will be asked."""
        for item in self.rendered.items:
            item.item = item.recover = item.encoded = None
            if item.given_back is not None:
                item.given_back()
                item.given_back = None


def _check_carried(rendered: RenderedPrompt, most_bytes: int) -> None:
    """Films and pages are made of a file, which is no item's own. Media that came by URL may be
    more, in base64, than one body may have (`most_bytes`). Raises `NotCarriedError`."""
    items = rendered.items
    if not all(map(_is_carried, items)):
        raise NotCarriedError("media of this request are rendered by engines alone")
    if sum((len(each.encoded or b"") + 2) // 3 * 4 for each in items) > most_bytes:
        raise NotCarriedError("media of this request are more than one request carries")


def _is_carried(item: RenderedItem) -> bool:
    return item.modality != "video" and (item.encoded is not None or item.recover is None)
