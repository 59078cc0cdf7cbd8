"""A small world around the cache protocol: API processes, an engine, FIFO links between them.

Everything that happens is a method; who calls them, in which order, is the test's business.
Links deliver at arbitrary times; the engine restarts, resets, forgets a sender; renders finish in
any order. The world itself checks what must hold at every moment:

* where no message is under way, share and directory list the same keys and bytes;
* what was looked up stays listed until sent, unless a restart or a reset took it;
* the engine asks again only for what nothing guaranteed;
* a request fails only with a documented error, and only for its documented cause;
* after a message that the engine could not read, both sides start over;
* of all API processes that claim an item, one makes it, and none waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lookonce.engine.client.sender_cache import SenderCache
from lookonce.engine.process.receiver_cache import ReceiverCache
from lookonce.errors import MediaNotCachedError
from lookonce.ipc.channel import Unreadable
from lookonce.ipc.messages import (
    Abort,
    Accepted,
    Claim,
    ClearCache,
    Deltas,
    Heartbeat,
    Hello,
    Hints,
    KeyedItem,
    Rejected,
    ResendMedia,
    Submit,
    SupplyMedia,
    Unclaim,
    UpdateCache,
    Welcome,
)
from lookonce.types.media import Array, ProcessedItem, feature_at
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest, RenderedItem, RenderedPrompt, TokenDelta
from lookonce.types.sampling import SamplingParams
from tests.support.cache_items import expansion, item, key

MODEL = ModelInfo("nano", "nano", 1024, 512, (0,), ("image",), "float32", 64)
SIZES = (512, 600, 900, 1300, 2000, 2900, 4100)
"""Bytes of item n: SIZES[n % 7]; some are larger than a tiny cache."""

ENDED = ("done", "cancelled", "rejected", "unavailable", "not cached")


def make_item(number: int) -> ProcessedItem:
    return item(SIZES[number % len(SIZES)], count=1 + number)


@dataclass
class Part:
    """What the world remembers about one media part beside its RenderedItem."""

    number: int
    rendered: RenderedItem
    certain: bool
    """It was listed, and not on the strength of a hint, when it was looked up."""


@dataclass
class Request:
    """One request as its API process sees it."""

    id: str
    fate: str
    """What the engine will do: "serve", "covered" (needs no missing item) or "reject"."""
    parts: list[Part]
    prompt: RenderedPrompt
    generation: tuple[int, int]
    """(epoch, resets) of the sender when the lookups were made."""
    state: str = "rendering"
    guaranteed: set[bytes] = field(default_factory=set)
    """Keys that listing, adding or sending loose guarantees once sent."""
    asked: deque[tuple[bytes, ...]] = field(default_factory=deque)
    num_asks: int = 0
    may_fail: bool = False
    """A message of its, or one before, was spoiled: nothing is guaranteed."""


@dataclass
class Flight:
    """The making of one item in one API process, for all parts there that need it."""

    number: int
    """Of the claim."""
    item_number: int
    parts: list[Part]
    granted: bool = False
    """Else it waits for the engine's word."""
    passed_over: bool = False
    """Its process was silent for long, and another one may make the item, too."""


