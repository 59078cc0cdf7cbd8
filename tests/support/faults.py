"""Faults of every kind on a live server under mixed load, and which answers each one explains.

    kind             what is done                          what it explains
    kill worker      SIGKILL                               422 of its API process, about one item
    stop worker      SIGSTOP for a moment                  nothing
    kill engine      SIGKILL                               503 until it is back
    stop engine      SIGSTOP for a moment                  nothing
    kill api         SIGKILL                               its connections are cut off
    stop api         SIGSTOP for a moment                  nothing
    tier             a Valkey pauses, dies, comes back     nothing
    disk full        files of the engine may not grow      nothing
    descriptors      an API process can open no more       503 of that process, connections closed
    worker memory    a worker can take no more memory      422 of its API process, about one item

An explanation is a fault at that time, on the path of that request, in the words of that fault
(`TOLD`). The path is the one engine, and the API process that served the request by the server's
own log; of a request that no process has served, the connection. A worker decodes one item at a
time, so what ends one explains the failure of requests about one item. Whatever a request is told
without an explanation is a finding.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIMIT_AS, RLIMIT_FSIZE, RLIMIT_NOFILE

from tests.support.chaos import API, ENGINE, WORKER, Load, Seen, client_ports, of_kind
from tests.support.kv_servers import ValkeyServer

OF_ONE_ITEM = ("kill worker", "worker memory")
NOTICED_SECONDS = 1.0
"""For an API process to notice that its worker has ended; until then more requests may begin to
wait for the same item."""
PAUSE = (0.1, 0.8)
"""Seconds that a process is stopped, or short of something."""
BACK_OFF_SECONDS = 0.25
"""A client that is told 503 waits for so long before its next request."""
TOLD = {
    "kill engine": (
        "the engine is not running; it is being restarted",
        "the engine ended unexpectedly; it is being restarted",
        "the model is still loading",
    ),
    "kill worker": ("its decoder crashed",),
    "worker memory": ("its decoder crashed", "takes too much memory"),
    "descriptors": ("the server is short of resources",),
}
"""Kind → the words of what it explains."""


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault: when, and on whose path it is."""

    kind: str
    began: float
    ended: float
    api: int | None = None
    """The API process whose fault it is, or whose worker's."""
    ports: frozenset[int] = frozenset()
    """Client ports of the connections of an API process that was killed."""

    def explains(self, seen: Seen, served_by: int | None) -> bool:
        """Whether this fault may have caused what a request was told. `served_by`: the API process
        that has answered it; None: none has."""
        if seen.began > self.ended or self.began > seen.ended:
            return False
        told = any(words in seen.body for words in TOLD.get(self.kind, ()))
        match self.kind:
            case "kill engine":
                return told and seen.status in (200, 503)
            case "kill api":
                return seen.status == 0 and seen.port in self.ports
            case "kill worker" | "worker memory":
                return told and seen.status == 422 and served_by == self.api
            case "descriptors" if seen.status == 0:  # closed before anything of it was read
                return not seen.body and served_by is None
            case "descriptors":
                return told and seen.status == 503 and served_by == self.api
        return False


