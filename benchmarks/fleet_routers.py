"""Front-ends of one fleet that choose engines by different rules, for `lookonce bench fleet`.

price       LookOnce's router
robin       each engine in turn
two         Ray Serve's power of two choices: of two random engines the one with fewer requests
prefix      the rule of Ray's `PrefixCacheAffinityRouter` (ray.serve.llm, alpha) with its defaults,
            written anew: the engines that have got the longest beginning of this text, if that is
            a tenth of it or more, else those that have got the least text; among several, by
            power of two choices. Text alone counts: it drops pictures
picture     consistent hashing (rendezvous) by the first picture, else by the prompt's beginning

`python -m benchmarks.fleet_routers [RULE …]`, with the engines' addresses as JSON on standard
input, serves one front-end for each rule (`renders=MODEL`: the price's, which renders), prints
their ports, and ends when standard input does. Rules that look at no engine's caches follow no
events, and those that look at no content hash and parse nothing.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
import socket
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import uvloop
from blake3 import blake3

from lookonce.config import Options, resolve
from lookonce.fleet.config import RenderedModel
from lookonce.fleet.frontend import Frontend
from lookonce.fleet.identity import Identity
from lookonce.fleet.members import EngineAddress, Fleet
from lookonce.fleet.router import EngineState, NoEngineError, Route, Router, Work
from lookonce.fleet.server import FrontendServer
from lookonce.types.memory import settle_memory
from lookonce.types.scheduling import prefer_event_loop

MATCH_RATE = 0.1
"""`match_rate_threshold` of Ray's router."""


class RuleRouter(Router):
    """A router that chooses by a rule of its own, and prices nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.texts: dict[str, str] = {}
        """Request id → its text, for rules that need it."""

    def route(
        self,
        request_id: str,
        identity: Identity,
        without: Collection[str] = (),
        *,
        now: float = 0.0,
    ) -> Route:
        candidates = [e for e in self.engines.values() if e.accepts and e.name not in without]
        if not candidates:
            raise NoEngineError
        engine = self.choose(candidates, identity, self.texts.pop(request_id, ""))
        route = Route(engine, Identity(), Work(), "rule", 0.0, math.inf)
        self._begin(request_id, route, [])
        return route

    def choose(self, engines: Sequence[EngineState], identity: Identity, text: str) -> EngineState:
        raise NotImplementedError

    def fewer_of_two(self, engines: Sequence[EngineState]) -> EngineState:
        two = self.random.sample(list(engines), min(2, len(engines)))
        return min(two, key=lambda engine: engine.num_requests)


class RoundRobin(RuleRouter):
    _next = 0

    def choose(self, engines: Sequence[EngineState], identity: Identity, text: str) -> EngineState:
        self._next += 1
        return engines[self._next % len(engines)]


class PowerOfTwo(RuleRouter):
    def choose(self, engines: Sequence[EngineState], identity: Identity, text: str) -> EngineState:
        return self.fewer_of_two(engines)


class PictureHashing(RuleRouter):
    def choose(self, engines: Sequence[EngineState], identity: Identity, text: str) -> EngineState:
        if identity.media:
            key = identity.media[0].key
        else:
            key = identity.pieces[min(2, len(identity.pieces) - 1)].digest
        named = key.to_bytes(8, "little")
        return max(engines, key=lambda e: blake3(e.name.encode() + named).digest())


class PrefixAffinity(RuleRouter):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._sent: dict[str, list[str]] = {}
        """Engine → the texts it got, sorted."""
        self._chars: Counter[str] = Counter()
        """Engine → characters of its tree: what each text has beyond those before."""

    def choose(self, engines: Sequence[EngineState], identity: Identity, text: str) -> EngineState:
        matched = {engine.name: self._match(engine.name, text) for engine in engines}
        longest = max(matched.values())
        if text and longest / len(text) >= MATCH_RATE:
            listed = [e for e in engines if matched[e.name] == longest]
        else:
            least = min(self._chars[e.name] for e in engines)
            listed = [e for e in engines if self._chars[e.name] == least]
        chosen = self.fewer_of_two(listed)
        self._chars[chosen.name] += len(text) - matched[chosen.name]
        bisect.insort(self._sent.setdefault(chosen.name, []), text)
        return chosen

    def _match(self, engine: str, text: str) -> int:
        """Characters of the longest common beginning with a text that the engine got: its
        neighbours in sorted order have it."""
        sent = self._sent.get(engine, [])
        at = bisect.bisect(sent, text)
        return max((_common(text, each) for each in sent[max(0, at - 1) : at + 1]), default=0)


def _common(one: str, two: str) -> int:
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == two[:middle] else (low, middle - 1)
    return low


ROUTERS: dict[str, type[Router]] = {
    "price": Router,
    "robin": RoundRobin,
    "two": PowerOfTwo,
    "prefix": PrefixAffinity,
    "picture": PictureHashing,
}


class RuleFrontend(Frontend):
    """Reads of a request what its rule needs."""

    def _identify(self, exchange: Any, body: bytes) -> tuple[str, Identity]:
        router = self._fleet.router
        if isinstance(router, PrefixAffinity):
            given = msgspec.json.decode(body)
            router.texts[exchange.request_id] = _text(given.get("messages", []))
        elif not isinstance(router, RoundRobin | PowerOfTwo):
            return super()._identify(exchange, body)
        return exchange.request_id, Identity()


def _text(value: Any) -> str:
    """As Ray's router makes one string of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    if isinstance(value, dict):
        return value["text"] if isinstance(value.get("text"), str) else _text(value.get("content"))
    return ""


async def _serve(engines: Sequence[EngineAddress], wanted: Sequence[str]) -> None:
    """`wanted`: rules, or `renders=MODEL`; none: all rules."""
    prefer_event_loop()
    config = resolve(Options(port=0)).server
    ports, fleets, running = {}, [], []
    stack = AsyncExitStack()
    for each in wanted or ROUTERS:
        name, _, rendered = each.partition("=")
        fleet = Fleet(ROUTERS.get(name, Router)())
        follows = name == "price" or bool(rendered)
        told = [e if follows else msgspec.structs.replace(e, events=None) for e in engines]
        fleet.update({engine.name: engine for engine in told})
        frontend = Frontend(fleet, config) if follows else RuleFrontend(fleet, config)
        if rendered:
            from lookonce.fleet.rendering import Rendering  # its memory is not the others'

            model = RenderedModel(name=engines[0].model, model=rendered)
            rendering = await stack.enter_async_context(Rendering(fleet, [model], config))
            await rendering.wait_opened()
            frontend = Frontend(fleet, config, rendering)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        ports[name] = listener.getsockname()[1]
        server = FrontendServer(frontend, config)
        running.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        fleets.append(fleet)
    while any(len(fleet.ready()) < len(engines) for fleet in fleets):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    settle_memory()
    print(msgspec.json.encode(ports).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server, task in running:
        server.should_exit = True
        await task
    await stack.aclose()
    for fleet in fleets:
        fleet.close()


def main() -> None:
    engines = msgspec.json.decode(sys.stdin.readline(), type=list[EngineAddress])
    uvloop.run(_serve(engines, sys.argv[1:]))


if __name__ == "__main__":
    main()
