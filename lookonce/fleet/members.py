"""The engines of a fleet as one front-end knows them: where they are, whether they take requests,
what they tell of themselves, and how they are asked.

    Fleet ─▶ Member of each engine ─ probes `/ready` and what caches know ─▶ `EngineState.accepts`
                    └─ events (`EventSubscriber`) ─▶ `Router.apply`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lookonce.config import ApiKey, sent_keys
from lookonce.errors import ConfigError
from lookonce.fleet.engine_http import (
    EngineAnswerParts,
    EngineClient,
    EngineLostError,
    EngineUnreachableError,
    Headers,
    IdleConnections,
    NoDescriptorError,
)
from lookonce.fleet.identity import Processor
from lookonce.fleet.router import EngineState, Router
from lookonce.fleet.subscriber import Change, EventSubscriber
from lookonce.types.lora import LoRAIdentity

logger = logging.getLogger("lookonce.fleet")

PROBE_SECONDS = 1.0
"""Between two looks at an engine's `/ready`."""
LATE_SECONDS = 1.0
"""A probe that has no answer for so long makes the engine late: others are preferred to it."""
PROBE_TIMEOUT = 3.0
SILENT_PROBES = 2
"""So many probes in a row without an answer in time: the engine is given up. One alone may be a
long pause of the engine, or of this process."""
ENGINE_LATE_SECONDS = 2.0
"""An engine whose process that computes has been silent for so long is late, too: that process says
twice a second that it lives, also while a step takes long."""
ENGINE_SILENT_SECONDS = 5.0
"""A probe that tells of such a silence counts as one without an answer."""
LOAD_ADAPTER = "/v1/load_lora_adapter"
LOAD_TIMEOUT = 300.0
CUT_OFF = "the server shuts down: this is cut off"
LOAD_HEADERS: Headers = [(b"content-type", b"application/json")]


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
        self._engine_silent = 0.0
        """Seconds that the process which computes has said nothing, by the last probe."""
        self._learning = asyncio.Lock()
        self._looks = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def look(self) -> None:
        """It failed: see at once whether it is still there."""
        self.state.accepts = False
        self._looks.set()

    def probe_now(self) -> None:
        """An answer is late: find out whether the engine is."""
        self._looks.set()

    def close(self) -> None:
        self._task.cancel()
        self.client.close()
        self.state.accepts = False
        if self.subscriber is not None:
            asyncio.get_running_loop().run_in_executor(None, self.subscriber.close)

    async def _watch(self) -> None:
        num_silent = 0
        loop = asyncio.get_running_loop()
        while True:
            self._looks.clear()
            ready: bool | None = None  # nothing was found out
            timer = loop.call_later(LATE_SECONDS, self._note_late)
            try:
                ready = await self._probe()
                timer.cancel()  # whatever follows: it lives
                num_silent = 0
                self.state.late = self._engine_silent > ENGINE_LATE_SECONDS
                ready = ready and await self._prepare()
            except TimeoutError:
                self._note_late()
                num_silent += 1
                if num_silent >= SILENT_PROBES:
                    ready = False
                    self._give_up()
            except NoDescriptorError:
                ready = None
            finally:
                timer.cancel()
            if ready is not None:  # `look` may have been called meanwhile
                self.state.accepts = ready and not self.draining
            self._on_look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._looks.wait()
                    await asyncio.sleep(0.05)

    def _note_late(self) -> None:
        self.state.late = True

    async def _probe(self) -> bool:
        """Whether the engine says that it takes requests. Raises `TimeoutError` where it gives no
        answer, or its process that computes is silent, and `NoDescriptorError`."""
        found = await self._probed("/ready")
        self._engine_silent = 0.0
        if found is None or found[0] != 200:
            self.without.clear()  # whatever comes back may be able to
            return False
        self._engine_silent = _told_silence(found[1])
        if self._engine_silent > ENGINE_SILENT_SECONDS:
            raise TimeoutError
        return True

    async def _prepare(self) -> bool:
        """Learn what the engine is, before it gets requests and as long as it does; whether it may
        get any. However long that takes says nothing of whether it hangs. Raises
        `NoDescriptorError`."""
        learned = False
        try:
            learned = await self._learn()
        except TimeoutError:
            self._looks.set()  # see at once whether it is still there
        if not learned:
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
        cache = await self._probed("/inference/v1/media_cache")
        if cache is None or cache[0] != 200:
            return False
        try:
            told = Processor.told(self.address.model, msgspec.json.decode(cache[1]))
            if not self.cards or told != self.processor:
                models = await self._probed("/v1/models")
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
            if not await self.learn():
                return False
            if failed := {n for n in missing() if self._loads[n] is answered.get(n)}:
                names, engine = ", ".join(sorted(failed)), self.address.name
                logger.error("%s could not load adapters as others have: %s", engine, names)
                self.without |= failed
                self.state.adapters -= failed
        return True

    async def _probed(self, path: str) -> tuple[int, bytes] | None:
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
                return await self.client.ask(method, target, headers, body)
        except EngineUnreachableError:
            raise TimeoutError from None
        except EngineLostError:
            return None


class _Readiness(msgspec.Struct):
    """What of `server.routes.admin.Readiness` is read here."""

    engine_silent_seconds: float = 0.0


def _told_silence(body: bytes) -> float:
    """0 where the answer does not say so, as that of an engine of another version."""
    try:
        return msgspec.json.decode(body, type=_Readiness).engine_silent_seconds
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0.0


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
        self.is_cut_off = False
        """Requests that lose their engine now are lost because the fleet ends."""

    async def wait_served(self, num_models: int) -> None:
        """Until engines of so many models accept requests."""
        while len({member.address.model for member in self.ready()}) < num_models:
            await self.wait_looked()

    async def wait_looked(self) -> None:
        """Until something may be known anew of an engine."""
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
            await self.wait_looked()
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
        """Engines that take requests; those that answer late come last."""
        accepting = [member for member in self.members.values() if member.state.accepts]
        return sorted(accepting, key=lambda each: each.state.late)

    def cut_off(self) -> None:
        """End all requests at engines (`EngineLostError`). None gets another one."""
        self.is_cut_off = True
        for member in self.members.values():
            member.draining, member.state.accepts = True, False
            member.client.abort()

    def close(self) -> None:
        self.update({})
