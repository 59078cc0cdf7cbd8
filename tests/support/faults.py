"""Faults of every kind on a live server under mixed load, and which answers each one explains.

    kind             what is done                               what it explains
    kill worker      SIGKILL                                    422 of its API process
    stop worker      SIGSTOP for a moment                       nothing
    kill engine      SIGKILL                                    503, broken answers until it is back
    stop engine      SIGSTOP for a moment                       nothing
    kill api         SIGKILL                                    broken answers of its connections
    stop api         SIGSTOP for a moment                       nothing
    tier             a Valkey pauses, dies, comes back          nothing
    disk full        files of the engine may not grow           nothing
    descriptors      an API process can open no more            503, and connections it closes
    worker memory    a worker can take no more memory           422 of its API process

Whatever a request is told that no fault on its own path explains is a finding.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.chaos import API, ENGINE, WORKER, Load, Seen, client_ports, of_kind
from tests.support.kv_servers import ValkeyServer

LOOK_SECONDS = 0.02
LINGERING = ("descriptors", "worker memory")
LINGER_SECONDS = 0.5
"""What a process has begun while it was short of something ends later."""
PAUSE = (0.1, 0.8)
"""Seconds that a process is stopped, or short of something."""
OF_A_WORKER = ("decoder crashed", "cannot be processed now")
"""What a request is told whose media worker was killed."""
BROKEN = (0, 500, 502, 503)


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault: when, and the client ports of the API process on whose path it is."""

    kind: str
    began: float
    ended: float
    ports: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    """Client ports of other API processes."""

    def overlaps(self, seen: Seen) -> bool:
        return seen.began <= self.ended and self.began <= seen.ended

    def explains(self, seen: Seen) -> bool:
        """Whether this fault may have caused what the request was told."""
        if not self.overlaps(seen):
            return False
        broken = seen.status in BROKEN or (seen.status == 200 and not seen.succeeded)
        match self.kind:
            case "kill engine":
                return broken
            case "kill api":
                return broken and seen.port in self.ports
            case "kill worker":
                told = any(words in seen.body for words in OF_A_WORKER)
                return seen.port in self.ports and told and seen.status in (422, 503)
            case "worker memory":  # where memory ends, a decoder may call anything broken
                return seen.port in self.ports and seen.status in (422, 503)
            case "descriptors":  # what it closes at once is in nobody's list
                return seen.port not in self.others and seen.status in (0, 503)
        return False


@dataclass(kw_only=True)
class Faults(Load):
    """Faults under a load, until `num_requests` were answered and each kind was done."""

    num_requests: int
    valkey: ValkeyServer | None = None
    injected: list[Injected] = field(default_factory=list)
    _others: frozenset[int] = frozenset()

    def run(self, patience: float) -> None:
        async def disturb(rng: random.Random) -> None:
            kinds: list[str] = []
            while len(self.seen) < self.num_requests or len(self.injected) < len(self._faults()):
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                kinds = kinds or rng.sample(list(self._faults()), len(self._faults()))
                async with asyncio.timeout(patience):
                    await self._inject(kinds.pop(), rng)

        asyncio.run(self.during(disturb, patience, rest_seconds=0.5))

    # --- faults -------------------------------------------------------------------------------

    def _faults(self) -> dict[str, Callable[[random.Random], Awaitable[frozenset[int]]]]:
        """Kind → what does it, and answers the client ports on its path."""
        faults = {
            "kill worker": lambda rng: self._kill(WORKER, rng),
            "stop worker": lambda rng: self._pause(WORKER, rng),
            "kill engine": lambda rng: self._kill(ENGINE, rng),
            "stop engine": lambda rng: self._pause(ENGINE, rng),
            "kill api": lambda rng: self._kill(API, rng),
            "stop api": lambda rng: self._pause(API, rng),
            "disk full": lambda rng: self._limit(ENGINE, resource.RLIMIT_FSIZE, 4096, rng),
            "descriptors": lambda rng: self._limit(API, resource.RLIMIT_NOFILE, None, rng),
            "worker memory": lambda rng: self._limit(WORKER, resource.RLIMIT_AS, 1 << 20, rng),
        }
        if self.valkey is not None:
            faults["tier"] = self._disturb_tier
        return faults

    async def _inject(self, kind: str, rng: random.Random) -> None:
        began = time.monotonic()
        self._others = frozenset()
        try:
            ports = await self._faults()[kind](rng)
        except OSError:  # the process has ended by itself
            return
        if kind in ("kill engine", "kill api"):
            await self.until_ready()
        ended = time.monotonic() + (LINGER_SECONDS if kind in LINGERING else 0.0)
        self.injected.append(Injected(kind, began, ended, ports, self._others))

    async def _victim(self, kind: str, rng: random.Random) -> int:
        while not (found := of_kind(self.server, kind)):  # noqa: ASYNC110 - only /proc can tell
            await asyncio.sleep(0.05)
        return rng.choice(found)

    async def _kill(self, kind: str, rng: random.Random) -> frozenset[int]:
        pid = await self._victim(kind, rng)
        os.kill(pid, signal.SIGSTOP)  # so that it takes no connection while we look
        ports = self._ports(kind, pid)
        os.kill(pid, signal.SIGKILL)
        return ports

    async def _pause(self, kind: str, rng: random.Random) -> frozenset[int]:
        pid = await self._victim(kind, rng)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(*PAUSE))
        finally:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        return frozenset()

    async def _limit(
        self, kind: str, what: int, most: int | None, rng: random.Random
    ) -> frozenset[int]:
        """A limit of a living process for a moment; None: what it uses now."""
        pid = await self._victim(kind, rng)
        ports = self._ports(kind, pid)
        soft, hard = resource.prlimit(pid, what)
        low = most if most is not None else len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, what, (low, hard))
        until = time.monotonic() + rng.uniform(*PAUSE)
        try:
            while time.monotonic() < until:
                await asyncio.sleep(LOOK_SECONDS)
                with suppress(OSError):  # it may not survive this
                    ports |= self._ports(kind, pid)
                for other in of_kind(self.server, API) if kind == API else ():
                    if other != pid:
                        self._others |= client_ports(other)
        finally:
            with suppress(OSError):
                resource.prlimit(pid, what, (soft, hard))
        return ports

    async def _disturb_tier(self, rng: random.Random) -> frozenset[int]:
        assert self.valkey is not None
        if rng.random() < 0.5:
            self.valkey.pause()
            await asyncio.sleep(rng.uniform(*PAUSE))
            self.valkey.resume()
        else:
            self.valkey.kill()
            await asyncio.sleep(rng.uniform(*PAUSE))
            await asyncio.to_thread(self.valkey.start)
        return frozenset()

    def _ports(self, kind: str, pid: int) -> frozenset[int]:
        """Client ports of the API process that this process is, or works for."""
        if kind == ENGINE:
            return frozenset()
        if kind == WORKER:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            apis = of_kind(self.server, API)
            owners = [int(each) for each in fields[1:3] if int(each) in apis]  # parent, group
            return frozenset().union(*(client_ports(owner) for owner in owners))
        return frozenset(client_ports(pid))

    # --- judging ------------------------------------------------------------------------------

    def unexplained(self) -> list[Seen]:
        """Answers that are neither as planned nor explained by a fault on their own path."""
        failed = [seen for seen in self.seen if not seen.as_planned]
        return [seen for seen in failed if not any(f.explains(seen) for f in self.injected)]

    @property
    def kinds(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.injected)