class Api:
    """One API process: renderer, sender, client."""

    sender_type = SenderCache

    def __init__(self, world: World, name: str, capacity_bytes: int) -> None:
        self.world = world
        self.name = name
        self.sender = self.sender_type(name, capacity_bytes=capacity_bytes)
        self.inbox: deque[object] = deque()
        self.outbox: deque[object] = deque([self.sender.hello()])
        self.requests: dict[str, Request] = {}
        self.flights: dict[bytes, Flight] = {}
        self.forgotten = False
        """The engine has forgotten this process, or could not read a claim, and the claims were not
        repeated since."""
        self.resets = 0
        self.num_spoiled = 0
        """Messages whose changes the engine will never make, or has yet to ask us to undo."""
        self.processed = 0
        self.counted: list[RenderedItem] = []
        """Every part whose rendering resolved; the receipts speak of these."""

    # --- rendering ----------------------------------------------------------------------------

    def start(self, numbers: list[int], fate: str, *, ahead: bool, by_reference: bool) -> None:
        """Look every part up; what is not found is processed before `finish`, or goes ahead."""
        request_id = self.world.new_id()
        parts: list[Part] = []
        for number in numbers:
            parts.append(self._look_up(number, parts, ahead, by_reference))
        prompt = RenderedPrompt([1], items=[part.rendered for part in parts])
        generation = (self.sender.epoch, self.resets)
        self.requests[request_id] = Request(request_id, fate, parts, prompt, generation)
        for part in parts:
            if part.rendered.outcome == "miss" and self.sender.claims_items:
                self._join_flight(part)

    def _look_up(self, number: int, before: list[Part], ahead: bool, by_reference: bool) -> Part:
        directory, name = self.sender.directory, key(number)
        listing = directory.listing(name)
        certain = listing is not None and not listing.adopted
        found = directory.lookup(name)
        outcome = "miss"
        if found is not None or any(part.number == number for part in before):
            outcome = "hit"
        elif ahead and directory.known_expansion(name) is not None:
            outcome = "not_needed"
        assert found in (None, expansion(1 + number)), "another item's expansion"
        rendered = RenderedItem(
            key=name,
            media_hash=name,
            modality="image",
            expansion=expansion(1 + number),
            item=None,
            recover=None if by_reference and found is not None else self._recover,
            outcome=outcome,
            pinned=found is not None,
        )
        return Part(number, rendered, certain)

    async def _recover(self) -> ProcessedItem:
        raise AssertionError("the world recovers by itself")

    # --- making items under claims ------------------------------------------------------------

    def _join_flight(self, part: Part) -> None:
        flight = self.flights.get(part.rendered.key)
        if flight is None:
            claim = self.sender.claim(part.rendered.key)
            flight = self.flights[claim.key] = Flight(claim.number, part.number, [])
            self.outbox.append(claim)
        flight.parts.append(part)

    def make(self, name: bytes) -> None:
        """A worker has made the item: it is published, and all parts that need it have it."""
        flight = self.flights.pop(name)
        assert flight.granted
        if self.sender.has_claim(flight.number):
            self.outbox.append(self.sender.publish(flight.number, make_item(flight.item_number)))
        for place, part in enumerate(flight.parts):
            part.rendered.outcome = "miss" if place == 0 else "hit"
            part.rendered.item = make_item(flight.item_number)
            self._pin(part)

    def fail(self, name: bytes) -> None:
        """The bytes cannot be decoded: the requests that need the item end."""
        flight = self.flights.pop(name)
        self._give_up(flight)
        for request in self.in_state("rendering"):
            if any(part in flight.parts for part in request.parts):
                self.cancel(request)

    def repeat_claims(self) -> None:
        """The engine has not answered for a while; or, for what is granted, a heartbeat came."""
        for name, flight in self.flights.items():
            self.outbox.append(Claim(self.sender.epoch, flight.number, name))
        self.forgotten &= not self.world.engine.receiver_cache.knows(self.name)

    def to_make(self) -> list[bytes]:
        return [name for name, flight in self.flights.items() if flight.granted]

    def to_finish(self) -> list[Request]:
        """Requests all of whose items are made or held."""
        open_parts = [part for flight in self.flights.values() for part in flight.parts]
        return [
            request
            for request in self.in_state("rendering")
            if not any(part is each for part in request.parts for each in open_parts)
        ]

    def _answered(self, message: Hints) -> None:
        for number in message.held:
            self.sender.forget_claim(number)
            for flight in [f for f in self.flights.values() if f.number == number]:
                self._look_again(self.flights.pop(key(flight.item_number)))
        for number in message.granted:
            if not self.sender.has_claim(number):
                self.outbox.append(Unclaim(self.sender.epoch, number))
            for flight in self.flights.values():
                flight.granted |= flight.number == number

    def _look_again(self, flight: Flight) -> None:
        """Another API process has added the item."""
        for part in flight.parts:
            if not self._pin(part):
                self._join_flight(part)
                continue
            part.rendered.outcome = "hit"

    def _pin(self, part: Part) -> bool:
        """Look the part up once more, and pin it if it is listed or hinted now."""
        name = part.rendered.key
        if self.sender.directory.lookup(name) is None:
            return False
        part.rendered.pinned = True
        part.certain = self.sender.directory.lists_for_certain(name)
        return True

    def _leave_flights(self, request: Request) -> None:
        """A flight that nobody waits for any more is given up."""
        for name, flight in list(self.flights.items()):
            flight.parts = [
                part for part in flight.parts if not any(part is each for each in request.parts)
            ]
            if not flight.parts:
                del self.flights[name]
                self._give_up(flight)

    def _give_up(self, flight: Flight) -> None:
        message = self.sender.give_up(flight.number)
        if message is not None:
            self.outbox.append(message)

    def finish(self, request: Request) -> None:
        assert request in self.to_finish()
        for part in request.parts:
            if part.rendered.outcome == "miss":
                part.rendered.item = make_item(part.number)
                self.processed += 1
            part.rendered.uncounted = part.rendered.outcome == "not_needed"
            if not part.rendered.uncounted:
                self.sender.directory.count(part.rendered.outcome)
            self.counted.append(part.rendered)
        request.state = "rendered"

    def cancel(self, request: Request) -> None:
        """The client left, or the prompt was refused, before anything was sent."""
        self.sender.cancel(request.prompt)
        self._leave_flights(request)
        self.end(request, "cancelled")

    # --- sending ------------------------------------------------------------------------------

    def send(self, request: Request) -> None:
        """There is room on the channel: commit and enqueue in one go."""
        self._check_pins_held(request)
        pinned_by = self.sender.directory.num_pins - sum(
            part.rendered.pinned for part in request.parts
        )
        message = self.commit(request)
        request.may_fail = self.num_spoiled > 0
        assert self.sender.directory.num_pins == pinned_by, "a pin was not given back"
        listings = self.sender.directory.listings()
        request.guaranteed = {k for k, listing in listings.items() if not listing.adopted}
        request.guaranteed |= {keyed.key for keyed in message.loose}
        self._check_uncached(message)
        self.outbox.append(message)
        request.state = "sent"

    def commit(self, request: Request) -> Submit:
        return self.sender.submit(self._generate(request), request.prompt)

    def _generate(self, request: Request) -> GenerateRequest:
        features = [
            feature_at(part.rendered.key, "image", part.rendered.expansion, 100 * at)
            for at, part in enumerate(request.parts)
        ]
        prompt = Array("int32", (1,), bytes(4))
        params = SamplingParams()
        return GenerateRequest(request.id, bytes(32), prompt, tuple(features), params, 0.0)

    def _check_pins_held(self, request: Request) -> None:
        if request.generation != (self.sender.epoch, self.resets):
            return
        for part in request.parts:
            listed = part.rendered.key in self.sender.directory
            assert listed or not part.certain, "a pinned entry was evicted"

    def _check_uncached(self, message: Submit) -> None:
        if self.sender.directory.capacity_bytes == 0:
            assert not message.ops.adds
            assert not message.ops.adopts

    def disconnect(self, request: Request) -> None:
        """The client left after the request was sent."""
        self.outbox.append(Abort(self.sender.epoch, (request.id,)))
        self.end(request, "cancelled")

    def spoil(self, which: int) -> None:
        """Some encoding mistake: the engine will not be able to read one of our messages."""
        kinds = Submit | SupplyMedia | UpdateCache | Claim | Unclaim
        places = [at for at, message in enumerate(self.outbox) if isinstance(message, kinds)]
        if not places:
            return
        at = places[which % len(places)]
        for message in list(self.outbox)[at:]:
            request = self.requests.get(_request_id(message) or "")
            if request is not None:
                request.may_fail = True
        self.forgotten |= isinstance(self.outbox[at], Claim)
        self.outbox[at] = Unreadable(_request_id(self.outbox[at]))
        self.num_spoiled += 1
        self.world.expectations_may_break = True

    def inject(self, numbers: list[int]) -> None:
        self.outbox.append(
            self.sender.update([KeyedItem(key(number), make_item(number)) for number in numbers])
        )

    def end(self, request: Request, state: str) -> None:
        """Whoever asked has the answer, an error, or has left."""
        self.sender.settle(request.prompt)
        request.state = state

    # --- receiving ----------------------------------------------------------------------------

    def receive(self) -> None:
        message = self.inbox.popleft()
        if isinstance(message, Heartbeat):
            if message.epoch != self.sender.epoch:
                self.outbox.append(self.sender.hello())
        elif isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, ClearCache):
            self.resets += 1
            self.num_spoiled -= message.number in self.world.misread
            self.outbox.append(self.sender.clear(message))
        elif isinstance(message, Hints):
            self.sender.hint(message)
            self._answered(message)
        else:
            self._answer(message)

    def _welcome(self, message: Welcome) -> None:
        if message.epoch != self.sender.epoch:
            for request in self.requests.values():
                if request.state in ("sent", "accepted"):
                    self.end(request, "unavailable")
            for flight in self.flights.values():
                flight.granted = True
        self.sender.welcome(message)

    def _answer(self, message: object) -> None:
        ids = [d.request_id for d in message.deltas] if isinstance(message, Deltas) else None
        request = self.requests.get(ids[0] if ids else message.request_id)
        if request is None or request.state not in ("sent", "accepted"):
            return
        if isinstance(message, Accepted):
            request.state = "accepted"
            self.sender.settle(request.prompt)
        elif isinstance(message, Deltas):
            self.end(request, "done")
        elif isinstance(message, Rejected):
            kind = message.error[0]
            known = kind == "EngineDeadError" or request.fate == "reject" or request.may_fail
            assert known, kind
            self.end(request, "unavailable" if kind == "EngineDeadError" else "rejected")
        elif isinstance(message, ResendMedia):
            self._asked_again(request, message)

    def _asked_again(self, request: Request, message: ResendMedia) -> None:
        guaranteed = set() if request.may_fail else request.guaranteed
        assert not guaranteed & set(message.keys), "asked for what was guaranteed"
        before = self.sender.resends
        self.sender.asked(request.prompt, message.keys)
        if not self.world.expectations_may_break:
            assert self.sender.resends == before, "a resend without a restart, reset or hint"
        request.num_asks += 1
        assert request.num_asks == 1, "asked twice"
        request.asked.append(message.keys)

    def recover(self, request: Request) -> None:
        """Decoding and processing again has finished: supply, or fail where no bytes stand."""
        keys = request.asked.popleft()
        if request.state != "sent":
            return
        try:
            todo = self.sender.to_recover(request.prompt, keys)
        except MediaNotCachedError:
            assert any(part.rendered.recover is None for part in request.parts)
            self.end(request, "not cached")
            self.outbox.append(Abort(self.sender.epoch, (request.id,)))
            return
        request.may_fail |= self.num_spoiled > 0
        for part in todo:
            self.made_again(part)
        numbers = {part.rendered.key: part.number for part in request.parts}
        recovered = {part.key: make_item(numbers[part.key]) for part in todo}
        message = self.sender.supply(request.id, request.prompt, keys, recovered)
        self.outbox.append(message)

    def made_again(self, part: RenderedItem) -> None:
        """What went ahead was needed after all; whatever else is made again counts nothing."""
        if part.uncounted:
            part.outcome = "miss"
            self.processed += 1

    # --- looking ------------------------------------------------------------------------------

    def in_state(self, *states: str) -> list[Request]:
        return [request for request in self.requests.values() if request.state in states]

    def to_recover(self) -> list[Request]:
        return [request for request in self.requests.values() if request.asked]