@dataclass(kw_only=True)
class Faults(Load):
    """Faults under a load, until `num_requests` were answered as planned and each kind was done."""

    num_requests: int
    valkey: ValkeyServer | None = None
    injected: list[Injected] = field(default_factory=list)
    num_as_planned: int = 0

    def run(self, patience: float) -> None:
        async def disturb(rng: random.Random) -> None:
            kinds: list[str] = []
            while self.num_as_planned < self.num_requests or len(self.injected) < len(
                self._faults()
            ):
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                kinds = kinds or rng.sample(list(self._faults()), len(self._faults()))
                async with asyncio.timeout(patience):
                    await self._inject(kinds.pop(), rng)

        asyncio.run(self.during(disturb, patience, rest_seconds=0.5))

    async def _take(self, seen: Seen) -> None:
        await super()._take(seen)
        self.num_as_planned += seen.as_planned
        if seen.status == 503:
            await asyncio.sleep(BACK_OFF_SECONDS)

    # --- faults -------------------------------------------------------------------------------

    def _faults(self) -> dict[str, Callable[[random.Random], Awaitable[Injected]]]:
        """Kind → what does it."""
        faults: dict[str, Callable[[random.Random], Awaitable[Injected]]] = {
            "kill worker": lambda rng: self._kill("kill worker", WORKER, rng),
            "stop worker": lambda rng: self._pause("stop worker", WORKER, rng),
            "kill engine": lambda rng: self._kill("kill engine", ENGINE, rng),
            "stop engine": lambda rng: self._pause("stop engine", ENGINE, rng),
            "kill api": lambda rng: self._kill("kill api", API, rng),
            "stop api": lambda rng: self._pause("stop api", API, rng),
            "disk full": lambda rng: self._limit("disk full", ENGINE, RLIMIT_FSIZE, 4096, rng),
            "descriptors": lambda rng: self._limit("descriptors", API, RLIMIT_NOFILE, None, rng),
            "worker memory": lambda rng: self._limit(
                "worker memory", WORKER, RLIMIT_AS, 1 << 20, rng
            ),
        }
        if self.valkey is not None:
            faults["tier"] = self._disturb_tier
        return faults

    async def _inject(self, kind: str, rng: random.Random) -> None:
        with suppress(OSError):  # the process has ended by itself
            self.injected.append(await self._faults()[kind](rng))

    async def _victim(self, kind: str, rng: random.Random) -> int:
        while not (  # noqa: ASYNC110 - only /proc can tell
            found := await asyncio.to_thread(of_kind, self.server, kind)
        ):
            await asyncio.sleep(0.05)
        return rng.choice(found)

    async def _kill(self, name: str, kind: str, rng: random.Random) -> Injected:
        pid = await self._victim(kind, rng)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)  # so that it takes no connection while we look
        try:
            api = await asyncio.to_thread(self._api_process, kind, pid)
            ports = await asyncio.to_thread(client_ports, pid) if kind == API else set()
        finally:
            os.kill(pid, signal.SIGKILL)
        ended = time.monotonic()
        if kind == WORKER:
            ended += NOTICED_SECONDS
        else:
            await self.until_ready()
        if kind == ENGINE:
            ended = time.monotonic()
        return Injected(name, began, ended, api, frozenset(ports))

    async def _pause(self, name: str, kind: str, rng: random.Random) -> Injected:
        pid = await self._victim(kind, rng)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(*PAUSE))
        finally:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        return Injected(name, began, time.monotonic())

    async def _limit(
        self, name: str, kind: str, what: int, most: int | None, rng: random.Random
    ) -> Injected:
        """A limit of a living process for a moment; None: what it uses now."""
        pid = await self._victim(kind, rng)
        api = await asyncio.to_thread(self._api_process, kind, pid)
        soft, hard = resource.prlimit(pid, what)
        low = most if most is not None else len(os.listdir(f"/proc/{pid}/fd"))
        began = time.monotonic()
        resource.prlimit(pid, what, (low, hard))
        try:
            await asyncio.sleep(rng.uniform(*PAUSE))
        finally:
            with suppress(OSError):  # it may not survive this
                resource.prlimit(pid, what, (soft, hard))
        return Injected(name, began, time.monotonic(), api)

    async def _disturb_tier(self, rng: random.Random) -> Injected:
        assert self.valkey is not None
        began = time.monotonic()
        if rng.random() < 0.5:
            self.valkey.pause()
            await asyncio.sleep(rng.uniform(*PAUSE))
            self.valkey.resume()
        else:
            await asyncio.to_thread(self.valkey.kill)
            await asyncio.sleep(rng.uniform(*PAUSE))
            await asyncio.to_thread(self.valkey.start)
        return Injected("tier", began, time.monotonic())

    def _api_process(self, kind: str, pid: int) -> int | None:
        """The API process that this process is, or works for; None of the engine."""
        if kind == API:
            return pid
        if kind == ENGINE:
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        owners = {int(fields[1]), int(fields[2])}  # parent, group
        return next(iter(owners & set(of_kind(self.server, API))), None)

    # --- judging ------------------------------------------------------------------------------

    def unexplained(self) -> list[Seen]:
        """Answers that are neither as planned nor explained by a fault on their own path."""
        served_by = self.served_by()
        left = [seen for seen in self.seen if not seen.as_planned]
        for fault in self.injected:
            told = [seen for seen in left if fault.explains(seen, served_by.get(seen.request_id))]
            excused = {
                id(seen) for seen in (_of_one_item(told) if fault.kind in OF_ONE_ITEM else told)
            }
            left = [seen for seen in left if id(seen) not in excused]
        return left

    def served_by(self) -> dict[str, int]:
        """Request id → the API process that has answered it, as its log says."""
        lines = (json.loads(line) for line in list(self.server.output) if line.startswith("{"))
        return {line["request_id"]: line["pid"] for line in lines if line["message"] == "served"}

    def summary(self) -> str:
        """How many answers of each status, and faults of each kind, there were."""
        statuses = dict(self.statuses)
        cut_off = len(self.seen) - sum(statuses.values())
        return (
            f"{self.num_as_planned} as planned, by status {statuses}, {cut_off} cut off; "
            f"{dict(self.kinds)}"
        )

    @property
    def statuses(self) -> Counter[int]:
        """Of whole answers."""
        return Counter(seen.status for seen in self.seen if seen.status)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.injected)

    @property
    def num_cut_off(self) -> int:
        """Requests that may have been answered completely although nobody saw it: those of API
        processes that were killed."""
        kills = [fault for fault in self.injected if fault.kind == "kill api"]
        return sum(any(kill.explains(seen, None) for kill in kills) for seen in self.seen)


def _of_one_item(told: Sequence[Seen]) -> list[Seen]:
    """Those about the one item that most of these are about."""
    by_item: dict[str, list[Seen]] = {}
    for seen in told:
        for item in seen.plan.media:
            by_item.setdefault(item, []).append(seen)
    return max(by_item.values(), key=len, default=[])