class Engine:
    """The engine process: its receiver cache, and requests that run until they finish."""

    def __init__(self, world: World, epoch: int, num_clears: int = 0) -> None:
        self.world = world
        self.receiver_cache = world.make_receiver_cache(world, epoch)
        self.running: dict[str, str] = {}
        """Accepted request → sender."""
        self.waiting: dict[str, tuple[str, tuple[bytes, ...]]] = {}
        """Request that waits for items → (sender, keys)."""
        self.num_clears = num_clears

    def receive(self, api: Api) -> None:
        message = api.outbox.popleft()
        if isinstance(message, Hello):
            self._heal(
                api,
                self.receiver_cache.hello(message.sender, message.epoch),
                self.receiver_cache.epoch,
            )
            api.inbox.append(
                Welcome(self.receiver_cache.epoch, MODEL, self.world.num_senders, True)
            )
        elif isinstance(message, Submit):
            self._submit(api, message)
        elif isinstance(message, SupplyMedia):
            self._supply(api, message)
        elif isinstance(message, UpdateCache):
            self._heal(api, self.receiver_cache.update(api.name, message), message.epoch)
        elif isinstance(message, Claim):
            self._heal(api, self.receiver_cache.claim(api.name, message), message.epoch)
        elif isinstance(message, Unclaim):
            self.receiver_cache.unclaim(api.name, message)
        elif isinstance(message, Unreadable):
            self._misread(api, message.request_id)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.end(request_id)
        self._send_hints()

    def _submit(self, api: Api, message: Submit) -> None:
        request_id = message.request.request_id
        held = self.receiver_cache.submit(api.name, message)
        if held is None:
            self._heal(api, False, message.epoch)
            self._reject(api, request_id, "EngineDeadError")
        elif self.world.fate(request_id) == "reject":
            self.end(request_id)
            self._reject(api, request_id, "BadRequestError")
        elif held.missing and self.world.fate(request_id) == "serve":
            self.waiting[request_id] = (api.name, held.missing)
            api.inbox.append(ResendMedia(request_id, held.missing))
        else:
            self._accept(api, request_id)

    def _supply(self, api: Api, message: SupplyMedia) -> None:
        held = self.receiver_cache.supply(api.name, message)
        self._heal(api, held is not None, message.epoch)
        _, keys = self.waiting.get(message.request_id, ("", ()))
        if held is None or not keys:
            return
        if not set(keys) <= held.items.keys():
            may_fail = api.requests[message.request_id].may_fail
            assert may_fail, "a resend did not bring what was asked for"
            self.end(message.request_id)
            self._reject(api, message.request_id, "MediaNotCachedError")
            return
        del self.waiting[message.request_id]
        self._accept(api, message.request_id)

    def _misread(self, api: Api, request_id: str | None) -> None:
        """Whatever it was, it changed the directory and not the share."""
        self._heal(api, False, self.receiver_cache.epoch)
        self.world.misread.add(self.num_clears)
        if request_id is not None:
            self.end(request_id)
            self._reject(api, request_id, "RequestFailedError")

    def _accept(self, api: Api, request_id: str) -> None:
        self.running[request_id] = api.name
        api.inbox.append(Accepted(request_id))

    def _reject(self, api: Api, request_id: str, kind: str) -> None:
        api.inbox.append(Rejected(request_id, (kind, "no", None, None)))

    def _heal(self, api: Api, taken: bool, epoch: int) -> None:
        if not taken and epoch == self.receiver_cache.epoch:
            self.num_clears += 1
            api.inbox.append(ClearCache(self.num_clears))

    def end(self, request_id: str) -> None:
        """Finished, rejected or aborted."""
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self.receiver_cache.release(request_id)

    def finish(self, request_id: str) -> None:
        """It has run to its end, or was aborted by somebody else's wish while it waited."""
        waiting, _ = self.waiting.get(request_id, ("", ()))
        api = self.world.apis[waiting or self.running[request_id]]
        self.end(request_id)
        api.inbox.append(Deltas([TokenDelta(request_id, 0, [0], "stop")]))

    def reset(self) -> None:
        self.num_clears += 1
        self.world.expectations_may_break = True
        for name in self.receiver_cache.store.senders:
            self.world.apis[name].inbox.append(ClearCache(self.num_clears))

    def forget(self, name: str) -> None:
        """Its heartbeats were lost: the engine takes an API process for dead."""
        self.world.expectations_may_break = True
        self.world.apis[name].forgotten = True
        for request_id in self.receiver_cache.goodbye(name):
            self.end(request_id)
            self._reject(self.world.apis[name], request_id, "EngineDeadError")
        self._send_hints()

    def pass_over(self, name: str) -> None:
        """The API process was silent for long: others make what it has claimed."""
        if self.receiver_cache.pass_claims_on(name):
            for flight in self.world.apis[name].flights.values():
                flight.passed_over = True
        self._send_hints()

    def _send_hints(self) -> None:
        """Replies carry what others added; they may be read long after that has gone again."""
        for name, api in self.world.apis.items():
            hints = self.receiver_cache.take_hints(name)
            if hints is not None:
                api.inbox.append(hints)


def _request_id(message: object) -> str | None:
    if isinstance(message, Submit):
        return message.request.request_id
    return message.request_id if isinstance(message, SupplyMedia) else None


class World:
    """All of it, and what must hold."""

    def __init__(
        self,
        capacity_bytes: int,
        num_senders: int = 2,
        *,
        make_api: type[Api] = Api,
        make_engine: type[Engine] = Engine,
        make_receiver_cache: Callable[[World, int], ReceiverCache] = (
            lambda world, epoch: ReceiverCache(epoch)
        ),
    ) -> None:
        self.num_senders = num_senders
        self.expectations_may_break = num_senders > 1
        """Hints, restarts and resets do that; nothing else may."""
        self.misread: set[int] = set()
        """Numbers of `ClearCache` that answer messages which could not be read."""
        self.make_receiver_cache = make_receiver_cache
        self._num_requests = 0
        self.make_engine = make_engine
        self.engine = make_engine(self, 1)
        names = [f"api-{number}" for number in range(num_senders)]
        self.apis = {name: make_api(self, name, num_senders * capacity_bytes) for name in names}
        for api in self.apis.values():
            self.engine.receive(api)
            api.receive()

    def new_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    def fate(self, request_id: str) -> str:
        return next(
            api.requests[request_id].fate
            for api in self.apis.values()
            if request_id in api.requests
        )

    def restart_engine(self) -> None:
        """The engine dies with all it held; what is under way to it still arrives, at the new."""
        self.expectations_may_break = True
        epoch = self.engine.receiver_cache.epoch + 1
        self.engine = self.make_engine(self, epoch, self.engine.num_clears)
        for api in self.apis.values():
            api.inbox.append(Heartbeat(epoch, True, 0.0))

    # --- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        self.engine.receiver_cache.check_integrity()
        mismatches = self.engine.receiver_cache.store.mismatches
        assert not mismatches or self.misread, "an operation contradicted a share"
        for api in self.apis.values():
            api.sender.directory.check_integrity()
            if not api.outbox and not api.num_spoiled and self._connected(api):
                self._check_equal(api)
        self._check_claims()

    def _check_claims(self) -> None:
        """One API process makes an item at a time, and whoever waits is going to be answered."""
        claims = self.engine.receiver_cache.claims()
        makers: set[bytes] = set()
        for api in self.apis.values():
            if api.forgotten or not self._connected(api):
                continue
            answers = [message for message in api.inbox if isinstance(message, Hints)]
            for name, flight in api.flights.items():
                place = claims.get((api.name, flight.number))
                answered = any(flight.number in m.held + m.granted for m in answers)
                if flight.granted and place is not None and not flight.passed_over:
                    assert name not in makers, "an item is made twice at a time"
                    makers.add(name)
                elif not flight.granted and not api.outbox and not api.num_spoiled:
                    assert answered or (place or 0) > 0, "a waiting claim is lost"

    def _connected(self, api: Api) -> bool:
        receiver_cache = self.engine.receiver_cache
        return receiver_cache.knows(api.name) and api.sender.epoch == receiver_cache.epoch

    def _check_equal(self, api: Api) -> None:
        store, directory = self.engine.receiver_cache.store, api.sender.directory
        assert dict(store.share(api.name)) == directory.sizes(), "the two sides differ"
        assert store.share_nbytes(api.name) == directory.nbytes

    def settle(self) -> None:
        """Let everything run to its end; there must be one within a bounded number of events."""
        apis = self.apis.values()
        work = sum(
            len(api.requests) + len(api.outbox) + len(api.inbox) + len(api.flights) for api in apis
        )
        for _ in range(100 + 20 * work):
            if not self._one_event():
                break
        else:
            raise AssertionError("requests never reach an end")
        self.check()
        self._check_nothing_left()

    def _one_event(self) -> bool:
        for api in self.apis.values():
            if api.outbox:
                self.engine.receive(api)
                return True
            if api.inbox:
                api.receive()
                return True
            if api.to_recover():
                api.recover(api.to_recover()[0])
                return True
            if api.to_make():
                api.make(api.to_make()[0])
                return True
            if api.to_finish():
                api.finish(api.to_finish()[0])
                return True
            if api.in_state("rendered"):
                api.send(api.in_state("rendered")[0])
                return True
        if self.engine.running:
            self.engine.finish(next(iter(self.engine.running)))
            return True
        for api in self.apis.values():
            if api.forgotten and api.flights:
                api.repeat_claims()
                return True
        return False

    def _check_nothing_left(self) -> None:
        store = self.engine.receiver_cache.store
        listed = set()
        for api in self.apis.values():
            states = {request.id: request.state for request in api.requests.values()}
            assert set(states.values()) <= set(ENDED), states
            assert api.sender.directory.num_pins == 0, "pins leaked"
            assert not api.num_spoiled, "what could not be read was never made good"
            assert not api.flights, "an item is waited for"
            assert api.sender.num_claims == 0, "claims leaked"
            self._check_counters(api)
            if self._connected(api):
                listed |= api.sender.directory.sizes().keys()
        assert not self.engine.receiver_cache.claims(), "claims leaked"
        assert store.requests == (), "items are still held"
        assert len(store) == len(listed), "items leaked"

    def _check_counters(self, api: Api) -> None:
        directory = api.sender.directory
        on = directory.capacity_bytes > 0
        assert directory.queries == (len(api.counted) if on else 0), "queries miscounted"
        misses = directory.queries - directory.hits
        assert misses == (api.processed if on else 0), "hits miscounted"
        told = sum(part.outcome == "miss" for part in api.counted)
        assert misses == (told if on else 0), "receipts say other than the counters"
